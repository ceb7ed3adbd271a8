"""Copies of a run in the memory of its machines."""

OPTION = "checkpoint.memory_interval"
