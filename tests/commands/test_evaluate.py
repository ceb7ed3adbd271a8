"""Evaluation of a run while it trains, by the command, and of its export."""

import json
import math

import pytest

from tests.support.commands import ROOT, run_command
from tests.support.tasks import foxes, write_task
from tests.support.tiny import (
    listen,
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    write_config,
    write_text,
)
from torchmars.exchange.tokenizer_files import byte_pair_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on two ranks that was asked two tasks, its tables, and what it printed."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_text(folder)
    tasks = [
        write_task(folder, "words", "loglikelihood", foxes(9)),
        write_task(folder, "foxes", "multiple_choice", foxes(9)),
    ]
    tables = tiny_tables(
        folder,
        optimizer={"lr": 1e-2},
        evaluation={"tasks": tasks, "interval": 8, "shots": 1, "limit": 7, "batch_size": 2},
    )
    return tables, tasks, listen(2, tables)


def evaluate(*args):
    return run_command("evaluate", [*map(str, args)], ROOT)


def test_a_run_is_asked_while_it_trains(trained):
    tables, _, out = trained
    accuracy = metrics(tables, "evaluation/foxes/acc")
    assert list(accuracy) == [8, 16, 20]
    perplexity = metrics(tables, "evaluation/words/perplexity")
    assert perplexity[20] < perplexity[8]
    error = metrics(tables, "evaluation/foxes/acc_stderr")[20]
    line = f"step 20/20 | foxes sample_len 7, acc {accuracy[20]:.4f} ± {error:.4f}, acc_norm"
    assert line in out and f"words sample_len 7, perplexity {perplexity[20]:.4f} ±" in out
    assert "it/s" not in out


def measured(tmp_path, *args):
    code, out, err = evaluate(*args, "--json", tmp_path / "results.json")
    assert code == 0, err
    assert "100%" in err
    return json.loads((tmp_path / "results.json").read_text()), out


def test_the_command_measures_the_same_of_the_run_and_of_its_export(trained, tmp_path):
    tables, tasks, _ = trained
    run = run_folder_of(tables)
    text = tmp_path / "own.txt"
    text.write_text("The old fox\n<|endoftext|>\n\u00e9 went over the hill.\n")
    options = ["--tasks", ",".join(tasks), "--shots", 1, "--limit", 7, "--text", text]
    found, out = measured(tmp_path, run, *options)
    for task in ("foxes", "words"):
        for name, value in found["tasks"][task].items():
            reported = metrics(tables, f"evaluation/{task}/{name}")[20]
            assert value == pytest.approx(reported, rel=1e-4), (task, name)
    accuracy, error = (found["tasks"]["foxes"][name] for name in ("acc", "acc_stderr"))
    assert f"foxes sample_len 7, acc {accuracy:.4f} ± {error:.4f}" in out
    own = found["texts"][str(text)]
    assert (own["tokens"], own["bytes"]) == (12 + 23, 12 + 23)
    assert own["bits_per_byte"] == pytest.approx(own["loss"] / math.log(2))
    assert own["perplexity"] == pytest.approx(math.exp(own["loss"]))

    folder = tmp_path / "hf"
    assert run_command("export", [str(run), str(folder)], ROOT)[0] == 0
    ours = {bytes([byte]): byte for byte in range(256)}, None, {"<|endoftext|>": 256}
    byte_pair_tokenizer(*ours).save(str(folder / "tokenizer.json"))
    exported, _ = measured(tmp_path, folder, *options)
    for task, figures in found["tasks"].items():
        assert exported["tasks"][task] == pytest.approx(figures, rel=1e-4)
    assert exported["texts"][str(text)] == pytest.approx(own, rel=1e-4)

    byte_pair_tokenizer(*ours[:2], {"<|endoftext|>": 999}).save(str(folder / "tokenizer.json"))
    mistake(folder, *options, message="largest id of its tokenizer is 999, and the model has 320")
    (folder / "tokenizer.json").unlink()
    mistake(folder, *options, message="has no tokenizer.json: put the model's file there")


def mistake(*args, message):
    code, _, err = evaluate(*args)
    assert code == 2 and message in err and err.count("\n") == 1, err


def test_mistakes_are_told_in_a_line(trained, tmp_path):
    tables, tasks, _ = trained
    run = run_folder_of(tables)
    mistake(run, message="name what to measure: --tasks or --text")
    for empty in ("", ",", "piqa,"):
        mistake(run, "--tasks", empty, message="--tasks needs a word on each side of a comma")
    mistake(run, "--tasks", "hellaswg", message="no task 'hellaswg': did you mean hellaswag")
    mistake(tmp_path, "--tasks", tasks[0], message="neither a checkpoint nor a run")
    mistake(run, "--text", tmp_path / "no*.txt", message="names no text file")
    mistake(run, "--tasks", tasks[0], "--step", 3, message="no checkpoint of step 3")


def test_the_launcher_refuses_a_task_before_ranks_start(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path, evaluation={"tasks": ["lambda.yaml"]})
    write_config(config, tmp_path / "run.toml")
    code, out, err = run_command("train", ["--prepare", str(tmp_path / "run.toml")], tmp_path)
    assert code == 2 and "evaluation.tasks: cannot read the task lambda.yaml" in err, err
    assert err.count("\n") == 1 and not (tmp_path / "shards").exists()
