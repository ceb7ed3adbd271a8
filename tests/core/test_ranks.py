"""What a test says of ranks that die."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks


def dies_by_a_signal():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    waits_for_the_other()


def waits_for_the_other():
    time.sleep(600)


def test_the_stacks_of_all_ranks_are_shown_where_one_dies_by_a_signal():
    with pytest.raises(AssertionError, match="rank 1 died: exit code -11") as failed:
        run_ranks(dies_by_a_signal, 2)
    first, second = str(failed.value).split("rank 1:\n")
    assert "in waits_for_the_other" in first
    assert "Fatal Python error: Segmentation fault" in second and "in dies_by_a_signal" in second
