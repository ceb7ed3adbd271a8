"""The held-out loss of a model, and a sample of its text."""

import torch
from torch import Tensor

from torchmars.config import ValidationConfig
from torchmars.core.device import is_gpu
from torchmars.data.loader import validation_batches
from torchmars.data.tokenizer import Tokenizer
from torchmars.data.windows import MixedWindows, Mixture
from torchmars.evaluation.sampling import Draw, continuations, predict_anew
from torchmars.parallel.parallel_model import ParallelModel

SAMPLE_TEMPERATURE = 0.8


class Validation:
    """Measures a model on the same windows on every layout. Every rank makes the same calls."""

    def __init__(
        self,
        config: ValidationConfig,
        model: ParallelModel,
        data: Mixture,
        windows: MixedWindows,
        batch_size: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.config, self.model, self.layout = config, model, model.layout
        self.data, self.windows, self.batch_size = data, windows, batch_size
        self.tokenizer = tokenizer

    @torch.no_grad()
    def losses(self) -> tuple[float, float, dict[str, float]]:
        """Return the loss over the validation windows, in bits per byte, and by part of a mixture.

        Losses are means. Parts without a validation window have none. Bits per byte are NaN where
        the data do not know their bytes.
        """
        layout, names = self.layout, self.data.names
        batches: list[tuple[Tensor, list[int]]] = []
        # Before the first forward pass, which needs all ranks.
        reading = self.windows, self.data.weights, self.config.windows, self.batch_size
        ranks = layout.data.rank, layout.data.size
        layout.on_all(lambda: batches.extend(validation_batches(*reading, *ranks)))
        self.model.train(False)
        sums, counts = [], []
        for tokens, parts in batches:
            if is_gpu(layout.device.type):
                tokens = tokens.pin_memory()  # else its copy would wait for the GPU
            losses = self.model.losses(tokens)[: len(parts)]
            sums.append(losses.double().flatten(1).sum(1))
            counts += [losses.shape[1]] * len(parts)
        self.model.train()
        # On the host: a GPU adds up in any order.
        of_windows = torch.cat(sums).cpu(), torch.tensor(counts, dtype=torch.float64)
        places = torch.tensor([part for _, parts in batches for part in parts], dtype=torch.int64)
        # Of each part: the sum of its losses, and its targets.
        totals = torch.zeros(len(self.data.parts), 2, dtype=torch.float64)
        totals.index_add_(0, places, torch.stack(of_windows, dim=1))
        means = (layout.add_up_losses(totals.to(layout.device)) / layout.loss_parts).tolist()
        of_parts = {name: row[0] / row[1] for name, row in zip(names, means) if row[1]}
        targets = [row[1] for row in means]
        loss = sum(row[0] for row in means) / sum(targets)
        return loss, self.data.bits_per_byte("validation", loss, targets), of_parts

    def sample(self) -> str:
        """Return a text by the model as it is now."""
        self.model.train(False)
        # Every length of context would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            [text] = continuations(
                predict_anew(self.model.next_logits, self.model.whole.seq_len),
                self.tokenizer,
                [self.config.sample_prompt],
                self.config.sample_tokens,
                Draw(temperature=SAMPLE_TEMPERATURE),
            )
        return self.config.sample_prompt + text
