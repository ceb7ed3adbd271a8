"""Commands and runs as users start them: by ./run_train.sh, or without importing torch each time.

`start` and `finish` run the script itself. `Command` is for tests that are not about the start.

The server of `tests.support.ranks`, which has imported everything, forks for the command, and a
launcher forks for its ranks. From there on all is as in a process of its own: arguments,
environment, `sitecustomize`, output, signals, exit code, and each rank is a child of its launcher.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from tests.support.ranks import context

SECONDS = 900  # after which a command is taken to hang
ROOT = Path(__file__).parents[2]
MODULES = {
    "rank": "torchmars.train",
    "torchrun": "torch.distributed.run",
    **{
        name: f"torchmars.commands.{name}"
        for name in (
            "train",
            "prepare",
            "plan",
            "presets",
            "runs",
            "plot",
            "generate",
            "export",
            "evaluate",
            "import",
            "checkpoint",
            "launch",
            "rendezvous",
        )
    },
}


class Command:
    """A command that was started: what `subprocess.Popen` is, as far as tests need it."""

    def __init__(
        self,
        module: str,
        args: list[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        ranks: int = 0,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | None = None,
    ) -> None:
        """Start one of `MODULES`.

        `ranks` is the number of ranks that a launcher may start, and start again. The output goes
        to the pipe `self.stdout`, errors to the file `self.stderr`, unless other places are given.
        """
        self.stderr = stderr or tempfile.TemporaryFile("w+", errors="replace")
        read, write = context.Pipe(duplex=False)
        self.stdout: IO[str] = os.fdopen(os.dup(read.fileno()), errors="replace")
        errors = context.reducer.DupFd(self.stderr.fileno())
        out = context.reducer.DupFd(_descriptor(write if stdout is None else stdout))
        task = (module, args, str(cwd), dict(os.environ if env is None else env), ranks)
        self.process = context.Process(target=_become, args=(task, out, errors))
        self.process.start()
        read.close(), write.close()
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the command runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        """Wait for the end; the exit code. Raises `TimeoutExpired`."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Wait for the end; what it has said on stdout and stderr. Raises `TimeoutExpired`."""
        late = threading.Timer(timeout, self.kill_group)  # so that reading comes to an end
        late.start()
        try:
            out = self.stdout.read()
        finally:
            late.cancel()
        self.wait(timeout)
        self.stderr.seek(0)
        return out, self.stderr.read()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command alone by SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)

    def kill_group(self) -> None:
        """End the command and what it has started by SIGKILL, but for ranks, which follow it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def script_environment(config: Path) -> dict[str, str]:
    """The variables by which run_train.sh starts two ranks, on a machine busy with other things."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "NGPU": "2",
        "CONFIG_FILE": str(config),
        "OMP_NUM_THREADS": "1",
        "RDZV_TIMEOUT": "300",
    }


def start(
    config: Path, *args: str, within: tuple[str, ...] | list[str] = (), **environment: str
) -> subprocess.Popen:
    """Start ./run_train.sh on two ranks, in a process group of its own as a terminal does.

    `within` is another command that starts it.
    """
    return subprocess.Popen(
        [*within, str(ROOT / "run_train.sh"), *args],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=config.parent,
        env=script_environment(config) | environment,
    )


def finish(*args: Any, **environment: str) -> tuple[int, str, str]:
    """Run ./run_train.sh as `start` does; return its exit code, output, errors."""
    process = start(*args, **environment)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def start_run(config: Path, *args: str, ranks: int = 2, **environment: str) -> Command:
    """Start what `start` does, as a `Command` whose launcher may start `ranks` ranks in all."""
    env = script_environment(config) | environment
    return Command("train", [str(config), *args], config.parent, env, ranks)


def finish_run(*args: Any, **environment: Any) -> tuple[int, str, str]:
    """Run what `start_run` starts; return its exit code, output, errors."""
    command = start_run(*args, **environment)
    out, err = command.communicate()
    return command.returncode, out, err


def run_command(
    module: str, args: list[str], cwd: Path, unread: bool = False
) -> tuple[int | None, str, str]:
    """Run one of `MODULES`; return its exit code (None: it hung), output, errors.

    `unread`: whoever would read the output has gone.
    """
    command = Command(module, args, cwd, stdout=_pipe_without_reader() if unread else None)
    try:
        out, err = command.communicate()
    except subprocess.TimeoutExpired:
        return None, "", ""
    return command.returncode, out, err


