"""Connects the ranks, and compares what must be alike on all of them before any training."""

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchmars.cluster import process
from torchmars.cluster.endpoint import interface_of
from torchmars.config import ParallelismConfig, ResolvedConfig
from torchmars.config.load import config_text
from torchmars.core.console import labelled, unless_done_in
from torchmars.core.device import INTERFACE, backend_of, gpu_name, gpu_type, use
from torchmars.core.errors import (
    EXIT_UNCONNECTED,
    LostRank,
    UserError,
    end_at_once,
    report_failure,
    say_error,
)
from torchmars.core.files import open_to_write
from torchmars.core.words import counted
from torchmars.parallel.layout import Layout

LOOK_SECONDS = 10.0  # how long a new file may take to be seen on other machines

# Facts that all ranks must share.
COMMON = ("code of torchmars", "torch", "config", "data.path")
OWN: dict[str, str] = {}  # variables of the network that this process has set for itself


def open_store() -> dist.Store:
    """Open the store of all ranks: a file on one machine, otherwise hosted by rank 0.

    A process that was started alone has one of its own. Raises `UserError` if the file cannot be
    shared, `LostRank` if rank 0 cannot be reached.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if file := os.environ.get(process.STORE_FILE):
        try:
            store = dist.FileStore(file)
            store.set_timeout(process.start_timeout())
            store.add("opened", 1)  # it locks the file
            return store
        except RuntimeError as error:
            raise UserError(
                f"the ranks cannot share {file} ({str(error).splitlines()[0]}): set TMPDIR to a "
                "folder of this machine's own disk"
            ) from None
    try:
        return next(dist.rendezvous("env://", timeout=process.start_timeout()))[0]
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRank(
            f"rank {process.rank()} on {process.node()} cannot reach rank 0 at {place} "
            f"({str(error).splitlines()[0]}): see what that one says, and whether "
            "the machines may reach each other on any port"
        ) from None


def start(config: ParallelismConfig) -> Layout:
    """Make the process group of all ranks, and return the layout.

    It checks that the network between the ranks carries data. Raises `UserError` if the degrees do
    not make the number of ranks.
    """
    size = process.world_size()
    degrees = config.degrees(size)
    process.allow_open_files()
    if process.alone_on_machine():
        keep_within_machine()
    device, backend = torch.device("cpu"), "gloo"
    if gpu := gpu_type():
        device = torch.device(gpu, process.local_rank())
        backend = f"cpu:gloo,{gpu}:{backend_of(gpu)}"
        use(device)
        # Of every group gloo would connect all ranks with each other, and NCCL carries the data.
        # Where gloo carries them, the death of a rank shows at once on connections that are there.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Collectives that torch's flight recorder keeps, for the watchdog to write.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if dist.is_initialized():
        return Layout.create(device, degrees)
    store = open_store()
    timeout = timedelta(minutes=30)  # NCCL's own 10 would forestall the watchdog
    with _first_traffic():
        rank = process.rank()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        for place in dict.fromkeys((torch.device("cpu"), device)):
            ones = torch.ones(1, device=place)
            dist.all_reduce(ones)
            assert ones.item() == size
        store.set_timeout(timeout)  # groups that are made later use it too
        return Layout.create(device, degrees)


def keep_within_machine() -> None:
    """Keep the ports of this process out of other machines' reach.

    A user who names an interface keeps it.
    """
    if loopback := interface_of("127.0.0.1"):
        of_gpus, form = INTERFACE
        named = {"GLOO_SOCKET_IFNAME": loopback, of_gpus: form.format(loopback)}
        OWN.update({name: value for name, value in named.items() if name not in os.environ})
        os.environ.update(OWN)


@contextlib.contextmanager
def _first_traffic() -> Iterator[None]:
    """Raise `LostRank` where the body, the first traffic between ranks, fails; end a hang by it.

    It has no time limit of its own.
    """

    def lost(reason: str) -> Exception:
        # Without a launcher, which would end others, a program may go on.
        return (LostRank if "RANK" in os.environ else UserError)(
            f"rank {process.rank()} on {process.node()} cannot exchange data with the others "
            f"({reason}): see what they say; set GLOO_SOCKET_IFNAME, for GPUs NCCL_SOCKET_IFNAME "
            "too, to the network interface that connects the machines, or RDZV_TIMEOUT to more"
        )

    def give_up() -> None:
        report_failure(lost(f"nothing has come in {seconds:g} s"))
        end_at_once(EXIT_UNCONNECTED)

    seconds = process.start_timeout().total_seconds()
    try:
        with unless_done_in(seconds, give_up):
            yield
    except RuntimeError as error:
        raise lost(str(error).splitlines()[0]) from None


def stop() -> None:
    """Leave the process group, if there is one, and undo its settings."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in OWN:  # a program that goes on may submit a job of several machines
        os.environ.pop(name, None)
    OWN.clear()


