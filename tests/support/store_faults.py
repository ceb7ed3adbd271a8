"""Faults of a store, for its proxy: what each kind makes of a request, and when it does."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.store import Answer, Proxy, Request
from torchmars.storage.storage import MANIFEST

STAGES = "start", "load", "save"  # of a process; the second begins with its owner

Passed = Callable[[], Answer]


def gets_object(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.path


def puts_file(request: Request) -> bool:
    return request.method == "PUT" and "/step-" in request.path


def gets_listing(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.path


def error(status: int, code: str) -> Answer:
    return status, [], f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def flipped(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))] if content else content


class Spoil:
    """What the kinds of faults make of a request."""

    def __init__(self, proxy: Proxy, rng: random.Random) -> None:
        self.proxy, self.rng = proxy, rng
        self.kill: Callable[[bool], None]
        """Kills the launcher of the run under way, or else one of its ranks."""

    def fail(self, request: Request, passed: Passed) -> Answer | None:
        return self.rng.choice([error(500, "InternalError"), error(503, "SlowDown")])

    def slow(self, request: Request, passed: Passed) -> Answer | None:
        time.sleep(self.rng.uniform(0.2, 1.0))
        return passed()

    def expire(self, request: Request, passed: Passed) -> Answer | None:
        return error(403, "ExpiredToken")

    def cut_get(self, request: Request, passed: Passed) -> Answer | None:
        status, headers, content = passed()
        return status, headers, cut(content, self.rng)

    def alter_get(self, request: Request, passed: Passed) -> Answer | None:
        status, headers, content = passed()
        return status, headers, flipped(content, self.rng)

    def cut_put(self, request: Request, passed: Passed) -> Answer | None:
        """The connection is cut before or after the store has it all. Or it keeps the half."""
        how = self.rng.randrange(3)
        if how == 0:
            request.body = cut(request.body, self.rng)
        if how < 2:
            answer = passed()
        return answer if how == 0 else None

    def alter_put(self, request: Request, passed: Passed) -> Answer | None:
        """The store finds that the checksum is another one, as S3 does, or keeps what came."""
        if self.rng.random() < 0.5:
            return error(400, "BadDigest")
        request.body = flipped(request.body, self.rng)
        return passed()

    def refuse(self, request: Request, passed: Passed) -> Answer | None:
        self.proxy.refuse()
        return None

    def kill_launcher(self, request: Request, passed: Passed) -> Answer | None:
        return self.kill_at(True, passed)

    def kill_rank(self, request: Request, passed: Passed) -> Answer | None:
        return self.kill_at(False, passed)

    def kill_at(self, launcher: bool, passed: Passed) -> Answer | None:
        """Before or after the store has what the request brings."""
        after = self.rng.random() < 0.5
        answer = passed() if after else None
        self.kill(launcher)
        return answer


@dataclass(frozen=True)
class Kind:
    """A kind of faults."""

    name: str
    spoil: str
    """Its method of `Spoil`."""
    hits: Callable[[Request], bool] = lambda request: True
    seconds: tuple[float, float] = (10.0, 10.0)
    """How long it goes on at most, from ... to ..."""
    requests: tuple[int, int] = (10**6, 10**6)
    """How many requests it spoils at most."""
    stages: tuple[str, ...] = STAGES


KINDS = [
    Kind("500 or 503", "fail", seconds=(0.1, 6.0)),
    Kind("slow answers", "slow", seconds=(1.0, 5.0)),
    Kind("GET cut short", "cut_get", gets_object, requests=(1, 40), stages=("load", "save")),
    Kind("GET altered", "alter_get", gets_object, requests=(1, 40), stages=("load", "save")),
    Kind("listing altered", "alter_get", gets_listing, requests=(1, 2)),
    Kind("PUT cut short", "cut_put", puts_file, requests=(1, 3), stages=("save",)),
    Kind("PUT altered", "alter_put", puts_file, requests=(1, 1), stages=("save",)),
    Kind("refused for a moment", "refuse", seconds=(0.2, 1.5)),
    Kind("refused for long", "refuse", seconds=(4.0, 9.0)),
    Kind("expired credentials", "expire", seconds=(0.1, 6.0)),
    Kind("killed rank", "kill_rank", requests=(1, 1), stages=("load", "save")),
    Kind("killed launcher", "kill_launcher", requests=(1, 1)),
]


@dataclass
class Fault:
    """A fault that waits for its moment, or goes on."""

    kind: Kind
    stage: str
    """Of the process, in which it begins."""
    start: int
    """Which of the starts it waits for."""
    number: int
    """With which of the requests that it hits there."""
    seconds: float
    requests: int
    seen: int = 0
    spoiled: int = 0
    began: float | None = None
    counted: bool = False
    published: int | None = None
    """How many checkpoints had been published when it was first seen to be over."""

    def over(self) -> bool:
        """Whether it began, and has ended."""
        return self.began is not None and (
            self.spoiled >= self.requests or time.monotonic() - self.began >= self.seconds
        )


@dataclass
class Faults:
    """The proxy's fault: lets one `Fault` at a time hit what passes, and watches what does."""

    spoil: Spoil
    fault: Fault | None = None
    start: int = 0
    """How many starts there were, and to which stage the last one has come."""
    stage: str = STAGES[0]
    published: int = 0
    bad: set[str] = field(default_factory=set)
    """Objects that the store has otherwise than the run has sent them."""
    errors: list[Exception] = field(default_factory=list)
    timer: threading.Timer | None = None
    """Ends refused connections."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request, passed: Passed) -> Answer | None:
        sent = request.body

        def passing() -> Answer:
            answer = passed()
            if request.method == "PUT" and answer[0] < 300:
                self.note(request, sent)
            return answer

        with self.lock:
            self.follow(request)
            fault = self.hitting(request)
        if fault is None:
            return passing()
        try:
            answer = getattr(self.spoil, fault.kind.spoil)(request, passing)
        except OSError:
            raise
        except Exception as error:  # of this test
            self.errors.append(error)
            raise
        if fault.kind.spoil == "refuse":
            self.timer = threading.Timer(fault.seconds, self.spoil.proxy.accept)
            self.timer.start()
        return answer

    def follow(self, request: Request) -> None:
        """Note which stage the run has come to."""
        if puts_file(request):
            self.stage = "save"
        elif request.method == "PUT" and self.stage == "start":
            self.stage = "load"

    def hitting(self, request: Request) -> Fault | None:
        """The fault that this request suffers."""
        fault = self.fault
        if fault is None or fault.over() or not fault.kind.hits(request):
            return None
        if fault.start > self.start:
            return None
        if fault.began is None:
            late = STAGES.index(self.stage) - STAGES.index(fault.stage)
            fault.seen += late == 0
            if late < 0 or (late == 0 and fault.seen < fault.number):
                return None
            fault.began = time.monotonic()
        elif fault.kind.spoil == "refuse":
            return None  # it was on its way before
        fault.spoiled += 1
        return fault

    def note(self, request: Request, sent: bytes) -> None:
        """Note what the store has now. A size that is wrong the run must notice by itself."""
        with self.lock:
            manifest = request.path.endswith(f"/{MANIFEST}")
            same = request.body == sent
            if not same and (manifest or len(request.body) == len(sent)):
                self.bad.add(request.path)
            else:
                self.bad.discard(request.path)
            self.published += manifest and same
