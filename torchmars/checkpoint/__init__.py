"""Checkpoints: what is in one (`manifest`), a run's folder of them (`folder`), its tensors (`state`), writing (`saver`), and which one a run
goes on from (`resume`). `torch.distributed.checkpoint` underneath.

A checkpoint is a folder `step-00000100` in the run's `checkpoints`: the tensors of every rank and `manifest.json`. It is written under
another name and renamed once everything in it is durable, so a folder of that name was complete when it appeared.
"""
