"""The run's corpora, and their reader."""

from dataclasses import dataclass

from torchmars.config import ResolvedConfig
from torchmars.core.device import is_gpu
from torchmars.data.loader import Loader
from torchmars.data.mixture import MixedWindows, Mixture
from torchmars.data.named_tokenizers import load_tokenizer
from torchmars.data.tokenizer import Tokenizer
from torchmars.parallel.layout import Layout
from torchmars.training.preparation import prepare_data


@dataclass(frozen=True)
class RunData:
    """The run's corpora, and their reader."""

    mixture: Mixture
    tokenizer: Tokenizer
    loader: Loader
    validation_windows: MixedWindows


def build_data(config: ResolvedConfig, layout: Layout) -> RunData:
    """Prepare the corpora where that is due, verify them, and open them at their start."""
    mixture = layout.on_first(lambda: prepare_data(config))
    training, world = config.training, layout.world
    # The first rank alone asks for size and time of every shard.
    train = layout.on_first(lambda: mixture.windows("train", training.seq_len))
    validation = layout.on_first(lambda: mixture.windows("validation", training.seq_len))
    # The ranks share the reading.
    layout.on_all(lambda: mixture.verify(config.data.verify, world.rank, world.size))
    microbatch_size, _ = training.microbatches(layout.data.size, config.parallelism.stages)
    loader = Loader(
        train,
        seed=config.run.seed,
        global_batch_size=training.global_batch_size,
        microbatch_size=microbatch_size,
        rank=layout.data.rank,
        ranks=layout.data.size,
        num_workers=config.data.num_workers,
        pin_memory=is_gpu(layout.device.type),
    )
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.begin_token)
    return RunData(mixture, tokenizer, loader, validation)
