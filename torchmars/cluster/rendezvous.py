"""The machines of a run, each with a launcher, as the document at a store that all reach says.

One thread of each launcher makes every call to the store: the calls have no time limit of their
own. The main thread reads the document that the thread saw last, and hands it changes.
"""

import contextlib
import hmac
import math
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from functools import partial

from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from torchmars.cluster import process
from torchmars.cluster.document import ASKS, ENDED, LARGEST, About, Document, largest, read_document
from torchmars.cluster.endpoint import free_port
from torchmars.cluster.environment import Environment, beat_seconds, lost_seconds
from torchmars.cluster.sizes import UsableSizes
from torchmars.core.console import labelled, say
from torchmars.core.errors import UserError

Change = Callable[[Document], None]

LOOK_SECONDS = 0.25  # between two looks at the document
STILL_SECONDS = 1.0  # of a pause between looks that count: this machine may stand still itself
MARGIN_SECONDS = 2.0  # before a machine's time to come is over, it can still form a round
LEAVE_SECONDS = 2.0  # for others that are sent the same signal as one which leaves
BACK_SECONDS = 600.0  # that a machine which beats may take to end its round, and to come back
END_SECONDS = 5.0  # that the store may take at the end, and the others where they meet here
WITHOUT_PLACE = "until it joins after a step, or takes the place of a machine that is lost"


