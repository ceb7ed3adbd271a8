"""Whether a file without a header has nanoGPT's tokens: uint16, of a tokenizer that is known here.

Nothing in such a file says its format. Other programs write other numbers under the same names, and
most can be read as uint16 too: they give other tokens, twice as many.
"""

import contextlib
import json
import shlex
import struct
from pathlib import Path

import numpy as np

from torchmars.core.errors import UserError
from torchmars.data.tokenizer import FileTokenizer, TokenDtype, Tokenizer

LOOKED_AT = 2**20  # bytes at the start of a file, which tell what its numbers are
FEWEST = 64  # bytes that tell it
# Every second uint16 of numbers below it is less than 4. Hardly a vocabulary is larger.
WIDE = 2**18
SHARE = 0.99  # of the numbers at least: there may be a header, and a few larger ones
OTHER_NUMBERS = ("<i8", ">i8", "<u4", ">u4")  # int32 are uint32 as long as none is negative
# Of llm.c's files, by magic number: the version that is read, and the tokens' dtype.
LLMC_KINDS: dict[int, tuple[int, TokenDtype]] = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
NUMPY_MAGIC = b"\x93NUMPY"
CHARACTERS = "meta.pkl"  # nanoGPT's characters and their numbers, beside tokens made of them


def check_numbers(file: Path, start: bytes, size: int) -> None:
    """Raise `UserError` if a file of `size` bytes that begins with `start` has no uint16 tokens.

    The line says what it has, and the command that makes it readable.
    """
    if start.startswith(NUMPY_MAGIC):
        name = json.dumps(file.name)
        raise UserError(f"{file} is NumPy's .npy: {conversion(file, f'np.load({name}).ravel()')}")
    for order in "<>":
        if len(start) >= 4 and struct.unpack(f"{order}i", start[:4])[0] in LLMC_KINDS:
            raise UserError(f"{file} has llm.c's header: set data.source to llmc:{file.parent}")
    if len(start) >= FEWEST and is_written(start):
        raise UserError(f"{file} is text, or has one byte a token: set data.source to text:{file}")
    if dtype := wide_numbers(start):
        name = np.dtype(dtype).name
        raise UserError(f"{file} has {name} tokens, no uint16: {conversion(file, dtype=dtype)}")
    if size % 2 or not size:
        raise UserError(
            f"{file} has {size} bytes, which are no uint16 tokens as nanoGPT writes them: "
            "copy it again, or set another data.source"
        )


def check_made_with(file: Path, start: bytes, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if uint16 tokens are not of a tokenizer, as far as can be told.

    `meta.pkl` is not read: that would run its code.
    """
    if file.with_name(CHARACTERS).exists() and not isinstance(tokenizer, FileTokenizer):
        raise UserError(
            f"{file.with_name(CHARACTERS)} says that {file.name} has nanoGPT's numbers of "
            f"characters, which data.tokenizer = {tokenizer.name!r} does not have: tokenise the "
            'text itself, as by data.source = "text:input.txt" and data.tokenizer = "bytes"'
        )
    if tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{file} is read as uint16, and data.tokenizer = {tokenizer.name!r} has "
            f"{tokenizer.vocab_size:,} tokens: where it has uint32, {conversion(file)}"
        )
    numbers = np.frombuffer(start[: len(start) // 2 * 2], "<u2")
    if numbers.max() >= tokenizer.vocab_size > numbers.byteswap().max():
        raise UserError(f"{file} has big-endian tokens: {conversion(file, dtype='>u2')}")


def is_written(start: bytes) -> bool:
    """Return whether bytes are text: UTF-8 without control characters except white space."""
    with contextlib.suppress(UnicodeDecodeError):
        end = start.rfind(b" ") + 1  # no character is cut there
        text = start[:end].decode()
        return end > len(start) // 2 and all(
            letter.isprintable() or letter in "\t\n\f\r" for letter in text
        )
    return False


def wide_numbers(start: bytes) -> str:
    """Return NumPy's name of the dtype of numbers of more than 16 bits; "" if they are uint16.

    What looks like low and high halves is uint16 all the same where the high ones are not smaller.
    """
    if len(start) < FEWEST:
        return ""
    for dtype in OTHER_NUMBERS:
        numbers = np.frombuffer(start[: len(start) // 8 * 8], dtype).astype(np.int64)
        those = numbers[(numbers >= 0) & (numbers < WIDE)]
        if len(those) >= SHARE * len(numbers) and (those >> 16).max() < (those & 0xFFFF).max():
            return dtype
    return ""


def conversion(file: Path, read: str = "", dtype: str = "<u4") -> str:
    """Return how to make llm.c's file of tokens, which are of a `dtype` or what `read` returns."""
    read = read or f"np.fromfile({json.dumps(file.name)}, {json.dumps(dtype)})"
    made = f"llmc_{file.name}"
    code = (
        f'import numpy as np; t = {read}.astype("<u4"); h = np.zeros(256, "<i4"); '
        f"h[:3] = {max(LLMC_KINDS)}, 7, t.size; "
        f'open({json.dumps(made)}, "wb").write(h.tobytes() + t.tobytes())'
    )
    folder = shlex.quote(str(file.parent))
    return (
        f"set data.source to llmc:{file.parent}/llmc_* after this, for each such file: "
        f"cd {folder} && python -c '{code}'"
    )
