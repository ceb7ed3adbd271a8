"""The settings of the roles that rules leave to AdamW or give other settings.

Source: the table "who gets which rule" of the MARS and MARS-M papers and their code (arXiv
2411.10438, 2510.21800).
"""

from collections.abc import Sequence

from torchmars.optim.settings import Settings


def mars_settings_by_role(outer: Settings, settings: Settings) -> dict[str, Settings]:
    """Return the settings of embeddings and heads, which take `outer`, and of vectors.

    Embeddings have no weight decay. Vectors take AdamW, or with `optimize_1d` what heads take.
    """
    vector = adamw_settings(
        settings, settings["lr_1d"], settings["betas_1d"], settings["weight_decay_1d"]
    )
    return {
        "embedding": outer | {"weight_decay": 0.0},
        "head": outer,
        "vector": outer if settings["optimize_1d"] else vector,
    }


def adamw_but_for_matrices(settings: Settings) -> dict[str, Settings]:
    """Return the settings of embeddings, heads and vectors, which take AdamW at `lr_rest`."""
    rest = settings.get("lr_rest")
    lr = settings["lr"] if rest is None else rest
    adamw = adamw_settings(settings, lr, settings["betas_1d"], settings["weight_decay"])
    return dict.fromkeys(("embedding", "head", "vector"), adamw)


def adamw_settings(
    settings: Settings, lr: float, betas: Sequence[float], weight_decay: float
) -> Settings:
    """Return a group's settings under plain AdamW; the others are the optimizer's `settings`."""
    return {
        "rule": "adamw",
        "lr": lr,
        "betas": betas,
        "eps": settings["eps"],
        "weight_decay": weight_decay,
    }
