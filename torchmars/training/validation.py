"""The held-out loss of a model, and a sample of its text."""

import torch
from torch import Tensor

from torchmars.config import ValidationConfig
from torchmars.data.loader import validation_batches
from torchmars.data.tokenizer import Tokenizer
from torchmars.data.windows import Windows
from torchmars.parallel.layout import Layout
from torchmars.parallel.model import ParallelModel
from torchmars.training.sampling import Draw, predict_anew, stream_text

SAMPLE_TEMPERATURE = 0.8


class Validation:
    """Measures a model on the same windows on every layout. Every rank makes the same calls."""

    def __init__(
        self,
        config: ValidationConfig,
        windows: Windows,
        batch_size: int,
        model: ParallelModel,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> None:
        self.config, self.windows, self.batch_size = config, windows, batch_size
        self.model, self.tokenizer, self.layout = model, tokenizer, layout

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss over the validation windows."""
        layout = self.layout
        total = torch.zeros(2, dtype=torch.float64, device=layout.device)  # of losses, targets
        batches: list[tuple[Tensor, int]] = []
        # Before the first forward pass, which needs all ranks.
        layout.on_all(lambda: batches.extend(self._batches()))
        self.model.train(False)
        for tokens, count in batches:
            losses = self.model.losses(tokens)[:count]
            total += torch.tensor([losses.double().sum(), losses.numel()], device=total.device)
        self.model.train()
        mean_sum, mean_count = (layout.mean_loss(part) for part in total)
        return mean_sum / mean_count

    def _batches(self) -> list[tuple[Tensor, int]]:
        data = self.layout.data
        count, batch_size = self.config.windows, self.batch_size
        return list(validation_batches(self.windows, count, batch_size, data.rank, data.size))

    def sample(self) -> str:
        """Return a text by the model as it is now."""
        self.model.train(False)
        # Every length of context would be compiled anew.
        with torch.compiler.set_stance("force_eager"):
            pieces = stream_text(
                predict_anew(self.model.next_logits, self.model.whole.seq_len),
                self.tokenizer,
                self.config.sample_prompt,
                self.config.sample_tokens,
                Draw(temperature=SAMPLE_TEMPERATURE),
            )
            return "".join(pieces)
