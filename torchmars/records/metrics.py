"""The reports of a run: the console's progress lines, metrics.jsonl, TensorBoard, W&B."""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch

from torchmars.core.console import say
from torchmars.records.lines import Journal
from torchmars.records.speed import Throughput, peak_memory
from torchmars.records.trackers import Tracker


@dataclass
class Metrics:
    """Reports the measurements of a run on the first rank. On others it does nothing."""

    journal: Journal | None
    """metrics.jsonl, on the first rank."""
    trackers: list[Tracker]
    throughput: Throughput
    steps: int
    """Of the run."""
    device: torch.device

    def train(
        self, step: int, loss: float, bits: float, lr: float, telemetry: dict[str, float]
    ) -> None:
        """Report training step number `step`, with the `telemetry` of optimizer and experts.

        `bits` is the loss in bits per byte, NaN where it is not known. Speed and time by phases are
        means since the last report.
        """
        if self.journal is None:
            return
        seconds = self.throughput.seconds_per_step(step)
        rate = self.throughput.tokens_per_step / seconds
        memory = peak_memory(self.device)
        values = {"lr": lr, "tokens_per_second": rate, "memory_gib": memory}
        for phase, milliseconds in self.throughput.milliseconds(step).items():
            values[f"{phase}_ms"] = milliseconds
        values = losses(loss, bits) | values | telemetry
        parts = [
            f"loss {loss_text(loss, bits)}",
            f"lr {lr:.2e}",
            f"grad norm {telemetry['grad_norm']:.3f}",
            f"{rate:,.0f} tok/s",
        ]
        if telemetry.get("skipped_steps"):
            parts.append(f"skipped {telemetry['skipped_steps']:.0f}")
        if busiest := telemetry.get("experts/busiest"):
            parts.append(f"busiest expert {busiest:.1f} x mean")
        if (mfu := self.throughput.mfu(rate)) is not None:
            values["mfu"] = mfu
            parts.append(f"mfu {mfu:.1%}")
        eta = timedelta(seconds=round((self.steps - step) * seconds))
        parts += [f"mem {memory:.2f} GiB", f"eta {eta}"]
        self._say(step, " | ".join(parts))
        self.write(step, "train", values)
        self.throughput.restart(step)

    def validation(self, step: int, loss: float, bits: float, of_parts: dict[str, float]) -> None:
        """Report the validation loss after step number `step`, and those of a mixture's parts.

        `bits` is the loss in bits per byte, NaN where it is not known.
        """
        self._say(step, f"validation loss {loss_text(loss, bits)}")
        named = {f"{name}/loss": value for name, value in of_parts.items()}
        self.write(step, "validation", losses(loss, bits) | named)

    def evaluation(self, step: int, task: str, values: dict[str, float], line: str) -> None:
        """Report how the model answered a task after step number `step`, in words a `line`."""
        self._say(step, line)
        self.write(step, f"evaluation/{task}", values)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Report measurements of a kind after step number `step`, without a progress line.

        In metrics.jsonl one that is not finite is null.
        """
        named = {f"{kind}/{name}": value for name, value in values.items()}
        if self.journal is not None:
            finite = {name: v if math.isfinite(v) else None for name, v in named.items()}
            self.journal.write({"step": step} | finite)
        for tracker in self.trackers:
            tracker.write(step, named)

    def sync(self) -> None:
        """Make metrics.jsonl durable, as the checkpoint that comes will be."""
        if self.journal is not None:
            self.journal.sync()

    def close(self) -> None:
        """Close the trackers, which may have numbers left to write."""
        for tracker in self.trackers:
            tracker.close()

    def _say(self, step: int, text: str) -> None:
        if self.journal is not None:
            say(f"step {step:>{len(str(self.steps))}}/{self.steps} | {text}")


def losses(loss: float, bits: float) -> dict[str, float]:
    """Return a loss and, where it is known, the same in bits per byte, by name."""
    return {"loss": loss} | ({} if math.isnan(bits) else {"bits_per_byte": bits})


def loss_text(loss: float, bits: float) -> str:
    """Return a loss and, where it is known, the same in bits per byte, for a line."""
    return f"{loss:.4f}" + ("" if math.isnan(bits) else f" | {bits:.3f} bits/byte")
