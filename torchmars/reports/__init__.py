"""Figures and pages of runs and comparisons."""
