"""What presets take, by the formulas of `find.py`: a plan of each would take minutes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from torchmars.config import ModelConfig, ResolvedConfig
from torchmars.config.load import config_from_sources
from torchmars.config.presets import Preset
from torchmars.core.console import labelled
from torchmars.core.tables import table
from torchmars.core.words import counted, short
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import build_meta_model
from torchmars.optim.rules import variance_reduced
from torchmars.planning.assumptions import ESTIMATED, PER_NODE
from torchmars.planning.find import estimate
from torchmars.planning.work import Work

HEADINGS = ("preset", "parameters", "tokens", "GPUs", "hours", "settings", "result to expect")
RIGHT = (1, 2, 3, 4)
# The settings of the optimizer that a preset shows.
SHOWN = ("lr", "lr_1d", "betas", "betas_1d", "weight_decay", "weight_decay_1d", "gamma", "clip")


@dataclass(frozen=True)
class PresetFigures:
    """A preset with what it takes."""

    preset: Preset
    config: ResolvedConfig
    work: Work
    """What its model takes."""
    seconds: float
    """Of a step, as estimated."""

    @classmethod
    def of(cls, preset: Preset) -> "PresetFigures":
        """Return the figures of a preset on its GPUs."""
        config = config_from_sources(preset.sources())
        tokenizer = load_tokenizer(config.data.tokenizer)
        work = work_of(config.model, tokenizer.vocab_size, config.training.seq_len)
        return cls(preset, config, work, estimate(config, work, preset.gpus, PER_NODE).seconds)

    @property
    def hours(self) -> float:
        """Hours of the whole run, as estimated."""
        return self.config.training.steps * self.seconds / 3600

    def row(self) -> tuple[str, ...]:
        """Return the cells of the preset in a table of all."""
        assumed = "" if self.preset.layout_published else "*"
        return (
            self.preset.name,
            short(self.work.parameters),
            short(self.config.training.tokens),
            f"{self.preset.gpus}{assumed}",
            f"{self.hours:,.0f}",
            self.preset.origin,
            self.preset.result or "none published",
        )


@cache
def work_of(config: ModelConfig, vocab_size: int, seq_len: int) -> Work:
    """Return what the model of a config takes. Presets share their models."""
    return Work.of(build_meta_model(config, vocab_size, seq_len))


def preset_table(presets: Iterable[Preset]) -> list[str]:
    """Return presets in lines, one for each."""
    rows = [PresetFigures.of(preset).row() for preset in presets]
    return [
        *table([HEADINGS, *rows], RIGHT),
        "* GPUs: what we assume; the others are those of the published runs",
        "settings: published in all that matters, or partly; ours are a starting point that the "
        "authors of the rule or model have not run",
        f"hours: {ESTIMATED}",
    ]


def preset_page(preset: Preset) -> list[str]:
    """Return all that is known of a preset, in lines."""
    figures = PresetFigures.of(preset)
    config, training = figures.config, figures.config.training
    schedule, optimizer = config.schedule, config.optimizer
    shown = [(name, getattr(optimizer, name)) for name in SHOWN]
    mode = f", {optimizer.mode}" if variance_reduced(optimizer.name) else ""
    size, accumulated = training.microbatches(
        config.parallelism.degrees(preset.gpus).data, config.parallelism.stages
    )
    sections = {
        "preset": [preset.name],
        "files": [" ".join(preset.files)],
        "model": [f"{figures.work.parameters:,} parameters: {figures.work.model.describe()}"],
        "batch": [
            f"{training.global_batch_size} x {training.seq_len} tokens a step, "
            f"{counted(training.steps, 'step')}, {short(training.tokens)} tokens of "
            f"{config.data.source}"
        ],
        "optimizer": [
            f"{optimizer.name}{mode}: "
            + ", ".join(f"{name} {words(value)}" for name, value in shown if value is not None)
        ],
        "schedule": [
            f"{schedule.name}, {counted(schedule.warmup_steps, 'step')} of warmup, "
            f"min_lr {schedule.min_lr}"
        ],
        "settings": [f"{preset.origin}: {preset.origin_text}"],
        "result": [preset.result or "none published"],
        "GPUs": [
            f"{preset.gpus}, {preset.layout}",
            f"here {accumulated} x {counted(size, 'sequence')} on each data-parallel rank",
        ],
        "time": [
            f"about {figures.hours:,.0f} hours, {figures.seconds:.2f} s a step",
            f"hours: {ESTIMATED}",
        ],
        "notes": list(preset.notes),
        "sources": [f"[{number}] {text}" for number, text in enumerate(preset.references, 1)],
        "start": [f"CONFIG_FILE={preset.name} ./run_train.sh"],
    }
    return [line for name, section in sections.items() for line in labelled(name, *section)]


def words(value: object) -> str:
    """Return a setting as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
