"""From a corpus to shards: tokenised once, under a lock."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from torchmars.config import DataConfig, ResolvedData
from torchmars.core.errors import UserError
from torchmars.core.files import lock
from torchmars.data import corpus, foreign, sources
from torchmars.data.manifest import DataManifest, check_manifest, read_manifest
from torchmars.data.tokenizer import load_tokenizer
from torchmars.data.writer import write_shards

LOCK_SECONDS = 7 * 86400.0  # how long one machine may prepare while the others wait


def prepare_shards(config: ResolvedData) -> DataManifest:
    """Return the manifest of the shards in data.path, which are made first where there are none.

    Raises `UserError` if they were made from something else than `config` asks for. Their bytes
    are left to `check_shards`.
    """
    folder = Path(config.path)
    if not os.path.exists(folder / "manifest.json"):
        named = Path(os.path.realpath(folder))  # also where it is "."
        # On several machines all begin with this.
        lock(named.with_name(named.name + ".lock"), f"preparing {folder}", LOCK_SECONDS)
    if not os.path.exists(folder / "manifest.json"):
        (foreign.index if foreign.is_foreign(config.source) else tokenise)(config, folder)
    found = read_manifest(folder)
    check_manifest(found, config, folder)
    return found


def tokenise(config: ResolvedData, folder: Path) -> None:
    """Write the shards of the corpus, and what they were made from, to `folder`."""
    files = corpus.source_files(config)
    tokenizer = load_tokenizer(config.tokenizer)
    made_from: dict[Path, sources.Source] = {}
    try:
        write_shards(config, tokenizer, read(config, files, made_from), folder)
        sources.write(folder, made_from)
    except OSError as error:
        raise UserError(
            f"cannot write the shards to {folder}: {error}: set data.path to a folder you can write"
        ) from None


def read(
    config: DataConfig, files: list[Path], made_from: dict[Path, sources.Source]
) -> Iterator[str]:
    """Yield all documents of `files`, with a progress bar.

    `made_from` gets size, time and checksum of each file.
    """
    with tqdm(
        total=sum(file.stat().st_size for file in files),
        unit="B",
        unit_scale=True,
        desc=f"tokenising {config.source} ({config.tokenizer})",
    ) as bar:
        for file in files:
            with contextlib.suppress(OSError):  # `documents` names a file that cannot be read
                made_from[file] = sources.describe(file)
            for document in corpus.documents(config, file):
                yield document
                bar.update(len(document))
        bar.update(bar.total - bar.n)
