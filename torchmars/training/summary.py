"""What a run is about to do, in lines for the console."""

from typing import Any

from torchmars.config import ResolvedConfig
from torchmars.core.console import labelled
from torchmars.core.tables import table
from torchmars.models import GPT2
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout


def summary(config: ResolvedConfig, layout: Layout, model: GPT2, optimizer: MARS) -> list[str]:
    """Return lines on the model, its layout, what a step takes, and which rule updates what.

    `config` has its dtypes resolved.
    """
    training, args = config.training, model.args
    microbatch_size, accumulation_steps = training.microbatches(layout.data.size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    has_matrices = bool(optimizer.plans.owner_loads)
    matrices = f", matrices in {config.optimizer.matrix_dtype}" if has_matrices else ""
    batch = f"{training.global_batch_size} x {training.seq_len} tokens a step"
    return [
        *labelled(
            "model",
            f"{config.model.name} {config.model.size}: {parameters:,} parameters, "
            f"{args.n_layer} layers, {args.n_head} heads, width {args.n_embd}, "
            f"vocabulary {args.vocab_size}",
        ),
        *labelled("layout", f"{layout.describe()}, {training.dtype} compute"),
        *labelled(
            "batch",
            f"{batch}: {layout.data.size} ranks x {accumulation_steps} accumulation steps "
            f"x {microbatch_size} sequences",
        ),
        *labelled(
            "optimizer",
            f"{config.optimizer.name}, {config.optimizer.mode}{matrices}",
            *group_table(optimizer.param_groups),
        ),
    ]


def group_table(groups: list[dict[str, Any]]) -> list[str]:
    """Return the optimizer's groups: whose parameters, how many, under which rule and settings."""
    headings = "group", "rule", "tensors", "parameters", "lr", "betas", "weight decay"
    return table([(*headings, "gamma", "clip"), *map(group_row, groups)])


def group_row(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one of the optimizer's groups."""
    mars = group["rule"].startswith("mars-")
    return (
        group["role"],
        group["rule"],
        str(len(group["params"])),
        f"{sum(p.numel() for p in group['params']):,}",
        f"{group['lr']:g}",
        " ".join(f"{beta:g}" for beta in group["betas"]),
        f"{group['weight_decay']:g}",
        f"{group['gamma']:g}" if mars else "-",
        f"{group['clip'] or 'off'}" if mars else "-",
    )
