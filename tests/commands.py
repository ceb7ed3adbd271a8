"""Commands as users run them, without waiting for torch each time: a warm process that forks for each command.

It has imported everything and done nothing, so that it has no threads that a fork could lose.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
MODULES = ("train", "prepare", "plan", "generate", "export", "checkpoint.__main__", "launch", "environment")


class Warm:
    """The warm process; `with Warm() as warm: warm.run(...)`."""

    def __enter__(self) -> "Warm":
        self.process = subprocess.Popen([sys.executable, "-m", "tests.commands"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, cwd=ROOT)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def run(self, module: str, args: list[str], cwd: Path, seconds: float = 300, unread: bool = False) -> tuple[int | None, str, str]:
        """`python -m torchmars.MODULE args`: its exit code (None: it hung and was killed), stdout and stderr.

        `unread`: whoever would read stdout has gone.
        """
        task = {"module": module, "args": args, "cwd": str(cwd), "seconds": seconds, "unread": unread}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


def serve() -> None:
    """Run the commands that stdin names, a line each, and answer each with a line."""
    for module in MODULES:
        importlib.import_module(f"torchmars.{module}")
    for line in sys.stdin:
        task = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                become(task, out, err)
            code = wait(child, task["seconds"])
            texts = [(stream.seek(0), stream.read().decode(errors="replace"))[1] for stream in (out, err)]
        print(json.dumps([code, *texts]), flush=True)


def become(task: dict, out: IO[bytes], err: IO[bytes]) -> NoReturn:
    """Be the command of `task`."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(pipe_without_reader() if task["unread"] else out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(task["cwd"])
        sys.argv = [task["module"], *task["args"]]
        importlib.import_module(f"torchmars.{task['module']}").main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def pipe_without_reader() -> int:
    """What writes into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def wait(child: int, seconds: float) -> int | None:
    """The exit code of a child, which is killed, with all that it has started, if it does not end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    serve()
