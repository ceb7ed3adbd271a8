"""What all tests share: CPU only, one thread per process, as many workers as cores."""

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks would fight over the cores
# torch would take code that it has compiled for the instructions of another kind of CPU.
if (kind := os.environ.get("ATEN_CPU_CAPABILITY")) and Path(tempfile.gettempdir()).name != kind:
    os.environ["TMPDIR"] = tempfile.tempdir = f"{tempfile.gettempdir()}/{kind}"
    os.makedirs(tempfile.tempdir, exist_ok=True)
# A shell that starts pytest in the background lets it ignore Ctrl-C, and so all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest. They start first, so that all workers end at about the same time.
# With --dist worksteal in its place fixtures of files are made twice: a fifth more CPU time.
LONGEST = (
    "commands/test_run_train.py",
    "checkpoint/test_resume.py",
    "commands/test_stores.py",
    "commands/test_run_ends.py",
    "exchange/test_folder.py",
    "api/test_api.py",
    "parallel/test_composition.py",
    "planning/test_memory.py",
    "planning/test_plan.py",
    "parallel/test_fsdp.py",
    "training/test_guards.py",
    "cluster/test_nodes.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, unless `pytest -m gpu` asks for the tests that need one.

    The other tests train on gloo ranks, also on a machine with GPUs.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of the files in `LONGEST` to the front."""
    places = {file: place for place, file in enumerate(LONGEST)}
    folder = Path(__file__).parent
    items.sort(key=lambda item: places.get(str(item.path.relative_to(folder)), len(LONGEST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of the mark `gpu` where no GPU is seen."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, and pytest -m gpu -n 0")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers: a core each, and at most 4, since a test may start 4 ranks."""
    return min(os.cpu_count() or 1, 4)


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """A command leaves its process group to the end of its process, which is here that of all."""
    yield
    if "torch.distributed" in sys.modules:
        from torchmars.cluster import connection

        connection.stop()


@pytest.fixture(autouse=True)
def evaluate_leaves_the_tests_alive(monkeypatch):
    """A command that fails ends its process at once, where other packages' threads may abort it."""
    monkeypatch.setattr("torchmars.commands.evaluate.end_at_once", sys.exit)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs `torchmars COMMAND ARGS` in this process; returns its exit code, output and errors."""

    def call(command, *args):
        main = importlib.import_module(f"torchmars.commands.{command.replace('-', '_')}").main
        monkeypatch.setattr(sys, "argv", [f"torchmars {command}", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def own_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plugin of tests/support/own_family.py, loaded in this process; not there afterwards."""
    from torchmars.config.model import MODELS

    monkeypatch.syspath_prepend(Path(__file__).parent / "support")
    monkeypatch.setitem(MODELS, "plain", None)  # so that it is not there afterwards
    del MODELS["plain"]
    yield importlib.import_module("own_family")
    del sys.modules["own_family"]
