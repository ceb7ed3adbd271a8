"""Training on one GPU: `pytest -m gpu -n 0` on a machine that has one."""

import pytest
import torch

from tests.support.commands import finish
from tests.support.tiny import metrics, tiny_config, tiny_tables, write_config, write_text
from torchmars.optim import MARS

pytestmark = pytest.mark.gpu


def test_a_run_in_bfloat16_goes_on_where_it_was_stopped(tmp_path):
    write_text(tmp_path)
    settings = {
        "training": {"dtype": "bfloat16", "steps": 3},
        "schedule": {"name": "constant"},
        "checkpoint": {"interval": 3},
    }
    losses = {}
    for name, steps in (("straight", ["6"]), ("stopped", ["3", "6"])):
        run = {"name": name}
        file = tmp_path / f"{name}.toml"
        write_config(tiny_config(tmp_path, run=run, **settings), file)
        for last in steps:
            code, out, err = finish(file, "--training.steps", last, NGPU="1")
            assert code == 0 and "(cuda, " in out and "bfloat16 compute" in out, err
        losses[name] = metrics(tiny_tables(tmp_path, run=run))
    assert list(losses["stopped"]) == [1, 2, 3, 4, 5, 6]
    assert losses["stopped"] == pytest.approx(losses["straight"], rel=1e-3)


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion", "mars-m"])
def test_a_step_does_not_wait_for_the_device(rule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).cuda()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = MARS(matrices, lr=0.01, rule=rule, max_grad_norm=1.0)
    for step in range(3):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first makes the state
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
