"""Records of a run for a closer look."""

from dataclasses import dataclass

from torchmars.config.fields import Count, Positive, require


@dataclass(frozen=True)
class ProfilerConfig:
    """Records for a closer look, in the folder profile of the run.

    Recording slows the run down.
    """

    start: Count = 0
    """First step of a trace by torch.profiler, a file for each rank. 0: no trace."""
    steps: Positive = 3
    """Steps of the trace."""
    memory: bool = False
    """Record what allocates memory on GPUs. A rank that runs out of it writes a snapshot."""
    memory_step: Count = 0
    """With memory: every rank writes a snapshot after this step too. 0: none."""

    def check(self) -> None:
        """Raise `UserError` for settings that do not go together."""
        require(
            self.memory or not self.memory_step,
            "profiler.memory_step has no meaning without profiler.memory: set that too",
        )
