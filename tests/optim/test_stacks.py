"""Stacks of matrices, as of experts: they stay on their shards, and some get no gradient."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.optim.numbers import numbers_apart
from tests.optim.reference import gradients, mars
from tests.support.full import full_but
from tests.support.ranks import run_ranks
from tests.support.steps import MARS_RULES, laid_out, relative, whole
from tests.support.traffic import TrafficCounter
from torchmars.optim import MARS
from torchmars.optim.reference import REFERENCES
from torchmars.optim.rules import RULES

EXPERTS, STEPS = 8, 5
# A clip that is never active: the norm, which is added up in parts, changes nothing then. The last
# gradient is kept all the same.
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
CORRECTION = {"clip": 1e6, "gamma": 0.1}


class Layers(nn.Module):
    """Experts, and matrices beside them that are sharded over all ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Module()
        self.experts.gate = nn.Parameter(torch.randn(EXPERTS, 12, 8))
        self.experts.up = nn.Parameter(torch.randn(EXPERTS, 12, 8))
        self.experts.proj = nn.Parameter(torch.randn(EXPERTS, 8, 12))
        self.mix, self.router = nn.Linear(8, 10, bias=False), nn.Linear(8, EXPERTS, bias=False)


def sharded(sizes, dim):
    """Return `Layers` on a mesh of `sizes` (replicas, efsdp, ep).

    Experts are cut over ep, and then over efsdp along `dim`.
    """
    names = ("replicas", "efsdp", "ep")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    layers = Layers()
    for name, weight in layers.experts.named_parameters():
        over_ep = distribute_tensor(weight, mesh["ep"], [Shard(0)], src_data_rank=None)
        layers.experts.register_parameter(name, nn.Parameter(over_ep))
    axes = names[:2] if sizes[0] > 1 else names[1]
    fully_shard(
        layers.experts, mesh=mesh[axes], shard_placement_fn=lambda _: Shard(dim) if dim else None
    )
    ranks = sizes[0], sizes[1] * sizes[2]
    dense = init_device_mesh("cpu", ranks, mesh_dim_names=("replicas", "shards"))
    fully_shard(layers, mesh=dense if ranks[0] > 1 else dense["shards"])
    return layers


def sparse_gradients(shape, seed):
    """Return gradients for STEPS steps: in some steps some experts get none, or a part of one."""
    sequence = gradients(shape, STEPS, seed)
    if len(shape) == 3:
        for step, gradient in enumerate(sequence):
            gradient[step] = 0.0
            gradient[step + 1, : shape[1] // 2] = 0.0
            gradient[-1] *= step != 2
    return sequence


def train(layers, rule, number=STEPS, **settings):
    parameters = list(layers.parameters())
    settings |= CORRECTION if RULES[rule].variance_reduced else {}
    optimizer = MARS([{"params": parameters, "rule": rule}], **SETTINGS, **settings)
    sequences = [sparse_gradients(tuple(p.shape), seed) for seed, p in enumerate(parameters)]
    for step in range(number):
        for parameter, sequence in zip(parameters, sequences):
            parameter.grad = laid_out(sequence[step], parameter)
        optimizer.step()
    return optimizer


def trained(sizes, dim, runs):
    """Return the weights after training each of `runs` on a layout."""
    results = []
    for rule, settings in runs:
        layers = sharded(sizes, dim)
        train(layers, rule, **settings)
        results.append(whole(layers.parameters()))
    return results


LAYOUTS = [
    ((1, 1, 2), 0),
    ((1, 2, 1), 0),
    ((1, 2, 1), 1),
    ((1, 2, 2), 0),
    ((1, 2, 2), 1),
    ((1, 1, 4), 0),
    ((2, 1, 2), 0),
    ((2, 2, 1), 1),
]


@pytest.mark.parametrize("sizes,dim", full_but([LAYOUTS[6]], LAYOUTS))
def test_stacks_equal_those_of_one_process_to_the_last_bit(sizes, dim):
    runs = [(rule, {"matrix_dtype": "float32"}) for rule in [*MARS_RULES, "muon"]]
    runs.append(("mars-m", {}))
    expected = []
    for rule, settings in runs:
        layers = Layers()
        train(layers, rule, **settings)
        expected.append(whole(layers.parameters()))
    for results in run_ranks(trained, torch.Size(sizes).numel(), sizes, dim, runs):
        for run, result, wanted in zip(runs, results, expected):
            assert all(torch.equal(one, other) for one, other in zip(result, wanted)), run


def sent(sizes, dim):
    """Return the bytes that a step of this rank sends by operation, for the experts alone.

    And the owners' loads, in units of one expert.
    """
    layers = sharded(sizes, dim)
    optimizer = train(layers.experts, "mars-m", 1, matrix_dtype="float32")
    counter = TrafficCounter()
    with counter:
        optimizer.step()
    of_operations = {}
    for kind, size in counter.sent.items():
        of_operations[kind.operation] = of_operations.get(kind.operation, 0) + size
    (loads,) = optimizer.plans.owner_loads.values()
    return of_operations, [load * 3 * EXPERTS / sum(loads.values()) for load in loads.values()]


STACK = 4 * 3 * EXPERTS * 12 * 8  # bytes of the three
NORMS = 3 * 8 * 3  # bytes of three float64 numbers for each of them, that are added up


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 1)])
def test_whole_experts_send_nothing(sizes):
    for of_operations, loads in run_ranks(sent, 2, sizes, 0):
        assert of_operations == {"all-reduce": NORMS}
        assert loads == [3 * EXPERTS / 2] * 2


