"""Cost and expected result of presets: a table of all, and a page for each."""

from collections.abc import Iterable
from functools import cache

from torchmars.config import ModelConfig, ResolvedConfig
from torchmars.config.load import config_from_sources, read
from torchmars.config.presets import Preset
from torchmars.core.console import labelled
from torchmars.core.words import counted, short, table
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import Model, build_meta_model
from torchmars.optim.rules import RULES
from torchmars.planning.memory import ModelCosts
from torchmars.planning.plan import PER_NODE, SPEEDS, Plan

HEADINGS = ("preset", "parameters", "tokens", "GPUs", "hours", "settings", "result to expect")
RIGHT = (1, 2, 3, 4)
# The settings of the optimizer that a preset shows.
SHOWN = ("lr", "lr_1d", "betas", "betas_1d", "weight_decay", "weight_decay_1d", "gamma", "clip")
HOURS = (
    f"hours: estimated for {PER_NODE} H100 on each machine, {SPEEDS}. Small models reach "
    "less, and the optimizer's own time is not in it: torchmars plan NAME --world-size GPUS"
)


@cache
def preset_costs(config: ModelConfig, tokenizer: str, seq_len: int) -> ModelCosts:
    """Return the costs of a config's model in bfloat16. Presets share their models."""
    model = build_meta_model(config, load_tokenizer(tokenizer).vocab_size, seq_len)
    return ModelCosts(model, None, 2)


def read_preset(preset: Preset) -> tuple[ResolvedConfig, Model, float]:
    """Return the config of a preset, its model, and about how many seconds a step takes."""
    config = config_from_sources(read([preset.name]))
    costs = preset_costs(config.model, config.data.tokenizer, config.training.seq_len)
    plan = Plan(costs, config, preset.about.gpus, PER_NODE)
    return config, costs.model, max(plan.times)


def preset_row(preset: Preset) -> tuple[str, ...]:
    """Return the cells of a preset in a table of all."""
    config, model, seconds = read_preset(preset)
    return (
        preset.name,
        short(model.parameter_count),
        short(config.training.tokens),
        f"{preset.about.gpus}{'*' if preset.about.layout == 'assumed' else ''}",
        f"{config.training.steps * seconds / 3600:,.0f}",
        preset.about.origin,
        preset.about.result or "none published",
    )


def preset_table(presets: Iterable[Preset]) -> list[str]:
    """Return presets in lines, one for each."""
    return [
        *table([HEADINGS, *map(preset_row, presets)], RIGHT),
        "* GPUs: our assumption; the others are from the published runs",
        "settings: published in all that matters, or partly",
        HOURS,
    ]


def preset_page(preset: Preset) -> list[str]:
    """Return all that is known of a preset, in lines."""
    config, model, seconds = read_preset(preset)
    training, schedule, optimizer = config.training, config.schedule, config.optimizer
    values = {name: getattr(optimizer, name, None) for name in SHOWN}
    shown = [  # as the command line takes them
        f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in values.items()
        if value is not None
    ]
    mode = f", {optimizer.mode}" if RULES[optimizer.name].variance_reduced else ""
    size, accumulated = training.microbatches(
        config.parallelism.degrees(preset.about.gpus).data, config.parallelism.stages
    )
    origin, name = f"{preset.about.origin}: {preset.about.source}", preset.name
    windows = f"{training.global_batch_size} x {training.seq_len} tokens a step"
    read = f"{short(training.tokens)} tokens of {config.data.source}"
    warmup = f"{counted(schedule.warmup_steps, 'step')} of warmup, min_lr {schedule.min_lr}"
    hours = f"about {training.steps * seconds / 3600:,.0f} hours, {seconds:.2f} s a step"
    here = f"here {accumulated} x {counted(size, 'sequence')} on each data-parallel rank"
    sections = {
        "preset": [name],
        "files": [" ".join(preset.files)],
        "model": [f"{model.parameter_count:,} parameters: {model.describe()}"],
        "batch": [f"{windows}, {counted(training.steps, 'step')}, {read}"],
        "optimizer": [f"{optimizer.name}{mode}: {', '.join(shown)}"],
        "schedule": [f"{schedule.name}, {warmup}"],
        "settings": [origin],
        "result": [preset.about.result or "none published"],
        "GPUs": [f"{preset.about.gpus}, {preset.about.layout}", here],
        "time": [hours, HOURS],
        "notes": list(preset.about.notes),
        "start": [f"CONFIG_FILE={name} ./run_train.sh"],
    }
    return [line for title, section in sections.items() for line in labelled(title, *section)]
