"""Lines for the console that describe a run before it starts."""

from typing import TYPE_CHECKING, Any

from torchmars.checkpoint.folder import step_folder
from torchmars.config import ResolvedConfig, TrainingConfig
from torchmars.config.ranks import eager_note, slow_warning
from torchmars.core.console import labelled
from torchmars.core.words import counted, table
from torchmars.data.windows import Mixture
from torchmars.models import Model, title
from torchmars.models.base import base_of
from torchmars.optim import MARS
from torchmars.optim.rules import RULES
from torchmars.parallel.layout import Layout
from torchmars.records.speed import mfu_note

if TYPE_CHECKING:  # it brings seconds of torch that a plan has no use for
    from torchmars.training.checkpointer import Resumed, RunState


def introduction(
    config: ResolvedConfig,
    layout: Layout,
    native_bfloat16: bool,
    compiles: bool,
    model: Model,
    optimizer: MARS,
    data: Mixture,
    resumed: "Resumed",
) -> list[str]:
    """Return all that a run prints at its start.

    `config` has its dtypes and compilation resolved, `native_bfloat16` and `compiles` say what all
    ranks can.
    """
    lines = labelled("run", f"{config.run.path}, seed {config.run.seed}")
    lines += summary(config, layout.describe(), layout.data.size, model, optimizer)
    slow = slow_warning(config, matrices=bool(optimizer.plans.owner_loads))
    if slow and not native_bfloat16:
        lines += labelled("warning", slow)
    lines += labelled("data", *data_lines(config.training, data, resumed.state))
    lines += continuation(config, resumed)
    eager = eager_note(config, layout.device, compiles, layout.group("tp").size)
    notes = [each for each in (eager, mfu_note(layout.device)) if each]
    return lines + [line for note in notes for line in labelled("note", note)]


def summary(
    config: ResolvedConfig, layout: str, data_ranks: int, model: Model, optimizer: MARS
) -> list[str]:
    """Return lines on the model, its layout, the batch of a step, and the optimizer's groups.

    The last ones warn of a schedule or a rate that does not fit. `config` has its dtypes resolved,
    `layout` is in words, and `data_ranks` read different samples.
    """
    training = config.training
    warnings = config.schedule.warning(training.steps), config.optimizer.warning()
    microbatch_size, accumulation_steps = training.microbatches(
        data_ranks, config.parallelism.stages
    )
    has_matrices = bool(optimizer.plans.owner_loads)
    matrices = f", matrices in {config.optimizer.matrix_dtype}" if has_matrices else ""
    return [
        *labelled(
            "model",
            f"{title(config.model)}: {model.counts_in_words}, {model.describe()}",
        ),
        *(labelled("base", base_line(config, model)) if config.transfer.named else []),
        *labelled(
            "layout",
            f"{layout}, {training.dtype} compute"
            + (f", {training.float8.recipe} float8" if training.float8.recipe != "none" else "")
            + (", compiled blocks" if training.compile else "")
            + (", deterministic" if training.deterministic else ""),
        ),
        *labelled(
            "batch",
            f"{training.global_batch_size} x {training.seq_len} tokens a step: "
            f"{counted(data_ranks, 'rank')} x "
            f"{counted(accumulation_steps, 'accumulation step')} x "
            f"{counted(microbatch_size, 'sequence')}",
        ),
        *labelled(
            "optimizer",
            f"{config.optimizer.name}, {config.optimizer.mode}{matrices}",
            *group_table(optimizer.param_groups),
        ),
        *(line for text in warnings if text for line in labelled("warning", text)),
    ]


def base_line(config: ResolvedConfig, model: Model) -> str:
    """Return whose learning rates the config has, and what the model multiplies for it."""
    base = base_of(model, config.transfer)
    return f"{base.describe()}: its rates are taken; multipliers {model.args.multipliers}"


def data_lines(training: TrainingConfig, data: Mixture, state: "RunState") -> list[str]:
    """Return how much of its data the run reads, from its `state` on: a line for each part."""
    steps = max(training.steps, state.step)
    position = state.position + (steps - state.step) * training.global_batch_size
    lines, samples = [], state.shares.counts(position)
    for part, count in zip(data.parts, samples):
        available, read = part.manifest.splits["train"].tokens, count * training.seq_len
        weight = f" (weight {part.weight:g})" if data.names else ""
        lines.append(
            f"{part.folder}{weight}: {available:,} tokens ({part.manifest.tokenizer}); "
            f"{counted(steps, 'step')} read{'s' * (steps == 1)} {read:,} "
            f"({read / available:.2f} epochs)"
        )
    return lines


def continuation(config: ResolvedConfig, resumed: "Resumed") -> list[str]:
    """Return where the run resumes, in lines; none for a new run."""
    step, training = resumed.state.step, config.training
    if resumed.origin is None:
        return []
    done = step >= training.last_step
    effect = ": has no effect, for nothing is trained" if done else ""
    lines = [line for change in resumed.changes for line in labelled("changed", change + effect)]
    if not done:
        return lines + labelled("continue", resumed.origin)
    if step < training.steps:
        stop = (
            f"at training.stop_after = {training.stop_after}: raise it, or leave it out, to go on"
        )
        return lines + labelled("stopped", stop)
    folder, more = step_folder(config.checkpoints, step), step + training.steps
    all_done = f"all {step} steps are done: {folder}"
    return lines + labelled("complete", f"{all_done}. To go on: --training.steps {more}")


def group_table(groups: list[dict[str, Any]]) -> list[str]:
    """Return the optimizer's groups: whose parameters, how many, under which rule and settings."""
    headings = "group", "rule", "tensors", "parameters", "lr", "betas", "weight decay"
    return table([(*headings, "gamma", "clip"), *map(group_row, groups)])


def group_row(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one of the optimizer's groups."""
    mars = RULES[group["rule"]].variance_reduced
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
