"""`python -m torchmars.prepare CONFIG.toml [--section.key value ...]`: all of a run that needs no ranks.

Checks the config, tokenises its corpus into shards once, verifies the shards, and checks that the run can go on from
the checkpoints it has. With `--ranks N` before the overrides, also that the batch divides over N ranks; `--nodes M`: on M machines.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from torchmars.build import build_meta_model, build_optimizer
from torchmars.checkpoint.folder import checkpoints, checkpoints_folder
from torchmars.checkpoint.initial import open_source
from torchmars.checkpoint.resume import check_same_run, newest_good, opened
from torchmars.config import Config, DataConfig
from torchmars.config_file import load_config, take_count
from torchmars.console import say
from torchmars.data import corpus, shards, sources
from torchmars.data.tokenizer import TOKENIZERS
from torchmars.errors import UserError, reported
from torchmars.files import lock
from torchmars.metrics import check_writers
from torchmars.models import model_args
from torchmars.parallel import mesh


def main() -> None:
    with reported():
        args, ranks = take_count(sys.argv[1:], "--ranks", 1)
        args, nodes = take_count(args, "--nodes", 1)
        if ranks % nodes:
            raise UserError(
                f"--ranks {ranks} does not divide over --nodes {nodes}: "
                f"choose a multiple of {nodes}"
            )
        config = load_config(args, "python -m torchmars.prepare [--ranks N] [--nodes M]")
        prepare(config, ranks, nodes)
        if warning := sources.warning(config.data):
            say(warning)


def prepare(config: Config, ranks: int, nodes: int) -> None:
    """Do all of a run of `ranks` ranks on `nodes` machines that needs no ranks; say what data there is. Raises `UserError`."""
    mesh.check_devices(ranks // nodes)
    replicate, shard = config.parallelism.degrees(ranks)
    config.training.microbatches(replicate * shard)
    check_writers(config.metrics)
    manifest = prepare_shards(config)
    shards.check_shards(manifest, Path(config.data.path))
    check_resume(config, manifest)
    for name, split in manifest.splits.items():
        say(
            f"{config.data.path}: {name} {split.tokens:,} {manifest.tokenizer} tokens in {split.documents:,} documents"
        )


def check_resume(config: Config, manifest: shards.Manifest) -> None:
    """Raise `UserError` where the run can neither go on from a checkpoint of its own nor start as it should. Their bytes are left to the ranks."""
    level = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(checkpoints_folder(config)),
        lambda path: opened(path, level),
        warn=lambda text: None,
    )
    optimizer = build_optimizer(config, build_meta_model(config, manifest.vocab_size))
    if found:
        check_same_run(*found, config, manifest.fingerprint(), optimizer)
    elif (source := config.checkpoint.init_from) and not source.endswith(".safetensors"):
        open_source(Path(source), "size")


def prepare_shards(config: Config) -> shards.Manifest:
    """The manifest of the config's shards, which are made first where there are none.

    Raises `UserError` where they do not fit the config; their bytes are left to `check_shards`.
    """
    folder = Path(config.data.path)
    if not os.path.exists(folder / "manifest.json"):
        named = Path(os.path.realpath(folder))  # also where it is "."
        # On several machines all begin with this.
        lock(named.with_name(named.name + ".lock"), f"preparing {folder}", patience=7 * 86400)
    if not os.path.exists(folder / "manifest.json"):
        files = corpus.source_files(config.data)
        tokenizer = TOKENIZERS[config.data.tokenizer]()
        made_from: dict[Path, sources.Source] = {}
        try:
            shards.write_shards(config.data, tokenizer, read(config.data, files, made_from), folder)
            sources.write(folder, made_from)
        except OSError as error:
            raise UserError(
                f"cannot write the shards to {folder}: {error}: set data.path to a folder you can write"
            ) from None
    manifest = shards.read_manifest(folder)
    shards.check_manifest(manifest, config.data, folder)
    args = model_args(config.model, manifest.vocab_size, config.training.seq_len)
    shards.check_vocabulary(manifest, args.vocab_size, folder)
    shards.check_size(manifest, config.training.seq_len, config.training.global_batch_size)
    return manifest


def read(
    config: DataConfig, files: list[Path], made_from: dict[Path, sources.Source]
) -> Iterator[str]:
    """All documents of `files`, with a progress bar; `made_from` gets what each file was like."""
    with tqdm(
        total=sum(file.stat().st_size for file in files),
        unit="B",
        unit_scale=True,
        desc=f"tokenising {config.corpus} ({config.tokenizer})",
    ) as bar:
        for file in files:
            with contextlib.suppress(OSError):  # `documents` names a file that cannot be read
                made_from[file] = sources.describe(file)
            for document in corpus.documents(config, file):
                yield document
                bar.update(len(document))
        bar.update(bar.total - bar.n)


if __name__ == "__main__":
    main()
