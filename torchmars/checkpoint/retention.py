"""Which checkpoints of a run are kept, and the deletion of all others."""

import math
from collections.abc import Callable, Iterable
from pathlib import PurePath

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints, delete_all, leftovers, step_of
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.config import CheckpointConfig, ResolvedConfig
from torchmars.core.errors import UserError
from torchmars.core.formats import OtherVersion
from torchmars.storage import storage_of
from torchmars.storage.storage import DAMAGED


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
