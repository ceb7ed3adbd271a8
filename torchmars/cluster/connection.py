"""Connects the ranks, and compares what must be alike on all of them before any training."""

import contextlib
import hashlib
import json
import os
import secrets
import time
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
from torchmars.core.device import INTERFACE, gpu_type
from torchmars.core.errors import (
    EXIT_UNCONNECTED,
    LostRank,
    UserError,
    end_at_once,
    file_errors,
    report_failure,
)
from torchmars.core.files import open_to_write
from torchmars.parallel.layout import Layout

LOOK_SECONDS = 10.0  # how long a new file may take to be seen on other machines
LONGEST = 2000  # bytes of a rank's report on itself
COMMON = ("code of torchmars", "torch", "config", "data.path")  # to all ranks
OWN: dict[str, str] = {}  # variables of the network that this process has set for itself


def open_store() -> dist.Store:
    """Open the store of all ranks: a file on one machine, otherwise hosted by rank 0.

    Raises `LostRank` if that cannot be reached, `UserError` if a variable is not set.
    """
    if "RANK" not in os.environ:
        return dist.HashStore()
    if file := os.environ.get(process.STORE_FILE):
        store = dist.FileStore(file)
        store.set_timeout(process.start_timeout())
        return store
    try:
        return next(dist.rendezvous("env://", timeout=process.start_timeout()))[0]
    except ValueError as error:  # in torch's words
        raise UserError(f"RANK is set, and not all that torchrun sets with it: {error}") from None
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRank(
            f"rank {process.rank()} on {process.node()} cannot reach rank 0 at {place} "
            f"({str(error).splitlines()[0]}): see what that one says, and whether the machines may "
            "reach each other on any port"
        ) from None


def start(config: ParallelismConfig) -> Layout:
    """Make the process group of all ranks, try its network, and return the layout.

    Raises `UserError` if the degrees do not make the number of ranks.
    """
    size = process.world_size()
    degrees = config.degrees(size)
    process.allow_open_files()
    if process.alone_on_machine():
        keep_within_machine()
    device, backend = torch.device("cpu"), "gloo"
    if gpu := gpu_type():
        device = torch.device(gpu, process.local_rank())
        backend = f"cpu:gloo,{gpu}:{dist.get_default_backend_for_device(gpu)}"
        torch.get_device_module(device).set_device(device)
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
    """Keep this process's ports out of other machines' reach, unless an interface is named."""
    if loopback := interface_of("127.0.0.1"):
        named = {"GLOO_SOCKET_IFNAME": loopback, INTERFACE[0]: INTERFACE[1].format(loopback)}
        OWN.update({name: value for name, value in named.items() if name not in os.environ})
        os.environ.update(OWN)


@contextlib.contextmanager
def _first_traffic() -> Iterator[None]:
    """Raise `LostRank` where the body, the first traffic between ranks, fails; end a hang by it."""

    def lost(reason: str) -> Exception:
        # Without a launcher, which would end others, a program may go on.
        return (LostRank if "RANK" in os.environ else UserError)(
            f"rank {process.rank()} on {process.node()} cannot exchange data with the others "
            f"({reason}): see what they say; set GLOO_SOCKET_IFNAME, for GPUs NCCL_SOCKET_IFNAME "
            "too, to the network interface that connects the machines, or RDZV_TIMEOUT to more"
        )

    seconds = process.start_timeout().total_seconds()

    def give_up() -> None:
        report_failure(lost(f"nothing has come in {seconds:g} s"))
        end_at_once(EXIT_UNCONNECTED)

    try:
        with unless_done_in(seconds, give_up):
            yield
    except RuntimeError as error:
        raise lost(str(error).splitlines()[0]) from None


def stop() -> None:
    """Leave the process group, if there is one; a program may go on to jobs of several machines."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while OWN:
        os.environ.pop(OWN.popitem()[0], None)


def check_ranks(config: ResolvedConfig, layout: Layout) -> str:
    """Compare the ranks: code, torch, config, data, and whether they share the run's folder.

    Returns a line on the cluster; an empty text for a single machine. Raises `UserError` on every
    rank where the ranks differ, naming the machine.
    """
    ranks = [json.loads(text) for text in gather_texts(json.dumps(own_report(config)), layout)]
    first = ranks[0]
    for rank in ranks:
        for name in COMMON:
            if rank[name] != first[name]:
                raise UserError(
                    f"{rank['node']} has another {name} than {first['node']} "
                    f"({rank[name] or 'none'} instead of {first[name] or 'none'}): give all the "
                    "same"
                )
    check_shared(config.run.path / ".shared", first["token"], layout)
    nodes = [*dict.fromkeys(rank["node"] for rank in ranks)]
    if len(nodes) == 1:
        return ""
    some = ", ".join(nodes[:8] + ["..."] * (len(nodes) > 8))
    return "\n".join(labelled("cluster", f"{len(ranks)} ranks on {len(nodes)} machines: {some}"))


def gather_texts(text: str, layout: Layout) -> list[str]:
    """Return the texts of all ranks, on each: as `LONGEST` bytes, of which nothing is unpickled."""
    own = torch.tensor([*text.encode().ljust(LONGEST)], dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(layout.world.size)]
    dist.all_gather(found, own, group=layout.control)
    return [bytes(each.tolist()).decode() for each in found]


def own_report(config: ResolvedConfig) -> dict[str, str]:
    """Return this rank's report on itself."""

    def hashed(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()[:12]

    manifests = [Path(corpus.path) / "manifest.json" for corpus in config.data.corpora()]
    contents = [file.read_bytes() for file in manifests if file.exists()]
    files, root = sorted(Path(__file__).parents[1].rglob("*.py")), process.ROOT
    code = [str(file.relative_to(root)).encode() + file.read_bytes() for file in files]
    return {
        "node": process.node()[:100],
        "code of torchmars": hashed(b"".join(code)),
        "torch": torch.__version__,
        "config": hashed(config_text(config).encode()),
        "data.path": hashed(b"".join(contents)) if contents else "",
        "token": secrets.token_hex(),
    }


def check_shared(file: Path, text: str, layout: Layout) -> None:
    """Raise `UserError` on all ranks unless each sees the file to which the first writes `text`."""

    def write() -> None:
        remedy = "set run.folder to a folder that all machines can write"
        with file_errors(f"{process.node()} cannot write to {file.parent}", remedy):
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "w", opener=open_to_write) as stream:
                stream.write(text)

    def find() -> None:
        deadline = time.monotonic() + LOOK_SECONDS
        while not (file.is_file() and file.read_text() == text):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{process.node()} does not see what the first machine writes to "
                    f"{file.parent}: set run.folder to a file system that all share"
                )
            time.sleep(0.1)

    layout.only_first(write)
    try:
        layout.on_all(find)
    finally:
        if layout.first:
            file.unlink(missing_ok=True)
