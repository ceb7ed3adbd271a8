"""Steps by Triton's kernels, in its interpreter: those of the passes on tensors."""

import copy
import pickle
import weakref
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.optim.gpu.interpreted import sharded_steps, steps, steps_of, with_kernels
from tests.support.full import full_but, selected
from tests.support.ranks import run_ranks
from torchmars.optim import MARS, mars, param_groups, transfer_factors
from torchmars.optim.rules import RULES, MarsAdamW, MatrixRule

launches = pytest.importorskip("torchmars.optim.gpu.launches", reason="needs triton")
if version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("the interpreter of Triton 3.6 fails with NumPy 2.4", allow_module_level=True)

QUICK = [
    ("mars-adamw", "nan"),
    ("mars-adamw", "narrow"),
    ("mars-m", ""),
    ("mars-m", "exact"),
    ("muon", "bfloat16 gradients"),
]
CASES = [
    *((rule, technique) for rule in RULES for technique in ("", "nan", "narrow")),
    *((rule, "bfloat16 gradients") for rule in RULES),
    *((rule, "lean") for rule in ("mars-lion", "mars-m", "mars-shampoo")),
    *((rule, "exact") for rule in ("mars-adamw", "mars-lion", "mars-m", "mars-shampoo")),
    ("mars-m", "two floats"),
    *(("mars-adamw", technique) for technique in ("two floats", "absent")),
]


@pytest.fixture(scope="module")
def found(request):
    """The steps of all cases that run, by kernels: made together, in a process of their own."""
    cases = selected(request, "rule", "technique")
    (results,) = run_ranks(steps_of, 1, cases)
    return dict(zip(cases, results))


def ulps(found, wanted):
    """How far numbers are apart, in units in the last place of the largest in a tensor."""
    pairs = [(one.double(), other.double()) for one, other in zip(found, wanted) if one.numel()]
    return max(
        ((one - other).abs().max() / (other.abs().max().clamp(min=1e-30) * 2.0**-23)).item()
        for one, other in pairs
    )


@pytest.mark.filterwarnings("ignore:MARS")
@pytest.mark.parametrize("rule,technique", full_but(QUICK, CASES))
def test_steps_are_those_of_the_passes(found, rule, technique):
    by_kernels, wanted = found[rule, technique], steps(rule, technique, kernels=False)
    rtol = 1e-8 if technique == "two floats" else 1e-13  # the interpreter rounds tl.fma twice
    torch.testing.assert_close(
        by_kernels["norms"], wanted["norms"], rtol=rtol, atol=0, equal_nan=True
    )
    assert by_kernels["skipped"].tolist() == wanted["skipped"].tolist()
    assert by_kernels["skipped"].tolist() == ([1, 0, 1] if technique == "nan" else [0, 0, 0])
    if technique == "narrow":  # the interpreter cuts bfloat16 off where a GPU rounds it
        for name in ("weights", "state"):
            torch.testing.assert_close(by_kernels[name], wanted[name], rtol=2.0**-6, atol=2e-3)
        return
    # The iteration of Newton and Schulz makes more of the last place.
    most = 16 if isinstance(RULES[rule], MatrixRule) else 2
    assert ulps(by_kernels["weights"], wanted["weights"]) <= most
    assert ulps(by_kernels["state"], wanted["state"]) <= 4  # torch's own AdamW weighs otherwise
    assert by_kernels["telemetry"] == pytest.approx(wanted["telemetry"], rel=1e-6)
    in_float64 = steps(rule, technique, kernels=False, dtype=torch.float64)
    if "lion" not in rule:  # whose sign makes much of a rounding
        exact = [each.float() for each in in_float64["weights"]]
        assert ulps(by_kernels["weights"], exact) <= 2 * most


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:MARS")
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m"])
@pytest.mark.parametrize("ranks,replicas", [(2, 1), (4, 2)])
def test_steps_on_shards_are_those_of_the_passes(rule, ranks, replicas):
    by_kernels, wanted = (
        run_ranks(sharded_steps, ranks, rule, replicas, kernels) for kernels in (True, False)
    )
    for (found, norms), (weights, wanted_norms) in zip(by_kernels, wanted):
        assert norms == pytest.approx(wanted_norms, rel=1e-13)
        assert ulps(found, weights) <= 16
        assert all(map(torch.equal, found, by_kernels[0][0]))


