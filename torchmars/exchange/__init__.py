"""Models as files: those that a run has left, and those that others read and write."""
