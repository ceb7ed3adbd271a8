"""The fault campaign: a run whose store fails again and again ends with an unbroken one's weights.

A proxy before moto's server makes the faults. FAULTS in the environment is how many each layout
has.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

import pytest

from tests.support.commands import ROOT, Command, descendants, ranks_of
from tests.support.store import BUCKET, Proxy, ServerProcess, variables
from tests.support.store_faults import KINDS, STAGES, Fault, Faults, Spoil
from tests.support.tiny import metrics, run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints, step_folder, step_of
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.checkpoint.resume import read_verified
from torchmars.config.load import config_from_tables
from torchmars.core.errors import EXIT_MISTAKE, EXIT_STOPPED, EXIT_UNCONNECTED
from torchmars.core.places import place
from torchmars.storage.objects import connect
from torchmars.storage.storage import File

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find ranks"),
]

STEPS, INTERVAL, RANKS = 40, 2, 2
FAULTS = int(os.environ.get("FAULTS", 50))
LONGEST = 300.0  # seconds after which a start is taken to hang
MOST_STARTS = 60  # of a run
WARNING, NOT_SAVED = "warning: the checkpoint ", "could not be written"  # of a save that has failed
CODES = {0, EXIT_MISTAKE, EXIT_UNCONNECTED, EXIT_STOPPED}
KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}


@dataclass
class Row:
    """What came of the faults of one kind."""

    faults: int = 0
    failed_saves: int = 0
    starts: int = 0


class Campaign:
    """Runs whose store has faults, one run after the other until there were enough."""

    def __init__(self, proxy: Proxy, folder: Path, overrides: dict, count: int) -> None:
        self.proxy, self.folder, self.overrides = proxy, folder, overrides
        self.rng = random.Random(count)
        self.faults = Faults(Spoil(proxy, random.Random(count + 1)))
        self.faults.spoil.kill = self.kill
        self.left = [KINDS[number % len(KINDS)] for number in range(count)]
        self.rng.shuffle(self.left)
        self.rows = {kind.name: Row() for kind in KINDS}
        self.codes: Counter[int] = Counter()
        self.row = Row()
        """Of the newest fault that began."""
        self.failed = 0  # saves of the start under way
        self.killed = False  # a process of the start under way
        self.command: Command
        proxy.fault = self.faults

    def tables(self, name: str, **checkpoint: object) -> dict[str, dict]:
        own = {"interval": INTERVAL, "keep_last": 4, "keep_best": False}
        return tiny_tables(
            self.folder,
            run={"name": name},
            model={"dropout": 0.1},
            training={"steps": STEPS},
            schedule={"name": "constant"},
            checkpoint=own | checkpoint,
            **self.overrides,
        )

    def kill(self, launcher: bool) -> None:
        self.killed = True
        victims = [self.command.pid] if launcher else ranks_of(self.command.pid)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self.faults.spoil.rng.choice(victims), signal.SIGKILL)

    def next_fault(self, running: bool) -> None:
        """Let another fault wait for its moment, if the run has got over the one before.

        A run that is `running` is stopped for a fault of its start.
        """
        faults = self.faults
        with faults.lock:
            fault = faults.fault
            if fault is not None:
                if not fault.over():
                    return
                if fault.published is None:
                    fault.published = faults.published
                if running and faults.published == fault.published:
                    return
            drawn = self.draw(running)
            if drawn is None:
                return
            faults.fault = drawn
        if drawn.start > faults.start:
            with contextlib.suppress(ProcessLookupError):
                self.command.send_signal(signal.SIGTERM)

    def draw(self, running: bool) -> Fault | None:
        """Take the first kind of those that are left that the run can get over."""
        for kind in self.left:
            # A run whose only checkpoint is bad cannot go on.
            if kind.spoil != "alter_put" or self.faults.published > 2:
                self.left.remove(kind)
                stage = self.rng.choice(kind.stages)
                return Fault(
                    kind,
                    stage,
                    self.faults.start + (running and stage != "save"),
                    self.rng.randint(1, {"start": 6, "load": 25, "save": 16}[stage]),
                    self.rng.uniform(*kind.seconds),
                    self.rng.randint(*kind.requests),
                )
        return None

    def count(self, log: Path) -> str:
        """Count the fault that began, and saves that have failed. Return what the run has said."""
        fault = self.faults.fault
        if fault is not None and fault.began is not None and not fault.counted:
            fault.counted = True
            self.row = self.rows[fault.kind.name]
            self.row.faults += 1
        said = log.read_text(errors="replace")
        failed = sum(line.startswith(WARNING) and NOT_SAVED in line for line in said.splitlines())
        self.row.failed_saves += failed - self.failed
        self.failed = failed
        return said

    def start(self, tables: dict[str, dict]) -> int:
        """Start the command of a run, and wait for its end. Return its exit code."""
        self.faults.start += 1
        self.failed, self.killed, self.faults.stage = 0, False, STAGES[0]
        log, config = self.folder / f"start-{self.faults.start}.log", self.folder / "run.toml"
        self.next_fault(running=False)
        with log.open("w") as out:
            self.command = launch(tables, config, self.proxy.address, out)
            deadline = time.monotonic() + LONGEST
            while self.command.poll() is None:
                assert time.monotonic() < deadline, f"{self.faults.fault}: hangs, {log}"
                self.count(log)
                if self.faults.stage == "save":
                    self.next_fault(running=True)
                time.sleep(0.02)
        while descendants(config):  # ranks end after their launcher
            assert time.monotonic() < deadline, f"{self.faults.fault}: ranks hang, {log}"
            time.sleep(0.02)
        code = self.command.wait()
        self.check(code, self.count(log), log)
        return code

    def check(self, code: int, said: str, log: Path) -> None:
        """Assert that a start has ended as it should."""
        self.codes[code] += 1
        about = f"exit code {code}, {self.faults.fault}, {log}: {said[-3000:]}"
        assert not self.faults.errors, self.faults.errors
        assert code in (CODES | KILLED if self.killed else CODES), about
        assert self.killed or "Traceback" not in said, about
        assert sum(line.startswith("error:") for line in said.splitlines()) <= 1, about

    def bad(self, checkpoint: PurePath) -> bool:
        """Whether a checkpoint is damaged. Only one whose bytes the proxy has altered may be."""
        try:
            read_verified(checkpoint, "full")
        except DamagedCheckpoint as error:
            name = str(checkpoint).removeprefix("s3:/")
            altered = [path for path in self.faults.bad if path.startswith(f"{name}/")]
            assert altered, f"{error}: published after {self.faults.fault}"
            return True
        return False

    def run(self, name: str, wanted: dict[str, File]) -> None:
        """Start a run until it is complete; compare the files of its last checkpoint."""
        folder = place(f"s3://{BUCKET}/{self.folder.name}/{name}")
        tables, self.faults.published = self.tables(name, folder=str(folder)), 0
        for _ in range(MOST_STARTS):
            code = self.start(tables)
            found = {step_of(path): self.bad(path) for path in checkpoints(folder)}
            if code == 0 and found.get(STEPS) is False:
                break
            assert code or STEPS in found, found
            self.row.starts += code != EXIT_STOPPED
        else:
            raise AssertionError(f"{name} is not complete after {MOST_STARTS} starts")
        files = manifests.read(step_folder(folder, STEPS)).files
        assert {each: files.get(each) for each in wanted} == wanted
        assert list(metrics(tables)) == list(range(1, STEPS + 1))

    def table(self) -> str:
        lines = [f"{'fault':24}{'count':>6}{'failed saves':>14}{'starts':>8}"]
        for name, row in self.rows.items():
            lines.append(f"{name:24}{row.faults:6}{row.failed_saves:14}{row.starts:8}")
        return "\n".join(lines)


def launch(tables: dict[str, dict], config: Path, address: str, log: IO[str]) -> Command:
    """Start a run by the launcher, on a store at an address."""
    write_config(config_from_tables(tables, "in a test"), config)
    options = ["-m", "torchmars.train", str(config)]
    # Their clients ask once, and s3fs five times.
    own = variables(address) | {"AWS_MAX_ATTEMPTS": "1", "RDZV_TIMEOUT": "300", "NGPU": f"{RANKS}"}
    return Command("launch", options, ROOT, os.environ | own, RANKS, log, log)


@pytest.fixture
def server(monkeypatch):
    """A server that this process reaches without a proxy."""
    with ServerProcess() as server:
        for name, value in variables(server.address).items():
            monkeypatch.setenv(name, value)
        connect.cache_clear()
        yield server
    connect.cache_clear()


@pytest.mark.parametrize(
    "overrides", [{}, {"parallelism": {"pp": 2}}], ids=["FSDP over 2 ranks", "PP over 2 ranks"]
)
def test_faults_of_a_store(tmp_path, server, overrides):
    write_text(tmp_path)
    began = time.monotonic()
    with Proxy(server.address) as proxy:
        campaign = Campaign(proxy, tmp_path, overrides, FAULTS)
        straight, log = campaign.tables("straight"), tmp_path / "straight.log"
        with log.open("w") as out:
            code = launch(straight, tmp_path / "run.toml", server.address, out).wait()
        assert code == 0, log.read_text()[-3000:]
        last = step_folder(run_folder_of(straight) / "checkpoints", STEPS)
        files = read_verified(last, "full").files
        wanted = {f"__{rank}_0.distcp": files[f"__{rank}_0.distcp"] for rank in range(RANKS)}
        runs = 0
        while sum(row.faults for row in campaign.rows.values()) < FAULTS:
            campaign.run(f"run-{runs}", wanted)
            runs += 1
        if campaign.faults.timer is not None:
            campaign.faults.timer.join()
    print(
        f"\n{campaign.table()}\n{FAULTS} faults of the seed {FAULTS} in {runs} runs and "
        f"{campaign.faults.start} starts, exit codes {dict(sorted(campaign.codes.items()))}, "
        f"{time.monotonic() - began:.0f} s: "
        "each run ends bit for bit as the unbroken one"
    )


def test_a_server_that_is_killed_and_has_lost_its_bucket(tmp_path, server):
    """The run ends with a line, and does not begin anew."""
    write_text(tmp_path)
    folder = place(f"s3://{BUCKET}/lost")
    own = {"interval": INTERVAL, "folder": str(folder)}
    tables = tiny_tables(tmp_path, training={"steps": 4000}, checkpoint=own)

    def start(when: Callable[[], bool] | None = None) -> tuple[int, list[str]]:
        with (tmp_path / "log").open("w") as log:
            command = launch(tables, tmp_path / "run.toml", server.address, log)
            if when:
                while not when():
                    assert command.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    time.sleep(0.05)
                server.kill()
            code = command.wait()
        said = (tmp_path / "log").read_text()
        assert "Traceback" not in said
        return code, [line for line in said.splitlines() if line.startswith("error:")]

    code, (line,) = start(lambda: len(checkpoints(folder)) > 1)
    assert code == EXIT_UNCONNECTED
    assert "checkpoint.max_failures = 3 in a row ends the run" in line
    reached = list(metrics(tables))
    code, (line,) = start()
    assert code == 69 and "see that the store answers, and start again" in line
    server.start()
    code, (line,) = start()
    assert code == 2 and "bucket does not exist: make it, or name another one" in line
    assert list(metrics(tables)) == reached