class Stub:
    """Takes the place of the launch function, and notes what is launched and sent to the GPU."""

    def __init__(self, monkeypatch):
        self.names, self.sent, original = [], 0, launches.sent

        def launch(kernel, programs, *arguments, **form):
            self.names += [kernel.__name__] * bool(programs)

        def send(values, device):
            self.sent += 1
            return original(values, device)

        monkeypatch.setattr(launches, "launch", launch)
        monkeypatch.setattr(launches, "sent", send)

    def of(self, step):
        """The names of the kernels that a step launches, and how often it sends something."""
        self.names.clear()
        self.sent = 0
        step()
        return self.names.copy(), self.sent


SUMS = ["inner_products", "sum_pieces", "settle"]


def model(*shapes, dtype=torch.float32):
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def test_a_step_launches_a_kernel_for_each_rule_and_dtype_and_sends_what_changed(monkeypatch):
    stub, parameters = Stub(monkeypatch), model((40, 30), (7,), (3, 8, 5), (9, 9), (2, 50_000))
    matrices = [each for each in parameters if each.ndim > 1]
    groups = [
        {"params": matrices[:2]},
        {"params": matrices[2:3], "lr": 1e-4, "weight_decay": 0.3},
        {"params": matrices[3:]},
        {"params": parameters[1:2], "rule": "adamw"},
    ]
    optimizer = with_kernels(MARS(groups, rule="mars-adamw"))
    assert stub.of(optimizer.step) == ([*SUMS, "update", "update"], 3)  # rows and pieces, once
    assert stub.of(optimizer.step) == ([*SUMS, "update", "update"], 0)
    optimizer.param_groups[0]["lr"] = 1e-5
    assert stub.of(optimizer.step)[1] == 1
    for parameter in parameters:
        parameter.grad = parameter.grad.clone()
    assert stub.of(optimizer.step)[1] == 1
    state = optimizer.state[matrices[0]]
    state["exp_avg"] = state["exp_avg"].clone()
    assert stub.of(optimizer.step)[1] == 2
    parameters[0].grad = None
    assert stub.of(optimizer.step)[1] == 3
    assert parameters[1]._version > 0


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {each.data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.data_ptr() not in given:
                self.elements = max(self.elements, each.numel())
        return result


def test_exact_mode_makes_no_tensor_as_large_as_a_gradient_and_sends_no_table_twice(monkeypatch):
    stub, parameters = Stub(monkeypatch), model((400, 300), (2, 90, 80))
    optimizer = with_kernels(MARS(parameters, rule="mars-adamw", exact=True))
    for _ in range(2):  # one table for each place of the last gradient
        optimizer.look_ahead(), optimizer.step()
    with Largest() as made:
        ahead, step = stub.of(optimizer.look_ahead), stub.of(optimizer.step)
    assert ahead == (["inner_products", "sum_pieces", "look_ahead"], 0)
    assert step == ([*SUMS, "update"], 0)
    assert 0 < made.elements < 100


@pytest.mark.parametrize("rule", ["mars-m", "muon"])
def test_matrices_are_packed_and_stepped_along_by_one_launch_each(monkeypatch, rule):
    stub, parameters = Stub(monkeypatch), model((40, 30), (20, 30), (40, 30))
    optimizer = with_kernels(MARS(parameters, rule=rule))
    optimizer.step()
    names, sent = stub.of(optimizer.step)
    assert (names, sent) == ([*SUMS, "update", *["pack", "step_along"] * 2], 0)


class Mine(torch.nn.Module):
    """Matrices of several kinds, whose factors differ if all but keys grow."""

    multipliers = ("logits",)

    def __init__(self, width):
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.norm = torch.nn.LayerNorm(width)
        sides = {"q": (width, width), "k": (8, width), "up": (3 * width, width), "fixed": (9, 9)}
        self.layers = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in sides.items()}
        )
        self.head = torch.nn.Linear(width, 11, bias=False)


@pytest.mark.parametrize("rule", ["mars-adamw", "adamw", "lion", "muon", "mars-m"])
def test_factors_of_a_base_cost_no_launch(monkeypatch, rule):
    stub, large, launched, groups = Stub(monkeypatch), Mine(48), [], []
    for parameter in large.parameters():
        parameter.grad = torch.ones_like(parameter)
    for factors in (None, transfer_factors(large, Mine(16))):
        optimizer = with_kernels(MARS(param_groups(large, rule, factors=factors)))
        optimizer.step()
        launched.append(stub.of(optimizer.step))
        groups.append(len(optimizer.param_groups))
    assert launched[0] == launched[1]
    assert groups[1] > groups[0]


