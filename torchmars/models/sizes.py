"""From a config to a model's shape: a family's named sizes, and the fields set in their place."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torchmars.config import ModelConfig
from torchmars.core.errors import UserError

T = TypeVar("T")

VOCABULARY_MULTIPLE = 64  # rows of the token table: matrix units like whole tiles


def make_args(
    config: ModelConfig,
    kind: type[T],
    size: Mapping[str, Any],
    vocab_size: int,
    seq_len: int,
) -> T:
    """Return the shape of a model, the dataclass `kind`: its named size, with overrides.

    `vocab_size` is the tokenizer's. Raises `UserError` for a field that `kind` does not have.
    """
    set_fields = {name: getattr(config, name) for name in config.changed()}
    for name in set_fields:
        if name not in inspect.signature(kind).parameters:
            raise UserError(
                f'model.{name} has no meaning for model.name = "{config.name}": remove it'
            )
    padded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return kind(**{"vocab_size": padded, "seq_len": seq_len} | dict(size) | set_fields)
