"""What a run is about to do, in lines for the console."""

from pathlib import Path
from typing import Any

from torchmars.checkpoint.folder import step_folder
from torchmars.config import Config, TrainingConfig
from torchmars.config.dtypes import slow_warning
from torchmars.data import sources
from torchmars.data.shards import DataManifest
from torchmars.models import Model
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout
from torchmars.training.checkpointer import Resumed


def introduction(
    config: Config,
    layout: Layout,
    model: Model,
    optimizer: MARS,
    data: DataManifest,
    fast: bool,
    resumed: Resumed,
) -> list[str]:
    """Return all that a run says at its start.

    `config` is one with resolved dtypes. `fast` is whether all ranks multiply bfloat16 fast.
    """
    lines = [f"run       {config.run.path}, seed {config.run.seed}"]
    lines += summary(config, layout, model, optimizer)
    slow = slow_warning(config, matrices=bool(optimizer.plans.owner_loads))
    if slow and not fast:
        lines.append(f"warning   {slow}")
    lines.append(f"data      {data_line(config.data.path, config.training, data)}")
    if layout.first and (changed := sources.warning(config.data)):
        lines.append(changed)
    return lines + continuation(config.run.checkpoints, config.training.steps, resumed)


def summary(config: Config, layout: Layout, model: Model, optimizer: MARS) -> list[str]:
    """Return the model, its layout, the batch of a step, and the optimizer's groups, in lines.

    `config` is one with resolved dtypes.
    """
    training = config.training
    microbatch_size, accumulation_steps = training.microbatches(layout.data.size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    has_matrices = bool(optimizer.plans.owner_loads)
    matrices = f", matrices in {config.optimizer.matrix_dtype}" if has_matrices else ""
    return [
        f"model     {config.model.name} {config.model.size}: {parameters:,} parameters, "
        f"{model.describe()}",
        f"layout    {layout.describe()}, {training.dtype} compute",
        f"batch     {training.global_batch_size} x {training.seq_len} tokens a step: "
        f"{layout.data.size} ranks x {accumulation_steps} accumulation steps "
        f"x {microbatch_size} sequences",
        f"optimizer {config.optimizer.name}, {config.optimizer.mode}{matrices}",
        *(f"          {line}" for line in group_table(optimizer.param_groups)),
    ]


def data_line(path: str, training: TrainingConfig, data: DataManifest) -> str:
    """Return what the run reads of its data."""
    available = data.splits["train"].tokens
    read = training.steps * training.global_batch_size * training.seq_len
    return (
        f"{path}: {available:,} {data.tokenizer} tokens; {training.steps} steps read "
        f"{read:,} ({read / available:.2f} epochs)"
    )


def continuation(checkpoints: Path, steps: int, resumed: Resumed) -> list[str]:
    """Return where the run goes on, in lines; none for a run that starts anew."""
    step = resumed.state.step
    if step >= steps:
        return [
            f"complete  all {steps} steps are done: {step_folder(checkpoints, step)}. "
            f"To go on: --training.steps {step + steps}"
        ]
    if resumed.origin is None:
        return []
    changes = [f"changed   {change}" for change in resumed.changes]
    return [*changes, f"continue  {resumed.origin}"]


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
