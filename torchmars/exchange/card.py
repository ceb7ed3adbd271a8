"""The model card of an export: facts on a run that a reader needs before using its weights."""

from collections.abc import Sequence
from importlib.metadata import version
from textwrap import fill

from torchmars.config.load import config_text
from torchmars.exchange.saved_model import SavedModel

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- torchmars
---
"""
CARD = """
# {name}

A language model of {parameters}, trained from scratch with torchmars {version}.

| | |
|---|---|
| model | {family}: {shape} |
| tokens trained on | {tokens:,} |
| steps | {steps} |
| validation loss | {loss} |
| data | {data} |
| tokenizer | {tokenizer} |
| optimizer | {optimizer} |
| sequence length | {seq_len:,} |

It was trained on raw text. It follows no instructions, and repeats what is in that text, right or
wrong.
{warning}
## Config

```toml
{config}```
"""


def model_card(models: Sequence[SavedModel], warning: str) -> str:
    """Return the text of the card of the mean of `models`, the newest of which is the first.

    `warning` is of its tokenizer.
    """
    newest = models[0]
    config, manifest, model = newest.config, newest.manifest, newest.model
    steps = f"{newest.step:,}"
    if len(models) > 1:
        steps += f", the mean of {len(models)} checkpoints from step {models[-1].step:,}"
    loss = manifest.validation_loss
    return HEAD + CARD.format(
        name=config.run.name,
        version=version("torchmars"),
        parameters=model.counts_in_words,
        family=config.model.name,
        shape=model.describe(),
        tokens=manifest.position * config.training.seq_len,
        steps=steps,
        loss="not measured at this step" if loss is None else f"{loss:.4f}",
        data=config.data.path,
        tokenizer=config.data.tokenizer,
        optimizer=f"{config.optimizer.name}, learning rate {config.optimizer.lr}",
        seq_len=config.training.seq_len,
        warning=f"\n## Tokenizer\n\n{fill(warning, 100)}.\n" if warning else "",
        config=config_text(config),
    )
