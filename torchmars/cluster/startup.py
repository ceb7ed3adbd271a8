"""The checks before any training: all ranks are there, and have the same code, config and files."""

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.console import labelled
from torchmars.core.device import gpu_name
from torchmars.core.errors import LostRank, UserError, say_error
from torchmars.core.files import open_to_write
from torchmars.core.words import counted

LOOK_SECONDS = 10.0  # how long a new file may take to be seen on other machines
CLOCK_SECONDS = 5.0  # from this difference of clocks on the logs of several machines mislead

# Facts that all ranks must share, each with the words for a machine that differs, and the remedy.
COMMON = {
    "code": ("runs other code of torchmars", "install the same version on all machines"),
    "torch": ("has another torch", "install the same version on all machines"),
    "config": ("has another config", "give all machines the same file and the same options"),
    "data": (
        "sees other data in data.path",
        "put data.path on a file system that all machines share",
    ),
}


@dataclass
class RankReport:
    """One rank's report on itself."""

    node: str
    code: str
    torch: str
    config: str
    data: str
    device: str
    clock: float
    """Seconds since 1970."""
    folder: str
    """The fault of the run folder as this machine sees it; empty if there is none."""


def own_report(config: ResolvedConfig) -> RankReport:
    """Return the report of this rank, which has not looked at the run folder."""
    clock = time.time()
    manifests = [Path(corpus.path) / "manifest.json" for corpus in config.data.corpora()]
    contents = [file.read_bytes() for file in manifests if file.exists()]
    return RankReport(
        process.node(),
        code_hash(),
        torch.__version__,
        short_hash(config_text(config).encode()),
        short_hash(b"".join(contents)) if contents else "",
        gpu_name(process.local_rank()),
        clock,
        "",
    )


def check_ranks(
    config: ResolvedConfig,
    store: dist.Store,
    look: Callable[[ResolvedConfig], RankReport] = own_report,
) -> str:
    """Wait for all ranks and compare their reports, which they exchange by `store`.

    Returns a description of the cluster in lines; an empty one for a single machine. Raises
    `UserError` on every rank where the ranks differ, naming the machine, and `LostRank` where one
    does not come. It takes the whole config, since all of it must be the same.
    """
    rank, size = process.rank(), process.world_size()
    token = Token(config.run.path)
    come(store, "here", process.node())
    if rank == 0:
        wait_for_ranks(store, "here", size)
        store.set("token", token.write())
    text = wait_for_value(store, "token")
    report = look(config)  # its clock, now that all are here
    if rank > 0 and process.local_rank() == 0 and text:
        token.check(text)
    report.folder = token.problem
    come(store, "report", json.dumps(asdict(report)))
    if rank == 0:
        wait_for_ranks(store, "report", size)
        token.remove()
        reports = [RankReport(**json.loads(store.get(f"report/{each}"))) for each in range(size)]
        store.set("result", json.dumps((differing_machines(reports), describe_cluster(reports))))
    wrong, cluster = json.loads(wait_for_value(store, "result"))
    come(store, "read", "")
    if rank == 0:
        # Where the ranks differ, that is the error, even if one of them is lost by now.
        with contextlib.suppress(*[LostRank] if wrong else []):
            wait_for_ranks(store, "read", size)  # the store ends with this process
        for line in wrong[:-1]:
            say_error(line)
    if wrong:
        raise UserError(wrong[-1])
    return cluster


def come(store: dist.Store, name: str, value: str) -> None:
    """Set this rank's value `name`, and count it: to ask for each of many ranks takes long."""
    store.set(f"{name}/{process.rank()}", value)
    store.add(name, 1)


def wait_for_ranks(store: dist.Store, name: str, size: int) -> None:
    """Wait until every rank has set its value `name`.

    Raises `LostRank`, naming those that have not.
    """
    seconds = process.start_timeout().total_seconds()
    deadline = time.monotonic() + seconds
    while store.add(name, 0) < size:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(size) if not store.check([f"{name}/{rank}"])]
            here = [rank for rank in range(size) if store.check([f"here/{rank}"])]
            nodes = sorted({store.get(f"here/{rank}").decode() for rank in here})
            raise LostRank(
                f"{len(missing)} of {size} ranks did not come within {seconds:g} s: "
                f"{first_eight(missing)} (others are on {', '.join(nodes)}): see what they say"
            )
        time.sleep(0.02)


