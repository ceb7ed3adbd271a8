"""What a terminal is shown, and what a pipe gets."""

import contextlib
import os
import pty

import pytest

from torchmars.core import console
from torchmars.core.words import table

STEERING = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x90q\x9c",
    "\x7f\b\r\x00",
    "\u202eevil\u2066",
    "a\u2028b",
    "\udc9b",
]
ORDINARY = "tab\t, lines\n\n, Grüße, 日本語, שלום, 👩\u200d🚀, a\u0301, \xa0, \ue000"


@pytest.fixture
def terminal():
    """A function that writes a text to a terminal; returns what arrives there."""
    inside, outside = pty.openpty()

    def show(act, text):
        stream = open(outside, "w", closefd=False)
        with contextlib.redirect_stdout(stream):
            act(text)
            console.write("END")
        found = b""
        while not found.endswith(b"END"):
            found += os.read(inside, 2**16)
        return found.removesuffix(b"END").decode().removesuffix("\r\n")

    yield show
    os.close(inside)
    os.close(outside)


@pytest.mark.parametrize("text", STEERING)
def test_nothing_steers_a_terminal(terminal, capsysbinary, text):
    shown = console.harmless(text)
    assert shown.isascii() and shown.isprintable() and "\\" in shown
    assert terminal(console.say, text) == terminal(console.write, text) == shown
    console.say(text)
    assert capsysbinary.readouterr().out.decode() == shown + "\n"
    console.write(text)  # generated text, exact
    expected = text.encode(errors="backslashreplace")
    assert capsysbinary.readouterr().out == expected


def test_ordinary_text_stays(terminal):
    assert console.harmless(ORDINARY) == ORDINARY
    assert terminal(console.write, "Grüße, 日本語 👩\u200d🚀") == "Grüße, 日本語 👩\u200d🚀"


def test_a_cell_stays_in_its_row():
    rows = table([("name", "n"), ("a\nb\x1b[2J", "1"), ("c", "2")])
    assert rows == ["name         n", "a\\nb\\x1b[2J  1", "c            2"]


def test_what_is_not_shown(monkeypatch, capsys):
    """As with --quiet: lines that begin neither with "warning" nor with "error"."""
    monkeypatch.setattr(console, "quiet", True)
    for line in ("step 3", "warnings are kept", "warning   a", "warning: b", "error: c"):
        console.say(line)
    assert capsys.readouterr().out == "warning   a\nwarning: b\nerror: c\n"
