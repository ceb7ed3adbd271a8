"""Compare optimizers fairly: each tuned on one grid, the best over several seeds."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tomli_w

from torchmars.begin import is_missing
from torchmars.cluster.environment import keep_compiled_in
from torchmars.comparison.contenders import find_baseline, find_contenders
from torchmars.comparison.results import (
    RESULTS_FILE,
    Comparison,
    Grid,
    Value,
    numbers_of,
    write_comparison,
)
from torchmars.comparison.settings import SETTINGS_FILE, check_settings
from torchmars.comparison.study import Study
from torchmars.comparison.tables import csv_text, lines, markdown, seeds_text
from torchmars.config import ResolvedConfig
from torchmars.config.load import load_command, require_config
from torchmars.core.check import Interval, Place, make, read_words
from torchmars.core.cli import words
from torchmars.core.console import labelled, next_commands, say
from torchmars.core.errors import (
    EXIT_STOPPED,
    Ended,
    UserError,
    exit_on_user_error,
    file_errors,
    missing_package,
)
from torchmars.core.files import locked, write_durably
from torchmars.core.words import counted

PROG = "torchmars compare"
TABLES = ("table.md", "table.csv")
PICTURES = ("plot.png", "plot.svg")
# Settings that have an option --NAME-grid, in the order that the names of trials have.
TUNED = ("lr", "weight_decay", "gamma", "lr_rest", "betas")


@dataclass
class TrialOptions:
    """What is tried, and where: options of each command that tunes by trials."""

    lr_grid: str | None = None
    """Learning rates to try: "1e-3,2e-3,4e-3". Always needed to train."""
    lr_rest_grid: str | None = None
    """Learning rates of embeddings, heads and vectors to try with each of these, for muon and
    mars-m."""
    widen: bool = False
    """Where the best learning rate is the lowest or the highest, try up to four more beyond it."""
    jobs: Annotated[int, Interval(1, 1_000)] | None = None
    """Trials at a time on this machine, which share its GPUs and cores. Default: 1."""
    slurm: bool = False
    """Submit each trial as a SLURM job of one machine. SBATCH_PARTITION, SBATCH_GPUS_PER_NODE and
    the like say where."""


@dataclass
class Compare(TrialOptions):
    """Compare optimizers fairly: each tuned on one grid, the best over several seeds.

    Every trial is a run of the config, on the same data for as many tokens, whose [optimizer] and
    run.seed are replaced. Prints and writes a table, the difference of each pair with its interval
    and whether seeds show it, the tokens that each optimizer saves, and plots. Whatever ends it,
    the same command resumes. It may then have more optimizers, values and seeds.
    """

    optimizers: str = "adamw,adamw-mars-betas,mars-adamw,muon,mars-m"
    """Who takes part: names of files in train_configs/optimizers, and TOML files of your own with
    an [optimizer] section."""
    seeds: Annotated[int, Interval(1, 1_000)] = 3
    """Seeds, from run.seed on. Tuning has the first, the best settings get all of them."""
    weight_decay_grid: str | None = None
    """Weight decays to try with each learning rate."""
    gamma_grid: str | None = None
    """Values of gamma to try with each of these, for mars-*."""
    betas_grid: str | None = None
    """Betas to try with each of these: "0.9:0.95,0.95:0.99"."""
    baseline: str | None = None
    """The optimizer that the others are measured against: their savings and differences. Default:
    adamw, where it takes part. It may change from one call to the next."""
    folder: Annotated[str, Place()] | None = None
    """Folder of the comparison. Default: comparisons/NAME by the config's run.name."""
    keep_checkpoints: bool = False
    """Keep the last checkpoints of trials. By default they are deleted once a trial is done."""


def main() -> None:
    """Run the comparison of the command line, or the rest of it."""
    with exit_on_user_error():
        options, config, rest = load_command(Compare, sys.argv[1:], PROG)
        require_config(rest, PROG)
        study = make_study(options, config, rest)
        own = "each optimizer has its own [optimizer] section; the config's is not used"
        if not run_study(study, options, own):
            raise Ended(EXIT_STOPPED)


def make_study(options: Compare, config: ResolvedConfig, arguments: list[str]) -> Study:
    """Return the comparison to make. Raises `UserError`."""
    if given := next((each for each in arguments if each.startswith("--optimizer.")), None):
        raise UserError(
            f"{given} has no meaning here: each optimizer of --optimizers has settings of its own; "
            "name a TOML file of yours there"
        )
    check_options(options, config)
    contenders = find_contenders(words(options.optimizers, "--optimizers"))
    folder = Path(options.folder or f"comparisons/{config.run.name}")
    return Study(
        folder,
        arguments,
        replace(config, run=replace(config.run, folder=str(folder / "trials"))),
        contenders,
        make_grid(options),
        [config.run.seed + number for number in range(options.seeds)],
        find_baseline(options.baseline, contenders),
        options.widen,
        options.keep_checkpoints,
    )


