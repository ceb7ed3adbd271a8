"""The bytes of text that tokens stand for, and losses in bits per byte."""

import math

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tests.support.tiny import listen, metrics, tiny_config, tiny_tables, write_text
from torchmars.core.errors import UserError
from torchmars.data.manifest import DataManifest, Split, read_manifest
from torchmars.data.windows import Mixture, MixturePart
from torchmars.training.preparation import prepare_data

TEXTS = [f"  ä b {n}\n日本語 text" for n in range(99)]


def test_the_manifest_knows_the_bytes_of_each_split(tmp_path):
    """With a token for each byte they are the tokens but those that end documents."""
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    prepare_data(tiny_config(tmp_path))
    manifest = read_manifest(tmp_path / "shards")
    assert sum(split.text_bytes for split in manifest.splits.values()) > 900
    for split in manifest.splits.values():
        assert split.text_bytes == split.tokens - split.documents


def test_the_end_of_a_single_document_has_its_share_of_the_bytes(tmp_path):
    text = "one document, Größe 1 " * 120
    (tmp_path / "text.txt").write_text(text)
    prepare_data(tiny_config(tmp_path))
    manifest = read_manifest(tmp_path / "shards")
    assert sum(split.text_bytes for split in manifest.splits.values()) == len(text.encode())
    for split in manifest.splits.values():
        assert abs(split.text_bytes - split.tokens) <= 1


def part(name, weight, train=0, validation=0):
    split = {"train": Split(1000, text_bytes=train), "validation": Split(100, 0, validation)}
    manifest = DataManifest({}, "bytes", None, 257, 256, None, "uint16", split)
    return MixturePart(name, None, weight, manifest)


def test_bits_per_byte_of_a_mixture():
    """Each part's tokens have the bytes of its own mean token."""
    parts = [part("a", 3.0, train=4000, validation=200), part("b", 1.0, train=2000), part("c", 0.0)]
    mixture, loss = Mixture(parts), 2 * math.log(2)
    assert mixture.bits_per_byte("train", loss, mixture.weights) == pytest.approx(2 * 4 / 14)
    assert mixture.bits_per_byte("validation", loss, [50.0, 0.0, 0.0]) == pytest.approx(1.0)
    assert math.isnan(mixture.bits_per_byte("validation", loss, [50.0, 1.0, 0.0]))
    assert math.isnan(mixture.bits_per_byte("train", loss, [1.0, 1.0, 1e-9]))


def test_a_run_reports_bits_per_byte(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 2}, validation={"interval": 2})
    out = listen(1, tables)
    manifest = read_manifest(tmp_path / "shards")
    for split, kind in (("train", "train"), ("validation", "validation")):
        losses, bits = metrics(tables, f"{kind}/loss"), metrics(tables, f"{kind}/bits_per_byte")
        ratio = manifest.splits[split].tokens / manifest.splits[split].text_bytes
        assert bits == {
            step: pytest.approx(loss / math.log(2) * ratio) for step, loss in losses.items()
        }
        assert f"loss {losses[2]:.4f} | {bits[2]:.3f} bits/byte" in out


def test_a_corpus_of_which_the_tokenizer_leaves_nothing_is_a_line(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("\x01\x02")
    config = tiny_config(tmp_path, data={"tokenizer": str(tmp_path / "tokenizer.json")})
    with pytest.raises(UserError, match="the corpus has no text"):
        prepare_data(config)
