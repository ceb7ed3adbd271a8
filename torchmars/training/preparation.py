"""All of a run that needs no ranks: its data, and whether it can go on from its checkpoints."""

from pathlib import Path

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.initial import open_source
from torchmars.checkpoint.resume import check_same_run, newest_good, read_verified
from torchmars.cluster import process
from torchmars.config import Config
from torchmars.core.console import say
from torchmars.data import shards
from torchmars.data.prepare import prepare_shards
from torchmars.metrics.trackers import check_trackers
from torchmars.models import build_meta_model, model_args
from torchmars.training.build import build_optimizer


def prepare_run(config: Config, ranks: int, nodes: int) -> None:
    """Prepare a run of `ranks` ranks on `nodes` machines, and print what data there is.

    Raises `UserError` for anything that would end it at its start.
    """
    process.check_devices(ranks // nodes)
    config.training.microbatches(config.parallelism.degrees(ranks).data)
    check_trackers(config.metrics)
    manifest = prepare_data(config)
    shards.check_shards(manifest, Path(config.data.path))
    check_resume(config, manifest)
    for name, split in manifest.splits.items():
        say(
            f"{config.data.path}: {name} {split.tokens:,} {manifest.tokenizer} tokens "
            f"in {split.documents:,} documents"
        )


def prepare_data(config: Config) -> shards.DataManifest:
    """Return the manifest of the run's shards, which are made first where there are none.

    Raises `UserError` where they do not fit the model or the batch.
    """
    folder, training = Path(config.data.path), config.training
    manifest = prepare_shards(config.data)
    args = model_args(config.model, manifest.vocab_size, training.seq_len)
    shards.check_vocabulary(manifest, args.vocab_size, folder)
    shards.check_size(manifest, training.seq_len, training.global_batch_size)
    return manifest


def check_resume(config: Config, manifest: shards.DataManifest) -> None:
    """Raise `UserError` where the run can neither resume from a checkpoint of its own nor start.

    The bytes of checkpoints are left to the ranks.
    """
    level = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(config.run.checkpoints),
        lambda path: read_verified(path, level),
        warn=lambda text: None,
    )
    model = build_meta_model(config.model, manifest.vocab_size, config.training.seq_len)
    optimizer = build_optimizer(config, model)
    if found:
        check_same_run(*found, config, manifest.fingerprint(), optimizer)
    elif (source := config.checkpoint.init_from) and not source.endswith(".safetensors"):
        open_source(Path(source), "size")
