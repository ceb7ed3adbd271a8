"""Tasks of EleutherAI's lm_eval, asked of a model on any layout. No other file imports lm_eval."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from torchmars.core.check import meant
from torchmars.core.device import is_gpu
from torchmars.core.errors import UserError
from torchmars.core.places import local_place
from torchmars.evaluation.sampling import Draw, continuations, predict_anew
from torchmars.evaluation.scoring import Report, Scorer, Tokens, windows_after

SUFFIXES = (".yaml", ".yml")
SEED = 1234  # lm_eval's own
DRAWS = 1000  # of a bootstrap: its standard error is right to 2%, and 100,000 take minutes
NEW_TOKENS = 256  # at most, where a task does not say it: lm_eval's own


class Tasks:
    """Tasks that are read once, and asked as often as one likes. Every rank makes the same calls.

    A name is one of lm_eval's, or a file *.yaml that describes a task. It may name Python code,
    which runs: only the user may name one. `shots` are solved examples before each question, by
    default as many as the task says. `limit` takes its first questions. Raises `UserError`.
    """

    def __init__(
        self, names: Sequence[str], shots: int | None = None, limit: int | None = None
    ) -> None:
        self.limit = limit
        self.tasks: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.requests = 0  # texts that are scored or written each time
        with lm_evals_own(torch.device("cpu")):
            # To look through the thousands of lm_eval takes seconds.
            own = all(name.endswith(SUFFIXES) for name in names)
            manager = TaskManager(include_defaults=not own)
            for name in names:
                self.read(manager, name)
            for name, task in self.tasks.items():
                self.prepare(name, task, shots)

    def read(self, manager: TaskManager, name: str) -> None:
        """Add the tasks that a name stands for. Raises `UserError`."""
        local_place(name, "a task")
        if not name.endswith(SUFFIXES) and name not in manager.task_index:
            hint = meant(name, manager.all_tasks, f"a task of your own is a file *{SUFFIXES[0]}")
            raise UserError(f"lm_eval has no task {name!r}: {hint}")
        with told_in_a_line(f"cannot read the task {name}"):
            found = manager.load(name)
        if twice := [*found["tasks"].keys() & self.tasks.keys()]:
            raise UserError(f"two tasks are called {twice[0]}: name it once")
        self.tasks |= found["tasks"]
        self.groups |= found["groups"]

    def prepare(self, name: str, task: Any, shots: int | None) -> None:
        """Set the examples of a task, and make its prompts once: its rows may be no questions.

        Raises `UserError` where it would end a run at its first evaluation.
        """
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"the task {name} runs code that a model writes, or has more than text")
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", own or 0 if shots is None or own == 0 else shots)
        task.set_fewshot_seed(SEED)
        with told_in_a_line(f"cannot ask the task {name}"):
            task.build_all_requests(limit=self.limit, rank=0, world_size=1)
            asked = (each for each in task.instances if each.request_type == "loglikelihood")
            for _, of_row in groupby(asked, key=lambda each: each.doc_id):
                some = [*of_row]  # whose answer, or the user's function of it, may fail
                task.process_results(some[0].doc, [(-1.0, False)] * len(some))
        self.requests += len(task.instances) * task.config.repeats

    def ask(
        self, scorer: Scorer, report: Report = lambda count: None
    ) -> dict[str, dict[str, float]]:
        """Return what lm_eval measures of each task, and of each group of tasks, by its names.

        The name of a filter, other than "none", follows after a comma. `report` is told of each
        batch how many texts it had. All generators of random numbers are as before.
        """
        with lm_evals_own(scorer.layout.device):
            for task in self.tasks.values():
                task.set_fewshot_seed(SEED)  # the same examples each time
            found = evaluate(
                HarnessModel(scorer, report),
                {"tasks": self.tasks, "groups": self.groups},
                limit=self.limit,
                bootstrap_iters=DRAWS,
                log_samples=False,
            )
        return {
            task: {
                name.removesuffix(",none"): value
                for name, value in values.items()
                if isinstance(value, int | float)
            }
            for task, values in found["results"].items()
        }


@contextmanager
def lm_evals_own(device: torch.device) -> Iterator[None]:
    """Seed the global generators as lm_eval does, and put them back at the end.

    Meanwhile its bars are not shown: a run has lines of its own, and each rank would show them.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # else it forks this rank, with its threads, to bootstrap
    python, numpy, shown = random.getstate(), np.random.get_state(), tqdm.__init__
    tqdm.__init__ = lambda bar, *args, **options: shown(bar, *args, **options | {"disable": True})
    try:
        with torch.random.fork_rng([device] if is_gpu(device.type) else []):
            random.seed(0)
            np.random.seed(SEED)
            torch.manual_seed(SEED)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        tqdm.__init__ = shown


@contextmanager
def told_in_a_line(problem: str) -> Iterator[None]:
    """Raise a `UserError` of whatever lm_eval, the hub, or a task's own code raises."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{problem} ({type(error).__name__}: {error})") from None


class HarnessModel(TemplateLM):
    """A model with the methods that lm_eval asks for, with its requests and results.

    To lm_eval each rank is the only one. It scores the texts of the first rank, so that nothing
    depends on the order of a set, or another accident, in a task's code.
    """

    def __init__(self, scorer: Scorer, report: Report) -> None:
        super().__init__()
        self.scorer, self.report = scorer, report
        self.model, self.tokenizer = scorer.model, scorer.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that comes before a text that has nothing before it."""
        return self.tokenizer.begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, after those that the tokenizer puts before it."""
        tokens: list[int] = self.tokenizer.encode(string).tolist()
        return tokens if add_special_tokens is False else [*self.tokenizer.before, *tokens]

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        """Return log-likelihoods of texts after contexts, and whether all tokens are likeliest."""
        texts = []
        for _, context, text in requests:
            ids = [*(context or [self.eot_token_id]), *text][-(self.scorer.seq_len + 1) :]
            # The first token of a text may also have the end of its context.
            texts.append(Tokens(ids, min(max(1, len(text)), len(ids) - 1)))
        return self.scorer.score(self.model.layout.broadcast(texts, 0), self.report)

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Return the log-likelihoods of whole texts, and of what the tokenizer puts before them."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        texts = self.model.layout.broadcast(texts, 0)
        windows = [windows_after([self.eot_token_id], text, self.scorer.seq_len) for text in texts]
        every = [each for text in windows for each in text]
        scores = iter(self.scorer.score(every, lambda _: self.report(0)))
        self.report(len(texts))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """Return continuations of contexts, each up to the first of the texts that end it."""
        asked = self.model.layout.broadcast([request.args for request in requests], 0)
        self.model.train(False)
        texts = [self.continuation(*each) for each in asked]
        self.model.train()
        return texts

    def continuation(self, context: str, options: dict[str, Any]) -> str:
        """Return the model's text after a context."""
        ends = options.get("until") or []
        ends = [end for end in ([ends] if isinstance(ends, str) else ends) if end]
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        draw = Draw(temperature, options.get("top_k") or None, options.get("top_p"))
        predict = predict_anew(self.model.next_logits, self.scorer.seq_len)
        count = options.get("max_gen_toks", NEW_TOKENS)
        heard: list[str] = []

        def has_ended(piece: str) -> bool:
            heard.append(piece)
            self.report(0)
            return any(end in "".join(heard) for end in ends)

        [text] = continuations(predict, self.tokenizer, [context], count, draw, has_ended)
        self.report(1)
        return text[: min((text.find(end) for end in ends if end in text), default=len(text))]
