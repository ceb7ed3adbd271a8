"""State goes where its parameter goes, and a saved state is loaded whole or not at all."""

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optim.reference import gradients
from tests.optim.test_mars import relative, run
from tests.ranks import run_ranks
from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES

LR = 0.01


class Net(nn.Module):
    """A matrix of odd size, a bias, an embedding."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.up, self.head = nn.Embedding(9, 6), nn.Linear(6, 11), nn.Linear(11, 5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens):
        return self.head(torch.tanh(self.up(self.embed(tokens))))


def train(model, optimizer, steps, backward=torch.Tensor.backward):
    for step in steps:
        tokens = torch.randint(9, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        backward(3 * model(tokens).square().mean())
        optimizer.step()


def whole(model):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def optimizer_of(model, rule, **settings):
    """Of bare parameters, or of named groups where the rule needs them. Matrices in float32: bfloat16 amplifies a last bit."""
    groups = param_groups(model, rule, lr=LR) if RULES[rule].kind == "matrix" else model.parameters()
    return MARS(groups, lr=LR, rule=rule, matrix_dtype=torch.float32, **settings)


def plain(rule, steps=5):
    model = Net()
    train(model, optimizer_of(model, rule), range(steps))
    return whole(model)


def accelerated():
    """Trained by Accelerate with FSDP2 after two steps without, for some rules; what they are without it; a full state loaded."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # asked for, not used: there is a process group
    accelerator = Accelerator(cpu=True)
    # It offers FSDP2 on accelerators only; with its state set, its own code shards and replaces on CPU too.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    result = {}
    for rule, efficient, before in (("mars-adamw", False, 0), ("mars-adamw", True, 2), ("adamw", False, 2),
                                    ("lion", False, 2), ("mars-m", False, 2)):
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=efficient, auto_wrap_policy="no_wrap")
        model = Net()
        optimizer = optimizer_of(model, rule)
        train(model, optimizer, range(before))
        full = copy.deepcopy(optimizer.state_dict())
        model, prepared = accelerator.prepare(model, optimizer)
        train(model, prepared, range(before, 4), accelerator.backward)
        assert all(isinstance(p, DTensor) and isinstance(value, DTensor) for p, state in optimizer.state.items()
                   for key, value in state.items() if key != "step")
        train(model, prepared, range(4, 5), accelerator.backward)
        result[rule, efficient] = whole(model)
        prepared.load_state_dict(full)  # a state of whole tensors
        result[rule, efficient, "loaded"] = all(
            torch.equal(getattr(value, "full_tensor", lambda value=value: value)(), saved[key])
            for state, saved in zip(optimizer.state_dict()["state"].values(), full["state"].values())
            for key, value in state.items())
    return result


def on_two_ranks():
    return replaced_on_meshes(), accelerated() if find_spec("accelerate") else None


@pytest.fixture(scope="module")
def results():
    """One start of ranks for two tests."""
    return run_ranks(on_two_ranks, 2)


def test_accelerate_with_fsdp2(results):
    pytest.importorskip("accelerate")
    for _, result in results:
        for (rule, efficient, *loaded), parameters in result.items():
            if loaded:
                assert parameters
                continue
            for one, other in zip(parameters, plain(rule)):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"{rule} {efficient}")


def replaced_on_meshes():
    """Parameters that become shards, shards of other dimensions of two meshes, and whole again."""
    parameters = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for shape in ((6, 7), (5, 3))]
    sequences = [gradients(tuple(p.shape), 8, seed) for seed, p in enumerate(parameters)]
    optimizer = MARS([{"params": parameters, "rule": "mars-m"}], lr=LR, matrix_dtype=torch.float32)
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    for step in range(8):
        if step in (2, 4, 6):
            placements = {2: (line, [Shard(0)]), 4: (line, [Shard(1)]), 6: (square, [Shard(1), Shard(0)])}[step]
            now = [p.full_tensor() if isinstance(p, DTensor) else p for p in optimizer.param_groups[0]["params"]]
            optimizer.param_groups[0]["params"] = [nn.Parameter(distribute_tensor(p.detach(), *placements)) for p in now]
        for parameter, sequence in zip(optimizer.param_groups[0]["params"], sequences):
            parameter.grad = sequence[step].clone()
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(sequence[step], parameter.device_mesh, parameter.placements)
        optimizer.step()
    results = [p.full_tensor().detach() for p in optimizer.param_groups[0]["params"]]
    return results, len(optimizer.state), len(optimizer._shardings)


