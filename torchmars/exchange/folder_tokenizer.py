"""The tokenizer in a folder of transformers: the tokens around texts that its model has seen.

Models that were trained here have seen documents that begin after an end-of-text token. Those of
other people have seen what the post-processor of their tokenizer.json adds, and they end what they
write by any of several tokens.
"""

from functools import cached_property
from typing import Any

from torchmars.data.tokenizer import FileTokenizer


class FolderTokenizer(FileTokenizer):
    """A tokenizer.json in the folder of its model."""

    @property
    def before(self) -> list[int]:
        """The tokens that the post-processor puts before a text."""
        return self.put_before

    @cached_property
    def begin(self) -> int:
        """The token that begins a text or else the one that ends it, as EleutherAI's harness."""
        named = self.named("bos_token")
        number = None if named is None else self.number(named)
        return self.end_of_text if number is None else number

    @cached_property
    def ends(self) -> frozenset[int]:
        """What generation_config.json names, or else config.json, or else the tokenizer."""
        return frozenset(self.ends_of_model or [self.end_of_text])

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the tokenizer_config.json, over which an older file of special tokens wins where
        transformers reads it. Raises `UserError` if one is damaged."""
        settings = super().settings
        if "added_tokens_decoder" in settings:
            return settings
        return settings | self.table("special_tokens_map.json")
