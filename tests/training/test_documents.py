"""Runs with documents kept apart and packed: the same on every layout, and they go on."""

import pytest

from tests.support.full import FULL
from tests.support.tiny import (
    listen,
    metrics,
    tiny_tables,
    train,
    write_text,
)

DATA = {"separate_documents": True, "packing": "best_fit"}


def tables(folder, name, data=DATA, **overrides):
    """A run of 6 steps on documents of about 50 to 500 tokens."""
    training = {"steps": 6, "seq_len": 64, "dtype": "float32"}
    validation = {"interval": 3, "windows": 4, "sample_tokens": 4}
    settings = {"training": training, "validation": validation, "run": {"name": name}}
    optimizer = {"mode": "exact", "lr": 2e-3}
    return tiny_tables(folder, data=data, optimizer=optimizer, **settings | overrides)


def write_documents(folder):
    """Documents of many lengths: `write_text` makes all of one."""
    file = write_text(folder, documents=60, words=100)
    documents = file.read_text().split("\n<|endoftext|>\n")
    cut = [text[: 40 + 83 * number % 460] for number, text in enumerate(documents)]
    file.write_text("\n<|endoftext|>\n".join(cut))


def losses(run):
    return metrics(run), metrics(run, "validation/loss")


@FULL
def test_a_run_is_the_same_on_other_layouts_and_goes_on(tmp_path):
    write_documents(tmp_path)
    one = tables(tmp_path, "one", checkpoint={"interval": 3})
    train(1, one)
    expected = losses(one)
    assert list(expected[0]) == [1, 2, 3, 4, 5, 6] and list(expected[1]) == [3, 6]

    plain = tables(tmp_path, "plain", data={})
    short = tables(tmp_path, "two", training={"steps": 3, "seq_len": 64, "dtype": "float32"})
    train(2, short, tables(tmp_path, "two"), tables(tmp_path, "cp", parallelism={"cp": 2}), plain)
    assert losses(plain)[0][1] != expected[0][1]
    for name in ("two", "cp"):
        for found, wanted in zip(losses(tables(tmp_path, name)), expected):
            assert found == pytest.approx(wanted, rel=1e-5), name
    assert (tmp_path / "shards" / "best_fit-64").is_dir()

    for key, value in (("separate_documents", False), ("packing", "stream")):
        other = tables(tmp_path, "one", data=DATA | {key: value})
        said = listen(1, other)
        assert f"was made with data.{key} = {DATA[key]}, the config says {value}" in said
