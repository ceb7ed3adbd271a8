"""How trials at the same time share a machine. GPUs are made up."""

import os

import pytest
import torch

from tests.support.tiny import tiny_config
from torchmars.commands.compare import Compare, make_study
from torchmars.comparison.local import LocalTrials, start_process
from torchmars.comparison.trials import OUTPUT_FILE
from torchmars.core import device
from torchmars.core.errors import UserError


@pytest.fixture
def study(tmp_path, monkeypatch):
    for name in ("NGPU", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torchmars.comparison.local.cores_of", lambda variables: 8)
    return make_study(Compare("1e-3"), tiny_config(tmp_path, validation={"interval": 5}), [])


def test_cores_are_shared(study, monkeypatch):
    trials = LocalTrials(study, 2)
    assert (trials.ranks, trials.threads) == (1, 4)
    assert trials.variables("") | {"NGPU": "1", "OMP_NUM_THREADS": "4"} == trials.variables("")
    monkeypatch.setenv("NGPU", "2")
    assert LocalTrials(study, 2).threads == 2


def test_gpus_are_shared(study, monkeypatch):
    monkeypatch.setattr(device, "built_for", lambda: "cuda")
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
