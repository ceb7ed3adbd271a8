"""Optimizers compared fairly: trials, how they are run, and what they tell."""