@pytest.mark.full
def test_replicas_share_the_work_of_whole_experts():
    """Each rank makes half of its shard, and sends it to the one other rank that has that shard."""
    for of_operations, loads in run_ranks(sent, 4, (2, 1, 2), 0):
        assert of_operations["all-gather"] == STACK / 2 / 2
        assert set(of_operations) == {"all-reduce", "all-gather"}
        assert loads == [3 * EXPERTS / 4] * 4


@pytest.mark.full
def test_cut_experts_travel():
    for of_operations, loads in run_ranks(sent, 4, (1, 2, 2), 1):
        assert of_operations["all-to-all"] > 0
        assert loads == [3 * EXPERTS / 4] * 4


def without_gradients(rule, dtype, number, **settings):
    """Return an optimizer after steps on one stack, its parameter and all its gradients."""
    parameter = nn.Parameter(torch.randn(EXPERTS, 6, 4, generator=torch.Generator().manual_seed(1)))
    parameter.data = parameter.data.to(dtype)
    start = parameter.detach().clone()
    given = [each.to(dtype) for each in sparse_gradients(tuple(start.shape), 1)]
    settings = SETTINGS | {"gamma": 0.1} | settings
    optimizer = MARS([{"params": [parameter], "rule": rule, "role": "matrix"}], **settings)
    for gradient in given[:number]:
        parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer, parameter, start, given


@pytest.mark.parametrize("clip", [1.0, 1e6])
@pytest.mark.parametrize("rule", MARS_RULES)
def test_three_implementations_agree_where_experts_get_no_token(rule, clip):
    """The norm to which c is clipped is of what is corrected too."""
    dtype, settings = torch.float64, {"betas": (0.95, 0.99), "clip": clip}
    _, parameter, start, given = without_gradients(
        rule, dtype, STEPS, matrix_dtype=dtype, **settings
    )
    eps = {"eps": 1e-8} if rule == "mars-adamw" else {}
    x, state = start.clone(), {}
    for gradient in given:
        REFERENCES[rule](x, gradient, state, gamma=0.1, **SETTINGS, **settings, **eps)
    independent, clipped = mars(start, given, rule=rule, gamma=0.1, **SETTINGS, **settings)
    assert (clipped > 0) == (clip == 1.0)
    assert relative(parameter, x) < 1e-11 and relative(x, independent) < 1e-11


def test_the_momentum_of_an_expert_without_tokens_decays():
    optimizer, parameter, _, given = without_gradients("mars-m", torch.float64, 1)
    before = optimizer.state[parameter]["exp_avg"].clone()
    parameter.grad = torch.where(torch.arange(EXPERTS)[:, None, None] == 3, 0.0, given[1])
    optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["exp_avg"][3], 0.95 * before[3], rtol=1e-14, atol=0.0)
    assert not state["last_grad"][3].any() and state["last_grad"][4].any()


@pytest.mark.parametrize("shape,flatten", [((8, 12), False), ((8, 4, 3), True), ((1, 8, 4), False)])
def test_what_is_no_stack_is_corrected_where_its_gradient_is_zero(shape, flatten):
    """As published: the rows of an embedding without tokens too."""
    parameter = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    group = {"params": [parameter], "rule": "mars-lion", "flatten": flatten}
    optimizer = MARS([group], lr=1e-2, clip=1e6, betas=(0.9, 0.99), gamma=0.1)
    for size in (1.0, 0.0):
        parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    # m = 0.1 g after the first step, and then 0.9 m - 0.1 kappa h.
    momentum = torch.full_like(parameter, 0.9 * 0.1 - 0.1 * 0.9)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], momentum)


def test_telemetry_is_of_the_correction_that_is_made():
    optimizer, _, _, given = without_gradients("mars-adamw", torch.float64, STEPS, clip=0.5)
    group = {"role": "matrix", "rule": "mars-adamw", "betas": (0.95, 0.99)}
    expected = numbers_apart(
        [group | {"gamma": 0.1, "clip": 0.5}], [[[gradient]] for gradient in given], None
    )
    assert optimizer.telemetry() == pytest.approx(expected, rel=1e-9)


def test_a_stack_without_a_last_gradient_is_not_corrected_by_it():
    """One that was loaded has none, which NaN says: nor where its own gradient is 0."""
    optimizer, parameter, _, given = without_gradients("mars-m", torch.float64, 2)
    optimizer.skip_next_correction([parameter])
    before = optimizer.state[parameter]["exp_avg"].clone()
    parameter.grad = given[2].clone()
    optimizer.step()
    used = given[2] * (1 / given[2].norm()).clamp(max=1.0)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.95 * before + 0.05 * used)
