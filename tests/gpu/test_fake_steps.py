"""Steps on fake GPUs, without one: nothing waits, and no step starts more than it did."""

import importlib.util

import pytest

from tests.support import fake_cuda
from tests.support.full import full_but, selected
from torchmars.optim.compiling import has_triton
from torchmars.optim.rules import RULES, MatrixRule

LAYERS, VOCABULARY = 2, 512
LAYOUTS = {
    "1 rank": (1, {}),
    "FSDP 8": (8, {}),
    "HSDP 2x4": (8, {"dp_replicate": 2}),
    "TP 2": (2, {"tp": 2}),
    "CP 2": (2, {"cp": 2}),
    "CP 2 Ulysses": (2, {"cp": 2, "cp_method": "ulysses"}),
    "PP 2": (2, {"pp": 2}),
    "PP 2 Interleaved": (2, {"pp": 2, "pp_schedule": "Interleaved1F1B"}),
}
MODELS = {
    "gpt2": {"name": "gpt2"},
    "llama": {"name": "llama"},
    "moe": {"name": "llama", "n_expert": 8, "n_expert_used": 2, "n_expert_inner": 512},
}
NARROW = {"momentum_dtype": "bfloat16", "last_grad_dtype": "bfloat16"}
TECHNIQUES = {
    "documents": {"data": {"separate_documents": True}},
    "selective": {"activation_checkpoint": {"mode": "selective"}},
    "full": {"activation_checkpoint": {"mode": "full"}},
    "microbatches": {"training": {"microbatch_size": 1}},
    "bfloat16 state": {"optimizer": NARROW},
    "exact": {"optimizer": {"mode": "exact"}},
    "EMA": {"training": {"ema_decay": 0.9}},
    "float8": {"training": {"float8": {"recipe": "tensorwise"}}},
    "without Triton": {},
}
OPTIONS = {
    "options": {
        "optimizer": {
            "orthogonalize": "polar-express",
            "equilibrate": True,
        }
    }
}
CASES = [
    *(("gpt2", rule, "FSDP 8", "") for rule in RULES),
    *(("llama", rule, "HSDP 2x4", "") for rule in RULES),
    *((model, "mars-adamw", layout, "") for model in ("gpt2", "llama") for layout in LAYOUTS),
    *(("llama", "mars-m", layout, "") for layout in LAYOUTS),
    *(("moe", "mars-m", layout, "") for layout in ("HSDP 2x4", "TP 2", "PP 2 Interleaved")),
    ("moe", "mars-adamw", "FSDP 8", "full"),
    *(("gpt2", "mars-adamw", "1 rank", each) for each in ("exact", "EMA", "microbatches")),
    *(("gpt2", "mars-adamw", "FSDP 8", technique) for technique in TECHNIQUES),
    *(("llama", "mars-m", "HSDP 2x4", technique) for technique in TECHNIQUES | OPTIONS),
]
CASES = list(dict.fromkeys(CASES))
# Each rule, layout, model and technique is in one of the others.
SLOW = [
    *(("llama", "mars-m", "HSDP 2x4", technique) for technique in TECHNIQUES),
    *(("llama", "mars-adamw", layout, "") for layout in LAYOUTS if layout != "HSDP 2x4"),
    *(("gpt2", rule, "FSDP 8", "") for rule in RULES if "adamw" not in rule),
    *(("gpt2", "mars-adamw", "1 rank", each) for each in ("EMA", "microbatches")),
]
# What a pass of a microbatch starts on a GPU: for each layer, and beside them.
OF_LAYER, OF_MODEL = {"gpt2": 60, "llama": 180, "moe": 260}, 80
# More for each layer.
MORE = {
    "TP 2": 60,
    "CP 2": 50,
    "CP 2 Ulysses": 30,
    "PP 2 Interleaved": 20,
    "selective": 60,
    "full": 60,
    "float8": 480,
}
# What the optimizer starts for each tensor by Triton's passes, and by torch's, which a GPU has
# where Triton is missing or something else is in its way; and for a step.
OF_TENSOR = {
    "mars-adamw": (7, 7),
    "mars-lion": (3, 5),
    "mars-shampoo": (7, 11),
    "mars-m": (11, 16),
    "adamw": (1, 3),
    "lion": (1, 3),
    "muon": (3, 12),
}
OF_NARROW_STATE, OF_STEP = 10, (120, 165)
OF_STACKS = (100, 160)  # experts are of a kind of their own
OF_HEADS = 120  # heads apart are of shapes of their own, each with the products of a batch
QUICK = [("llama", "mars-m", "HSDP 2x4", "")]


def tables(model, rule, layout, technique):
    """The tables of a config whose matrices are large enough for kernels of their own."""
    stages = 2 if "Interleaved" in layout else 1  # on each rank
    result = {
        "run": {"name": "fake"},
        "model": MODELS[model] | {"n_layer": stages * LAYERS, "n_head": 4, "n_embd": 1024},
        "data": {"source": "text", "files": ["text.txt"]},
        "training": {
            "global_batch_size": 16,
            "seq_len": 64,
            "dtype": "bfloat16",
            "compile": False,
        },
        "optimizer": {"name": rule},
        "parallelism": LAYOUTS[layout][1],
    }
    for section, values in (TECHNIQUES | OPTIONS).get(technique, {}).items():
        result[section] = result.get(section, {}) | values
    return result


