"""Checkpoints, written and read by `torch.distributed.checkpoint` (DCP).

Read these in order: a run's folder of checkpoints (`folder`), what is in one (`manifest`), its
tensors (`state_dict`), writing one (`saver`), which are kept (`retention`), and which one a run
resumes from (`resume`). `memory` has copies that ranks resume from sooner. Where checkpoints lie is
the room `storage`, and what other programs read and write is `exchange`.

A checkpoint is a folder `step-00000100` in the run's folder `checkpoints`: the tensors of every
rank and `manifest.json`. It is written under another name, and renamed once everything in it is
durable. So a folder of that name was complete when it appeared.
"""
