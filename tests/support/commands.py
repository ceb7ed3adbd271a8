"""Commands as users run them, but without the import of torch each time: a process forks for each.

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

SECONDS = 300  # after which a command is taken to hang
ROOT = Path(__file__).parents[2]
MODULES = {
    "rank": "torchmars.train",
    **{
        name: f"torchmars.commands.{name}"
        for name in ("train", "prepare", "plan", "generate", "export", "checkpoint", "launch")
    },
}


class Warm:
    """The warm process; `with Warm() as warm: warm.run(...)`."""

    def __enter__(self) -> "Warm":
        command = [sys.executable, "-m", "tests.support.commands"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def run(
        self, module: str, args: list[str], cwd: Path, unread: bool = False
    ) -> tuple[int | None, str, str]:
        """One of `MODULES` with `args`: exit code (None: it hung), output, errors.

        `unread`: whoever would read the output has gone.
        """
        task = {"module": module, "args": args, "cwd": str(cwd), "unread": unread}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


def serve() -> None:
    """Run the commands that stdin names, a line each, and answer each with a line."""
    for module in MODULES.values():
        importlib.import_module(module)
    for line in sys.stdin:
        task = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                become(task, out, err)
            answer = [wait(child)]
            for stream in (out, err):
                stream.seek(0)
                answer.append(stream.read().decode(errors="replace"))
        print(json.dumps(answer), flush=True)


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
        importlib.import_module(MODULES[task["module"]]).main()
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


def wait(child: int) -> int | None:
    """The exit code of a child. One that does not end is killed, with all that it has started."""
    deadline = time.monotonic() + SECONDS
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
