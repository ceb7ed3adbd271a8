"""What a run reports: console line, metrics.jsonl, TensorBoard, W&B; throughput, MFU, memory."""

import contextlib
import importlib.util
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

import torch

from torchmars.config import MetricsConfig, ResolvedConfig
from torchmars.core.console import say
from torchmars.core.errors import UserError
from torchmars.metrics.journal import Journal

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "V100": 125e12,
}

# From this size of the momentum over that of the gradient on
# one earlier gradient decides where the weights go.
MOMENTUM = 100
WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def peak_flops(device: torch.device) -> float | None:
    """The device's peak FLOP/s in bfloat16, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def peak_memory(device: torch.device) -> float:
    """The most memory this rank has held so far, in GiB: of the GPU, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Times a block of device work without waiting for it: `with stopwatch: ...`, and later `milliseconds()`."""

    def __init__(self, device: torch.device) -> None:
        self.events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if device.type == "cuda"
            else None
        )

    def __enter__(self) -> None:
        self.began = self.events[0].record() if self.events else time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.ended = self.events[1].record() if self.events else time.perf_counter()

    def milliseconds(self) -> float:
        """The time of the last block. On a GPU its work must have ended."""
        return (
            self.events[0].elapsed_time(self.events[1])
            if self.events
            else (self.ended - self.began) * 1e3
        )


class Metrics:
    """Writes the measurements of a run, on the first rank; on others it does nothing.

    A run that continues from `step`, `validated` or not, drops what metrics.jsonl says of what is made again.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        active: bool,
        step: int,
        validated: bool,
        device: torch.device,
        ranks: int,
        flops_per_token: int,
    ) -> None:
        self.active = active
        self.steps = config.training.steps
        self.step, self.validated = step, validated
        self.tokens_per_step = config.training.global_batch_size * config.training.seq_len
        self.device = device
        peak = peak_flops(device)
        self.mfu_per_token_rate = flops_per_token / (peak * ranks) if peak else None
        self.tensorboard = self.wandb = None
        self.config = config
        self.restart_clock()

    def open(self) -> None:
        """Open the writers. For the rank that reports only."""
        config, folder = self.config, self.config.run.path
        self.journal = Journal(folder / "metrics.jsonl", self.step, self.validated)
        check_writers(config.metrics)
        if config.metrics.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=self.step + 1)
        if config.metrics.wandb:
            import wandb

            self.wandb = wandb.init(
                project=config.metrics.wandb_project,
                name=config.run.name,
                group=config.run.name,
                dir=folder,
                config=asdict(config),
            )
        self.restart_clock()

    def rewind(self, step: int, validated: bool) -> None:
        """Go back to `step`: what came after is made again, and its validation unless it was `validated`."""
        self.step = step
        if self.active:
            self.journal.rewind(step, validated)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin to measure the throughput of training anew."""
        self.clock, self.clock_step = time.perf_counter(), self.step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the body out of the throughput."""
        began = time.perf_counter()
        yield
        self.clock += time.perf_counter() - began

    def train(self, step: int, loss: float, lr: float, told: dict[str, float]) -> None:
        """Report training step number `step` and what the optimizer told of it; speed is the mean since the last report."""
        if not self.active:
            return
        self.step = step
        seconds = (time.perf_counter() - self.clock) / max(step - self.clock_step, 1)
        rate = self.tokens_per_step / seconds
        values = {
            "loss": loss,
            "lr": lr,
            "tokens_per_second": rate,
            "memory_gib": peak_memory(self.device),
        } | told
        parts = [
            f"step {step:>{len(str(self.steps))}}/{self.steps}",
            f"loss {loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {told['grad_norm']:.3f}",
            f"{rate:,.0f} tok/s",
        ]
        if told.get("skipped_steps"):
            parts.append(f"skipped {told['skipped_steps']:.0f}")
        momentum = max((told[name] for name in told if name.endswith("/momentum")), default=0.0)
        if momentum > MOMENTUM:
            parts.append(f"an earlier gradient rules: momentum {momentum:.0e} x gradient")
        if self.mfu_per_token_rate:
            values["mfu"] = rate * self.mfu_per_token_rate
            parts.append(f"mfu {values['mfu']:.1%}")
        eta = timedelta(seconds=round((self.steps - step) * seconds))
        say(" | ".join(parts + [f"mem {values['memory_gib']:.2f} GiB", f"eta {eta}"]))
        self._write(step, "train", values)
        self.restart_clock()

    def validation(self, step: int, loss: float) -> None:
        """Report the validation loss after step number `step`."""
        if self.active:
            say(f"step {step:>{len(str(self.steps))}}/{self.steps} | validation loss {loss:.4f}")
            self._write(step, "validation", {"loss": loss})

    def sync(self) -> None:
        """Make metrics.jsonl durable, as the checkpoint that comes will be."""
        if self.active:
            self.journal.sync()

    def stall(self, step: int, seconds: float) -> None:
        """Report how long training waited for the checkpoint of step number `step`."""
        if self.active:
            self._write(step, "checkpoint", {"stall_ms": 1e3 * seconds})

    def _write(self, step: int, kind: str, values: dict[str, float]) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self.journal.write(
            {"step": step}
            | {name: value if math.isfinite(value) else None for name, value in named.items()}
        )
        if self.tensorboard:
            for name, value in named.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(named, step=step)

    def close(self) -> None:
        """Flush and close every writer."""
        if self.active:
            self.journal.close()
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def check_writers(config: MetricsConfig) -> None:
    """Raise `UserError` where a writer that the config asks for cannot be had."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "metrics.tensorboard needs the tensorboard package: pip install 'torchmars[tensorboard]'"
        )
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("metrics.wandb needs the wandb package: pip install wandb")
    mode = os.environ.get("WANDB_MODE")
    if config.wandb and mode not in (None, *WANDB_MODES):
        raise UserError(f"WANDB_MODE must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
