"""Work that takes too long."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.support.full import FULL
from torchmars.core.console import done_in


def test_the_result_of_work_is_waited_for_as_long_as_is_said():
    assert done_in(None, lambda: 7) == done_in(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        done_in(60, lambda: 1 // 0)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        done_in(0.1, never.wait)
    never.set()


STOPPED = """
import time
from torchmars.core.console import done_in

def work():
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.05)
    return "done"

print(done_in(3, work), flush=True)
"""


@FULL
def test_a_process_that_stood_still_gives_work_its_time():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3.5)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate()[0] == "done\n"