def check_options(options: TrialOptions, config: ResolvedConfig) -> None:
    """Raise `UserError` for what is missing, and for what trials of `config` cannot have."""
    if options.lr_grid is None:
        raise UserError("--lr-grid is missing: give the learning rates to try, 1e-3,2e-3,4e-3")
    if missing := next((each for each in ("scipy", "matplotlib") if is_missing(each)), None):
        raise missing_package(missing, "a comparison", "compare")
    if not config.validation.interval:
        raise UserError(
            "validation.interval = 0: trials are compared by their validation loss, so set the "
            "steps between validations"
        )
    if config.checkpoint.folder is not None:
        raise UserError(
            "checkpoint.folder has no meaning in a comparison, whose trials have folders of their "
            "own: leave it out"
        )


def make_grid(options: TrialOptions) -> Grid:
    """Return the values to try of each setting, in ascending order, by its option --NAME-grid.

    Raises `UserError`, also for a grid that cannot be widened.
    """
    grid: Grid = {}
    for name in TUNED:
        if (text := getattr(options, f"{name}_grid", None)) is not None:
            option = f"--{name.replace('_', '-')}-grid"
            kind: Any = tuple[float, float] if name == "betas" else list[float]
            given = [word.split(":") for word in words(text, option)]
            read = [make(kind, read_words(each, kind, option), name=option) for each in given]
            values: list[Value] = [[*each] if name == "betas" else each[0] for each in read]
            grid[name] = sorted({str(value): value for value in values}.values(), key=numbers_of)
    if options.widen and len(grid["lr"]) < 2:
        raise UserError("--widen needs two learning rates or more, to know by which ratio")
    return grid


def run_study(study: Study, options: TrialOptions, about: str) -> bool:
    """Run the trials that are left; print and write results. Return whether all trials ended.

    `about` says more of the contenders. Raises `UserError`.
    """
    # Here, since they bring torch, and mistakes are said before.
    from torchmars.comparison import execution, summary
    from torchmars.reports import figures

    runner = execution.make_runner(study, options.jobs or 1, options.slurm)
    heading = study_heading(study, about, runner.describe())
    folder = str(study.folder)
    with (
        file_errors(f"cannot write to {folder}", "set --folder to one you can write"),
        locked(study.folder / "lock", f"comparing in {folder}"),
    ):
        study.folder.mkdir(parents=True, exist_ok=True)
        settings = check_settings(study)
        say(*heading)
        keep_compiled_in(study.folder / "compile_cache", "--folder")
        runner.prepare()
        write_durably(study.folder / SETTINGS_FILE, tomli_w.dumps(settings))
        results = execution.Results(study)

        def write() -> Comparison:
            found = summary.summarise(study, results)
            for name, text in zip(TABLES, (markdown(found), csv_text(found))):
                write_durably(study.folder / name, text)
            write_comparison(found, study.folder)
            return found

        write()  # so that it can be watched from the first trial on
        complete = execution.run_trials(study, results, runner, write)
        found = write()
        if figure := figures.comparison_figure(found):
            figures.write_files(figure, [study.folder / name for name in PICTURES])
    drawn = PICTURES if figure else ()
    say(*lines(found), f"{folder}: {', '.join([*TABLES, RESULTS_FILE, *drawn])}")
    say(*next_commands(("torchmars", "plot", folder, "--html"), ("torchmars", "runs", folder)))
    return complete


def study_heading(study: Study, about: str, how: str) -> list[str]:
    """Return lines on a study before it starts. Raises `UserError` for a trial that cannot be."""
    training, names = study.base.training, [each.name for each in study.contenders]
    first = [study.tuning(each, study.lrs) for each in study.contenders]
    least = sum(map(len, first)) + len(names) * (len(study.seeds) - 1)
    return [
        *labelled("compare" if study.kind == "optimizer" else "transfer", ", ".join(names), about),
        *labelled(
            "trials",
            f"at least {least}, each of {counted(training.steps, 'step')} "
            f"({training.tokens:,} tokens), with {seeds_text(study.seeds)}",
            how,
            *["checkpoints of a trial that is done are deleted"] * (not study.keep_checkpoints),
        ),
        *labelled("folder", str(study.folder)),
    ]
