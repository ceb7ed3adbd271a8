"""Pretraining of large models with the MARS family of optimizers, the same run on every layout."""

# `python -m torchmars.plan` is the command of that name, torchmars/commands/plan.py.
__path__ += [f"{__path__[0]}/commands"]
