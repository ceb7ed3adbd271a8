"""Tasks of lm_eval that a model is asked while it trains."""

from dataclasses import dataclass, field
from typing import Annotated

from torchmars.config.fields import Count, Positive
from torchmars.core.bounds import Local


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks that the model is asked while it trains, as torchmars evaluate asks them."""

    tasks: list[Annotated[str, Local()]] = field(default_factory=list)
    """Tasks of the package lm_eval, by its names, or files *.yaml that describe tasks of your own.
    Such a file may name Python code, which runs."""
    interval: Count = 1000
    """Steps between evaluations, and one at the end. 0: never."""
    shots: Count | None = None
    """Solved examples before each question, by default as many as the task says, mostly 0."""
    limit: Positive | None = None
    """Take only the first so many questions of each task."""
    batch_size: Positive = 16
    """Texts of the model's length that a rank scores at once, and of shorter ones more."""
