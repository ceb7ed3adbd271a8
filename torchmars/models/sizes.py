"""From a config to a model's shape: a family's named sizes, and the fields set in their place."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torchmars.config import ModelConfig
from torchmars.core.errors import UserError
from torchmars.core.typed import nearest

T = TypeVar("T")

VOCABULARY_MULTIPLE = 64  # rows of the token table: matrix units like whole tiles


def make_args(
    config: ModelConfig,
    kind: type[T],
    sizes: Mapping[str, Mapping[str, Any]],
    vocab_size: int,
    seq_len: int,
) -> T:
    """Return the shape of a model, the dataclass `kind`: the named size, and what is set instead.

    `vocab_size` is the tokenizer's. Raises `UserError` for a size that is not among `sizes`, and
    for a field that `kind` does not have.
    """
    family = f'model.name = "{config.name}"'
    if config.size not in sizes:
        raise UserError(
            f'model.size = "{config.size}" is no size of {family}: did you mean '
            f'"{nearest(config.size, list(sizes))}"? There are {", ".join(sizes)}'
        )
    set_fields = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in ("name", "size") and getattr(config, field.name) != field.default
    }
    for name in set_fields:
        if name not in inspect.signature(kind).parameters:
            raise UserError(f"model.{name} has no meaning for {family}: remove it")
    padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return kind(
        **{"vocab_size": padded, "seq_len": seq_len} | dict(sizes[config.size]) | set_fields
    )
