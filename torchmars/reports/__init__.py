"""Pictures and pages of runs and comparisons."""
