"""When a run is saved, which checkpoints are kept, and where it starts from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchmars.config.fields import Count, Positive, require
from torchmars.core.bounds import Place

HF = "hf:"  # begins the name of a folder of transformers, or of a model of the hub


@dataclass(frozen=True)
class Origin(Place):
    """Bounds of the place that a run starts from. Files of weights alone are local."""

    def check(self, value: str) -> str:
        """Return such a text. Raises `ValueError` for another one."""
        kind = HF if value.startswith(HF) else ""
        of_stores = not kind and not value.endswith(".safetensors")
        return kind + Place(stores=of_stores).check(value.removeprefix(kind))


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved and which checkpoints are kept.

    A run continues from its newest good checkpoint.
    """

    folder: Annotated[str, Place(stores=True)] | None = None
    """Where checkpoints are kept: a folder, or one of an object store, as s3://BUCKET/RUN, of this
    run alone. Default: checkpoints in the run's own folder."""
    interval: Count = 100
    """Steps between checkpoints. 0: only at the end."""
    at_end: bool = True
    """Save the run when it is complete. false is for runs whose weights nobody needs."""
    async_save: bool = True
    """Train on while a checkpoint is written. Takes memory for a copy of weights and optimizer
    state on the host."""
    memory_interval: Count = 0
    """Steps between copies in the memory of each machine (/dev/shm), from which ranks that
    MAX_RESTARTS starts again resume. They keep two copies, with several machines four. 0: none."""
    max_failures: Positive = 3
    """Checkpoints in a row that may fail to be written before the run ends."""
    keep_last: Count = 10
    """Newest checkpoints to keep. 0: all."""
    keep_every: Count = 0
    """Keep the checkpoints of every such step for good. 0: none."""
    keep_best: bool = True
    """Keep the checkpoint of the lowest validation loss."""
    verify: Literal["full", "size", "off"] = "full"
    """How a checkpoint is checked before it is loaded. full: size and SHA-256 of every file. size:
    sizes only. off: nothing."""
    init_from: Annotated[str, Origin()] | None = None
    """Start from the weights of another run, of one checkpoint, of a folder or a .safetensors file
    that torchmars export made, or of a model of Hugging Face's transformers: hf:FOLDER, or hf:NAME
    of the hub. Has no effect once the run has a checkpoint of its own."""
    init_optimizer: bool = False
    """Take the optimizer's state from init_from too, as far as this optimizer has use for it."""

    def check(self) -> None:
        """Raise `UserError` for settings that do not go together."""
        require(
            self.init_from is not None or not self.init_optimizer,
            "checkpoint.init_optimizer has no meaning without checkpoint.init_from: set that too",
        )
