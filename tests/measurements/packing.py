"""Measure how many documents are cut, by windows from the stream and by best-fit packing.

    python -m tests.measurements.packing

Lengths are drawn: web-like ones are log-normal with a median of 600 tokens and sigma 1, those of
books with a median of 100,000 and sigma 0.5. Each shard is written to a temporary folder, is read
and packed in one process, and has at most about 100 million tokens.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from torchmars.data.manifest import Shard, Split
from torchmars.data.packed import packing
from torchmars.data.windows import Windows

END = 50256
SOURCES = {"web": (600, 1.0, 100_000), "books": (100_000, 0.5, 1_000)}
LENGTHS = (1024, 2048, 8192)


def pieces_of(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return in how many pieces each document is. They begin at `starts`, documents at `ends`."""
    document = np.searchsorted(ends, starts, side="right") - 1
    return np.bincount(document, minlength=len(ends))


def main() -> None:
    print(
        "| text | T | cut, stream | cut, best fit | pieces, stream | pieces, best fit | at least | "
        "documents per s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for source, (median, sigma, count) in SOURCES.items():
        generator = np.random.default_rng(0)
        lengths = generator.lognormal(np.log(median), sigma, count).astype(np.int64) + 1
        ends = np.cumsum(lengths) - lengths
        tokens = np.zeros(lengths.sum() + 1, dtype="<u2")
        tokens[[*ends, -1]] = END
        with tempfile.TemporaryDirectory() as folder:
            tokens.tofile(Path(folder) / "shard.bin")
            split = Split(len(tokens), count, END, [Shard("shard.bin", len(tokens), "")])
            for seq_len in LENGTHS:
                began = time.perf_counter()
                content = packing(Windows(Path(folder), split, "uint16", seq_len), 0, END)
                seconds = time.perf_counter() - began
                n_windows = (len(tokens) - 1) // seq_len
                starts = np.frombuffer(content, "<i8")[n_windows + 1 :: 2]
                stream = np.union1d(np.arange(0, n_windows * seq_len, seq_len), ends)
                packed, streamed = pieces_of(starts, ends), pieces_of(stream, ends)
                short = lengths <= seq_len
                cut = (
                    f"{(each[short] > 1).mean():.2%}" if short.any() else "-"
                    for each in (streamed, packed)
                )
                least = -(-lengths // seq_len)
                pieces = (f"{each[~short].mean():.3f}" for each in (streamed, packed, least))
                columns = (source, f"{seq_len:,}", *cut, *pieces, f"{count / seconds:,.0f}")
                print("| " + " | ".join(columns) + " |")


if __name__ == "__main__":
    main()
