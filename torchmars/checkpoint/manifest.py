"""What a checkpoint is and holds: `manifest.json`, with the size and SHA-256 of every file beside it."""

import errno
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from torchmars.checkpoint.folder import STEP, step_of
from torchmars.core.bounds import Name, Range
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem, read_text, write_durably
from torchmars.core.typed import make, parse_json

FORMAT = "torchmars-checkpoint-2"
NAME = "manifest.json"
Number = Annotated[int, Range(0, 2**63 - 1)]


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be trusted. The message names the file and what is wrong with it."""


@dataclass
class File:
    """A file of a checkpoint: its size in bytes and SHA-256."""

    size: Number
    sha256: str


@dataclass
class Manifest:
    """All that is known of a checkpoint without its tensors."""

    step: Number
    """Optimizer steps made."""
    position: Number
    """Samples of the global data order consumed."""
    world_size: Annotated[int, Range(1, 2**31)]
    data: str
    """Fingerprint of the training tokens."""
    vocab_size: Annotated[int, Range(1, 2**16)]
    """The tokenizer's vocabulary, without padding."""
    optimizer: dict[str, str]
    """The rule and the state tensors of each parameter."""
    config: dict[str, dict[str, Any]]
    """The resolved config, a table per section."""
    validation_loss: float | None = None
    """The validation loss at this step, if it was measured."""
    recent_losses: list[Annotated[float, Range(-1e38, 1e38)]] = field(default_factory=list)
    """What the guard against loss spikes has seen."""
    files: dict[Annotated[str, Name("file")], File] = field(default_factory=dict)
    format: str = FORMAT

    def text(self) -> str:
        """The content of manifest.json, whose last entry is the SHA-256 of the others."""
        entries = asdict(self)
        digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
        return json.dumps(entries | {"sha256": digest}, indent=1) + "\n"

    def write(self, folder: Path) -> None:
        """Make it durable in `folder`."""
        write_durably(folder / NAME, self.text())

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files.values())


def read(folder: Path) -> Manifest:
    """The manifest of the checkpoint `folder`. Raises `DamagedCheckpoint` where a single byte of it is not as it was written."""
    path = folder / NAME
    try:
        text = read_text(path)
        raw = parse_json(text)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if raw.get("format") != FORMAT:
        raise DamagedCheckpoint(
            f"{path} is of format {raw.get('format')!r}, not of this version's {FORMAT!r}"
        )
    raw.pop("sha256", None)  # compared below
    try:
        manifest = make(Manifest, raw)
    except UserError as error:
        raise DamagedCheckpoint(f"{path} is damaged ({error})") from None
    if STEP.fullmatch(folder.name) and step_of(folder) != manifest.step:
        raise DamagedCheckpoint(
            f"{path} is of step {manifest.step}, not of the one that the folder is named after"
        )
    if manifest.text() != text:
        raise DamagedCheckpoint(f"{path} was altered: it does not match its own checksum")
    return manifest


def describe(path: Path) -> File:
    """The size and checksum of a file as it is now."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return File(stream.tell(), digest)


def verify(
    folder: Path,
    manifest: Manifest,
    level: Literal["full", "size", "off"],
    part: int = 0,
    parts: int = 1,
) -> None:
    """Raise `DamagedCheckpoint` naming the first file of `folder` that is missing, foreign, truncated or altered.

    "size" reads no file. `parts` ranks can share the reading, each taking the files `part`, `part + parts`, ...
    """
    if level == "off":
        return
    try:
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be read: {error.strerror}") from None
    if foreign := sorted(present - set(manifest.files) - {NAME}):
        raise DamagedCheckpoint(f"{folder / foreign[0]} is not a file of this checkpoint")

    def check(name: str) -> None:
        path, wanted = folder / name, manifest.files[name]
        try:
            if wrong := path_problem(path, "file"):
                raise OSError(errno.EINVAL, wrong)
            if (size := path.stat().st_size) != wanted.size:
                raise DamagedCheckpoint(f"{path} has {size} bytes instead of {wanted.size}")
            if level == "full" and describe(path) != wanted:
                raise DamagedCheckpoint(f"{path} was altered: its SHA-256 is not the manifest's")
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from None

    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        list(pool.map(check, sorted(manifest.files)[part::parts]))
