"""All of a run that needs no ranks: its data, and whether it can resume from its checkpoints."""

from pathlib import Path
from typing import Literal

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.initial import open_source
from torchmars.checkpoint.resume import check_same_run, newest_good, read_verified
from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.core.files import write_durably
from torchmars.data import manifest, shards
from torchmars.data.packed import METHOD, pack_shards
from torchmars.data.prepare import prepare_shards
from torchmars.data.tokenizer import load_tokenizer
from torchmars.metrics.trackers import check_trackers
from torchmars.models import build_meta_model
from torchmars.parallel.checks import check_layout
from torchmars.training.optimizer import build_optimizer


def prepare_run(config: ResolvedConfig, ranks: int, nodes: int) -> None:
    """Prepare a run of `ranks` ranks on `nodes` machines, and print what data there is.

    Raises `UserError` for anything that would end it at its start.
    """
    process.check_devices(ranks // nodes)
    degrees = config.parallelism.degrees(ranks)
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    model = build_meta_model(config.model, vocab_size, config.training.seq_len)
    check_layout(config, degrees, model)
    check_trackers(config.metrics)
    manifest = prepare_data(config)
    shards.check_shards(manifest, Path(config.data.path))
    check_resume(config, manifest)
    for name, split in manifest.splits.items():
        say(
            f"{config.data.path}: {name} {split.tokens:,} {manifest.tokenizer} tokens "
            f"in {split.documents:,} documents"
        )


def prepare_data(config: ResolvedConfig) -> manifest.DataManifest:
    """Return the manifest of the run's shards, which are made first where there are none.

    Raises `UserError` if they do not fit the model or the batch.
    """
    folder, training = Path(config.data.path), config.training
    build_meta_model(config.model, 1, training.seq_len)  # mistakes, before minutes of tokenising
    manifest = prepare_shards(config.data)
    model = build_meta_model(config.model, manifest.vocab_size, training.seq_len)
    shards.check_vocabulary(manifest, model.vocab_rows, folder)
    packed = config.data.packing == METHOD
    shards.check_size(manifest, training.seq_len, training.global_batch_size, packed)
    if packed:
        end_of_text = load_tokenizer(config.data.tokenizer).end_of_text
        pack_shards(folder, manifest, training.seq_len, end_of_text)
    return manifest


def check_resume(config: ResolvedConfig, manifest: manifest.DataManifest) -> None:
    """Raise `UserError` if the run can neither resume from a checkpoint of its own nor start.

    The bytes of checkpoints are left to the ranks.
    """
    level: Literal["off", "size"] = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(config.run.checkpoints),
        lambda path: read_verified(path, level),
        warn=lambda text: None,
    )
    model = build_meta_model(config.model, manifest.vocab_size, config.training.seq_len)
    optimizer = build_optimizer(config.optimizer, config.training.max_grad_norm, model)
    if found:
        check_same_run(*found, config, manifest.fingerprint(), optimizer)
    elif (source := config.checkpoint.init_from) and not source.endswith(".safetensors"):
        open_source(Path(source), "size")


def write_resolved_config(config: ResolvedConfig) -> None:
    """Leave the settings of a run in its folder, as a config that reproduces it."""
    folder = config.run.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "config.toml", config_text(config))
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}: set run.folder to a folder you can write"
        ) from None