def check_ranks(config: ResolvedConfig, layout: Layout) -> str:
    """Compare the ranks: code, torch, config, data, and whether they share the run's folder.

    Returns a line on the cluster, and another where its devices differ; an empty text for a single
    machine. Raises `UserError` on every rank where the ranks differ, naming the machine. It takes
    the whole config, since all of it must be the same.
    """
    shared, token, fault = config.run.path / ".shared", secrets.token_hex(), ""
    if layout.first:
        fault = write_fault(shared, token)
    own = own_report(config) | {"token": token, "fault": fault}
    ranks = [json.loads(text) for text in gather_texts(json.dumps(own), layout)]
    if not layout.first and process.local_rank() == 0 and not ranks[0]["fault"]:
        fault = share_fault(shared, ranks[0]["token"])
    faults = gather_texts(json.dumps(fault), layout)
    if layout.first:
        with contextlib.suppress(OSError):
            shared.unlink()
    wrong = differing_machines(ranks, [json.loads(text) for text in faults])
    if wrong:
        for line in wrong[:-1] if layout.first else ():
            say_error(line)
        raise UserError(wrong[-1])
    return describe_cluster(ranks)


def gather_texts(text: str, layout: Layout) -> list[str]:
    """Return the texts of all ranks, on each: as bytes, of which nothing is unpickled."""
    own, size = torch.tensor([*text.encode()], dtype=torch.uint8), layout.world.size
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=layout.control)
    longest = max(int(each) for each in lengths)
    padded = torch.nn.functional.pad(own, (0, longest - len(own)))
    found = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(found, padded, group=layout.control)
    return [
        bytes(each[: int(length)].tolist()).decode()
        for each, length in zip(found, lengths, strict=True)
    ]


def own_report(config: ResolvedConfig) -> dict[str, str]:
    """Return this rank's report on itself."""
    manifests = [Path(corpus.path) / "manifest.json" for corpus in config.data.corpora()]
    contents = [file.read_bytes() for file in manifests if file.exists()]
    package = Path(__file__).parents[1]
    code = [
        str(file.relative_to(package)).encode() + file.read_bytes()
        for file in sorted(package.rglob("*.py"))
    ]
    return {
        "node": process.node(),
        "code of torchmars": short_hash(b"".join(code)),
        "torch": torch.__version__,
        "config": short_hash(config_text(config).encode()),
        "data.path": short_hash(b"".join(contents)) if contents else "",
        "device": gpu_name(process.local_rank()),
    }


def short_hash(content: bytes) -> str:
    """Return the beginning of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def write_fault(file: Path, text: str) -> str:
    """Write a file in the run's folder. Return why that cannot be done; empty if it can."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # whatever somebody has left there
        with open(file, "w", opener=open_to_write) as stream:
            stream.write(text)
    except OSError as error:
        return (
            f"cannot write to {file.parent} ({error.strerror}): "
            "set run.folder to a folder that all machines can write"
        )
    return ""


def share_fault(shared: Path, text: str) -> str:
    """Return why the run's folder is not shared with the first machine; empty if it is.

    That one has written `text` to a file there.
    """
    deadline = time.monotonic() + LOOK_SECONDS
    while not (shared.is_file() and shared.read_text() == text):
        if time.monotonic() > deadline:
            return (
                f"does not see what the first machine writes to {shared.parent}: "
                "set run.folder to a file system that all share"
            )
        time.sleep(0.1)
    return ""


def differing_machines(ranks: list[dict[str, str]], faults: list[str]) -> list[str]:
    """Return a line for each machine and each thing that must be the same and is not."""
    first, lines = ranks[0], []
    for rank, fault in zip(ranks, faults, strict=True):
        lines += [
            f"{rank['node']} has another {name} than {first['node']} "
            f"({rank[name] or 'none'} instead of {first[name] or 'none'}): give all the same"
            for name in COMMON
            if rank[name] != first[name]
        ]
        if fault:
            lines.append(f"{rank['node']} {fault}")
    return list(dict.fromkeys(lines))


def describe_cluster(ranks: list[dict[str, str]]) -> str:
    """Return lines on the cluster, with anything unusual; nothing for a single machine."""
    nodes = Counter(rank["node"] for rank in ranks)
    if len(nodes) == 1:
        return ""
    devices = Counter(rank["device"] for rank in ranks)
    counts = counted(max(nodes.values()), "rank")
    names = ", ".join(f"{count} x {device}" for device, count in devices.items())
    some = ", ".join([*nodes][:8] + ["..."] * (len(nodes) > 8))
    text = f"{len(nodes)} machines ({some}), {counts} on each: {names}"
    lines = labelled("cluster", text)
    if len(devices) > 1:
        first = {rank["device"]: rank["node"] for rank in reversed(ranks)}
        places = ", ".join(f"{device} on {first[device]}" for device in devices)
        lines += labelled("warning", f"devices differ, and the slowest sets the pace: {places}")
    return "\n".join(lines)
