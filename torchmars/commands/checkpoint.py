"""List, verify or prune the checkpoints of a run."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from torchmars.checkpoint.folder import (
    DAMAGED,
    DELETED,
    checkpoints,
    delete_all,
    leftovers,
    step_of,
)
from torchmars.checkpoint.manifest import FORMAT, CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.resume import read_verified
from torchmars.checkpoint.retention import steps_to_delete
from torchmars.config.fields import Count
from torchmars.config.load import config_from_tables
from torchmars.core.console import say
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.files import PARTIAL, path_problem
from torchmars.core.formats import OtherVersion
from torchmars.core.options import choose, parse
from torchmars.core.tables import table

NO_CHECKPOINTS = "name a run's folder, such as runs/quickstart"
LEFT = {
    PARTIAL: "of a save under way or cut short",
    DAMAGED: "set aside as damaged; prune --damaged deletes it",
}


@dataclass
class List:
    """List what checkpoints there are, with the size of every file checked."""

    run: Positional[Path]
    """A run's folder."""


@dataclass
class Verify:
    """Read every byte and compare checksums. Exit code 2 where anything is damaged."""

    run: Positional[Path]
    """A run's folder."""


@dataclass
class Prune:
    """Verify, then delete the checkpoints that the run's settings do not keep."""

    run: Positional[Path]
    """A run's folder."""
    keep_last: Count | None = None
    """Newest checkpoints to keep. Default: the run's checkpoint.keep_last."""
    keep_every: Count | None = None
    """Steps whose multiples are kept. Default: the run's checkpoint.keep_every."""
    damaged: bool = False
    """Delete those that are not good, and *.damaged, too."""
    dry_run: bool = False
    """Only say what would be deleted."""


def main() -> None:
    """Do with the checkpoints of a run what the command line says."""
    with exit_on_user_error():
        texts = {name: str(kind.__doc__).partition("\n")[0] for name, kind in OPTIONS.items()}
        prog = "torchmars checkpoint"
        name = choose(sys.argv[1:], texts, prog, "The checkpoints of a run.")
        options = parse(OPTIONS[name], sys.argv[2:], f"{prog} {name}")
        if wrong := path_problem(options.run, "folder"):
            raise UserError(f"{options.run} has no checkpoints ({wrong}): {NO_CHECKPOINTS}")
        folder = options.run / "checkpoints"
        found = checkpoints(folder)
        if not found and not leftovers(folder):
            raise UserError(f"{options.run} has no checkpoints: {NO_CHECKPOINTS}")
        COMMANDS[name](options, folder, found)


def list_checkpoints(options: List, folder: Path, found: list[Path]) -> None:
    """Print a line for each checkpoint and for what is left of others."""
    rows = [("step", "ranks", "validation loss", "MiB", "state")]
    for path in found:
        try:
            manifest = read_verified(path, "size")
        except DamagedCheckpoint as error:
            rows.append((str(step_of(path)), "", "", "", f"damaged: {error}"))
            continue
        except OtherVersion as error:
            rows.append((str(step_of(path)), "", "", "", f"of another version: {error}"))
            continue
        size = f"{manifest.bytes / 2**20:,.1f}"
        ranks, loss = str(manifest.world_size), loss_of(manifest)
        rows.append((str(manifest.step), ranks, loss, size, "complete"))
    for line in table(rows, right=range(4)):
        say(line)
    for path in leftovers(folder):
        say(f"{path.name}: {LEFT.get(path.suffix, 'not used any more')}")


def verify_checkpoints(options: Verify, folder: Path, found: list[Path]) -> None:
    """Read everything. Raises `UserError` at the end if a checkpoint cannot be loaded."""
    good, other = read_all(found)
    for path in found:
        if path in good:
            size = good[path].bytes / 2**20
            say(f"{path.name}: good, {size:,.1f} MiB in {len(good[path].files)} files")
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


def prune_checkpoints(options: Prune, folder: Path, found: list[Path]) -> None:
    """Delete what need not be kept.

    Raises `UserError` if no checkpoint is good: then nothing is deleted.
    """
    good, other = read_all(found)
    if found and not good:
        raise UserError(f"no checkpoint in {folder} is good: nothing was deleted")
    # A .partial may be a save under way.
    endings = (DELETED, DAMAGED) if options.damaged else (DELETED,)
    unwanted = [path for path in leftovers(folder) if path.suffix in endings]
    unwanted += [path for path in found if options.damaged and path not in (*good, *other)]
    unwanted += not_kept(options, good) if good else []
    stuck = [] if options.dry_run else delete_all(unwanted, warn=lambda text: say(text, error=True))
    gone = [path for path in unwanted if path not in stuck]
    for path in gone:
        say(f"{'would delete' if options.dry_run else 'deleted'} {path}")
    staying = len(good) - sum(path in good for path in gone)
    say(f"{staying} checkpoints {'would stay' if options.dry_run else 'stay'}")
    if stuck:
        raise UserError(f"{len(stuck)} of {len(unwanted)} could not be deleted: see the warnings")


def not_kept(options: Prune, good: dict[Path, CheckpointManifest]) -> list[Path]:
    """Return the good checkpoints that neither the options nor the run's settings keep."""
    newest = good[max(good, key=step_of)]
    settings = config_from_tables(newest.config, "in the newest checkpoint").checkpoint
    asked = {"keep_last": options.keep_last, "keep_every": options.keep_every}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    by_step = {step_of(path): path for path in good}
    losses = {
        step_of(path): manifest.validation_loss
        for path, manifest in good.items()
        if manifest.validation_loss is not None
    }
    steps = steps_to_delete(list(by_step), losses, replace(settings, **given))
    return [by_step[step] for step in steps]


def read_all(found: list[Path]) -> tuple[dict[Path, CheckpointManifest], list[Path]]:
    """Return the good ones among checkpoints with their manifests, and those of another version.

    Prints what is wrong with all but the good ones.
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


def loss_of(manifest: CheckpointManifest) -> str:
    """Return a checkpoint's validation loss as text, "-" where there is none."""
    loss = manifest.validation_loss
    return "-" if loss is None or math.isnan(loss) else f"{loss:.4f}"


OPTIONS: dict[str, Any] = {"list": List, "verify": Verify, "prune": Prune}
COMMANDS: dict[str, Callable[[Any, Path, list[Path]], None]] = {
    "list": list_checkpoints,
    "verify": verify_checkpoints,
    "prune": prune_checkpoints,
}

if __name__ == "__main__":
    main()
