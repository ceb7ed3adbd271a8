"""Tests that need a GPU: `pytest -m gpu -n 0`. What one can do: `session.sh`."""
