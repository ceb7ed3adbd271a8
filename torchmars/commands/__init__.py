"""The commands.

Modules that import torch are imported in `main`, after the options were read: so `--help` and
mistakes are said without the seconds that takes.
"""