def has_kernels(technique):
    """Whether the optimizer has kernels by Triton for all that it does."""
    return has_triton() and technique != "without Triton"


@pytest.fixture(scope="module")
def found(request):
    """What the steps of all cases that run do, made together."""
    if reason := fake_cuda.obstacle():
        pytest.skip(reason)
    cases = selected(request, "model", "rule", "layout", "technique")
    steps = [
        {
            "tables": tables(*case),
            "world": LAYOUTS[case[2]][0],
            "vocab_size": VOCABULARY,
            "kernels": case[3] != "without Triton",
        }
        for case in cases
    ]
    return dict(zip(cases, fake_cuda.found(steps)))


@pytest.mark.parametrize("model,rule,layout,technique", full_but(QUICK, CASES, SLOW))
def test_a_step_waits_for_nothing_and_starts_no_more_than_it_did(
    found, model, rule, layout, technique
):
    if technique == "float8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao")
    step = found[model, rule, layout, technique]
    assert "error" not in step, step["error"]
    passes, optimizer = step["passes"], step["optimizer"]
    for part in (passes, optimizer):
        assert part["waits"] == part["to_host"] == []
    of_each = 2 if technique == "documents" else 1  # tokens, and where documents begin
    times = 2 if technique == "exact" else 1
    assert len(passes["to_device"]) <= of_each * times * step["microbatches"], passes["to_device"]
    assert all("batches.py" in each for each in passes["to_device"]), passes["to_device"]
    # Where gradients are, and settings: once for each pass.
    assert len(optimizer["to_device"]) <= times * has_kernels(technique)

    # All is eager but for the optimizer's kernels of large tensors, which are one each.
    layers = LAYERS // 2 if layout == "PP 2" else LAYERS  # of this rank
    of_layer = OF_LAYER[model] + MORE.get(layout, 0) + MORE.get(technique, 0)
    budget = times * step["microbatches"] * (of_layer * layers + OF_MODEL)
    assert passes["launches"] <= budget, passes["most"]
    by_torch = not has_kernels(technique)
    of_tensor = OF_TENSOR[rule][by_torch] + OF_NARROW_STATE * (technique == "bfloat16 state")
    of_step = OF_STEP[by_torch] + OF_STACKS[by_torch] * (model == "moe")
    if RULES[rule].defaults.get("per_head") == "auto":
        of_step += OF_HEADS
    budget = times * (of_tensor * step["tensors"] + of_step)
    assert optimizer["launches"] + optimizer["kernels"] <= budget, optimizer["most"]

    if not by_torch:  # a launch of Triton's is for all tensors, whatever their number
        # A bucket of matrices has two of its own; with replicas one more for each.
        launched = optimizer["launched"]
        of_all = {name: n for name, n in launched.items() if name not in ("pack", "step_along")}
        assert sum(of_all.values()) <= times * 7, of_all
        assert optimizer["kernels"] == 0
        if not isinstance(RULES[rule], MatrixRule) and not technique:
            # Beside them a copy and an all-reduce; where there are replicas, some more.
            others = optimizer["launches"] - sum(launched.values())
            assert others <= (4 if layout == "FSDP 8" else 16), optimizer["most"]


# Models as large as they are, but for the number of their layers, with the ranks that share them.
LARGE = [
    ({"name": "gpt2", "size": "small"}, 1),
    ({"name": "llama", "size": "1b", "n_layer": 4}, 1),
    ({"name": "llama", "size": "qwen3-30b-a3b", "n_layer": 2}, 64),
]


@pytest.mark.full
def test_large_models_take_as_few_launches_and_hints_only_where_they_may():
    """A q_norm [128] on 64 ranks has 2 elements: what its unit keeps behind it lies at +8 bytes."""
    if (reason := fake_cuda.obstacle()) or not has_triton():
        pytest.skip(reason or "needs triton")
    cases = [
        {
            "tables": tables("gpt2", rule, "FSDP 8", "") | {"model": model, "parallelism": {}},
            "world": world,
            "vocab_size": VOCABULARY,
        }
        for model, world in LARGE
        for rule in ("mars-adamw", "mars-m")
    ]
    for case in cases:
        case["tables"]["training"]["global_batch_size"] = 64
    for case, step in zip(cases, fake_cuda.found(cases)):
        assert "error" not in step, step["error"]
        optimizer, launched = step["optimizer"], step["optimizer"]["launched"]
        assert len(optimizer["to_device"]) <= 1
        of_matrices = launched.pop("pack", 0) + launched.pop("step_along", 0)
        assert sum(launched.values()) <= 6 and optimizer["kernels"] == 0
        assert bool(of_matrices) == (case["tables"]["optimizer"]["name"] == "mars-m")
        offsets = [address % 16 for address in step["addresses"]]
        assert len(offsets) == step["tensors"]
        assert offsets.count(8) == (2 if case["world"] == 64 else 0)
        assert set(offsets) <= {0, 8}
