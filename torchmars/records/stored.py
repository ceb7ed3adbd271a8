"""Which runs have checkpoints in an object store, and how far each is by the newest one."""

from pathlib import PurePath

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints
from torchmars.core.errors import UserError
from torchmars.records.overview import Overview, State
from torchmars.storage import storage_of
from torchmars.storage.storage import MANIFEST
from torchmars.storage.stores import size_and_time


def stored_overview(folder: PurePath) -> Overview:
    """Return how far the run is whose checkpoints are in `folder`, by the newest one alone.

    Raises `UserError` if it has none that can be read.
    """
    found = checkpoints(folder)
    if not found:
        raise UserError(f"{folder} has no checkpoints")
    manifest = manifests.read(found[-1])
    steps = int(manifest.config["training"]["steps"])
    state: State = "complete" if manifest.step >= steps else "saved"
    written = size_and_time(found[-1] / MANIFEST)[1] / 1e9
    loss = manifest.validation_loss
    return Overview(state, manifest.step, steps, None, loss, None, None, written, 0)


def stored_runs(folder: PurePath) -> list[PurePath]:
    """Return the folders in an object store that have checkpoints: this one, or those in it."""
    if checkpoints(folder):
        return [folder]
    inside = [
        folder / name for name, is_folder in storage_of(folder).list(folder).items() if is_folder
    ]
    return [each for each in sorted(inside) if checkpoints(each)]