class Machines(RendezvousHandler):
    """This machine among those of a run. Methods raise torch's `RendezvousError`."""

    def __init__(
        self,
        run_id: str,
        environment: Environment,
        sizes: UsableSizes,
        connect: Callable[[], Store] = HashStore,
        holds_store: bool = False,
        address: str = "127.0.0.1",
    ) -> None:
        """The thread opens the store by `connect`.

        `holds_store`: the others meet at this machine, whose `address` they know.
        """
        self.run_id, self.sizes, self.usable = run_id, sizes, sizes.usable
        self.name, self.address, self.holds_store = process.node(), address, holds_store
        self.timeout: float = environment.start_seconds(sizes.per_machine)
        self.join_seconds, self.secret = environment.JOIN_SECONDS, environment.RDZV_TOKEN
        self.connect: Callable[[], Store] = connect
        self.store: Store = HashStore()
        most, lost = sizes.asked.most, environment.LOST_SECONDS
        self.several = most > 1
        self.beat_seconds = beat_seconds(most)
        self.lost = lost_seconds(most) if lost is None else lost or math.inf
        self.me, self.run, self.round = secrets.token_hex(8), -1, -1
        self.spare = False  # others go on without this machine, which waits
        # The launcher's: the last step that the run has reported; what it does wherever it waits.
        self.reached: Callable[[], int] = lambda: 0
        self.heed: Callable[[], None] = lambda: None
        # When this round began, by this machine's own clock, the step by then; how many machines
        # leave, and since when this one knows.
        self.begun, self.begun_at, self.leaving, self.leaving_since = 0.0, 0, 0, 0.0
        # The newest document that the thread has seen, as it lies at the store.
        self.document: Document | None = None
        self.bytes, self.looked, self.last_look = b"", 0.0, time.monotonic()
        self.beats: dict[str, tuple[bytes, int, float]] = {}
        self.live: set[str] = set()  # machines whose beats have ever changed while this one looked
        # Answers of the store, and those that the main thread knows of.
        self.answers, self.heard, self.connected, self.left = 0, 0, False, False
        self.unanswered, self.last_tick = 0.0, time.monotonic()
        self.error: Exception | None = None
        self.work: queue.Queue[tuple[Change, Future[Document]]] = queue.Queue()
        threading.Thread(target=self._serve, name="machines", daemon=True).start()

    def get_backend(self) -> str:
        """See base class."""
        return "torchmars"

    def get_run_id(self) -> str:
        """See base class."""
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the machines of the next round. Raises `UserError` for other sizes."""
        begin, about = time.monotonic(), (self.name, self.address, free_port())
        deadline, self.spare = begin + self.timeout, False
        seen, since = -1, begin  # the round, and when it was first seen
        while True:
            doc, now = self.look(), time.monotonic()
            if doc and self.me in doc.all():
                self.run = doc.run
            if doc and doc.round != seen:
                seen, since = doc.round, now
            if doc and self.run >= 0 and (doc.run != self.run or doc.closed):
                raise RendezvousClosedError(self.ending())
            if doc and self.me in doc.members and doc.round > self.round:
                break
            if doc and self.me in doc.waiting:
                deadline = now + self.timeout
                if not self.spare:
                    self.spare = True
                    say(*labelled("waits", WITHOUT_PLACE))
            elif doc and self.me in doc.here:
                if doc.expected:  # they live, and their ranks have not ended yet
                    deadline = now + self.timeout
                    if now > since + BACK_SECONDS:
                        self.change(partial(self._give_up, number=seen))
                if self._ready(doc, begin):
                    self.change(lambda found: self._form(found, begin))
            else:
                self.change(lambda found: self._arrive(found, about))
            if now > deadline:
                raise RendezvousTimeoutError(self._who_is_missing(doc))
            time.sleep(0.05)
        self.spare, self.round = False, doc.round
        self.begun, self.begun_at = time.monotonic(), self.reached()
        _, address, port = doc.machines[doc.members[0]]
        rank, size = doc.members.index(self.me), len(doc.members)
        shared = PrefixStore(f"{self.run_id}/agents/{doc.round}", self.store)
        return RendezvousInfo(shared, rank, size, RendezvousStoreInfo(address, port))

    def num_nodes_waiting(self) -> int:
        """Return 0 while this round goes on, else 1. Raises `RendezvousClosedError` at its end."""
        if self.is_closed():
            raise RendezvousClosedError(self.ending())
        doc = self.look()
        return int(doc is None or doc.round != self.round)

    def is_closed(self) -> bool:
        """See base class."""
        doc = self.look()
        return doc is not None and self.run >= 0 and (doc.run != self.run or bool(doc.closed))

    def set_closed(self) -> None:
        """See base class."""
        self.close(1, f"{self.name} has given up")

    def shutdown(self) -> bool:
        """Leave the run to the others: an error of one launcher ends it for nobody.

        Returns whether they hear of it. Where they meet at this machine, it waits for their end.
        """
        end = time.monotonic() + END_SECONDS
        with contextlib.suppress(RendezvousError):
            while self.holds_store and self.document and time.monotonic() < end:
                if not {*self.document.all()} - {self.me}:
                    break
                self.look()
                time.sleep(0.05)
            if not self.left and self.connected:
                self.change(lambda doc: doc.drop([self.me], "has ended"), END_SECONDS)
            self.left = True
        return self.left

    def look(self) -> Document | None:
        """Return the newest document. Raises what the thread has met, or that nobody answers."""
        self.heed()
        now = time.monotonic()
        if self.answers != self.heard:
            self.heard, self.unanswered = self.answers, 0.0
        else:
            self.unanswered += min(now - self.last_tick, STILL_SECONDS)
        self.last_tick = now
        # The others count from the last beat that they have seen.
        patience = max(1.0, self.lost - self.beat_seconds) if self.connected else self.timeout
        if self.unanswered > patience and self.error is None:
            text = f"their store has not answered for {patience:g} s"
            text = text if self.connected else f"nobody answers there in {patience:g} s"
            self.error = RendezvousConnectionError(text)
        if self.error is not None:
            raise self.error
        return self.document

    def change(self, how: Change, seconds: float = math.inf) -> Document:
        """Change the document by `how`, unless that changes nothing. Return it then."""
        result: Future[Document] = Future()
        self.work.put((how, result))
        end = time.monotonic() + seconds
        while not result.done():
            self.look()
            if time.monotonic() > end:
                raise RendezvousConnectionError(f"no answer of their store in {seconds:g} s")
            with contextlib.suppress(TimeoutError):
                return result.result(0.05)
        return result.result()

    def change_round(self, how: Change) -> Document:
        """Change the document, unless this machine's round or run has ended. Return it then."""

        def change(doc: Document) -> None:
            if doc.round == self.round and not doc.closed and self.me in doc.members:
                how(doc)

        return self.change(change)

    def leave_after_step(self, signal: str) -> None:
        """Let the ranks of all machines end after a step, so that this machine can leave.

        The run stops where the others meet at it, or are too few.
        """

        def leave(doc: Document) -> None:
            doc.leaving[self.me] = signal
            doc.ask = "stop" if self.holds_store else doc.ask

        if (doc := self.look()) and self.me not in doc.leaving:
            self.change_round(leave)

    def asked(self) -> str:
        """Return how the ranks are to end after a step, and by which signals; empty: not.

        It asks for it where machines leave, or may join: those once a later step was reported than
        before, else they could keep a run from any step.
        """
        doc, now = self.look(), time.monotonic()
        if doc is None or doc.round != self.round:
            return ""
        if len(doc.leaving) != self.leaving:
            self.leaving, self.leaving_since = len(doc.leaving), now
        needs = doc.needs(self.usable)
        if needs != "stop" and now < max(self.begun, self.leaving_since) + LEAVE_SECONDS:
            needs = ""
        late = now >= self.begun + self.join_seconds
        if late and not (needs or doc.ask) and doc.may_grow(self.usable):
            reached = self.reached()
            self.begun_at = min(self.begun_at, reached)  # the run may have gone back
            needs = "memory" if reached > self.begun_at else ""

        def ask(doc: Document) -> None:
            doc.ask = max(doc.ask, needs, key=ASKS.index)

        if ASKS.index(needs) > ASKS.index(doc.ask):
            doc = self.change_round(ask)
        return " ".join([doc.ask, *dict.fromkeys(doc.leaving.values())]) if doc.ask else ""

    def done(self, code: int | None) -> bool:
        """Say that the ranks here have ended as they should; wait for those of the others.

        Their exit code ends the run, or None the round. Returns whether it was so; else another
        thing has ended the round, and the machines meet again.
        """
        doc = self.change_round(lambda doc: doc.finish([self.me], code))
        patience = time.monotonic() + BACK_SECONDS
        while doc.run == self.run and doc.round == self.round and not doc.closed:
            time.sleep(0.05)
            doc = self.look() or doc
            if time.monotonic() > patience:  # the launchers of the rest may hang
                say(f"warning: no end of other machines in {BACK_SECONDS:g} s", error=True)
                doc = self.change_round(lambda doc: doc.finish(doc.members, code))
        if code is None:
            return doc.round == self.round + 1 and self.me not in doc.all()
        return self.is_closed()

    def fail(self, most: int, code: int, what: str) -> bool:
        """Tell all machines that ranks here have failed. Return whether they start again."""
        step = self.reached()
        return not self.change_round(lambda doc: doc.fail(step, most, code, what)).closed

    def end_round(self, why: str) -> None:
        """End this round, for a reason that all machines can tell."""
        self.change_round(lambda doc: doc.end_round(why))

    def close(self, code: int, how: str) -> None:
        """End the run on all machines, unless they go on without this one."""

        def end(doc: Document) -> None:
            if (
                doc.run == self.run
                and not doc.closed
                and (self.me in doc.members or not doc.formed)
            ):
                doc.close(code, how)

        with contextlib.suppress(RendezvousError):
            self.change(end, END_SECONDS)

    def exit_code(self) -> int | None:
        """Return the exit code of this run, where it has ended."""
        doc = self.document
        return doc.code if doc and doc.code_of == self.run else None

    def ending(self) -> str:
        """Return how the run has ended, in words."""
        doc = self.document
        return doc.closed if doc and doc.run == self.run and doc.closed else ENDED

    def change_in_words(self) -> str:
        """Return why this round has ended."""
        doc = self.look()
        if doc is None or self.me not in doc.all():
            return "the other machines go on without this one"
        return doc.why

    def _who_is_missing(self, doc: Document | None) -> str:
        if doc is None or self.round < 0:
            came = doc.names(doc.here) if doc else self.name
            return f"only {came} came in {self.timeout:g} s, and {self.usable[0]} are needed"
        missing = doc.names({*doc.was} - {*doc.here}) or "too many"
        return f"{missing} did not come back in {self.timeout:g} s, nor another machine instead"

    def _arrive(self, doc: Document, about: About) -> None:
        sizes = self.sizes
        bounds = f"NNODES = {sizes.asked} and NGPU = {sizes.per_machine}"
        if self.run < 0 and (doc.closed or (doc.n and not doc.all())):
            doc.begin_run()
        if self.run >= 0 and (doc.closed or doc.run != self.run):
            return
        if doc.bounds not in ("", bounds):
            if self.live & {*doc.all()}:
                raise UserError(
                    f"{self.name} has {bounds}, and the first machine {doc.bounds[:100]}: "
                    "give all machines the same"
                )
            return  # they may all be gone
        if self.me in doc.members:
            if doc.round > self.round:
                return  # the round has just been formed
            doc.end_round(f"ranks on {self.name} have ended")
        doc.bounds = bounds
        doc.arrive(self.me, about)

    def _ready(self, doc: Document, begin: float) -> bool:
        """Return whether the machines that are here may form a round."""
        if doc.formed or doc.expected or not largest(self.usable, len(doc.here)):
            return False
        waited = time.monotonic() >= begin + self.timeout - MARGIN_SECONDS
        return waited or len(doc.here) >= self.usable[-1] or self._goes_on(doc)

    def _goes_on(self, doc: Document) -> bool:
        """Return whether a run goes on, of whose machines one is here or was seen to live."""
        return bool({*doc.was} & {*self.live, self.me, *doc.here})

    def _give_up(self, doc: Document, number: int) -> None:
        """Drop the machines that beat and do not come back: their launchers may hang."""
        if doc.round == number and self.me in doc.here:
            doc.drop(doc.expected, "did not come back")

    def _form(self, doc: Document, begin: float) -> None:
        if self.me not in doc.here or not self._ready(doc, begin):
            return
        if doc.was and not self._goes_on(doc):  # the newcomers at a dead run begin another one
            kept = {name: getattr(doc, name) for name in ("here", "machines", "bounds")}
            doc.begin_run()
            vars(doc).update(kept)
        doc.form(largest(self.usable, len(doc.here)))

    def _serve(self) -> None:
        """Show that this machine lives, look at the document and at the others, until the end."""
        count, due = 0, 0.0
        try:
            while not self.connected:
                try:
                    self.store, self.connected = self.connect(), True
                except RuntimeError:  # nobody listens there yet
                    if self.holds_store:
                        raise
                time.sleep(0 if self.connected else LOOK_SECONDS)
            self.answers = 1
            while not (self.left and self.work.empty()):
                how = None
                with contextlib.suppress(queue.Empty):
                    how, result = self.work.get(timeout=LOOK_SECONDS)
                if time.monotonic() >= due:
                    count, due = count + 1, time.monotonic() + self.beat_seconds
                    self.store.set(key := self._key(self.me), self._sealed(key, str(count)))
                if self.store.check([key := self._key("document")]):
                    self._take(self.store.get(key))
                elif self.bytes:
                    raise RendezvousConnectionError("their store has lost what it knew")
                self._judge()
                if how is not None:
                    result.set_result(self._write(how))
                self.answers += 1
        except RuntimeError as error:  # torch's `DistError`
            self.error = RendezvousConnectionError((str(error) or "no reason").splitlines()[0])
        except Exception as error:
            self.error = error

    def _take(self, stored: bytes) -> None:
        if stored == self.bytes:
            return
        doc, before = read_document(self._opened(self._key("document"), stored)), self.document
        if before and (doc.n <= before.n or doc.round < before.round):
            raise RendezvousStateError("it is older than what this machine has read before")
        if before and (doc.meeting != before.meeting or doc.run < before.run):
            raise RendezvousStateError("it is of other machines than before")
        self.bytes, self.document = stored, doc

    def _write(self, how: Change) -> Document:
        """Change the document at the store by `how`. Return what lies there then."""
        key = self._key("document")
        while True:
            doc = deepcopy(self.document) or Document(secrets.token_hex(8))
            how(doc)
            if doc == self.document:
                return doc
            doc.n, doc.by = doc.n + 1, self.me
            read_document(text := doc.text())  # what others would refuse ends this machine alone
            wanted, old = self._sealed(key, text), self.bytes
            found = self.store.compare_set(key, old.decode(), wanted)
            self.answers += 1  # of many that write at once each has to try again
            if found == old:  # so it answers for a key that is not there any more
                raise RendezvousConnectionError("their store has lost what it knew")
            self._take(found)
            if found == wanted.encode():
                return doc

    def _judge(self) -> None:
        """Drop machines whose beats have not changed for too long, while this machine looked."""
        now, doc = time.monotonic(), self.document
        if doc is None or doc.closed or now - self.last_look < STILL_SECONDS:
            return
        self.looked += min(now - self.last_look, 2 * STILL_SECONDS)
        self.last_look = now
        others = [each for each in doc.all() if each != self.me]
        keys = [self._key(each) for each in others]
        there = bool(keys) and self.store.check(keys)  # to ask for a key that is not there waits
        found = self.store.multi_get(keys) if there else [b""] * len(keys)
        silent = []
        for each, key, stored in zip(others, keys, found, strict=True):
            before, count, at = self.beats.setdefault(each, (b"", -1, self.looked))
            if stored != before and (new := self._beat(key, stored)) > count:
                self.beats[each] = stored, new, self.looked
                if count >= 0:
                    self.live.add(each)
            elif self.looked - at > self.lost:
                silent.append(each)

        if silent:
            self._write(lambda doc: doc.drop(silent, "fell silent"))

    def _beat(self, key: str, stored: bytes) -> int:
        """Return the count of a beat; -1 for what is none."""
        with contextlib.suppress(RendezvousStateError, ValueError):
            return int(self._opened(key, stored)[:15])
        return -1

    def _key(self, name: str) -> str:
        return f"{self.run_id}/machines/{name}"

    def _sealed(self, key: str, text: str) -> str:
        """Return a text as it lies at the store: after its digest, where there is a secret."""
        if self.secret is None:
            return f"- {text}"
        secret = os.fsencode(self.secret)
        return f"{hmac.new(secret, f'{key} {text}'.encode(), 'sha256').hexdigest()} {text}"

    def _opened(self, key: str, stored: bytes) -> str:
        """Return the text that lies at the store. Raises `RendezvousStateError` if it is forged."""
        digest, _, text = stored[: LARGEST + 100].decode(errors="replace").partition(" ")
        if hmac.compare_digest(self._sealed(key, text).encode(), stored):
            return text
        if self.secret is not None:
            why = "it is not signed by the RDZV_TOKEN of this machine"
        elif re.fullmatch("[0-9a-f]{64}", digest):
            why = "it is signed by an RDZV_TOKEN, and this machine has none"
        else:
            why = "it is no document of machines"
        raise RendezvousStateError(why)
