"""What all tests share: CPU only, and one thread per process."""

import os

# Before torch: the layouts under test are of gloo ranks, also on a machine with GPUs, and ranks would fight over the cores.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
