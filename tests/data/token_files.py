"""Token files of nanoGPT, llm.c and Megatron, written by the definitions of those formats."""

import struct

import numpy as np

from tests.support.tiny import tiny_config

END = 256  # of text, for the tokenizer "bytes"


def documents(count, seed):
    """Return `count` documents, each of which ends in an end-of-text token."""
    generator = np.random.default_rng(seed)
    texts = [generator.integers(0, 256, size=generator.integers(20, 90)) for _ in range(count)]
    return [np.append(text, END) for text in texts]


TRAIN, VALIDATION = documents(50, 1), documents(10, 2)


def write_nanogpt(file, texts):
    file.write_bytes(np.concatenate(texts).astype("<u2").tobytes())


def write_llmc(file, texts, magic=20240520, version=1, dtype="<u2"):
    tokens = np.concatenate(texts)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    file.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


def write_megatron(file, texts, code=8, dtype="<u2", version=1, magic=b"MMIDIDX\x00\x00"):
    """Write PREFIX.bin and PREFIX.idx; every second document is of two sequences."""
    sequences, ends = [], [0]
    for number, text in enumerate(texts):
        sequences += [text[:7], text[7:]] if number % 2 else [text]
        ends.append(len(sequences))
    lengths = np.array([len(each) for each in sequences], "<i4")
    pointers = np.cumsum([0, *lengths[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    file.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    file.with_suffix(".idx").write_bytes(
        magic
        + struct.pack("<QBQQ", version, code, len(sequences), len(ends))
        + lengths.tobytes()
        + pointers.tobytes()
        + np.array(ends, "<i8").tobytes()
    )


def llama3(file, texts):
    write_llmc(file, texts, 20240801, 7, "<u4")


def megatron_int32(file, texts):
    write_megatron(file, texts, 4, "<i4")


FORMATS = {
    "nanogpt": (write_nanogpt, "nanogpt:{}", "uint16"),
    "llmc": (write_llmc, "llmc:{}", "uint16"),
    "llmc glob": (write_llmc, "llmc:{}/*.bin", "uint16"),
    "llmc llama-3": (llama3, "llmc:{}", "uint32"),
    "megatron": (write_megatron, "megatron:{}", "uint16"),
    "megatron glob": (write_megatron, "megatron:{}/*_text_document", "uint16"),
    "megatron index": (write_megatron, "megatron:{}/*_text_document.idx", "uint16"),
    "megatron int32": (megatron_int32, "megatron:{}", "uint32"),
}


def config_of(folder, source, **data):
    (folder / "tokens").mkdir(exist_ok=True)
    data = {"source": source.format(folder / "tokens"), "files": []} | data
    return tiny_config(folder, data=data)
