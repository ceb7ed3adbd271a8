"""The same run on several layouts, and how far its losses are apart."""

from pathlib import Path

from tests.support.layouts import LAYOUTS, by_ranks
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train_here

MODELS: dict[str, dict] = {
    "GPT-2": {"n_layer": 4, "n_head": 4, "n_embd": 32},
    "Llama": {
        "name": "llama",
        "n_layer": 4,
        "n_head": 8,
        "n_kv_head": 4,
        "n_embd": 64,
        "n_inner": 96,
    },
}
MODELS["DeepSeek"] = {
    "name": "deepseek",
    "n_layer": 4,
    "n_head": 8,
    "n_embd": 64,
    "n_inner": 96,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # Without experts: near ties of a router hide nothing.
    "n_expert": 0,
    "n_dense": 0,
    "n_expert_shared": 0,
    "routed_scaling": 1.0,
    "router": "softmax",
}
MODELS["DeepSeek without latents of queries"] = MODELS["DeepSeek"] | {"q_lora_rank": 0}
# Of 3 times the width and 5 times the depth of a base, whose heads of keys are as many.
SHAPE = {"n_layer": 5, "n_head": 12, "n_kv_head": 4, "n_embd": 48, "n_inner": 72}
MODELS["Llama of a base"] = {"name": "llama"} | SHAPE
MODELS["windows"] = MODELS["Llama"] | {
    **{"window": 20, "window_blocks": "sf", "rope_blocks": "rrn"},
    **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_len": 16},
}
MODELS["OLMo 3"] = MODELS["windows"] | {
    **{"rope_blocks": "ur", "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
}
BASES: dict[str, dict] = {
    "Llama of a base": SHAPE
    | {"n_layer": 1, "n_head": 4, "n_embd": 16, "n_inner": 24, "depth": "1/L"}
}
RULES: dict[str, dict] = {
    # At 6e-3 the losses of Llama jump by up to 1e-4 at single steps, and by 2e-5 on one rank with
    # other microbatches: AdamW divides gradients that are hardly more than rounding by their size.
    # That goes away with a lower rate, or with eps = 1e-6.
    "mars-adamw": {"name": "mars-adamw", "lr": 2e-3},
    "mars-m": {"name": "mars-m", "matrix_dtype": "float32", "per_head": False},
    "mars-m, per head": {"name": "mars-m", "matrix_dtype": "float32", "per_head": True},
    "mars-m, bfloat16": {"name": "mars-m", "matrix_dtype": "bfloat16"},
    "mars-m, options": {
        "name": "mars-m",
        "matrix_dtype": "float32",
        "orthogonalize": "polar-express",
        "equilibrate": True,
    },
    "mars-adamw, exact": {"name": "mars-adamw", "mode": "exact", "lr": 2e-3},
    "adamw": {"name": "adamw", "lr": 6e-3},
    **{name: {"name": name, "lr": 1e-3} for name in ("mars-lion", "lion")},
    **{name: {"name": name, "lr": 6e-3} for name in ("mars-shampoo", "muon")},
}


def run_tables(
    folder: Path, model: str, rule: str, layout: str, steps: int = 20, **training: int
) -> dict:
    """Return the tables of a run in float32, whose name tells of further settings of training."""
    again = " again" if training else ""
    name = f"{model} {rule} {layout}{again}".replace(" ", "-").replace(",", "")
    return tiny_tables(
        folder,
        run={"name": name},
        model=MODELS[model],
        transfer=BASES.get(model, {}),
        optimizer=RULES[rule],
        parallelism=LAYOUTS[layout][1],
        training={"dtype": "float32", "steps": steps} | training,
        validation={"interval": 10, "windows": 4, "sample_tokens": 4},
    )


def losses_apart(
    folder: Path,
    cases: list[tuple[str, str]],
    layouts: list[str],
    steps: int = 20,
    **training: int,
) -> dict[tuple[str, str, str], float]:
    """Train each of `cases`, pairs of a model and a rule, on 1 rank and on each of `layouts`.

    On the layouts with the settings `training`.

    Returns the largest difference of a training or validation loss from that on 1 rank, as a part
    of it, by model, rule and layout. The text is in `folder`.
    """
    one = [run_tables(folder, *case, "1 rank", steps) for case in cases]
    run_ranks(train_here, 1, *one)
    for size, alike in by_ranks(layouts).items():
        runs = [run_tables(folder, *c, each, steps, **training) for each in alike for c in cases]
        run_ranks(train_here, size, *runs)
    apart = {}
    for case in cases:
        expected = losses(run_tables(folder, *case, "1 rank"))
        for layout in layouts:
            found = losses(run_tables(folder, *case, layout, **training))
            assert found.keys() == expected.keys()
            apart[*case, layout] = max(abs(found[at] / expected[at] - 1) for at in expected)
    return apart


def losses(tables: dict) -> dict[tuple[str, int], float]:
    """Return the losses of a run by what they are of and step."""
    return {
        (name, step): value
        for name in ("train/loss", "validation/loss")
        for step, value in metrics(tables, name).items()
    }