def wait_for_value(store: dist.Store, key: str) -> str:
    """Return a value once the first rank has set it. Raises `LostRank` if it does not."""
    try:
        store.wait([key], process.start_timeout() + timedelta(seconds=2 * LOOK_SECONDS))
        return store.get(key).decode()
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        raise LostRank(
            f"rank {process.rank()} on {process.node()} lost rank 0 at the start "
            f"({str(error).splitlines()[0]}): see what that one says"
        ) from None


class Token:
    """A file by which the first rank shows the others that they share a folder."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ".shared"
        self.problem = ""
        """The fault of the folder as this machine sees it; empty if there is none."""

    def write(self) -> str:
        """Write the file, and return its text; an empty one where that cannot be done."""
        text = secrets.token_hex()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.unlink(missing_ok=True)  # whatever somebody has left there
            with open(self.file, "w", opener=open_to_write) as stream:
                stream.write(text)
        except OSError as error:
            self._complain(error)
            return ""
        return text

    def remove(self) -> None:
        """Delete the file, unless that cannot be done."""
        with contextlib.suppress(OSError):
            self.file.unlink()

    def check(self, text: str) -> None:
        """Check that this machine sees the file with `text`, and can write beside it."""
        deadline = time.monotonic() + LOOK_SECONDS
        while not self._has(text):
            if time.monotonic() > deadline:
                self.problem = (
                    f"does not see what the first machine writes to {self.file.parent}: "
                    "set run.folder to a file system that all share"
                )
                return
            time.sleep(0.1)
        try:
            mine = self.file.with_name(f".shared-{process.rank()}")
            os.close(open_to_write(mine, os.O_WRONLY))
            mine.unlink()
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        self.problem = (
            f"cannot write to {self.file.parent} ({error.strerror}): "
            "set run.folder to a folder that all machines can write"
        )

    def _has(self, text: str) -> bool:
        try:
            return self.file.read_text() == text
        except OSError:  # not there yet, or not to be read
            return False


def code_hash() -> str:
    """Return a hash of this package's sources."""
    package = Path(__file__).parents[1]
    return short_hash(
        b"".join(
            str(file.relative_to(package)).encode() + file.read_bytes()
            for file in sorted(package.rglob("*.py"))
        )
    )


def short_hash(content: bytes) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def first_eight(things: Iterable[object]) -> str:
    """Return the first eight things, and whether there are more."""
    texts = list(map(str, things))
    return ", ".join(texts[:8] + ["..."] * (len(texts) > 8))


def differing_machines(reports: list[RankReport]) -> list[str]:
    """Return a line for each machine and each thing that must be the same and is not."""
    first, lines = reports[0], []
    for report in reports:
        for name, (difference, remedy) in COMMON.items():
            ours, theirs = getattr(report, name), getattr(first, name)
            if ours != theirs:
                lines.append(
                    f"{report.node} {difference} than {first.node} "
                    f"({ours or 'none'} instead of {theirs or 'none'}): {remedy}"
                )
        if report.folder:
            lines.append(f"{report.node} {report.folder}")
    return list(dict.fromkeys(lines))


def describe_cluster(reports: list[RankReport]) -> str:
    """Return lines on the cluster, with anything unusual; nothing for a single machine."""
    ranks = Counter(report.node for report in reports)
    if len(ranks) == 1:
        return ""
    fewest, most = min(ranks.values()), max(ranks.values())
    counts = counted(most, "rank") if fewest == most else f"{fewest} to {most} ranks"
    devices = Counter(report.device for report in reports)
    names = ", ".join(f"{count} x {device}" for device, count in devices.items())
    clocks = sorted((report.clock, report.node) for report in reports)
    (earliest, behind), (latest, ahead) = clocks[0], clocks[-1]
    spread = latest - earliest
    lines = labelled(
        "cluster",
        f"{len(ranks)} machines ({first_eight(ranks)}), {counts} on each: {names}; "
        f"clocks within {spread:.2f} s",
    )
    if len(devices) > 1:
        first = {report.device: report.node for report in reversed(reports)}
        places = ", ".join(f"{device} on {first[device]}" for device in devices)
        lines += labelled("warning", f"devices differ, and the slowest sets the pace: {places}")
    if spread > CLOCK_SECONDS:
        lines += labelled(
            "warning",
            f"the clock of {behind} is {spread:.1f} s behind that of {ahead}: "
            "times in their logs do not compare",
        )
    return "\n".join(lines)
