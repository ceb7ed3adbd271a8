"""Records of a run for a closer look."""

from dataclasses import dataclass

from torchmars.config.fields import Count, Positive


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
