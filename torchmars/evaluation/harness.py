"""Runs as a model of EleutherAI's harness: `python -m torchmars.evaluation.harness` is `lm_eval`.

It knows one more model, `--model torchmars --model_args folder=RUN`. That is for the harness's
hundreds of tasks; `torchmars evaluate` needs no harness. Needs the package lm_eval (0.4.13).
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import lm_eval.models  # noqa: F401, registers the harness's own
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from torchmars.cluster import connection
from torchmars.config import ParallelismConfig
from torchmars.core.errors import exit_on_user_error
from torchmars.core.places import place
from torchmars.data.hub import distrust_hub
from torchmars.evaluation.sampling import Draw, predict_anew, stream_text
from torchmars.evaluation.scoring import Tokens, load_scorer, windows_after

NEW_TOKENS = 256  # at most, where a task does not say it; as in the harness


@register_model("torchmars")
class HarnessModel(LM):
    """A run, a checkpoint or a folder that transformers wrote, in one process.

    The methods are those that the harness asks of a model, with its requests and results.
    """

    def __init__(
        self,
        folder: str,
        batch_size: int | str = 16,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """`device` and `max_batch_size` come from the harness, and are not used."""
        super().__init__()
        layout = connection.start(ParallelismConfig())
        self.scorer = load_scorer(place(folder, "folder"), layout, "float32", int(batch_size))
        self.tokenizer = self.scorer.tokenizer

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return log-likelihoods of texts after contexts, and whether all tokens are likeliest."""
        pairs = [request.args for request in requests]
        with tqdm(total=len(pairs), unit="text") as bar:
            scores = self.scorer.score(pairs, bar.update)
        return [(score.log_likelihood, score.likeliest) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihoods of whole texts."""
        windows = [self.windows(request.args[0]) for request in requests]
        scores = iter(self.scorer.score_tokens([each for text in windows for each in text]))
        return [sum(next(scores).log_likelihood for _ in text) for text in windows]

    def windows(self, text: str) -> list[Tokens]:
        """Return the windows of a text.

        Tokens that the tokenizer puts before a text count as part of it, as with the harness's
        models. A begin token of the run's own documents does not.
        """
        tokenizer = self.tokenizer
        if tokenizer.begin_token is not None:
            return self.scorer.windows(text)
        tokens = [*tokenizer.before, *tokenizer.encode_batch([text])[0].tolist()]
        return windows_after([tokenizer.begin], tokens, self.scorer.seq_len)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return continuations of contexts, each up to the first of the texts that end it."""
        return [self.continuation(*request.args) for request in tqdm(requests)]

    def continuation(self, context: str, options: dict[str, Any]) -> str:
        """Return the model's text after a context."""
        ends = options.get("until") or []
        ends = [end for end in ([ends] if isinstance(ends, str) else ends) if end]
        temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
        draw = Draw(temperature, options.get("top_k") or None, options.get("top_p"))
        model = self.scorer.model
        model.train(False)
        predict = predict_anew(model.next_logits, self.scorer.seq_len)
        count = options.get("max_gen_toks", NEW_TOKENS)
        text = ""
        # The first piece is the context.
        for piece in islice(stream_text(predict, self.tokenizer, context, count, draw), 1, None):
            text += piece
            if any(end in text for end in ends):
                break
        return text[: min((text.find(end) for end in ends if end in text), default=len(text))]


def main() -> None:
    """Run the command line of lm_eval."""
    try:
        with exit_on_user_error():
            distrust_hub()
            cli_evaluate()
    finally:
        connection.stop()


if __name__ == "__main__":
    main()