def test_shards_replaced_by_others(results):
    parameters = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for shape in ((6, 7), (5, 3))]
    run(MARS([{"params": parameters, "rule": "mars-m"}], lr=LR, matrix_dtype=torch.float32), parameters,
        [gradients(tuple(p.shape), 8, seed) for seed, p in enumerate(parameters)])
    for (actual, states, shardings), _ in results:
        assert (states, shardings) == (2, 1)  # nothing is left of former parameters
        for one, other in zip(actual, parameters):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["mars-adamw", "adamw", "lion", "mars-m"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_that_changes_its_dtype(rule, overwrite):
    """In place, and by new parameters that take the old ones' places in the groups; before any step and after two."""
    for before in (0, 2):
        model, expected = Net(), Net().double()
        optimizer, reference = optimizer_of(model, rule), optimizer_of(expected, rule)
        train(model, optimizer, range(before))
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        try:
            former = list(model.parameters())
            old = dict(zip(former, model.double().parameters()))
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        for group in optimizer.param_groups:
            group["params"] = [old[p] for p in group["params"]]
        assert overwrite == (next(iter(old)) is not next(iter(old.values())))
        train(model, optimizer, range(before, 4))
        train(expected, reference, range(4))
        for one, other in zip(whole(model), whole(expected)):
            assert one.dtype == torch.float64 and relative(one, other) < (1e-3 if before else 1e-7)
        assert len(optimizer.state) == len(old)
        assert all(value.dtype == torch.float64 for state in optimizer.state.values() for key, value in state.items() if key != "step")


def test_a_model_that_gets_its_memory_later():
    """Made on the meta device, as deferred initialisation does."""
    with torch.device("meta"):
        model = Net()
    optimizer = optimizer_of(model, "mars-adamw", max_grad_norm=1.0)
    model = Net()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, range(3))
    expected = Net()
    train(expected, optimizer_of(expected, "mars-adamw", max_grad_norm=1.0), range(3))
    assert all(torch.equal(one, other) for one, other in zip(whole(model), whole(expected)))


def test_a_model_that_changes_its_memory_format():
    """Elements in another order: the state must be laid out anew, or it would be mixed up silently."""
    sequence = gradients((8, 4, 3, 3), 6, seed=0)
    start = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    plain, last = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    run(MARS([plain]), [plain], [sequence])
    optimizer = MARS([last])
    run(optimizer, [last], [sequence[:3]])
    last.data, last.grad = last.data.to(memory_format=torch.channels_last), None
    run(optimizer, [last], [sequence[3:]])
    assert last.stride() != plain.stride() and relative(last, plain) < 1e-6


def test_groups_that_gain_and_lose_parameters():
    """As with torch's AdamW: those that stay keep their state, wherever they are, and new ones start anew."""
    first, second, third = (nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = MARS([first, second])
    run(optimizer, [first, second], [gradients((4,), 3, seed) for seed in (0, 1)])
    kept = optimizer.state[second]["exp_avg"].clone()
    optimizer.param_groups[0]["params"] = [second, third, nn.Parameter(torch.ones(2, 2))]
    saved = optimizer.state_dict()["state"]
    assert torch.equal(saved[0]["exp_avg"], kept) and not saved[1]["exp_avg"].any() and set(saved) == {0, 1, 2}
    run(optimizer, [second, third], [gradients((4,), 3, seed) for seed in (0, 1)])
    assert optimizer.state[second]["step"] == 6 and optimizer.state[third]["step"] == 3


def test_what_cannot_follow_is_named():
    model = Net()
    optimizer = MARS(model.named_parameters(), exact=True)
    with pytest.raises(ValueError, match=r"parameter 'up.weight' \(1 of group 0\) has shape \(6, 11\) now, and its state \(11, 6\)"):
        optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(6, 11))
        optimizer.state_dict()
    optimizer.param_groups[0]["params"][1] = model.up.weight
    model(torch.tensor([1])).sum().backward()
    optimizer.look_ahead()
    model.double()
    with pytest.raises(RuntimeError, match="between look_ahead"):
        optimizer.step()


