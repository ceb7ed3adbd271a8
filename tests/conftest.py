"""What all tests share: CPU only, one thread per process, as many workers as cores."""

import os

# Before torch: the layouts under test are of gloo ranks, also on a machine with GPUs, and ranks would fight over the cores.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: object) -> int:
    """Return the number of workers: a core each, and at most 4, since a test may start 4 ranks."""
    return min(os.cpu_count() or 1, 4)