class DoublesItsStep(MarsAdamW):
    """A rule that derives from one with a kernel, and has none itself."""

    name = "doubles"

    def direction(self, *arguments):
        return 2 * super().direction(*arguments)


WITHOUT = ["float64", "a setting on a GPU", "a part elsewhere", "a rule", "state", "wire"]


@pytest.mark.parametrize("why", WITHOUT)
def test_where_there_is_no_kernel_a_step_is_made_by_passes(monkeypatch, why):
    stub = Stub(monkeypatch)
    monkeypatch.setitem(RULES, "doubles", DoublesItsStep())
    (parameter,) = model((4, 3), dtype=torch.float64 if why == "float64" else torch.float32)
    rule = {"a rule": "doubles", "wire": "mars-m"}.get(why, "mars-adamw")
    wire = torch.float64 if why == "wire" else "auto"
    optimizer = with_kernels(MARS([parameter], rule=rule, matrix_dtype=wire))
    if why == "a setting on a GPU":
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    if why == "a part elsewhere":
        optimizer.launcher.device = torch.device("meta")
    if why == "state":  # by a hook: its elements lie otherwise than the parameter's
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.zeros(3, 4).T
    before = parameter.detach().clone()
    assert stub.of(optimizer.step)[0] == []
    assert not torch.equal(parameter, before)


def test_memory_that_runs_out_leaves_no_old_addresses(monkeypatch):
    stub, parameters = Stub(monkeypatch), model((4, 3))
    optimizer, send = with_kernels(MARS(parameters, rule="mars-adamw")), launches.sent

    def full(values, device):
        raise torch.OutOfMemoryError

    for changes in ("the table", "a gradient"):
        monkeypatch.setattr(launches, "sent", full)
        parameters[0].grad = parameters[0].grad.clone()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        monkeypatch.setattr(launches, "sent", send)
        names, sent = stub.of(optimizer.step)
        assert names == [*SUMS, "update"] and sent == (3 if changes == "the table" else 1)
        assert optimizer.launcher._fresh[0] == parameters[0].grad.data_ptr()


def test_a_step_keeps_no_gradient(monkeypatch):
    Stub(monkeypatch)
    (parameter,) = model((4, 3))
    with_kernels(MARS([parameter], rule="mars-adamw")).step()
    gradient = weakref.ref(parameter.grad)
    parameter.grad = None
    assert gradient() is None


def test_a_clip_that_is_changed_in_place_is_sent(monkeypatch):
    stub, clip, most = Stub(monkeypatch), torch.tensor(1.0), torch.tensor(1.0)
    optimizer = with_kernels(MARS(model((4, 3)), rule="mars-adamw", clip=clip))
    optimizer.max_grad_norm = most
    optimizer.step()
    assert stub.of(optimizer.step)[1] == 0
    for each in (clip, most):
        each.fill_(0.5)
        assert stub.of(optimizer.step)[1] == 1


def test_where_triton_cannot_compile_a_line_says_so_and_steps_go_on(monkeypatch, caplog):
    def launch(*arguments, **form):
        raise NotADirectoryError("/home/nobody/.triton")

    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(mars, "has_launches", lambda device: True)
    (parameter,) = model((4, 3))
    optimizer = MARS([parameter], rule="mars-adamw")
    assert optimizer.launcher is None
    [line] = [each.message for each in caplog.records if "cannot be compiled" in each.message]
    assert "/home/nobody/.triton" in line and "TRITON_CACHE_DIR" in line
    before = parameter.detach().clone()
    optimizer.step()
    assert not torch.equal(parameter, before)


def test_copies_make_kernels_of_their_own_and_pickles_hold_none(monkeypatch):
    stub = Stub(monkeypatch)
    monkeypatch.setattr(mars, "has_launches", lambda device: True)
    optimizer = MARS(model((4, 3)), rule="mars-adamw")
    optimizer.step()
    assert b"triton" not in pickle.dumps(optimizer) and b"optim.gpu" not in pickle.dumps(optimizer)
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    assert twin.launcher.plans is twin.plans and twin.plans is not optimizer.plans
    assert stub.of(twin.step)[0] == [*SUMS, "update"]


def test_a_compiled_step_is_made_by_passes(monkeypatch):
    stub, (parameter,) = Stub(monkeypatch), model((4, 3))
    optimizer = with_kernels(MARS([parameter], rule="mars-adamw"))
    optimizer.step()
    before = parameter.detach().clone()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert stub.of(optimizer.step)[0] == [] and not torch.equal(parameter, before)
