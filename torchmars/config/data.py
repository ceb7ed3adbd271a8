"""Where the tokens come from."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchmars.config.fields import Count, Mark, Positive, require
from torchmars.config.source import OF_FILES, parse_source, slug
from torchmars.core.bounds import Place, Range


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    source: str = "stdlib"
    """Text to train on. stdlib: the Python standard library's sources. text:GLOB,
    jsonl:GLOB[:FIELD], parquet:GLOB[:FIELD]: files. hf:DATASET[:CONFIG[:SPLIT[:FIELD]]]: a data
    set of Hugging Face. openwebtext, fineweb-edu[:CONFIG]: names of two of these."""
    files: list[Annotated[str, Place()]] = field(default_factory=list)
    """For text, jsonl and parquet: files, folders and globs beside the source's own glob. A line
    `<|endoftext|>` of a text file ends a document."""
    tokenizer: Annotated[Literal["bytes", "gpt2"], Mark.IDENTITY] = "bytes"
    """bytes (256 values and an end-of-text token) or gpt2 (BPE, 50257 tokens)."""
    path: Annotated[str, Place()] | None = None
    """Folder of the tokenised shards. The first run fills it. Default: data/SOURCE-TOKENIZER."""
    validation_fraction: Annotated[float, Range(0, 0.5, open_low=True)] = 0.01
    """Share of the documents kept for validation: those whose hash falls below it."""
    validation_seed: Count = 0
    """Key of that hash."""
    max_damaged: Count = 100
    """Damaged records that are left out. One more ends the preparation."""
    processes: Positive | None = None
    """Processes that tokenise. The shards do not depend on it. Default: the cores that this
    process may use."""
    num_workers: Annotated[int, Range(0, 64)] = 1
    """Processes of each rank that read ahead. 0: the training process reads."""

    def resolve(self) -> "ResolvedData":
        """Return the section with its folder. Raises `UserError`."""
        source = parse_source(self.source)
        require(
            source.kind not in OF_FILES or bool(self.files or source.glob) or self.path is not None,
            f"data.files is empty: name the files, folders or globs that data.source = "
            f'"{self.source}" reads',
        )
        require(
            source.kind in OF_FILES or not self.files,
            f'data.files has no meaning for data.source = "{self.source}": '
            'set data.source = "text"',
        )
        path = self.path or f"data/{slug(f'{self.source}-{self.tokenizer}')}"
        return ResolvedData(**vars(self) | {"path": path})


@dataclass(frozen=True, kw_only=True)
class ResolvedData(DataConfig):
    """Where the tokens come from, and where the shards are."""

    path: str
