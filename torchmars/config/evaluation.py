"""Tasks that a model is asked while it trains."""

from dataclasses import dataclass, field
from typing import Annotated

from torchmars.config.fields import Count, Positive
from torchmars.core.bounds import Local


@dataclass(frozen=True)
class EvaluationConfig:
    """Tasks that the model is asked while it trains, as torchmars evaluate asks them."""

    tasks: list[Annotated[str, Local()]] = field(default_factory=list)
    """hellaswag, arc_easy, arc_challenge, piqa, winogrande, openbookqa, sciq, lambada of the hub;
    TASK=FILE.jsonl; or a FILE.jsonl of your own questions."""
    interval: Count = 1000
    """Steps between evaluations, and one at the end. 0: never."""
    shots: Count = 0
    """Solved examples before each question."""
    limit: Positive | None = None
    """Take only the first so many questions of each task."""
    batch_size: Positive = 16
    """Answers that a rank scores at once."""
