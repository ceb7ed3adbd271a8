"""Small runs in float32, by the names of a model, a rule and a layout."""

from functools import partial
from pathlib import Path

from tests.support.layouts import LAYOUTS_WITH_EXPERTS
from tests.support.tiny import tiny_tables, train_here
from torchmars.training.trainer import Trainer

LLAMA = {"name": "llama", "n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 64, "n_inner": 96}
LATENT = {"name": "deepseek", "n_layer": 4, "n_head": 8, "n_embd": 64, "n_inner": 96}
LATENT |= {"q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 12}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
EXPERTS = {"n_expert": 8, "n_expert_used": 2, "n_expert_inner": 48}
DENSE = {"n_expert": 0, "n_dense": 0, "n_expert_shared": 0, "routed_scaling": 1.0}
MODELS: dict[str, dict] = {
    "GPT-2": {"n_layer": 4, "n_head": 4, "n_embd": 32},
    "Llama": LLAMA,
    "DeepSeek, dense": LATENT | DENSE | {"router": "softmax"},
    "Qwen3-MoE": LLAMA | EXPERTS | {"qk_norm": True},
    "GLM-4.5": LLAMA
    | EXPERTS
    | {"n_dense": 1, "n_expert_shared": 1, "router": "sigmoid", "qkv_bias": True}
    | {"routed_scaling": 2.5, "rotary_fraction": 0.5},
    "DeepSeek": LATENT | EXPERTS | {"n_dense": 1, "n_group": 4, "topk_group": 2},
}
MODELS["windows"] = LLAMA | {
    **{"window": 20, "window_blocks": "sf", "rope_blocks": "rrn"},
    **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_len": 16},
}
MODELS["OLMo 3"] = MODELS["windows"] | {
    **{"rope_blocks": "ur", "post_norms": True, "qk_norm": True, "qk_norm_whole": True},
}
# What keeps their experts busy.
LOSSES: dict[str, dict] = {
    "Qwen3-MoE": {"balance_loss": 1e-2, "router_z_loss": 1e-3},
    "GLM-4.5": {"balance_rate": 1e-3},
    "DeepSeek": {"balance_rate": 1e-3},
}
RULES: dict[str, dict] = {
    # At 6e-3 the losses of Llama jump by up to 1e-4 at single steps, and by 2e-5 on one rank with
    # other microbatches: AdamW divides gradients that are hardly more than rounding by their size.
    # That goes away with a lower rate, or with eps = 1e-6.
    "adamw": {"name": "adamw", "lr": 2e-3},
    "mars-adamw": {"name": "mars-adamw", "lr": 2e-3},
    "mars-adamw, exact": {"name": "mars-adamw", "mode": "exact", "lr": 2e-3},
    "mars-m": {"name": "mars-m", "per_head": False},
    "mars-m, per head": {"name": "mars-m", "per_head": True},
    "mars-m, options": {"name": "mars-m", "orthogonalize": "polar-express", "equilibrate": True},
    **{name: {"name": name, "lr": 6e-3} for name in ("muon", "mars-shampoo")},
    **{name: {"name": name, "lr": 1e-3} for name in ("lion", "mars-lion")},
    "mars-m, bfloat16": {"name": "mars-m", "matrix_dtype": "bfloat16"},
}
RULES = {name: {"matrix_dtype": "float32"} | settings for name, settings in RULES.items()}
# At the begin and after each step, by layer: how many tokens of the last step chose each expert.
Counts = list[dict[str, list[int]]]


def run_tables(
    folder: Path, model: str, rule: str, layout: str, steps: int = 20, **overrides: dict
) -> dict:
    """Return the tables of a run."""
    training = {"dtype": "float32", "steps": steps} | LOSSES.get(model, {})
    return tiny_tables(
        folder,
        run={"name": f"{model} {rule} {layout}".replace(" ", "-").replace(",", "")},
        model=MODELS[model],
        optimizer=RULES[rule],
        parallelism=LAYOUTS_WITH_EXPERTS[layout][1],
        training=training | overrides.pop("training", {}),
        validation={"interval": 10, "windows": 4, "sample_tokens": 4},
        **overrides,
    )


def train_counted(*runs: dict) -> list[Counts]:
    """Train runs on the ranks of this process group; return the counts of this rank's layers."""
    found: list[Counts] = []
    for tables in runs:
        found.append([])
        train_here(tables, change=partial(record_counts, into=found[-1]))
    return found


def record_counts(trainer: Trainer, into: Counts) -> None:
    """Let a trainer add its counts to `into`, now and after each step."""
    step = trainer.train_step

    def record(made=None):
        state = trainer.model.balance.state()
        into.append({name: counts.tolist() for name, counts in state.items()})
        return made

    record()
    trainer.train_step = lambda: record(step())


def merged(ranks: tuple[Counts, ...]) -> Counts:
    """Return the counts of all layers. Ranks that have the same ones must agree."""
    steps = []
    for of_step in zip(*ranks, strict=True):
        layers: dict[str, list[int]] = {}
        for of_rank in of_step:
            for name, counts in of_rank.items():
                assert layers.setdefault(name, counts) == counts, name
        steps.append(layers)
    return steps
