"""The same run of a mixture of experts on several layouts: losses, and who was chosen."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.support.layout_losses import RULES
from tests.support.layouts import LAYOUTS_WITH_EXPERTS
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train_here
from torchmars.training.trainer import Trainer

SHAPE = {"name": "llama", "n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 64}
SHAPE |= {"n_expert": 8, "n_expert_used": 2, "n_expert_inner": 48}
MODELS: dict[str, dict] = {
    "Qwen3-MoE": SHAPE | {"qk_norm": True},
    "GLM-4.5": SHAPE
    | {"n_inner": 96, "n_dense": 1, "n_expert_shared": 1, "router": "sigmoid"}
    | {"routed_scaling": 2.5, "rotary_fraction": 0.5, "qkv_bias": True},
}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
MODELS["DeepSeek"] = SHAPE | LATENT | {"name": "deepseek", "n_inner": 96, "v_head_dim": 12}
MODELS["DeepSeek"] |= {"n_dense": 1, "n_group": 4, "topk_group": 2}
del MODELS["DeepSeek"]["n_kv_head"]
# What keeps their experts busy.
LOSSES: dict[str, dict] = {
    "Qwen3-MoE": {"balance_loss": 1e-2, "router_z_loss": 1e-3},
    "GLM-4.5": {"balance_rate": 1e-3},
    "DeepSeek": {"balance_rate": 1e-3},
}
# Settings that change how a step is computed and not what, by a name that may follow a layout's.
VARIANTS: dict[str, dict] = {
    "": {},
    "full": {"activation_checkpoint": {"mode": "full"}},
    "selective": {"activation_checkpoint": {"mode": "selective"}},
    # Of each rank's part of 16 sequences.
    "microbatches of 4": {"training": {"microbatch_size": 4}},
    "microbatches of 2": {"training": {"microbatch_size": 2}},
    "microbatches of 1": {"training": {"microbatch_size": 1}},
}
Case = tuple[str, str]  # the names of a layout and of a variant
ONE: Case = ("1 rank", "")
# At the begin and after each step, by layer: how many tokens of the last step chose each expert.
Counts = list[dict[str, list[int]]]


def run_tables(
    folder: Path,
    model: str,
    rule: str,
    case: Case,
    layers: int = 4,
    steps: int = 20,
    **overrides: dict,
) -> dict:
    """Return the tables of a run in float32."""
    layout, variant = case
    name = f"{model} {rule} {layout} {variant}".strip().replace(" ", "-").replace(",", "")
    settings = {key: dict(value) for key, value in VARIANTS[variant].items()}
    training = {"dtype": "float32", "steps": steps} | LOSSES[model] | settings.pop("training", {})
    return tiny_tables(
        folder,
        run={"name": name},
        model=MODELS[model] | {"n_layer": layers},
        optimizer=RULES[rule],
        parallelism=LAYOUTS_WITH_EXPERTS[layout][1],
        training=training,
        validation={"interval": 10, "windows": 4},
        **settings,
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


@dataclass
class Apart:
    """How far a run is from the one on 1 rank, as a part of it."""

    before: float
    """The largest difference of losses before a count differs."""
    norms: float
    """The same of gradient norms."""
    after: float
    """The largest of losses from then on."""
    moved: int
    """Choices that fell otherwise, of all steps."""
    choices: int
    """All choices."""


def runs_apart(
    folder: Path, model: str, rule: str, cases: list[Case], layers: int, steps: int
) -> dict[Case, Apart]:
    """Train on 1 rank and on each of `cases`, and compare. The text is in `folder`."""
    sizes = {case: LAYOUTS_WITH_EXPERTS[case[0]][0] for case in (ONE, *cases)}
    counts: dict[Case, Counts] = {}
    for size in sorted(set(sizes.values())):
        alike = [case for case in sizes if sizes[case] == size]
        runs = [run_tables(folder, model, rule, case, layers, steps) for case in alike]
        for case, ranks in zip(alike, zip(*run_ranks(train_counted, size, *runs))):
            counts[case] = merged(ranks)
    tables = {case: run_tables(folder, model, rule, case, layers, steps) for case in (ONE, *cases)}
    used = MODELS[model]["n_expert_used"]
    return {
        case: apart(tables[case], tables[ONE], counts[case], counts[ONE], used) for case in cases
    }


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


def apart(tables: dict, one: dict, counts: Counts, of_one: Counts, used: int) -> Apart:
    """Compare a run with the `one` on 1 rank. `used` experts get each token."""
    tokens, moved, steps = 16 * 32, [], len(counts) - 1
    for ours, theirs in zip(counts[1:], of_one[1:], strict=True):
        assert ours.keys() == theirs.keys()
        layers = [name for name in ours if name.endswith(".counts")]  # not of the step before
        assert all(sum(ours[name]) == used * tokens for name in layers), tables
        pairs = [(torch.tensor(ours[name]), torch.tensor(theirs[name])) for name in layers]
        moved.append(sum(int((a - b).abs().sum()) for a, b in pairs) // 2)
    first = next((step for step, number in enumerate(moved, 1) if number), steps + 1)
    differences = {
        (name, step): abs(value / metrics(one, name)[step] - 1)
        for name in ("train/loss", "validation/loss", "train/grad_norm")
        for step, value in metrics(tables, name).items()
    }
    assert len(differences) == 2 * steps + steps // 10
    norms, before, after = [0.0], [0.0], [0.0]
    for (name, step), each in differences.items():
        if name == "train/grad_norm":
            norms.append(each if step < first else 0.0)
        else:
            (before if step < first else after).append(each)
    choices = steps * used * tokens * len(layers)
    return Apart(max(before), max(norms), max(after), sum(moved), choices)
