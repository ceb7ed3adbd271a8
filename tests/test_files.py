"""One process at a time trains a run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmars.errors import UserError
from torchmars.files import lock

ROOT = Path(__file__).parents[1]
HOLDS = """
import os, sys, time
from pathlib import Path
from torchmars.files import lock
lock(Path(sys.argv[1]) / "lock", "training")
if os.fork() == 0:  # a helper that outlives it, as one that reads data may
    time.sleep(30)
    os._exit(0)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_run_is_locked_while_its_process_lives_and_not_by_its_helpers(tmp_path, capsys):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match="another process is training: stop it"):
        lock(tmp_path / "lock", "training", patience=0.1)
    assert "waiting for another process that is training" in capsys.readouterr().out
    holder.kill()
    began = time.monotonic()
    lock(tmp_path / "lock", "training", patience=20)
    assert time.monotonic() - began < 10
