"""Runs and comparisons as pictures and pages."""
