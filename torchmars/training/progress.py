"""What a run reports of itself: lines on the console, and metrics."""

from pathlib import Path

from torchmars.config import TrainingConfig
from torchmars.core.console import labelled
from torchmars.data.mixture import Mixture
from torchmars.metrics.metrics import Metrics
from torchmars.optim import MARS
from torchmars.parallel.layout import Layout
from torchmars.training.state import RunState


class Progress:
    """Reports a run, on the first rank. Every rank makes the same calls.

    `introduction` are the lines that say what the run is about to do. `data` are its corpora, and
    `epochs` how often it has read each when it starts.
    """

    def __init__(
        self,
        config: TrainingConfig,
        layout: Layout,
        optimizer: MARS,
        metrics: Metrics,
        introduction: list[str],
        data: Mixture,
        epochs: list[int],
    ) -> None:
        self.config, self.layout, self.optimizer = config, layout, optimizer
        self.metrics, self.introduction = metrics, introduction
        self.data, self.epochs = data, epochs

    def announce(self) -> None:
        """Print what the run is about to do."""
        for line in self.introduction:
            self.layout.say(line)

    def rewind(self, state: RunState, checkpoint: Path) -> None:
        """Report that the run went back to `checkpoint`; later steps are reported anew."""
        validated = state.validation_loss is not None
        self.layout.on_first(lambda: self.metrics.rewind(state.step, validated))
        self._say(
            "rollback",
            f"to step {state.step}: {checkpoint}; the data goes on at sample {state.position}",
        )

    def report(self, state: RunState, loss: float, lr: float) -> dict[str, float]:
        """Report a step; return the optimizer's telemetry. Waits for the device."""
        telemetry = self.optimizer.telemetry()
        self.optimizer.start_interval()
        tokens = state.position * self.config.seq_len
        self.metrics.train(state.step, loss, lr, telemetry | {"tokens": tokens})
        if self.data.names:
            self.metrics.data(state.step, self._read(state))
        return telemetry

    def _read(self, state: RunState) -> dict[str, float]:
        """Return the tokens read of each part of the mixture so far, and how often that is all."""
        values: dict[str, float] = {}
        for part, count in zip(self.data.parts, state.shares.counts(state.position)):
            tokens = count * self.config.seq_len
            values[f"{part.name}/tokens"] = tokens
            values[f"{part.name}/epochs"] = tokens / part.manifest.splits["train"].tokens
        return values

    def report_spike(self, loss: float, state: RunState, action: str) -> None:
        """Report a loss that stands out, of the step after `state.step`."""
        first = state.position - self.config.global_batch_size
        self._say(
            "spike",
            f"loss {loss:.4f} at step {state.step + 1}, samples {first} to "
            f"{state.position - 1}: guards.loss_spike = {action}",
        )

    def report_epochs(self, epochs: list[int]) -> None:
        """Report the beginning of another epoch of a corpus, once."""
        for part, before, now in zip(self.data.parts, self.epochs, epochs):
            if now != before:
                of_part = f" of {part.name}" if self.data.names else ""
                self.layout.say(
                    f"epoch {now + 1}{of_part} begins: the data has been read {now} times, "
                    "and is read again in another order"
                )
        self.epochs = epochs

    def report_stop(self, step: int, signal: str | None) -> None:
        """Report that a signal ended the run after `step`."""
        self._say(
            "stopped",
            f"by {signal or 'a signal to another rank'} after step {step}, saved; "
            "the same command goes on",
        )

    def _say(self, label: str, text: str) -> None:
        for line in labelled(label, text):
            self.layout.say(line)
