"""`python -m torchmars.checkpoint list|verify|prune RUN`: what checkpoints a run has, whether they are good, and deleting those not wanted."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from torchmars.checkpoint.folder import (
    DAMAGED,
    DELETED,
    checkpoints,
    delete_all,
    leftovers,
    step_of,
    steps_to_delete,
)
from torchmars.checkpoint.manifest import FORMAT, CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.resume import read_verified
from torchmars.config.load import config_from_tables
from torchmars.core.console import say
from torchmars.core.errors import Arguments, UserError, reported
from torchmars.core.files import PARTIAL, misfit
from torchmars.core.formats import OtherVersion


def main() -> None:
    with reported():
        args = parse()
        if wrong := misfit(args.run, "folder"):
            raise UserError(
                f"{args.run} has no checkpoints ({wrong}): name a run's folder, "
                "such as runs/quickstart"
            )
        folder = args.run / "checkpoints"
        found = checkpoints(folder)
        if not found and not leftovers(folder):
            raise UserError(
                f"{args.run} has no checkpoints: name a run's folder, such as runs/quickstart"
            )
        COMMANDS[args.command](args, folder, found)


def parse() -> argparse.Namespace:
    parser = Arguments(
        prog="python -m torchmars.checkpoint", description="The checkpoints of a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("list", "what there is, with the size of every file checked"),
        ("verify", "read every byte and compare checksums; exit code 2 where anything is damaged"),
        ("prune", "verify, then delete those that the run's settings do not keep"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run", type=Path, help="a run's folder")
    command.add_argument(
        "--keep_last",
        type=int,
        help="newest checkpoints to keep; default: the run's checkpoint.keep_last",
    )
    command.add_argument(
        "--keep_every",
        type=int,
        help="steps whose multiples are kept; default: the run's checkpoint.keep_every",
    )
    command.add_argument(
        "--damaged", action="store_true", help="delete those that are not good, and *.damaged, too"
    )
    command.add_argument("--dry_run", action="store_true", help="only say what would be deleted")
    return parser.parse_args()


def list_checkpoints(args: argparse.Namespace, folder: Path, found: list[Path]) -> None:
    """A line for each checkpoint and for what is left of others."""
    rows = [("step", "ranks", "validation loss", "MiB", "state")]
    for path in found:
        try:
            manifest = read_verified(path, "size")
            rows.append(
                (
                    str(manifest.step),
                    str(manifest.world_size),
                    loss_of(manifest),
                    f"{manifest.bytes / 2**20:,.1f}",
                    "complete",
                )
            )
        except DamagedCheckpoint as error:
            rows.append((str(step_of(path)), "", "", "", f"damaged: {error}"))
        except OtherVersion as error:
            rows.append((str(step_of(path)), "", "", "", f"of another version: {error}"))
    widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
    for row in rows:
        say("  ".join([cell.rjust(width) for cell, width in zip(row, widths)] + [row[-1]]))
    for path in leftovers(folder):
        say(f"{path.name}: {LEFT.get(path.suffix, 'not used any more')}")


def verify_checkpoints(args: argparse.Namespace, folder: Path, found: list[Path]) -> None:
    """Read everything. Raises `UserError` at the end where a checkpoint cannot be loaded."""
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


def prune_checkpoints(args: argparse.Namespace, folder: Path, found: list[Path]) -> None:
    """Delete what need not be kept. Raises `UserError` where no checkpoint is good: then nothing is deleted."""
    good, other = read_all(found)
    if found and not good:
        raise UserError(f"no checkpoint in {folder} is good: nothing was deleted")
    # A .partial may be a save under way.
    unwanted = (DELETED, DAMAGED) if args.damaged else (DELETED,)
    going = [path for path in leftovers(folder) if path.suffix in unwanted]
    going += [path for path in found if args.damaged and path not in good and path not in other]
    if good:
        newest = good[max(good, key=step_of)]
        settings = config_from_tables(newest.config, "in the newest checkpoint").checkpoint
        given = {
            name: getattr(args, name)
            for name in ("keep_last", "keep_every")
            if getattr(args, name) is not None
        }
        if any(value < 0 for value in given.values()):
            raise UserError("--keep_last and --keep_every must be at least 0")
        by_step = {step_of(path): path for path in good}
        losses = {
            step_of(path): manifest.validation_loss
            for path, manifest in good.items()
            if manifest.validation_loss is not None
        }
        going += [
            by_step[step]
            for step in steps_to_delete(list(by_step), losses, replace(settings, **given))
        ]
    stuck = [] if args.dry_run else delete_all(going, warn=lambda text: say(text, error=True))
    gone = [path for path in going if path not in stuck]
    for path in gone:
        say(f"{'would delete' if args.dry_run else 'deleted'} {path}")
    staying = len(good) - sum(path in good for path in gone)
    say(f"{staying} checkpoints {'would stay' if args.dry_run else 'stay'}")
    if stuck:
        raise UserError(f"{len(stuck)} of {len(going)} could not be deleted: see the warnings")


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
    return (
        "-"
        if manifest.validation_loss is None or math.isnan(manifest.validation_loss)
        else f"{manifest.validation_loss:.4f}"
    )


LEFT = {
    PARTIAL: "of a save under way or cut short",
    DAMAGED: "set aside as damaged; prune --damaged deletes it",
}
COMMANDS = {"list": list_checkpoints, "verify": verify_checkpoints, "prune": prune_checkpoints}

if __name__ == "__main__":
    main()
