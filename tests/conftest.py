"""What all tests share: one thread per process, and real distributed runs on gloo."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks would fight over the cores
