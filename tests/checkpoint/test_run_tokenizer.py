"""A run's tokenizer, which is known by its content: from any folder, under any path."""

import json
import os
import shutil

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny import listen_here, tiny_tables, write_text
from tests.support.tokenizers import tokenizer_file
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.export import texts_of
from torchmars.exchange.saved_model import load_model, open_model


def tables_in(folder, tokenizer, steps=2):
    data = {"tokenizer": tokenizer, "files": ["text.txt"]}
    return tiny_tables(folder, data=data, training={"steps": steps}, checkpoint={"interval": 2})


def train_in(folder, *runs):
    """What runs print that are started one after the other in a folder."""
    os.chdir(folder)
    return [listen_here(tables) for tables in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose tokenizer is a relative path, made in the folder of that."""
    folder = tmp_path_factory.mktemp("run")
    write_text(folder)
    file = tokenizer_file(folder / "mine", special="<stop>")
    file.with_name("tokenizer_config.json").write_text('{"eos_token": "<stop>", "bos_token": "a"}')
    file.with_name("generation_config.json").write_text('{"eos_token_id": [101, 127, 102]}')
    run_ranks(train_in, 1, folder, tables_in(folder, "mine/tokenizer.json"))
    return folder


def test_a_run_is_loaded_from_any_folder(folder, tmp_path, monkeypatch):
    content = (folder / "mine" / "tokenizer.json").read_bytes()
    monkeypatch.chdir(tmp_path)
    copied = tmp_path / "copied"
    shutil.copytree(folder / "runs" / "tiny", copied)
    [checkpoint] = (copied / "checkpoints").iterdir()
    for place in (copied, checkpoint):
        _, tokenizer, _ = load_model(place)
        assert tokenizer.encode("fox").tolist() == [102, 111, 120]
        assert tokenizer.end_of_text == 127
    texts = texts_of(open_model(copied), "float32")
    assert texts["tokenizer.json"].encode() == content
    for name in ("config.json", "generation_config.json"):
        found = json.loads(texts[name])
        assert found["eos_token_id"] == [127, 101, 102] and found["bos_token_id"] == ord("a")
    found = json.loads(texts["config.json"])
    assert found["dtype"] == found["torch_dtype"] == "float32"
    monkeypatch.chdir(checkpoint)
    assert load_model(checkpoint.relative_to(checkpoint))[1].end_of_text == 127


def test_without_its_copy_a_run_has_the_file_of_its_config_and_no_other(folder, tmp_path):
    copied, mine = tmp_path / "runs" / "tiny", folder / "mine"
    shutil.copytree(folder / "runs" / "tiny", copied)
    shutil.rmtree(copied / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert load_model(copied)[1].sha256 == load_tokenizer(str(mine)).sha256
        patch.chdir(tmp_path)
        message = "neither .*copied|tiny/tokenizer.* nor mine/tokenizer.json is the tokenizer"
        with pytest.raises(UserError, match=message):
            load_model(copied)
        tokenizer_file(tmp_path / "mine", letter_id=lambda letter: ord(letter) ^ 1)
        with pytest.raises(UserError, match=message):
            load_model(copied)


def test_the_same_tokenizer_under_another_path_goes_on_and_another_one_does_not(folder, tmp_path):
    """And shards are not made again."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    shutil.move(tmp_path / "mine", tmp_path / "other")
    other = tokenizer_file(tmp_path / "mine", letter_id=lambda letter: ord(letter) ^ 1)
    shutil.copytree(tmp_path / "other", tmp_path / "without_end")
    (tmp_path / "without_end" / "tokenizer_config.json").write_text('{"eos_token": "?"}')
    moved, wrong, end = run_ranks(
        train_in,
        1,
        tmp_path,
        tables_in(tmp_path, str(tmp_path / "other"), 4),
        tables_in(tmp_path, str(other), 6),
        tables_in(tmp_path, "without_end", 6),
    )[0]
    assert "from step 2" in moved and "error" not in moved and "tokenising" not in moved
    assert 'was prepared with data.tokenizer = "a file of SHA-256 ' in wrong
    assert "was prepared with the tokenizer's end of text = 127, now it is " in end
    shutil.rmtree(tmp_path / "shards")
    [anew] = run_ranks(train_in, 1, tmp_path, tables_in(tmp_path, "mine/tokenizer.json", 6))[0]
    assert f"another tokenizer ({tmp_path}/other) than mine/tokenizer.json is now" in anew
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert manifest["end_of_text"] == load_tokenizer(str(other)).end_of_text
