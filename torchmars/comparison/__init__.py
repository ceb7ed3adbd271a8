"""Optimizers compared fairly: trials, how they are run, and the conclusions."""
