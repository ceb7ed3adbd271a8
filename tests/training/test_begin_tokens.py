"""Runs whose documents begin with a token: warnings, text, evaluation, and exports of them."""

import json

import pytest
import torch

from tests.support.full import FULL
from tests.support.tiny import listen, metrics, tiny_tables, train, write_text
from tests.support.tokenizers import write_llama
from torchmars.api import load
from torchmars.config.load import config_from_tables
from torchmars.exchange.export import export_folder
from torchmars.exchange.folder import open_folder
from torchmars.exchange.saved_model import load_model, open_model
from torchmars.training.preparation import prepare_run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of transformers, whose texts begin with token 1, and documents."""
    folder = tmp_path_factory.mktemp("begin")
    write_llama(folder / "llama")
    write_text(folder, words=60)
    return folder


def tables_from(folder, source, path, **data):
    tables = open_folder(folder / "llama").tables
    tables["checkpoint"] |= {"init_from": source}
    own = tiny_tables(
        folder,
        data=tables.pop("data") | {"path": str(folder / path)} | data,
        training={"seq_len": 64, "steps": 2, "global_batch_size": 4},
        checkpoint=tables.pop("checkpoint"),
    )
    return own | {"model": tables["model"], "run": {"name": path, "folder": str(folder / "runs")}}


def warnings(capsys, tables):
    prepare_run(config_from_tables(tables, "in a test"), 1, 1)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("warning") and "begin" in line]


def set_begin(folder, number):
    """Let the config.json in a folder name another begin token; "gone": none at all."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("bos_token_id", None)
    file.write_text(json.dumps(config if number == "gone" else config | {"bos_token_id": number}))


def test_a_model_that_saw_another_begin_token_is_told_in_a_line(folder, capsys):
    llama = folder / "llama"
    source = f"hf:{llama}"
    plain = tables_from(folder, source, "plain")
    [line] = warnings(capsys, plain)
    assert line.split(maxsplit=1)[1] == (
        f"{source} was trained on texts that begin with token 1, those of {folder}/plain begin with"
        ' token 2 alone, which ends them: set data.begin_token to "<s>", and data.path to another '
        "folder"
    )
    begun = tables_from(folder, source, "begun", begin_token="auto")
    assert not warnings(capsys, begun)
    other = tables_from(folder, source, "other", begin_token="<turn>")
    assert 'begin with token 3: set data.begin_token to "<s>"' in warnings(capsys, other)[0]
    theirs = tables_from(folder, source, "theirs", tokenizer="bytes")
    assert "token 256 alone, which ends them: set data.tokenizer to" in warnings(capsys, theirs)[0]
    try:
        set_begin(llama, "gone")  # Llama's own default is 1
        assert "begin with token 1, those" in warnings(capsys, plain)[0]
        assert not warnings(capsys, begun)
        set_begin(llama, 2)
        assert not warnings(capsys, plain)
        assert "those of" in warnings(capsys, begun)[0]
        assert "set data.begin_token to none, and" in warnings(capsys, begun)[0]
        for number in (None, "x", [1], -1, True):
            set_begin(llama, number)
            assert not warnings(capsys, plain) and not warnings(capsys, begun)
    finally:
        set_begin(llama, 1)


def test_a_run_is_asked_and_exported_as_its_documents_began(folder, tmp_path, capsys):
    data = {"begin_token": "auto", "separate_documents": True, "packing": "best_fit"}
    tables = tables_from(folder, f"hf:{folder}/llama", "asked", **data)
    assert "error" not in listen(1, tables)
    run, prompts = folder / "runs" / "asked", ["The", "", "The cat sat on"]
    _, tokenizer, _ = load_model(run)
    assert (tokenizer.before, tokenizer.begin, tokenizer.end_of_text) == ([1], 1, 2)
    export_folder([open_model(run)], tmp_path / "hf", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.config.bos_token_id == theirs.generation_config.bos_token_id == 1
    expected = []
    for prompt in prompts:
        ids = their_tokenizer(prompt, return_tensors="pt").input_ids
        assert ids[0, 0] == 1
        new = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        text = their_tokenizer.decode(new, skip_special_tokens=True)
        expected.append(text[len(their_tokenizer.decode(ids[0], skip_special_tokens=True)) :])
    for place in (run, tmp_path / "hf"):
        assert load(place).generate(prompts, max_tokens=20, temperature=0) == expected
    # A run goes on from a run as from a folder.
    assert (
        "begin with token 1, those of" in warnings(capsys, tables_from(folder, str(run), "p2"))[0]
    )
    same = tables_from(folder, str(run), "p3", begin_token="<s>")
    assert not warnings(capsys, same)


@FULL
def test_documents_with_a_begin_token_are_the_same_on_other_layouts(folder):
    data = {"begin_token": "auto", "separate_documents": True, "packing": "best_fit"}
    runs = [
        tables_from(folder, f"hf:{folder}/llama", "begun", **data)
        | {"run": {"name": name, "folder": str(folder / "runs")}, "parallelism": parallelism}
        for name, parallelism in (("one", {}), ("cp", {"cp": 2}), ("tp", {"tp": 2}))
    ]
    train(1, runs[0])
    train(2, *runs[1:])
    expected = metrics(runs[0])
    assert len(expected) == 2
    for run in runs[1:]:
        assert metrics(run) == pytest.approx(expected, rel=1e-5)
