"""Folders of transformers: what comes before texts and ends them, and the losses that follow."""

import json
import shutil

import pytest
import tokenizers
import torch

from tests.support.commands import run_command
from tests.support.mistakes import mistake
from tests.support.their_models import model_of
from tests.support.tokenizers import letters, tokenizer_file, write_llama, write_tokenizer
from torchmars.api import load
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.saved_model import open_folder, other_tokenizer
from torchmars.exchange.tokenizer_files import FolderTokenizer, tokenizer_files

transformers = pytest.importorskip("transformers")
TEXTS = ["The cat sat on", "é日", " The  fox\n", "The fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.mark.parametrize(
    "template,named",
    [
        ("<s> $A", {}),
        ("$A", {}),
        ("$A", {"bos_token": None}),
        ("</s> <s> $A", {}),
        ("<s> $A", {"bos_token": None}),
    ],
)
def test_prompts_and_contexts_are_those_of_transformers(tmp_path, template, named):
    theirs = write_tokenizer(tmp_path, template, **named)
    ours = FolderTokenizer(str(tmp_path))
    for text in TEXTS:
        assert [*ours.before, *ours.encode(text)] == theirs(text).input_ids
    assert ours.before == theirs("").input_ids
    bos, eos = theirs.bos_token_id, theirs.eos_token_id
    assert ours.begin == (eos if bos is None else bos)  # the harness's rule


def test_what_comes_after_a_text_is_left_out(tmp_path):
    write_tokenizer(tmp_path, "<s> $A </s>")
    assert FolderTokenizer(str(tmp_path)).before == [1]


def test_a_run_with_the_same_tokenizer_is_asked_as_it_was_trained(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.before, tokenizer.begin, tokenizer.ends) == ([], 2, [2])


def test_losses_and_logits_are_those_of_transformers(folder, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = theirs(ids, labels=ids)
        torch.testing.assert_close(model.logits(text), expected.logits[0], rtol=1e-4, atol=1e-4)
        file = tmp_path / f"{number}.txt"
        file.write_text(text)
        found = model.evaluate(text=str(file))[str(file)]
        assert found["tokens"] == ids.shape[1] - 1
        assert found["bytes"] == len(text.encode())
        assert found["loss"] == pytest.approx(float(expected.loss), rel=1e-5)


def test_generation_ends_where_that_of_transformers_does(folder):
    """Each token that the model writes ends a text in turn, besides another one."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = folder / "generation_config.json"
    kept = settings.read_text()
    ids = tokenizer("The cat", return_tensors="pt").input_ids
    free = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=[2])[0].tolist()
    lengths = set()
    for end in free[ids.shape[1] :]:
        theirs.generation_config.eos_token_id = [2, end]
        theirs.generation_config.save_pretrained(folder)
        out = theirs.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
        lengths.add(len(out))
        out = out[:-1] if out[-1] in (2, end) else out
        expected = tokenizer.decode(out, skip_special_tokens=True).removeprefix("The cat")
        found = load(folder).generate(["The cat"], max_tokens=8, temperature=0)
        assert found == [expected]
    settings.write_text(kept)
    assert len(lengths) > 1


@pytest.mark.parametrize(
    "files,ends",
    [
        ({"generation_config": {"eos_token_id": [5, 7]}, "config": {"eos_token_id": 9}}, [5, 7]),
        ({"generation_config": {"eos_token_id": 5}}, [5]),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [9, 5]}}, [9, 5]),
        ({"generation_config": {}}, [2]),
        ({"config": {"eos_token_id": []}}, [2]),
        ({}, [2]),
    ],
)
def test_the_tokens_that_end_a_text(tmp_path, files, ends):
    write_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert FolderTokenizer(str(tmp_path)).ends == ends


@pytest.mark.parametrize(
    "content",
    ["[", "3"],
)
def test_settings_that_name_no_tokens_are_told_in_a_line(tmp_path, content):
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match="generation_config.json"):
        FolderTokenizer(str(tmp_path)).ends  # noqa: B018


def test_a_template_without_a_text_has_its_tokens_alone(tmp_path):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(file))
    assert FolderTokenizer(str(tmp_path)).before == tokenizer.encode("a text").ids == [1, 2]


@pytest.mark.parametrize("number", [259, 260])
def test_an_id_without_a_row_is_told_with_both_numbers(tmp_path, number):
    """As that of a token of padding that was added to a tokenizer."""
    model_of("llama").save_pretrained(tmp_path)
    tokenizer = letters(lambda letter: ord(letter) - 32)
    tokenizer.add_special_tokens([f"<{each}>" for each in range(96, number)] + ["<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    line = mistake(open_folder, tmp_path)
    told = "largest id of its tokenizer is 260, and the model has 260 rows" in line
    assert told == (number == 260) and bool(line) == told


def test_a_tokenizer_that_is_not_the_models_is_told(tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    model_of("llama").save_pretrained(folder)
    source = f"hf:{folder}"
    assert "model has no tokenizer.json: name the one" in other_tokenizer(source, "bytes")
    assert not other_tokenizer(source, "gpt2") and not other_tokenizer("runs/tiny", "bytes")
    code, out, err = run_command("import", [str(folder), "new.toml"], tmp_path)
    said = f"{folder} has no tokenizer.json: set data.tokenizer to the one"
    assert code == 0 and f"warning: {said}" in err and "next" not in out
    assert (tmp_path / "new.toml").read_text().startswith(f"# {said}")
    for name, text in tokenizer_files(load_tokenizer("bytes"), 64).items():
        (folder / name).write_text(text)
    assert not other_tokenizer(source, "bytes")  # other files, the same tokens
    file = tokenizer_file(other)
    assert f"other tokens than {folder}/tokenizer.json" in other_tokenizer(source, str(file))
    shutil.copy(file, folder / "tokenizer.json")
    assert not other_tokenizer(source, str(file))


def test_the_settings_of_a_tokenizer_in_a_cache_are_found(tmp_path):
    """They lie beside the link, not beside the file that it leads to."""
    folder = tmp_path / "model"
    model_of("llama").save_pretrained(folder)
    tokenizer_file(folder, special="<stop>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    for file in (folder / "tokenizer.json", folder / "config.json"):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    name = open_folder(folder).tables["data"]["tokenizer"]
    assert load_tokenizer(name).end_of_text == 127
