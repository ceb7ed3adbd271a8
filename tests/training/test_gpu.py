"""Training on one GPU: `pytest -m gpu -n 0` on a machine that has one."""

import pytest
import torch

from tests.support.commands import finish
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_config, tiny_tables, write_config, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.models.documents import Documents, document_starts
from torchmars.optim import MARS
from torchmars.training.build import build_trainer

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


def staged_and_not(tables):
    """Gradients of a batch that was staged while the device worked, and of the same one at once."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    model, found = trainer.model, []
    for staged in (True, False):
        busy = torch.randn(4096, 4096, device="cuda")
        batch = [windows.pin_memory() for windows in trainer.loader.peek()]
        for _ in range(50):
            busy = busy @ busy / 64
        torch.cuda.set_sync_debug_mode("error")
        try:
            if staged:
                model.stage(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (model.staged[0] is batch) == staged
        loss = model.backward(batch)
        found.append([loss, *(weight.grad.to_local() for weight in model.weights.values())])
        trainer.optimizer.zero_grad()
    return [[value.cpu() for value in values] for values in found]


def test_a_batch_is_staged_while_the_device_works(tmp_path):
    write_text(tmp_path)
    data = {"separate_documents": True, "num_workers": 0}
    [found] = run_ranks(staged_and_not, 1, tiny_tables(tmp_path, data=data))
    for staged, direct in zip(*found):
        assert torch.equal(staged, direct)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("first", [0, 128])
def test_documents_apart_are_those_of_the_mask(first, kv_heads):
    """Without waiting for the device. `first`: as one of several ranks that share sequences."""
    torch.manual_seed(0)
    tokens = torch.randint(20, (3, 256))
    starts = document_starts(tokens, end_of_text=0).cuda()
    shapes = [(3, 4, 256 - first, 64), *[(3, kv_heads, 256, 64)] * 2]
    parts = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    weights = torch.randn_like(parts[0])
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (part.to(dtype, copy=True).requires_grad_() for part in parts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            documents = Documents.of(starts, 256, q, dropout=0.0)
            mixed = documents.attend(q, k, v, 0.0)
            (mixed * weights).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([mixed.float(), *(part.grad.float() for part in (q, k, v))])
        assert (documents.mask is None) == (dtype == torch.bfloat16)
    for by_kernel, by_mask in zip(*found):
        assert (by_kernel - by_mask).norm() / by_mask.norm() < 0.02
