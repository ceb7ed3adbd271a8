"""The files of a run: config, curves, events, checkpoints."""
