"""What a run is about to do, in lines for the console."""

from typing import Any

from torchmars.config import Config
from torchmars.models import GPT2
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout


def summary(config: Config, layout: Layout, model: GPT2, optimizer: MARS) -> list[str]:
    """The model, how it is laid out, what a step takes and who updates what.

    `config` is one with resolved dtypes.
    """
    training, args = config.training, model.args
    microbatch_size, accumulation_steps = training.microbatches(layout.data.size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    has_matrices = bool(optimizer.plans.owner_loads)
    matrices = f", matrices in {config.optimizer.matrix_dtype}" if has_matrices else ""
    return [
        f"model     {config.model.name} {config.model.size}: {parameters:,} parameters, {args.n_layer} layers, {args.n_head} heads, "
        f"width {args.n_embd}, vocabulary {args.vocab_size}",
        f"layout    {layout.describe()}, {training.dtype} compute",
        f"batch     {training.global_batch_size} x {training.seq_len} tokens a step: {layout.data.size} ranks x {accumulation_steps} accumulation steps "
        f"x {microbatch_size} sequences",
        f"optimizer {config.optimizer.name}, {config.optimizer.mode}{matrices}",
        *(f"          {line}" for line in group_table(optimizer.param_groups)),
    ]


def group_table(groups: list[dict[str, Any]]) -> list[str]:
    """The optimizer's groups: whose parameters, how many, under which rule and settings."""
    rows = [
        ("group", "rule", "tensors", "parameters", "lr", "betas", "weight decay", "gamma", "clip")
    ]
    for group in groups:
        mars = group["rule"].startswith("mars-")
        rows.append(
            (
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
        )
    return table(rows)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
