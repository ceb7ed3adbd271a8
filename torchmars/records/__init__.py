"""What a run has left in its folder: config, curves, events, checkpoints."""
