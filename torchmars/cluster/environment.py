"""The environment variables that run_train.sh documents, and a job's in their place."""

import math
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torchmars.cluster.scheduler import PARTS, TASKS, VARIABLES, in_batch_job, number_of
from torchmars.cluster.sizes import MinMax, read_bounds
from torchmars.core.check import Interval, make, read_word
from torchmars.core.errors import UserError
from torchmars.core.files import check_writable


@dataclass
class Environment:
    """The variables of run_train.sh, which docs/cluster.md describes, by their names."""

    NGPU: Annotated[int, Interval(1, 1_000)] | None = None
    NNODES: MinMax = MinMax(1, 1)
    NODE_RANK: Annotated[int, Interval(0, 100_000)] | None = None
    RDZV_ENDPOINT: str | None = None
    RDZV_TOKEN: str | None = None
    RDZV_TIMEOUT: Annotated[int, Interval(1, 86_400)] | None = None
    LOST_SECONDS: Annotated[int, Interval(0, 86_400)] | None = None
    JOIN_SECONDS: Annotated[int, Interval(0, 86_400)] = 60
    MAX_RESTARTS: Annotated[int, Interval(0, 1_000_000)] = 0
    LOG_RANK: list[Annotated[int, Interval(0, 1_000)]] = field(default_factory=lambda: [0])
    OMP_NUM_THREADS: Annotated[int, Interval(1, 10_000)] | None = None

    def start_seconds(self, ranks: int) -> int:
        """Return for how long machines with `ranks` ranks each wait for each other at the start."""
        return self.RDZV_TIMEOUT or start_seconds(ranks * self.NNODES.most)


def beat_seconds(machines: int) -> int:
    """Return how often each of so many machines shows that it lives: all write to one place."""
    return max(2, math.ceil(machines / 16))


def lost_seconds(machines: int) -> int:
    """Return after how much silence one of so many machines is lost: three beats, one late."""
    return 3 * beat_seconds(machines) + 2


def start_seconds(ranks: int) -> int:
    """Return for how long ranks wait for each other at the start: many read the same files."""
    return min(600, 45 + ranks // 2)


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Return the variables of run_train.sh, checked.

    A job's variables stand in for those that are not set. Raises `UserError`.
    """
    of_job = VARIABLES if in_batch_job(variables) else {}
    names = Environment.__dataclass_fields__
    sources = {name: name if name in variables else of_job.get(name, name) for name in names}
    given = {
        name: read_variable(name, variables[source], source)
        for name, source in sources.items()
        if source in variables
    }
    environment = Environment(**given)
    fewest, most = environment.NNODES
    if most > 1 and not environment.RDZV_ENDPOINT:
        raise UserError(
            f"{sources['NNODES']} = {environment.NNODES} needs RDZV_ENDPOINT=HOST:PORT, the same "
            "on every machine, HOST being one of them"
        )
    if environment.RDZV_ENDPOINT is not None:
        split_endpoint(environment.RDZV_ENDPOINT)
    if environment.LOST_SECONDS and environment.LOST_SECONDS < (least := lost_seconds(most)):
        raise UserError(
            f"LOST_SECONDS = {environment.LOST_SECONDS} must be 0 or at least {least}: {most} "
            f"machines show every {beat_seconds(most)} s that they live"
        )
    tasks, parts = number_of(variables, TASKS, 1), number_of(variables, PARTS, 1)
    if not of_job and tasks > most == fewest:  # else some are spares
        raise UserError(
            f"{TASKS} = {tasks}, and each of these processes would train apart: start torchmars "
            "train once on each machine, with NNODES and RDZV_ENDPOINT if there are several; or "
            f"unset {TASKS} if this process is alone"
        )
    if of_job and parts > 1:
        raise UserError(f"{PARTS} = {parts}: submit this job without other parts than its first")
    if of_job and fewest < most:  # it may also have lost some
        nodes = number_of(variables, of_job["NNODES"], most)
        environment.NNODES = MinMax(fewest, max(fewest, min(most, nodes)))
    return environment


def read_variable(name: str, value: str, source: str = "") -> Any:
    """Return the variable `name` of run_train.sh, whose text is `value`. Raises `UserError`.

    `source` is the variable that stands in for it.
    """
    source = source or name
    if not value and name != "RDZV_ENDPOINT":
        raise UserError(f"{source} is empty: set it, or unset it for its default")
    if name == "NNODES":
        return read_bounds(value, source)
    if name in ("RDZV_ENDPOINT", "RDZV_TOKEN"):  # of any bytes, and no error repeats a token
        return value
    hint = typing.get_type_hints(Environment, include_extras=True)[name]
    numbers = [read_word(each, int) for each in value.split(",")]
    return make(hint, numbers if name == "LOG_RANK" else read_word(value, int), name=source)


def split_endpoint(endpoint: str, source: str = "RDZV_ENDPOINT") -> tuple[str, int]:
    """Return the HOST and PORT in `source`, also of [HOST]:PORT. Raises `UserError` for others."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.:%-]+):([0-9]{1,5})", endpoint)
    if not found or not 0 < int(found[2]) < 65536:
        raise UserError(
            f"{source} must be HOST:PORT, with a port from 1 to 65535, got {endpoint!r}"
        )
    return found[1].strip("[]"), int(found[2])


def keep_compiled_in(folder: Path, option: str = "run.folder") -> None:
    """Let torch and Triton keep compiled code in `folder`: no restart compiles it again.

    Each kind of CPU has a folder in it: torch (2.13) also takes code that was made for wider
    vectors, and then leaves out half of each row. A variable that is set says where instead. It has
    to come before torch's compiler is imported, which makes the folder. Raises `UserError`, with
    the setting `option`, where it cannot be made.
    """
    from torch.backends.cpu import get_cpu_capability  # torch takes seconds

    name, own = "TORCHINDUCTOR_CACHE_DIR", os.path.abspath(folder / get_cpu_capability().lower())
    os.environ[name] = place = os.environ.get(name) or own
    check_writable(Path(place), option if place == own else name)
    # Of Triton's kernels, which would go to the user's home.
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(place, "triton"))