# Loading.


def trained(optimizer_class=MARS, steps=4, **settings):
    model = Net()
    optimizer = optimizer_class(model.named_parameters(), lr=LR, **settings)
    train(model, optimizer, range(steps))
    return model, optimizer


def everything(optimizer):
    """A copy of all that loading changes."""
    return copy.deepcopy(optimizer.state_dict())


def assert_same(one, other):
    assert one["param_groups"] == other["param_groups"]
    for state, expected in zip(one["state"].values(), other["state"].values(), strict=True):
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


def spoil_shape(saved):
    saved["state"][1]["exp_avg"] = saved["state"][1]["exp_avg"].T.contiguous()


def spoil_step(saved):
    saved["state"][1]["step"] = torch.ones(2)


def spoil_keys(saved):
    del saved["state"][1]["exp_avg_sq"]


def spoil_rule(saved):
    saved["param_groups"][0]["rule"] = "lion"


def spoil_count(saved):
    saved["param_groups"][0]["params"].pop()


def spoil_groups(saved):
    saved["param_groups"] *= 2


def spoil_lr(saved):
    saved["param_groups"][0]["lr"] = -1.0


def spoil_all(saved):
    saved.clear()


@pytest.mark.parametrize("spoil,message", [
    (spoil_shape, r"parameter 'up.weight' \(1 of group 0\): exp_avg has shape \(6, 11\) in the state_dict, here \(11, 6\)"),
    (spoil_step, r"'up.weight' .*: step has shape \(2,\)"),
    (spoil_keys, r"'up.weight' .* has the state exp_avg, last_grad, step in .* needs exp_avg, exp_avg_sq, last_grad, step"),
    (spoil_rule, "group 0 of the state_dict is of the rule lion, here it is of mars-adamw"),
    (spoil_count, "group 0 has 4 parameters in the state_dict, 5 in this optimizer"),
    (spoil_groups, "state_dict has 2 parameter groups, this optimizer 1"),
    (spoil_lr, "lr must be at least 0"), (spoil_all, "must have 'state' and 'param_groups'")])
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    _, source = trained(betas=(0.9, 0.9))
    model, optimizer = trained(steps=2)
    before, saved = everything(optimizer), everything(source)
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(everything(optimizer), before)
    expected_model, expected = trained(steps=2)
    train(model, optimizer, range(2, 4)), train(expected_model, expected, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(whole(model), whole(expected_model)))


def test_hooks_of_others_may_change_what_is_loaded():
    _, source = trained()
    saved = {"wrapped": everything(source)}
    _, optimizer = trained(steps=0)
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict["wrapped"])
    optimizer.load_state_dict(saved)
    assert_same(everything(optimizer), saved["wrapped"])


