"""How far a long piece of work is: a bar on a terminal, lines in a log."""

import sys
from typing import Self, TextIO, cast

from tqdm import tqdm

from torchmars.core.console import harmless, is_shown, say
from torchmars.core.words import counted
from torchmars.data.documents import Encoded

LOG_SECONDS = 30.0  # between two lines of a log
LINE = "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class LogLines:
    """A stream that makes lines of a bar that is drawn over itself."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            say(text, error=True)

    def flush(self) -> None:
        """Do nothing: a line is written at once."""


class ProgressBar:
    """A bar with the rate and the time that is left; of a corpus also its documents and tokens."""

    def __init__(self, what: str, total: int, done: int, unit: str, shown: bool = True) -> None:
        """Show `done` of `total`. `unit` names the counted things, such as B for bytes."""
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.documents = self.text = self.tokens = 0
        self.bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            unit_scale=True,
            desc=harmless(what),
            file=sys.stderr if terminal else cast(TextIO, LogLines()),
            mininterval=0.1 if terminal else LOG_SECONDS,
            bar_format=None if terminal else LINE,
            disable=not (shown and is_shown()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def add(self, amount: int, encoded: Encoded | None = None) -> None:
        """Show `amount` more, and for a corpus the results so far."""
        if encoded:
            self.documents += sum(encoded.documents.values())
            self.text += sum(encoded.text.values())
            self.tokens += sum(len(tokens) for tokens in encoded.tokens.values())
            self.bar.set_postfix_str(
                f"{counted(self.documents, 'document')}, {tqdm.format_sizeof(self.tokens)} tokens",
                refresh=False,
            )
        self.bar.update(amount)
