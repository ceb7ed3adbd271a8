"""Before any training: are all ranks there, of one code and config, and do all machines see the same files?"""

import contextlib
import hashlib
import json
import secrets
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchmars.cluster import process
from torchmars.config import ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.errors import LostRank, UserError, say_error

LOOK_SECONDS = 10.0  # how long a new file may take to be seen on other machines
CLOCK_SECONDS = 5.0  # difference of clocks from which on the logs of several machines mislead

# What all ranks must have in common, what to call it, and what to do where they have not.
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
class Facts:
    """What one rank tells of itself."""

    node: str
    code: str
    torch: str
    config: str
    data: str
    device: str
    clock: float
    folder: str
    """What is wrong with the run folder as this machine sees it; nothing if all is well."""


def compare_ranks(config: ResolvedConfig, store: dist.Store) -> str:
    """Wait for all ranks and compare them, by words in `store`; what the cluster is, in lines, where it is more than one machine.

    Raises `UserError` on every rank where they differ, naming the machine, and `LostRank` where one does not come.
    """
    rank, size, token = process.rank(), process.world_size(), Token(config.run.path)
    store.set(f"here/{rank}", process.node())
    if rank == 0:
        wait_for_all(store, "here", size)
        store.set("token", token.write())
    text = wait_for_first(store, "token")
    clock = time.time()
    folder = (
        token.problem if rank == 0 or process.local_rank() > 0 or not text else token.look(text)
    )
    mine = Facts(
        process.node(),
        code_hash(),
        torch.__version__,
        digest(config_text(config).encode()),
        data_hash(config),
        device_name(),
        clock,
        folder,
    )
    store.set(f"facts/{rank}", json.dumps(asdict(mine)))
    if rank == 0:
        wait_for_all(store, "facts", size)
        everyone = [Facts(**json.loads(store.get(f"facts/{other}"))) for other in range(size)]
        token.file.unlink(missing_ok=True)
        store.set("verdict", json.dumps((differences(everyone), describe(everyone))))
    wrong, cluster = json.loads(wait_for_first(store, "verdict"))
    store.set(f"read/{rank}", "")
    if rank == 0:
        # What is wrong is the verdict, also where a rank does not come to read it.
        with contextlib.suppress(*[LostRank] if wrong else []):
            wait_for_all(store, "read", size)  # the store ends with this process
        for line in wrong[:-1]:
            say_error(line)
    if wrong:
        raise UserError(wrong[-1])
    return cluster


def wait_for_all(store: dist.Store, name: str, size: int) -> None:
    """Wait until every rank has set its word `name`. Raises `LostRank`, naming those that have not."""
    seconds = process.start_timeout().total_seconds()
    missing, deadline = list(range(size)), time.monotonic() + seconds
    while missing := [rank for rank in missing if not store.check([f"{name}/{rank}"])]:
        if time.monotonic() > deadline:
            met = {
                store.get(f"here/{rank}").decode()
                for rank in range(size)
                if store.check([f"here/{rank}"])
            }
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise LostRank(
                f"{len(missing)} of {size} ranks did not come within {seconds:g} s: {some} (others are on {', '.join(sorted(met))}): see what they say"
            )
        time.sleep(0.02)


def wait_for_first(store: dist.Store, key: str) -> str:
    """A word that the first rank sets. Raises `LostRank` where it does not come."""
    try:
        store.wait([key], process.start_timeout() + timedelta(seconds=2 * LOOK_SECONDS))
        return store.get(key).decode()
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        raise LostRank(
            f"rank {process.rank()} on {process.node()} lost rank 0 at the start ({str(error).splitlines()[0]}): see what that one says"
        ) from None


class Token:
    """A file by which the first rank shows the others that they share a folder."""

    def __init__(self, folder: Path) -> None:
        self.file, self.problem = folder / ".shared", ""

    def write(self) -> str:
        """Write the file; its text, or nothing where that cannot be done."""
        text = secrets.token_hex()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(text)
        except OSError as error:
            self.problem = f"cannot write to {self.file.parent} ({error.strerror}): set run.folder to a folder that it can write"
            return ""
        return text

    def look(self, text: str) -> str:
        """What is wrong with the folder as this machine sees it: nothing where it has `text` and can be written."""
        deadline = time.monotonic() + LOOK_SECONDS
        while not self._has(text):
            if time.monotonic() > deadline:
                return f"does not see what the first machine writes to {self.file.parent}: set run.folder to a file system that all share"
            time.sleep(0.1)
        try:
            mine = self.file.with_name(f".shared-{process.rank()}")
            mine.touch()
            mine.unlink()
        except OSError as error:
            return f"cannot write to {self.file.parent} ({error.strerror}): set run.folder to a folder that all machines can write"
        return ""

    def _has(self, text: str) -> bool:
        try:
            return self.file.read_text() == text
        except OSError:  # not there yet, or not to be read
            return False


def code_hash() -> str:
    """A hash of this package's sources."""
    package = Path(__file__).parents[1]
    return digest(
        b"".join(
            str(file.relative_to(package)).encode() + file.read_bytes()
            for file in sorted(package.rglob("*.py"))
        )
    )


def data_hash(config: ResolvedConfig) -> str:
    """A hash of what the data's manifest says; nothing where there is none yet."""
    manifest = Path(config.data.path) / "manifest.json"
    return digest(manifest.read_bytes()) if manifest.exists() else ""


def device_name() -> str:
    """What this rank computes on."""
    return torch.cuda.get_device_name(process.local_rank()) if torch.cuda.is_available() else "cpu"


def digest(content: bytes) -> str:
    """The beginning of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def differences(everyone: list[Facts]) -> list[str]:
    """What must be the same and is not: a line for each machine and matter."""
    first, lines = everyone[0], []
    for facts in everyone:
        lines += [
            f"{facts.node} {what} than {first.node} ({getattr(facts, name) or 'none'} instead of {getattr(first, name) or 'none'}): {remedy}"
            for name, (what, remedy) in COMMON.items()
            if getattr(facts, name) != getattr(first, name)
        ]
        lines += [f"{facts.node} {facts.folder}"] if facts.folder else []
    return list(dict.fromkeys(lines))


def describe(everyone: list[Facts]) -> str:
    """The cluster in lines, with what is odd but no mistake; nothing for a single machine."""
    ranks = Counter(facts.node for facts in everyone)
    if len(ranks) == 1:
        return ""
    some = ", ".join(list(ranks)[:8]) + (", ..." if len(ranks) > 8 else "")
    devices = Counter(facts.device for facts in everyone)
    spread = max(facts.clock for facts in everyone) - min(facts.clock for facts in everyone)
    lines = [
        f"cluster   {len(ranks)} machines ({some}), {' or '.join(map(str, sorted(set(ranks.values()))))} ranks on each: "
        f"{', '.join(f'{count} x {device}' for device, count in devices.items())}; clocks within {spread:.2f} s"
    ]
    if len(devices) > 1:
        odd = {
            device: next(facts.node for facts in everyone if facts.device == device)
            for device in devices
        }
        lines.append(
            f"warning   devices differ, and the slowest sets the pace: {', '.join(f'{device} on {node}' for device, node in odd.items())}"
        )
    if spread > CLOCK_SECONDS:
        slow, fast = (
            min(everyone, key=lambda facts: facts.clock),
            max(everyone, key=lambda facts: facts.clock),
        )
        lines.append(
            f"warning   the clock of {slow.node} is {spread:.1f} s behind that of {fast.node}: times in their logs do not compare"
        )
    return "\n".join(lines)
