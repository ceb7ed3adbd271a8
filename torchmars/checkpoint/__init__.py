"""Checkpoints, written and read by `torch.distributed.checkpoint` (DCP).

Read these in order: where checkpoints lie (`storage`; in an object store `objects`), a run's folder
of them (`folder`), what is in one (`manifest`), its tensors (`state_dict`), writing one (`saver`),
and which one a run resumes from (`resume`). A new run may start from another one's weights
(`initial`), and a model be loaded without training (`inference`). Files of weights alone are in
`weights`.

A checkpoint is a folder `step-00000100` in the run's folder `checkpoints`: the tensors of every
rank and `manifest.json`. It is written under another name, and renamed once everything in it is
durable. So a folder of that name was complete when it appeared.
"""
