"""Losses and predictions with documents kept apart, on ranks that share sequences or layers."""

from functools import partial

import pytest
import torch

from tests.support.gradients import END, MODELS, WINDOWS, plain_gradients, training_on
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.models.documents import document_starts
from torchmars.models.initialize import init_weights
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

PROMPT = torch.tensor([[5, 9, END, 21, 3, END, 8, 30, 1]])


def scores_on(layouts):
    """The mean loss over WINDOWS and the logits after PROMPT, on each of `layouts`."""
    return [score(ParallelismConfig(**LAYOUTS[name][1])) for name in layouts]


def score(parallelism):
    world, cpu = torch.distributed.get_world_size(), torch.device("cpu")
    layout = Layout.create(cpu, parallelism.degrees(world))
    with torch.device("meta"):
        whole = MODELS["llama"]()
    training, keep_all = training_on(world), ActivationCheckpointConfig()
    find_starts = partial(document_starts, end_of_text=END)
    model = ParallelModel(
        whole, parallelism, training, keep_all, layout, cpu, find_starts=find_starts
    )
    model.init_weights(seed=0)
    data = layout.data
    losses = model.losses(WINDOWS.chunk(data.size)[data.rank])
    mean = losses.mean() if losses.numel() else torch.zeros(())
    return layout.mean_loss(mean), model.next_logits(PROMPT)


def test_losses_and_predictions_are_those_of_documents_alone():
    layouts = ["FSDP 2", "TP 2", "CP 2", "PP 2"]
    plain = MODELS["llama"]()
    init_weights(plain, seed=0)
    with torch.no_grad():
        alone = plain.head(plain(PROMPT[:, 5:])[:, -1])
        together = plain.head(plain(PROMPT)[:, -1])
    assert not torch.allclose(alone, together, rtol=0, atol=1e-3)
    expected_loss, _ = plain_gradients("llama", apart=True)
    for results in run_ranks(scores_on, 2, layouts):
        for name, (loss, logits) in zip(layouts, results):
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
