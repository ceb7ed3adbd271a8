"""The manifest of a checkpoint: all about it but its tensors, and the checksums of its files."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, BinaryIO, Literal

from torchmars.checkpoint.folder import STEP, lies_in, step_of
from torchmars.config.sections import RunConfig
from torchmars.core.check import Interval, Name
from torchmars.core.errors import UserError
from torchmars.core.formats import Format
from torchmars.data.order import Shares
from torchmars.data.tokenizer import VocabularySize
from torchmars.storage import storage_of
from torchmars.storage.storage import MANIFEST, File

VERSION = 6  # of all that a run's folder has
FORMAT = Format(
    "torchmars-checkpoint",
    VERSION,
    "continue with the version of torchmars that wrote it, or choose another run.name",
)
# Keys of the config that loading needs.
NEEDED = (
    ("run", "seed"),
    ("training", "dtype"),
    ("training", "compile"),
    ("optimizer", "matrix_dtype"),
)
Number = Annotated[int, Interval(0, 2**63 - 1)]


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be trusted. The message names the file and its fault."""


@dataclass
class CheckpointManifest:
    """All about a checkpoint but its tensors."""

    step: Number
    """Optimizer steps made."""
    position: Number
    """Samples of the global data order consumed."""
    world_size: Annotated[int, Interval(1, 2**31)]
    data_fingerprint: str
    """A hash of the training tokens."""
    vocab_size: VocabularySize
    """The tokenizer's vocabulary, without padding."""
    optimizer: dict[str, str]
    """The rule and the state tensors of each parameter."""
    config: dict[str, dict[str, Any]]
    """The resolved config, a table per section."""
    validation_loss: float | None = None
    """The validation loss at this step, if it was measured."""
    recent_losses: list[Annotated[float, Interval(-1e38, 1e38)]] = field(default_factory=list)
    """The losses that the guard against loss spikes compares with."""
    shares: Shares = field(default_factory=Shares)
    """How samples are assigned to the parts of the mixture."""
    tokenizer_sha256: str | None = None
    """Of the file of the tokenizer; None for one that has a name."""
    files: dict[Annotated[str, Name()], File] = field(default_factory=dict)

    def text(self) -> str:
        """Return the text of its file."""
        return FORMAT.text(asdict(self))

    @property
    def run(self) -> str:
        """The name of its run."""
        return str(self.config["run"].get("name"))

    def is_of(self, run: RunConfig, checkpoint: PurePath) -> bool:
        """Return whether it is a run's: by its name, or as it lies in the run's folder."""
        return self.run == run.name or lies_in(checkpoint, run.path)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files.values())


def read(folder: PurePath) -> CheckpointManifest:
    """Return the manifest of the checkpoint `folder`.

    Raises `DamagedCheckpoint` if a single byte of it is not as it was written, and
    `OtherVersion` where another version wrote it.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(path, storage_of(path).open)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise DamagedCheckpoint(
            f"{path} is of step {manifest.step}, not of the one that the folder is named after"
        )
    return manifest


def parse_manifest(path: PurePath, open: Callable[[PurePath], BinaryIO]) -> CheckpointManifest:
    """Return the manifest in a file. Raises as `Format.read` does, also if it makes no sense."""
    manifest = FORMAT.read(path, CheckpointManifest, open)
    for section, key in NEEDED:
        if key not in manifest.config.get(section, {}):
            raise ValueError(f"config.{section}.{key} is missing in it")
    shares = manifest.shares
    same_length = len(shares.weights) == len(shares.before)
    if not (same_length and sum(shares.weights) > 0 and shares.start <= manifest.position):
        raise ValueError("its shares contradict each other")
    return manifest


def describe_file(path: PurePath) -> File:
    """Return the size and checksum of a file as it is now."""
    with storage_of(path).open(path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        return File(stream.tell(), digest)


def verify(
    folder: PurePath,
    manifest: CheckpointManifest,
    level: Literal["full", "size", "off"],
    part: int = 0,
    parts: int = 1,
) -> None:
    """Raise `DamagedCheckpoint` for a file of `folder` that is missing, truncated or altered.

    A file that the manifest does not name is damage too. The level "size" reads no file. `parts`
    ranks can share the work: each takes the files `part`, `part + parts`, ..., and the first one
    looks for other files.
    """
    if level == "off":
        return
    storage = storage_of(folder)
    found = {} if part else storage.list(folder)
    if foreign := sorted(found.keys() - manifest.files - {MANIFEST}):
        raise DamagedCheckpoint(f"{folder / foreign[0]} is not a file of this checkpoint")

    def check(name: str) -> None:
        path, wanted = folder / name, manifest.files[name]
        try:
            with storage.open(path) as stream:
                size = stream.seek(0, os.SEEK_END)
            if size != wanted.size:
                raise DamagedCheckpoint(f"{path} has {size} bytes instead of {wanted.size}")
            if level == "full" and describe_file(path) != wanted:
                raise DamagedCheckpoint(f"{path} was altered: its SHA-256 is not the manifest's")
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        list(pool.map(check, sorted(manifest.files)[part::parts]))
