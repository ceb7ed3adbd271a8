"""What a run trains: the model on its ranks, the average of its weights, and the optimizer."""

from dataclasses import dataclass
from functools import partial

from torchmars.config import ResolvedConfig
from torchmars.models import build_run_model
from torchmars.models.base import factors_of
from torchmars.models.documents import document_starts
from torchmars.optim import MARS
from torchmars.parallel.checks import check_layout
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.training.data import RunData
from torchmars.training.ema import MovingAverage
from torchmars.training.optimizer import build_optimizer


@dataclass(frozen=True)
class Trained:
    """What a run trains, as the ranks share it."""

    model: ParallelModel
    average: MovingAverage | None
    """Of the weights, if the run keeps one."""
    optimizer: MARS


def build_trained(config: ResolvedConfig, layout: Layout, data: RunData) -> Trained:
    """Lay out the model over the ranks, with its initial weights, and make its optimizer."""
    training = config.training
    whole = build_run_model(config, data.mixture.vocab_size)
    # The launcher has asked already. Plain torchrun starts ranks without it.
    check_layout(config, config.parallelism.degrees(layout.world.size), whole)
    tokenizer = data.tokenizer
    find_starts = partial(
        document_starts,
        end_of_text=tokenizer.end_of_text,
        begin_token=tokenizer.begin_token,
    )
    model = ParallelModel(
        whole,
        config.parallelism,
        training,
        config.activation_checkpoint,
        layout,
        layout.device,
        find_starts=find_starts if config.data.separate_documents else None,
        exact=config.optimizer.mode == "exact",
    )
    factors = factors_of(whole, config.transfer)
    model.init_weights(config.run.seed, None if factors is None else factors.std)
    average = MovingAverage(model.weights, training.ema_decay) if training.ema_decay else None
    optimizer = build_optimizer(config, whole, model.weights, layout)
    return Trained(model, average, optimizer)
