"""Resuming: which checkpoint a run resumes from, and whether it still is the same run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import P, checkpoints, folder_of, no_checkpoint
from torchmars.checkpoint.manifest import CheckpointManifest, DamagedCheckpoint
from torchmars.checkpoint.state_dict import optimizer_state_names
from torchmars.config import Config, ResolvedConfig, identity_fields, reported_sections
from torchmars.config.load import flattened
from torchmars.config.sections import OF_RANKS
from torchmars.core.errors import UserError
from torchmars.core.files import path_problem
from torchmars.data.tokenizer import load_tokenizer
from torchmars.optim import MARS
from torchmars.storage import storage_of
from torchmars.storage.storage import MANIFEST

T = TypeVar("T")

TOKENIZER = "data.tokenizer"


def newest_good(
    found: list[P], check: Callable[[P], T], warn: Callable[[str], None]
) -> tuple[P, T] | None:
    """Return the newest good one of the checkpoints `found` (oldest first), and its `check`.

    `check` raises `DamagedCheckpoint` for one that is not good. None if none was found. Raises
    `UserError` if there are some, but none is good, and what else `check` raises.
    """
    damage = []
    for path in reversed(found):
        try:
            return path, checked(path, check)
        except DamagedCheckpoint as error:
            damage.append(str(error))
            if len(damage) < len(found):
                warn(f"warning: {error}; falling back to an older checkpoint")
    if damage:
        raise UserError(
            f"no checkpoint in {found[0].parent} is good; the newest: {damage[0]}: "
            "restore one, or move them away to start over"
        )
    return None


def checked(path: P, check: Callable[[P], T]) -> T:
    """Return the `check` of a checkpoint, of one in a store if need be of a second try.

    The network may have spoiled the first answer.
    """
    try:
        return check(path)
    except DamagedCheckpoint:
        if isinstance(path, Path):
            raise
        return check(path)


def read_verified(folder: PurePath, level: Literal["full", "size", "off"]) -> CheckpointManifest:
    """Verify a checkpoint in this process alone. Return its manifest.

    Raises `DamagedCheckpoint`, and `OtherVersion` if another version wrote it.
    """
    manifest = manifests.read(folder)
    manifests.verify(folder, manifest, level)
    return manifest


def find_checkpoint(
    folder: PurePath, warn: Callable[[str], None], level: Literal["full", "size"] = "full"
) -> tuple[PurePath, CheckpointManifest]:
    """Return the checkpoint that `folder` names, and its manifest, verified by this process.

    It is `folder` itself or, if that is a run, its newest good one. Raises `UserError` if there
    is none.
    """
    if isinstance(folder, Path) and path_problem(folder, "folder"):
        raise no_checkpoint(folder)
    if MANIFEST in storage_of(folder).list(folder):
        return folder, read_verified(folder, level)
    found = newest_good(
        checkpoints(folder_of(folder)), lambda path: read_verified(path, level), warn
    )
    if found is None:
        raise no_checkpoint(folder)
    return found


def newest_config(found: Sequence[PurePath]) -> dict[str, Any] | None:
    """Return the config of the newest good manifest among the checkpoints `found` (oldest first).

    None if there is none.
    """
    for path in reversed(found):
        try:
            return manifests.read(path).config
        except DamagedCheckpoint:  # reported when it is to be loaded
            continue
    return None


def check_same_run(
    folder: PurePath,
    manifest: CheckpointManifest,
    config: ResolvedConfig,
    data: str,
    optimizer: MARS,
) -> list[str]:
    """Raise `UserError`, with the difference and the remedy, where a checkpoint is another run's.

    The run is that of `config`, on tokens with the fingerprint `data`. `optimizer`, which may be on
    the meta device, would resume with it. Returns the changes that are allowed, a line each.
    """
    if not manifest.is_of(config.run, folder):
        raise UserError(
            f"{folder} is of the run {manifest.run:.80}, not of {config.run.name}: put that name "
            "back, or choose another checkpoint.folder; checkpoint.init_from takes its weights"
        )
    was, now = flattened(manifest.config), flat_settings(config)
    for name in OF_RANKS:
        if now[name] in ("auto", None):  # not resolved yet: it will be what it was
            now[name] = was[name]
    if manifest.tokenizer_sha256 is not None:  # it may have moved
        tokenizer = config.data.tokenizer
        if load_tokenizer(tokenizer).sha256 != manifest.tokenizer_sha256:
            raise UserError(
                f"{folder} was made with another tokenizer ({was[TOKENIZER]}) than {tokenizer} is "
                "now: put that one back, or choose another run.name"
            )
        was[TOKENIZER] = now[TOKENIZER]
    fields = tuple(f"{each}." for each in identity_fields(config))
    for name in now | was:
        same_run = f"{name}.".startswith(fields)  # below a field are the values of a table
        if same_run and was.get(name) != now.get(name):
            keep = ", or keep the weights by checkpoint.init_from" * name.startswith("training.")
            raise UserError(
                f"{folder} was made with {name} = {was.get(name)}, the config says "
                f"{now.get(name)}: set it back, or choose another run.name{keep}"
            )
    if manifest.data_fingerprint != data:
        places = ", ".join(corpus.path for corpus in config.data.corpora())
        others = "restore the shards"
        if config.data.mixture:  # whose weights may change
            others += ", or the parts of data.mixture and their order,"
        raise UserError(
            f"{folder} was trained on other tokens than those in {places}: "
            f"{others} or choose another run.name"
        )
    for name, wanted in optimizer_state_names(optimizer).items():
        saved = manifest.optimizer.get(name)
        if saved != wanted:
            raise UserError(
                f"{folder} has for {name} the rule and state ({saved}), the config's optimizer "
                f"({wanted}): set optimizer.clip, the roles' and groups' rules "
                "back, or choose another run.name"
            )
    return [
        f"{name} {was.get(name)} -> {now[name]}"
        for name in now
        if name.split(".")[0] in reported_sections() and was.get(name) != now[name]
    ]


def flat_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a config by name, as a manifest has them."""
    return flattened(json.loads(json.dumps(asdict(config))))