def descendants(mark: Path) -> list[int]:
    """The processes that name the file `mark` in their command line, or have it open.

    A `Command` has its config open, and so have its ranks.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(mark) in (process / "cmdline").read_text().replace("\0", " ") or any(
                os.readlink(descriptor) == str(mark) for descriptor in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return sorted(found)


def ranks_of(launcher: int) -> list[int]:
    """The processes of a launcher's ranks, in their order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
            if parent == launcher and b"resource_tracker" not in command:
                found.append(int(stat.parent.name))
    return sorted(found)


def begun(config, *args, start=start_run, **environment):
    """A run of a million steps that has made some of them."""
    options = "--training.steps 1000000 --validation.interval 0"
    process = start(config, *options.split(), *args, **environment)
    for line in process.stdout:
        if line.startswith("step  ") and int(line.split("/")[0][4:]) > 5:
            return process
    raise AssertionError(process.stderr.read())


def all_gone(config):
    """Whether no process of a config's run is left, in time."""
    deadline = time.monotonic() + SECONDS
    while descendants(config) and time.monotonic() < deadline:
        time.sleep(0.2)
    return descendants(config) == []


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")


def measure_quickly(file, ranks, output):
    """What `measure.train` does, in processes that need not import torch."""
    env = os.environ | {"NGPU": str(ranks), "RDZV_TIMEOUT": "300", "OMP_NUM_THREADS": "1"}
    stream = os.fdopen(os.dup(output), "w+")
    return Command(
        "train", ["--prepared", str(file)], file.parent, env, ranks, stream, stream
    ).wait()


def kill(number):
    """End a process by SIGKILL, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def _descriptor(file: Any) -> int:
    return file if isinstance(file, int) else file.fileno()


def _pipe_without_reader() -> int:
    """What writes into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def _become(task: tuple[str, list[str], str, dict[str, str], int], out: Any, err: Any) -> None:
    """Be a command, in a session of its own as those of a terminal are."""
    module, args, cwd, env, ranks = task
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have made it ignored
    _take_over(cwd, env, out.detach(), err.detach())
    for arg in args:
        if Path(arg).suffix == ".toml" and Path(arg).is_file():
            os.open(arg, os.O_RDONLY)  # for `descendants`
    if ranks:
        Rank.prepare(ranks)
    sys.argv = [module, *args]
    importlib.import_module(MODULES[module]).main()


def _take_over(cwd: str, env: dict[str, str], out: int, err: int) -> None:
    """Make a folder, an environment and outputs those of this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out), os.close(err)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _customize()


def _customize() -> None:
    """Do what Python does first: make PYTHONPATH count, and run `sitecustomize`."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)[::-1]:
        sys.path.insert(0, folder)
        if (Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(Path(folder) / "sitecustomize.py"))


def _run_and_end(main: Callable[[], object]) -> NoReturn:
    """Run `main`, and end this process as Python does after it."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


class Rank:
    """In place of the `Popen` by which torchrun starts a rank: a fork that waits for its command.

    It was made before the launcher had threads, which a fork would lose.
    """

    waiting: list[tuple[int, socket.socket]] = []

    @classmethod
    def prepare(cls, count: int) -> None:
        """Fork `count` processes that wait, and let torchrun use them."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = cls
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            child = os.fork()
            if child == 0:
                for line in (ours, *(line for _, line in cls.waiting)):
                    line.close()
                _wait_and_become_rank(theirs)
            theirs.close()
            cls.waiting.append((child, ours))

    def __init__(
        self, args: tuple, env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        self.args, self.returncode = args, None
        self.pid, line = self.waiting.pop(0)
        task = json.dumps([list(args), env])
        descriptors = [_descriptor(stdout or 1), _descriptor(stderr or 2)]
        socket.send_fds(line, [task.encode()], descriptors)
        line.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode


def _wait_and_become_rank(line: socket.socket) -> NoReturn:
    """Be the rank that the launcher names; nothing where it ends without."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task, descriptors, _, _ = socket.recv_fds(line, 2**20, 2)
    line.close()
    if not task:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args, env = json.loads(task)
    _take_over(os.getcwd(), env, *descriptors)
    sys.stdout.reconfigure(write_through=True)  # python -u
    options = args[args.index("-u") + 1 :]
    if options[0] == "-m":
        sys.argv = options[1:]
        _run_and_end(lambda: importlib.import_module(sys.argv[0]).main())
    sys.argv = options
    sys.path.insert(0, str(Path(options[0]).parent))
    _run_and_end(lambda: runpy.run_path(options[0], run_name="__main__"))
