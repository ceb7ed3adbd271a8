"""Which checkpoints of a run are kept: the deletion of others, by the run or a command; verify."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import (
    checkpoints,
    delete_all,
    folder_of,
    leftovers,
    lies_in,
    no_checkpoint,
    step_of,
)
from torchmars.checkpoint.manifest import FORMAT, CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.resume import read_verified
from torchmars.config import CheckpointConfig, ResolvedConfig
from torchmars.config.load import without_none
from torchmars.config.sections import RunConfig
from torchmars.core.check import make
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.core.formats import OtherVersion
from torchmars.core.words import counted
from torchmars.storage import storage_of
from torchmars.storage.storage import DAMAGED, DELETED


class Retention:
    """Deletes checkpoints that a run does not keep, on the first rank.

    `check` raises a `UserError` if this process may not write there. `warn` prints a line.
    """

    def __init__(
        self, config: ResolvedConfig, check: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        self.config, self.run, self.folder = config.checkpoint, config.run, config.checkpoints
        self.check, self.warn = check, warn
        self.undeletable: list[PurePath] = []  # a warning was printed of these

    def clear(self) -> None:
        """Delete leftovers of crashed or failed saves and deletions."""
        self.check()
        self._delete(path for path in leftovers(self.folder) if path.suffix != DAMAGED)

    def tidy(self, step: int) -> None:
        """Delete the checkpoints that need not be kept, now that the one of `step` is durable.

        Those of another version stay: their contents are not known here. So do another run's.
        """
        try:
            self.check()
            own: dict[int, PurePath] = {}
            losses: dict[int, float] = {}
            for path in checkpoints(self.folder):
                loss = None
                try:
                    manifest = manifests.read(path)
                    if not manifest.is_of(self.run, path):
                        continue
                    loss = manifest.validation_loss
                except OtherVersion:
                    continue
                except DamagedCheckpoint:
                    pass  # nobody can load it
                if step_of(path) > step:  # the run went back behind it, so it could not be loaded
                    storage_of(path).set_aside(path)
                    continue
                own[step_of(path)] = path
                losses |= {} if loss is None else {step_of(path): loss}
            old = steps_to_delete([*own], losses, self.config)
            self._delete(own[step] for step in old)
        except (OSError, UserError) as error:
            self.warn(f"warning: cannot tidy {self.folder}: {error}")

    def _delete(self, paths: Iterable[PurePath]) -> None:
        """Delete them as far as possible, and warn once of the others."""
        paths = [path for path in paths if path not in self.undeletable]
        self.undeletable += delete_all(paths, self.warn)


def steps_to_delete(
    steps: list[int], losses: dict[int, float], config: CheckpointConfig
) -> list[int]:
    """Return those of `steps` whose checkpoints `config` does not keep.

    `losses` are the validation losses that are known, by step.
    """
    kept = set(sorted(steps)[-config.keep_last :])  # all of them for 0
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    losses = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    if config.keep_best and losses:
        kept.add(min(losses, key=lambda step: (losses[step], step)))
    return sorted(set(steps) - kept)


def checkpoints_of(run: PurePath) -> PurePath:
    """Return the folder of a run's checkpoints. Raises `UserError` if there are none."""
    what = "has no checkpoints"
    if isinstance(run, Path) and path_problem(run, "folder"):
        raise no_checkpoint(run, what)
    folder = folder_of(run)
    if not checkpoints(folder) and not leftovers(folder):
        raise no_checkpoint(run, what)
    return folder


def verify_checkpoints(folder: PurePath) -> None:
    """Read everything. Raises `UserError` at the end if a checkpoint cannot be loaded."""
    found = checkpoints(folder)
    good, other = read_all(found)
    for path in found:
        if path in good:
            size = good[path].bytes / 2**20
            say(f"{path.name}: good, {size:,.1f} MiB in {counted(len(good[path].files), 'file')}")
        else:
            say(f"{path.name}: {'of another version' if path in other else 'damaged'}")
    if damaged := len(found) - len(good) - len(other):
        raise UserError(
            f"{damaged} of {len(found)} checkpoints are damaged: "
            "a run falls back to the newest good one"
        )
    if other:
        raise UserError(
            f"{len(other)} of {len(found)} checkpoints are of another version: {FORMAT.remedy}"
        )


def prune_checkpoints(
    run: PurePath,
    folder: PurePath,
    asked: dict[str, int],
    damaged: bool = False,
    dry_run: bool = False,
) -> None:
    """Delete the checkpoints of a run, in `folder`, that neither its settings nor `asked` keep.

    `asked` has values of [checkpoint], instead of the run's. `damaged` deletes those that are not
    good, too. `dry_run` deletes nothing, only prints. Raises `UserError` if no checkpoint is good,
    or if `folder` is elsewhere and may be another run's: then nothing is deleted.
    """
    say(f"pruning {folder}")
    found = checkpoints(folder)
    good, other = read_all(found)
    if found and not good:
        raise UserError(f"no checkpoint in {folder} is good: nothing was deleted")
    # Elsewhere it is as a config says, which may be anybody's.
    if isinstance(run, Path) and not lies_in(folder, run):
        tables = [without_none(manifest.config["run"]) for manifest in good.values()]
        runs = {make(RunConfig, each, f"in {folder}", "run").path.resolve() for each in tables}
        if runs != {run.resolve()}:
            raise UserError(
                f"{folder} is not in {run}, nor are its checkpoints all of that run: nothing was "
                f"deleted: name {folder} itself"
            )
    # A .partial may be a save under way.
    endings = (DELETED, DAMAGED) if damaged else (DELETED,)
    unwanted = [path for path in leftovers(folder) if path.suffix in endings]
    unwanted += [path for path in found if damaged and path not in (*good, *other)]
    unwanted += not_kept(good, asked) if good else []
    stuck = [] if dry_run else delete_all(unwanted, warn=lambda text: say(text, error=True))
    for path in unwanted:
        if path not in stuck:
            say(f"{'would delete' if dry_run else 'deleted'} {path}")
    if stuck:
        raise UserError(f"{len(stuck)} of {len(unwanted)} could not be deleted: see the warnings")


def not_kept(good: dict[PurePath, CheckpointManifest], asked: dict[str, int]) -> list[PurePath]:
    """Return the good checkpoints that neither `asked` nor the run's settings keep."""
    newest = good[max(good, key=step_of)]
    saved = without_none(newest.config.get("checkpoint", {})) | asked
    settings = make(CheckpointConfig, saved, "in the newest checkpoint", "checkpoint")
    by_step = {step_of(path): path for path in good}
    losses = {
        step_of(path): manifest.validation_loss
        for path, manifest in good.items()
        if manifest.validation_loss is not None
    }
    steps = steps_to_delete(list(by_step), losses, settings)
    return [by_step[step] for step in steps]


def read_all(found: list[PurePath]) -> tuple[dict[PurePath, CheckpointManifest], list[PurePath]]:
    """Return the good ones among checkpoints with their manifests, and those of another version.

    Prints the faults of all except the good ones.
    """
    good, other = {}, []
    for path in found:
        try:
            good[path] = read_verified(path, "full")
        except (DamagedCheckpoint, OtherVersion) as error:
            say(str(error))
            if isinstance(error, OtherVersion):
                other.append(path)
    return good, other
