"""A model of a checkpoint for use without training: in one process, without an optimizer."""

from pathlib import Path

from torchmars.checkpoint.manifest import NAME, DamagedCheckpoint
from torchmars.checkpoint.resume import find_checkpoint
from torchmars.checkpoint.state import model_state, read_tensors, saved_shapes
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_from_tables
from torchmars.core.console import say
from torchmars.data.tokenizer import Tokenizer, load_tokenizer
from torchmars.models import Model, build_meta_model


def load_model(folder: Path) -> tuple[Model, Tokenizer, ResolvedConfig]:
    """Load the model of a checkpoint on the CPU. Return it, its tokenizer and its config.

    `folder` is a checkpoint or a run, whose newest good one is taken. Raises `UserError` if
    there is none, and `DamagedCheckpoint`.
    """
    folder, manifest = find_checkpoint(folder, warn=lambda text: say(text, error=True))
    config, saved = config_from_tables(manifest.config, f"in {folder}/{NAME}"), saved_shapes(folder)
    model = build_meta_model(config.model, manifest.vocab_size, config.training.seq_len).eval()
    # Before the model takes memory that is not there.
    for name, value in model_state(model.state_dict()).items():
        if saved.get(name) != tuple(value.shape):
            raise DamagedCheckpoint(
                f"{folder} does not have the model that its {NAME} describes: "
                f"{name} is not of shape {list(value.shape)}"
            )
    read_tensors(folder, model_state(model.to_empty(device="cpu").state_dict()), group=None)
    return model, load_tokenizer(config.data.tokenizer), config
