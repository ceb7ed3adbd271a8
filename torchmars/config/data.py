"""Where the tokens come from."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchmars.config.fields import Mark, require
from torchmars.core.bounds import Place, Range


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """Text to train on. stdlib: the Python standard library's sources. text: your own files."""
    files: list[Annotated[str, Place()]] = field(default_factory=list)
    """For source "text": files, folders (every .txt and .md below) and globs. A line
    `<|endoftext|>` ends a document."""
    tokenizer: Annotated[Literal["bytes", "gpt2"], Mark.IDENTITY] = "bytes"
    """bytes (256 values and an end-of-text token) or gpt2 (BPE, 50257 tokens)."""
    path: Annotated[str, Place()] | None = None
    """Folder of the tokenised shards. The first run fills it. Default: data/SOURCE-TOKENIZER."""
    validation_fraction: Annotated[float, Range(0, 0.5, open_low=True)] = 0.01
    """Share of the tokens kept for validation, by whole documents."""
    num_workers: Annotated[int, Range(0, 64)] = 1
    """Processes of each rank that read ahead. 0: the training process reads."""

    def resolve(self) -> "ResolvedData":
        """Return the section with its folder. Raises `UserError`."""
        require(
            self.source != "text" or bool(self.files) or self.path is not None,
            'data.files is empty: name the files, folders or globs that data.source = "text" reads',
        )
        require(
            self.source == "text" or not self.files,
            f'data.files has no meaning for data.source = "{self.source}": '
            'set data.source = "text"',
        )
        path = self.path or f"data/{self.source}-{self.tokenizer}"
        return ResolvedData(**vars(self) | {"path": path})


@dataclass(frozen=True, kw_only=True)
class ResolvedData(DataConfig):
    """Where the tokens come from, and where the shards are."""

    path: str
