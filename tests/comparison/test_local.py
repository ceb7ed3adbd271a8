"""How trials at the same time share a machine. GPUs are made up."""

import json
import os
import signal
import time

import pytest
import torch

from tests.support.tiny import tiny_config, write_config, write_text
from torchmars.commands.compare import Compare, make_study
from torchmars.comparison.local import ForkedTrial, LocalTrials, start_launcher, start_process
from torchmars.comparison.trials import OUTPUT_FILE
from torchmars.core.errors import EXIT_STOPPED, UserError
from torchmars.training.preparation import prepare_run


@pytest.fixture
def study(tmp_path, monkeypatch):
    for name in ("NGPU", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torchmars.comparison.local.own_cores", lambda: 8)
    return make_study(Compare("1e-3"), tiny_config(tmp_path, validation={"interval": 5}), [])


def test_cores_are_shared(study, monkeypatch):
    trials = LocalTrials(study, 2)
    assert (trials.ranks, trials.threads) == (1, 4)
    assert trials.variables("") | {"NGPU": "1", "OMP_NUM_THREADS": "4"} == trials.variables("")
    monkeypatch.setenv("NGPU", "2")
    assert LocalTrials(study, 2).threads == 2


def test_gpus_are_shared(study, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    trials = LocalTrials(study, 2)
    assert trials.places == ["0,1", "2,3"] and trials.ranks == 2
    assert trials.variables("2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,1,3,0")
    assert LocalTrials(study, 2).places == ["6,7", "1,3"]
    with pytest.raises(UserError, match="--jobs: 6 trials at a time need as many GPUs, .* are 5"):
        LocalTrials(study, 6)


def test_a_trial_is_a_run_of_torchmars_train(tmp_path):
    """By a mistake that it finds: other tests start trials in processes of their own."""
    file = tmp_path / "trial.toml"
    file.write_text("[training]\nstpes = 3\n")
    assert start_process(file, dict(os.environ)).wait() == 2
    assert "unknown key training.stpes" in (tmp_path / OUTPUT_FILE).read_text()


def ended(trial):
    while (code := trial.poll()) is None:
        time.sleep(0.05)
    return code


@pytest.mark.full
def test_a_forked_trial_is_the_run_of_a_launcher(tmp_path, monkeypatch):
    """The same losses to the last bit; a signal saves; a mistake is code 2."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    variables = dict(os.environ) | {"NGPU": "1", "OMP_NUM_THREADS": "1"}
    losses = []
    for name, steps in (("launched", 6), ("forked", 6), ("stopped", 10**6)):
        config = tiny_config(tmp_path, run={"name": name}, training={"steps": steps})
        prepare_run(config, 1, 1)
        file = tmp_path / name / "trial.toml"
        file.parent.mkdir()
        write_config(config, file)
        if name == "launched":
            assert start_launcher([str(file)], variables).wait() == 0
        else:
            trial = start_process(file, variables)
            assert isinstance(trial, ForkedTrial)
        metrics = tmp_path / "runs" / name / "metrics.jsonl"
        if name == "stopped":
            # The file is there before the trial catches signals.
            while not (metrics.exists() and "train/loss" in metrics.read_text()):
                assert trial.poll() is None
                time.sleep(0.05)
            trial.send_signal(signal.SIGTERM)
            assert ended(trial) == EXIT_STOPPED
            assert "the same command resumes" in (file.parent / OUTPUT_FILE).read_text()
            break
        assert name == "launched" or ended(trial) == 0
        lines = map(json.loads, metrics.read_text().splitlines())
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) > 2
    wrong = tmp_path / "trial.toml"
    wrong.write_text("[training]\nstpes = 3\n")
    assert ended(start_process(wrong, variables)) == 2
    assert "unknown key training.stpes" in (tmp_path / OUTPUT_FILE).read_text()
