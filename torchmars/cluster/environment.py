"""The environment variables that run_train.sh documents, and a job's in their place."""

import math
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torchmars.cluster.scheduler import (
    CORES,
    PARTS,
    RESTARTS,
    VARIABLES,
    in_batch_job,
    number_of,
)
from torchmars.cluster.sizes import MinMax, read_bounds
from torchmars.core.check import Range, make, whole_number
from torchmars.core.errors import UserError
from torchmars.core.files import check_writable, own_cores

Cores = Annotated[int, Range(1, 10_000)]
# The variables by which those who start several copies of a program say how many: srun, the
# launchers of Open MPI, of MPICH and Intel MPI, and of MVAPICH, Kubeflow's Trainer, torchrun.
COPIES = (
    "SLURM_STEP_NUM_TASKS",  # SLURM_NTASKS is also that of the shell which salloc starts, once
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PET_NNODES",
    "WORLD_SIZE",
)


@dataclass
class Environment:
    """The variables of run_train.sh, by their names."""

    NGPU: Annotated[int, Range(1, 1_000)] | None = None
    """Ranks on this machine. Default: one for each GPU, 2 on a machine without."""
    NNODES: MinMax = MinMax(1, 1)
    """Machines: a number, or MIN:MAX, between which it may change while the run goes on."""
    NODE_RANK: Annotated[int, Range(0, 100_000)] | None = None
    """Number of this machine. Default: found out."""
    RDZV_ENDPOINT: str | None = None
    """HOST:PORT of the rendezvous. One machine alone needs none."""
    RDZV_TOKEN: str | None = None
    """Secret of the machines, the same on all, by which they know each other."""
    RDZV_TIMEOUT: Annotated[int, Range(1, 86_400)] | None = None
    """Seconds that machines and ranks wait for each other at the start. Default: by their number.
    """
    LOST_SECONDS: Annotated[int, Range(0, 86_400)] | None = None
    """Seconds of silence after which a machine is lost; 0: never. Default: by their number."""
    JOIN_SECONDS: Annotated[int, Range(0, 86_400)] = 60
    """Seconds from a change of the machines until those that come are taken in."""
    MAX_RESTARTS: Annotated[int, Range(0, 1_000_000)] = 0
    """Times that all ranks are started again after one has died, without progress between."""
    LOG_RANK: list[Annotated[int, Range(0, 1_000)]] = field(default_factory=lambda: [0])
    """Ranks of this machine whose output is shown."""
    OMP_NUM_THREADS: Cores | None = None
    """CPU threads of each rank. Default: the machine's cores over its ranks."""

    def check(self, nodes: str = "NNODES") -> None:
        """Raise `UserError` if the variables do not go together.

        `nodes` is the one that says how many machines there are.
        """
        machines = self.NNODES.most
        if machines > 1 and not self.RDZV_ENDPOINT:
            raise UserError(
                f"{nodes} = {self.NNODES} needs RDZV_ENDPOINT=HOST:PORT, the same on "
                "every machine, HOST being one of them"
            )
        if self.RDZV_ENDPOINT is not None:
            split_endpoint(self.RDZV_ENDPOINT)
        if self.LOST_SECONDS and self.LOST_SECONDS < (least := lost_seconds(machines)):
            raise UserError(
                f"LOST_SECONDS = {self.LOST_SECONDS} must be 0 or at least {least}: "
                f"{machines} machines show every {beat_seconds(machines)} s that they live"
            )
        if self.NODE_RANK is not None and (self.NNODES.elastic or self.NODE_RANK >= machines):
            raise UserError(
                f"NODE_RANK = {self.NODE_RANK} has no meaning with {nodes} = {self.NNODES}: "
                "machines are numbered from 0, and those that come and go are not"
            )

    def rank_variables(self, ranks: int, cores: int) -> dict[str, str]:
        """Return the variables that the ranks of this machine, which has `cores`, get."""
        threads = self.OMP_NUM_THREADS or max(1, cores // ranks)
        seconds = self.start_seconds(ranks)
        return {"RDZV_TIMEOUT": str(seconds), "OMP_NUM_THREADS": str(threads)}

    def start_seconds(self, ranks: int) -> int:
        """Return for how long machines with `ranks` ranks each wait for each other at the start."""
        return self.RDZV_TIMEOUT or start_seconds(ranks * self.NNODES.most)


def beat_seconds(machines: int) -> int:
    """Return how often each of so many machines shows that it lives: all write to one place."""
    return max(2, math.ceil(machines / 16))


def lost_seconds(machines: int) -> int:
    """Return after how many seconds of silence one of so many machines is lost, by default.

    It is three beats, of which the last may come late.
    """
    return 3 * beat_seconds(machines) + 2


def start_seconds(ranks: int) -> int:
    """Return for how long `ranks` ranks wait for each other at the start, by default.

    Many are slow to start and to connect: they read the same files, and each connects to others.
    """
    return min(600, 45 + ranks // 2)


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return the variables of run_train.sh, checked.

    A job's variables stand in for those that are not set. Raises `UserError`.
    """
    of_job = VARIABLES if in_batch_job(variables) else {}
    names = Environment.__dataclass_fields__
    sources = {name: name if name in variables else of_job.get(name, name) for name in names}
    environment = Environment(
        **{
            name: read_variable(name, variables[source], source)
            for name, source in sources.items()
            if source in variables
        }
    )
    environment.check(sources["NNODES"])
    if of_job and (parts := number_of(variables, PARTS, 1)) > 1:
        raise UserError(
            f"{PARTS} = {parts}: the machines of a run are all in one part of a job: "
            "submit it without the others"
        )
    most = environment.NNODES.most
    nodes = number_of(variables, of_job["NNODES"], most) if of_job else most
    if number_of(variables, RESTARTS, 0) and environment.NNODES.fewest <= nodes < most:
        environment.NNODES = MinMax(environment.NNODES.fewest, nodes)  # it had lost some
    elif environment.NNODES.elastic and most > nodes:
        raise UserError(
            f"NNODES = {environment.NNODES} is more than the {nodes} nodes of this job: submit it "
            f"with --nodes={most}, or lower NNODES"
        )
    return environment


def check_copies(variables: Mapping[str, str], machines: MinMax | None = None) -> None:
    """Raise `UserError` if something has started more copies of this process than `machines`.

    They know nothing of each other: each would train all by itself. By default there is one
    machine. Where machines come and go, those above their number are spares.
    """
    most = machines.most if machines else 1
    for name in () if machines and machines.elastic else COPIES:
        count = whole_number(variables.get(name, "").rpartition(":")[2])
        if name == "WORLD_SIZE" and most > 1:
            continue  # it may count ranks
        if isinstance(count, int) and count > most:
            raise UserError(
                f"{name} = {variables[name]} tells of {count} processes like this one, and each "
                "would work apart: start torchmars train once on each machine, with NNODES and "
                "RDZV_ENDPOINT if there are several, or ranks by torchrun; or unset "
                f"{name} if this process is alone"
            )


def read_variable(name: str, value: str, source: str = "") -> Any:
    """Return the variable `name` of run_train.sh, whose text is `value`.

    `source` is the variable that stands in for it. Raises `UserError` for a text of another type,
    or out of bounds.
    """
    hint = typing.get_type_hints(Environment, include_extras=True)[name]
    source = source or name
    if not value and name != "RDZV_ENDPOINT":
        raise UserError(f"{source} is empty: set it, or unset it for its default")
    if name == "NNODES":
        return read_bounds(value, source)
    if name in ("RDZV_ENDPOINT", "RDZV_TOKEN"):  # of any bytes, and no error repeats a token
        return value
    if name != "LOG_RANK":
        return make(hint, whole_number(value), name=source)
    numbers = [whole_number(each) for each in value.split(",")]
    if not all(isinstance(each, int) for each in numbers):
        raise UserError(f"{source} must be numbers of a machine's ranks, as 0,1, got {value!r}")
    return make(hint, numbers, name=source)


def split_endpoint(endpoint: str, source: str = "RDZV_ENDPOINT") -> tuple[str, int]:
    """Return the HOST and PORT in `source`, also of [HOST]:PORT. Raises `UserError` for others."""
    host, _, port = endpoint.rpartition(":")
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+(%\w+)?\]", host):  # as in URLs
        host = host[1:-1]
    try:
        known = bool(re.fullmatch(r"[\w.:%-]+", host) and host.encode("idna"))
    except UnicodeError:  # a part that is empty or too long
        known = False
    if not (known and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise UserError(
            f"{source} must be HOST:PORT, with a port from 1 to 65535, got {endpoint!r}"
        )
    return host, int(port)


def check_shown(shown: list[int], ranks: int, source: str = "LOG_RANK") -> None:
    """Raise `UserError` if `source` names a rank that a machine of `ranks` ranks has not."""
    if max(shown) >= ranks:
        raise UserError(
            f"{source} must be numbers of a machine's ranks, below {ranks}, got {max(shown)}"
        )


def keep_compiled_in(folder: Path, option: str = "run.folder") -> None:
    """Let torch and Triton keep compiled code in `folder`: no restart compiles it again.

    Each kind of CPU has a folder in it. torch (2.13) also takes code whose loops were made for
    wider vectors than this CPU has, and they then leave out half of each row.

    A variable that is set already says where instead. It is for this process and those that it
    starts, and has to come before torch's compiler is imported, which sets the variable too.
    That import also makes the folder, so `UserError` is raised here where it cannot be made;
    `option` is the setting that names another one.
    """
    from torch.backends.cpu import get_cpu_capability  # torch takes seconds

    name, own = "TORCHINDUCTOR_CACHE_DIR", os.path.abspath(folder / get_cpu_capability().lower())
    place = os.environ.get(name) or own
    check_writable(Path(place), option if place == own else name)
    os.environ[name] = place
    # Of Triton's kernels, which would go to the user's home.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(place, "triton"))


def cores_of(variables: Mapping[str, str]) -> int:
    """Return the CPU cores here that the job, or else this process, may use. Raises `UserError`."""
    if in_batch_job(variables) and variables.get(CORES):
        return make(Cores, whole_number(variables[CORES]), name=CORES)
    return own_cores()
