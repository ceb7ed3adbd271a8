"""Runs whose documents begin with a token: text, evaluation, and exports of them."""

import pytest

from tests.support.tiny import listen, tiny_tables, write_text
from tests.support.tokenizers import write_llama
from torchmars.api import load
from torchmars.exchange.export import export
from torchmars.exchange.saved_model import load_model, open_folder, open_model

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


def test_a_run_is_asked_and_exported_as_its_documents_began(folder, tmp_path):
    data = {"begin_token": "auto", "separate_documents": True, "packing": "best_fit"}
    tables = tables_from(folder, f"hf:{folder}/llama", "asked", **data)
    assert "error" not in listen(1, tables)
    run, prompts = folder / "runs" / "asked", ["The", "", "The cat sat on"]
    _, tokenizer, _ = load_model(run)
    assert (tokenizer.before, tokenizer.begin, tokenizer.end_of_text) == ([1], 1, 2)
    export(open_model(run), tmp_path / "hf")
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
