"""Comparisons of optimizers."""