def test_adamw_goes_on_as_rule_adamw():
    settings = dict(betas=(0.8, 0.9), weight_decay=0.1)
    theirs_model, theirs = trained(torch.optim.AdamW, **settings)
    model = copy.deepcopy(theirs_model)
    optimizer = MARS(model.parameters(), rule="adamw", lr=1.0)
    optimizer.load_state_dict(theirs.state_dict())
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "rule")} == {"lr": LR, "betas": (0.8, 0.9), "rule": "adamw"}
    train(model, optimizer, range(4, 8)), train(theirs_model, theirs, range(4, 8))
    for one, other in zip(whole(model), whole(theirs_model)):
        assert relative(one, other) < 1e-6
    fresh = torch.optim.AdamW(model.parameters())  # without state: no step was made
    optimizer.load_state_dict(fresh.state_dict())
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("source", ["torch", "ours"])
@pytest.mark.parametrize("bad_first", [False, True])
def test_mars_goes_on_from_adamw(source, bad_first):
    """Its moments, its own settings, and a first step that is not corrected, also where it comes after a skipped one."""
    gs = gradients((5, 4), 8, seed=0, dtype=torch.float64)
    parameter = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    betas = dict(betas=(0.9, 0.95), weight_decay=0.0)
    adamw = torch.optim.AdamW([parameter], lr=LR, **betas) if source == "torch" else MARS([parameter], rule="adamw", lr=LR, **betas)
    run(adamw, [parameter], [gs[:4]])
    x, state = parameter.detach().clone(), {key: value.clone() for key, value in adamw.state[parameter].items()}
    saved, parameter = adamw.state_dict(), nn.Parameter(x.clone())
    optimizer = MARS([parameter], lr=0.02, clip=None, gamma=0.1)
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as Accelerate does: it still knows that h is missing
    assert optimizer.param_groups[0]["lr"] == 0.02 and optimizer.param_groups[0]["betas"] == (0.95, 0.99)
    if bad_first:
        run(optimizer, [parameter], [[torch.full((5, 4), float("nan"))]])
    run(optimizer, [parameter], [gs[4:]])
    m, v, h = state["exp_avg"], state["exp_avg_sq"], gs[4]
    for t, g in enumerate(gs[4:], start=5):
        c = g + 0.1 * 0.95 / 0.05 * (g - h)
        m, v, h = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c, g
        x = x - 0.02 * (m / (1 - 0.95**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    assert relative(parameter, x) < 1e-12


def test_adamw_state_of_another_kind_is_refused():
    for settings, message in ((dict(amsgrad=True), "amsgrad=True"), (dict(maximize=True), "maximize=True")):
        _, source = trained(torch.optim.AdamW, **settings)
        for rule in ("adamw", "mars-adamw"):
            with pytest.raises(ValueError, match=message):
                trained(rule=rule)[1].load_state_dict(source.state_dict())
    _, source = trained(torch.optim.AdamW)
    with pytest.raises(ValueError, match="is of the rule adamw, here it is of lion"):
        trained(rule="lion")[1].load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match="has the state momentum_buffer in the state_dict, adamw needs"):
        trained(rule="adamw")[1].load_state_dict(trained(torch.optim.SGD, momentum=0.9)[1].state_dict())


def scaled_by_betas(rule, betas, steps):
    """The buffer "momentum" that Lion and Muon kept up to version 0.1, whose scale the betas made."""
    b1, b2 = betas
    decay, weight = (b2, (1 - b2) * b1 / b2) if rule == "lion" else (b1, b1 * (1 - b1))
    u = torch.zeros_like(steps[0])
    for g in steps:
        u = decay * u + weight * g
    return u


@pytest.mark.parametrize("rule,betas", [("lion", (0.9, 0.98)), ("muon", (0.95, 0.99)), ("lion", (0.0, 0.9)), ("muon", (0.0, 0.9))])
def test_the_former_buffer_of_lion_and_muon_is_converted(rule, betas):
    gs = gradients((5, 4), 8, seed=0, dtype=torch.float64)
    settings = dict(rule=rule, betas=betas, lr=LR, matrix_dtype=torch.float64)
    straight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))
    optimizer = MARS([straight], **settings)
    run(optimizer, [straight], [gs[:4]])
    stopped, saved = nn.Parameter(straight.detach().clone()), copy.deepcopy(optimizer.state_dict())
    run(optimizer, [straight], [gs[4:]])
    saved["state"][0] = {"step": torch.tensor(4.0), "momentum": scaled_by_betas(rule, betas, gs[:4])}
    optimizer = MARS([stopped], **settings | {"betas": (0.5, 0.5)})  # the file's betas count
    optimizer.load_state_dict(saved)
    run(optimizer, [stopped], [gs[4:]])
    assert relative(stopped, straight) < 1e-12
