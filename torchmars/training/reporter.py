"""The reports of a run: lines on the console, metrics, and events."""

from torch import Tensor

from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.config.model import OWN
from torchmars.core.console import labelled, next_commands
from torchmars.data.loader import Loader
from torchmars.data.windows import Mixture
from torchmars.optim import MARS
from torchmars.parallel.parallel_model import ParallelModel
from torchmars.records.events import EventLog, MachinesBefore
from torchmars.records.metrics import Metrics
from torchmars.training.checkpointer import Resumed, RunState


class RunReporter:
    """Reports a run, on the first rank. Every rank makes the same calls."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: ParallelModel,
        optimizer: MARS,
        data: Mixture,
        loader: Loader,
        metrics: Metrics,
        events: EventLog,
        before: MachinesBefore | None,
    ) -> None:
        self.config, self.training = config, config.training
        self.model, self.optimizer, self.layout = model, optimizer, model.layout
        self.data, self.loader = data, loader
        self.metrics, self.events = metrics, events
        self.epochs = self.loader.epochs
        self.before = before
        """The machines of an elastic run before this start, on the first rank."""

    def report_start(self, resumed: Resumed) -> None:
        """Report that the run begins to train, from where it is `resumed`."""
        step, facts = resumed.state.step, {"origin": resumed.origin, "changes": resumed.changes}
        if process.fewest_ranks():
            names, meeting = frozenset(self.layout.gather(process.node)), process.meeting()[0]
            if self.before is not None and self.before.meeting == meeting:
                values = self.before.add_changes(self.events, step, names)
                self.metrics.write(step, "machines", values)
            facts |= {"names": sorted(names), "meeting": meeting}
        ranks, machines = self.layout.world.size, process.machines()
        self.events.add("started", step, ranks=ranks, machines=machines, **facts)

    def report(self, state: RunState, mean: Tensor, lr: float) -> dict[str, float]:
        """Report a step with this rank's `mean` loss; return the optimizer's telemetry.

        Waits for the device once: when it has made telemetry, it has copied the loss too. Of a
        model with experts it waits for their figures too, and for those of attention's logits.
        """
        copied = self.layout.add_up_losses(mean).to("cpu", non_blocking=True)
        telemetry = self.optimizer.telemetry()
        loss = copied.item() / self.layout.loss_parts
        self.optimizer.start_interval()
        read = {"tokens": state.position * self.training.seq_len}
        bits = self.data.bits_per_byte("train", loss, self.data.weights)
        figures = self.model.balance.figures() | self.model.attention_logits.figures()
        self.metrics.train(state.step, loss, bits, lr, telemetry | read | figures)
        if self.data.names:
            values: dict[str, float] = {}
            for part, count in zip(self.data.parts, state.shares.counts(state.position)):
                tokens = count * self.training.seq_len
                values[f"{part.name}/tokens"] = tokens
                values[f"{part.name}/epochs"] = tokens / part.manifest.splits["train"].tokens
            self.metrics.write(state.step, "data", values)
        return telemetry

    def report_spike(self, loss: float, state: RunState) -> None:
        """Report an outlier, the loss of the step after `state.step`."""
        first = state.position - self.training.global_batch_size
        self._say(
            "spike",
            f"loss {loss:.4f} at step {state.step + 1}, samples {first} to "
            f"{state.position - 1}: its step is left out",
        )
        self.events.add("spike", state.step, loss=loss)

    def report_epochs(self) -> None:
        """Report the beginning of another epoch of a corpus, once."""
        epochs = self.loader.epochs
        for part, before, now in zip(self.data.parts, self.epochs, epochs):
            if now != before:
                of_part = f" of {part.name}" if self.data.names else ""
                self.layout.say(
                    f"epoch {now + 1}{of_part} begins: the data has been read {now} times, "
                    "and is read again in another order"
                )
        self.epochs = epochs

    def report_stop(self, step: int, signal: str | None) -> None:
        """Report that a signal, or training.stop_after, ended the run after `step`."""
        by = signal or "a signal to another rank"
        remedy = (
            "raise it to go on" if step == self.training.last_step else "the same command resumes"
        )
        self._say("stopped", f"by {by} after step {step}, saved; {remedy}")
        self.events.add("stopped", step, signal=signal)

    def report_sample(self, step: int, text: str) -> None:
        """Report the model's sample text after `step`."""
        self.layout.say(f"sample:\n{text}")
        self.events.add("sample", step, text=text)

    def report_complete(self, step: int) -> None:
        """Report that the run has made all its steps, the last of which is `step`."""
        self.events.add("complete", step)
        if self.config.checkpoint.at_end:
            run, prompt = str(self.config.run.path), self.config.validation.sample_prompt
            words = ["--prompt", prompt] if prompt.strip() else []
            named = ",".join(self.config.run.plugins)
            plugins = ["--plugins", named] if named else []
            # Transformers has no plugin's model.
            theirs = self.config.model.name in OWN
            target = [f"{run}-hf"] if theirs else [f"{run}-weights", "--to", "safetensors"]
            commands = [
                ["generate", run, *words, *plugins],
                ["plot", run],
                ["export", run, *target, *plugins],
            ]
            self.layout.say(*next_commands(*(["torchmars", *each] for each in commands)))

    def _say(self, label: str, text: str) -> None:
        self.layout.say(*labelled(label, text))
