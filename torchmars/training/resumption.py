"""Whether a run can resume from a checkpoint of its own, or start from another one's weights.

It is apart from preparation.py because its imports take a second, which a new run need not wait
for.
"""

import json
from typing import Literal

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.manifest import CheckpointManifest
from torchmars.checkpoint.resume import check_same_run, newest_good, read_verified
from torchmars.config import ResolvedConfig
from torchmars.config.checkpoint import HF
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError
from torchmars.core.places import place
from torchmars.data.mixture import Mixture
from torchmars.data.named_tokenizers import load_tokenizer
from torchmars.data.tokenizer_file import FileTokenizer
from torchmars.exchange.from_config import begin_token_of
from torchmars.exchange.hub import find_folder
from torchmars.exchange.initial import open_source, weights_of
from torchmars.exchange.weights import read_config
from torchmars.models import Model
from torchmars.training.optimizer import build_optimizer


def check_resume(config: ResolvedConfig, data: Mixture, model: Model) -> None:
    """Raise `UserError` if the run can neither resume from a checkpoint of its own nor start.

    `model` is on the meta device. The bytes of checkpoints are left to the ranks.
    """
    level: Literal["off", "size"] = "off" if config.checkpoint.verify == "off" else "size"
    found = newest_good(
        checkpoints(config.checkpoints),
        lambda path: read_verified(path, level),
        warn=lambda text: None,
    )
    if found:
        optimizer = build_optimizer(config, model)
        check_same_run(*found, config, data.fingerprint(), optimizer)
    elif source := config.checkpoint.init_from:
        if weights_of(source, model) is None:
            begin = begin_token_in(open_source(place(source), "size", model)[1], config)
        else:
            begin = begin_token_of_weights(source)
        if warning := begin_token_warning(begin, config, data):
            say(*labelled("warning", warning))


def begin_token_in(manifest: CheckpointManifest, config: ResolvedConfig) -> int | None:
    """Return the token that documents began with in the run of a checkpoint; None if not known."""
    setting = manifest.config.get("data", {}).get("begin_token", "none")
    try:
        return load_tokenizer(config.data.tokenizer, setting).begin
    except UserError:  # it had another tokenizer
        return None


def begin_token_of_weights(source: str) -> int | None:
    """Return the token that texts began with for imported weights; None if it is not known."""
    if not source.startswith(HF):
        return None
    return begin_token_of(read_config(find_folder(source)[0]))


def begin_token_warning(begin: int | None, config: ResolvedConfig, data: Mixture) -> str:
    """Return a warning where documents begin with another token than the model to start from saw.

    "" if not. That is `begin`; None: it is not known.
    """
    manifest = data.parts[0].manifest
    own = manifest.end_of_text if manifest.begin_token is None else manifest.begin_token
    if begin in (None, own):
        return ""
    tokenizer = load_tokenizer(config.data.tokenizer)
    remedy = "set data.tokenizer to the one of that model, data.begin_token to auto"
    if begin == tokenizer.end_of_text:
        remedy = "set data.begin_token to none"
    elif isinstance(tokenizer, FileTokenizer) and begin < tokenizer.vocab_size:
        token = tokenizer.token(begin)
        if tokenizer.number(token) == begin:  # else no token has the id
            remedy = f"set data.begin_token to {json.dumps(token, ensure_ascii=False)}"
    after = " alone, which ends them" if manifest.begin_token is None else ""
    return (
        f"{config.checkpoint.init_from} was trained on texts that begin with token {begin}, those "
        f"of {data.parts[0].folder} begin with token {own}{after}: {remedy}, and data.path to "
        "another folder"
    )
