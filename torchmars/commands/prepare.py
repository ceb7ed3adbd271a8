"""Do all of a run that needs no ranks, or only tokenise a corpus into shards."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from torchmars.cluster import scheduler
from torchmars.config import DataConfig, ResolvedData
from torchmars.config.load import load_command, require_config
from torchmars.core.check import Interval
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.words import counted
from torchmars.data.prepare import prepare_shards

PROG = "torchmars prepare"


@dataclass
class Prepare:
    """Do all of a run that needs no ranks, or prepare a corpus alone.

    With a config: checks it, tokenises its corpus into shards once, verifies the shards, and checks
    that the run can resume from the checkpoints it has. With --source and without a config: only
    tokenises that corpus. --source, --files, --validation-files, --tokenizer, --begin-token,
    --path, --validation_fraction and --processes are short for --data.source and so on.
    """

    ranks: Annotated[int, Interval(1, 100_000)] = 1
    """Ranks that the batch must divide over."""
    nodes: Annotated[int, Interval(1, 100_000)] = 1
    """Machines that the ranks run on."""
    task: Annotated[int, Interval(0, 100_000)] | None = None
    """Number of this task, from 0, of several that tokenise the corpus side by side."""
    tasks: Annotated[int, Interval(1, 100_000)] | None = None
    """How many tasks there are. With --source, the default of both is what SLURM says of the array
    or step that this is a task of."""


def main() -> None:
    """Prepare the corpus that the command line names, and the run of its config, if it has one."""
    with exit_on_user_error():
        args = [long_form(arg) for arg in sys.argv[1:]]
        options, config, settings = load_command(Prepare, args, PROG)
        given = {arg.partition("=")[0] for arg in sys.argv[1:]}
        corpus_alone = "--source" in given and settings[0].startswith("--")
        task, tasks = task_of(options, os.environ if corpus_alone else {})
        if options.ranks % options.nodes:
            raise UserError(
                f"--ranks {options.ranks} does not divide over --nodes {options.nodes}: "
                f"choose a multiple of {options.nodes}"
            )
        if not corpus_alone:
            require_config(settings, PROG)
        corpora = config.data.corpora()
        if corpus_alone or tasks != 1:
            done = [prepare_corpus(corpus, task, tasks) for corpus in corpora]
            if not all(done):
                return
        if not corpus_alone:
            # Not at the top: it imports much, and mistakes are said before.
            from torchmars.training.preparation import prepare_run

            prepare_run(config, options.ranks, options.nodes)


def long_form(arg: str) -> str:
    """Return `--data.NAME` for the short form `--NAME` of a setting of [data]."""
    name = arg.partition("=")[0].removeprefix("--").replace("-", "_")
    short = arg.startswith("--") and name in {each.name for each in fields(DataConfig)}
    return f"--data.{arg.removeprefix('--')}" if short else arg


def task_of(options: Prepare, variables: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of this task, and how many there are.

    SLURM's `variables` say so where the options do not. Raises `UserError`.
    """
    task, tasks = options.task, options.tasks
    if (task is None) != (tasks is None):
        raise UserError("--task and --tasks need each other: --task 0 --tasks 8 is the first of 8")
    if task is None or tasks is None:
        return scheduler.task_of_array(variables) or scheduler.task_of_step(variables)
    if task >= tasks:
        raise UserError(
            f"task {task} is none of {tasks} tasks: they are numbered from 0 to {tasks - 1}, "
            "without gaps"
        )
    return task, tasks


def prepare_corpus(config: ResolvedData, task: int, tasks: int) -> bool:
    """Do this task's part of a corpus, and print a summary.

    Returns whether the shards are complete. Raises `UserError`.
    """
    manifest = prepare_shards(config, task, tasks)
    if manifest is None:
        say(f"task {task} of {tasks} is done: the one that ends last completes {config.path}")
        return False
    for name, split in manifest.splits.items():
        say(
            f"{config.path}: {name} {split.tokens:,} tokens ({manifest.tokenizer}) "
            f"in {counted(split.documents, 'document')}, {counted(len(split.shards), 'shard')}"
        )
    return True
