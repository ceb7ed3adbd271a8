"""The machines of a run, each with a launcher, as the document at a store that all reach says.

One thread of each makes every call to the store, since no call has a time limit of its own. The
main thread reads the document that it saw last, and hands it changes.
"""

import contextlib
import hmac
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy

from torch.distributed import HashStore, Store
from torch.distributed.elastic import rendezvous as elastic

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


class Machines:
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
        """Open the store by `connect`; with `holds_store` the others meet at this `address`."""
        self.run_id, self.sizes, self.usable = run_id, sizes, sizes.usable
        self.name, self.address, self.holds_store = process.node(), address, holds_store
        self.timeout: float = environment.start_seconds(sizes.per_machine)
        self.join_seconds, self.secret = environment.JOIN_SECONDS, environment.RDZV_TOKEN
        most, lost = sizes.asked.most, environment.LOST_SECONDS
        self.beat_seconds = beat_seconds(most)
        self.lost = lost_seconds(most) if lost is None else lost or math.inf
        self.me, self.run, self.round = secrets.token_hex(8), -1, -1
        self.spare = False  # others go on without this machine, which waits
        # The launcher's: the last step that the run has reported; what it does wherever it waits.
        self.reached: Callable[[], int] = lambda: 0
        self.heed: Callable[[], None] = lambda: None
        # When this round began, and the step by then; how many machines leave, and since when.
        self.begun, self.begun_at, self.leaving, self.leaving_since = 0.0, 0, 0, 0.0
        # Of the thread: the newest document, how it lies at the store, and the others' beats.
        self.connect: Callable[[], Store] = connect
        self.store: Store = HashStore()
        self.connected = self.left = False
        self.document = Document(secrets.token_hex(8))  # proposed, until there is one
        self.bytes, self.looked, self.last_look = b"", 0.0, time.monotonic()
        self.beats: dict[str, tuple[bytes, int, float]] = {}
        self.live: set[str] = set()  # machines whose beats have ever changed while this one looked
        self.error: Exception | None = None
        # Answers of the store, and those that the main thread knows of.
        self.answers, self.heard, self.unanswered, self.last_tick = 0, 0, 0.0, time.monotonic()
        self.work: queue.Queue[tuple[Change, Future[Document]]] = queue.Queue()
        threading.Thread(target=self._serve, name="machines", daemon=True).start()

    def meet(self) -> Document:
        """Wait for the machines of the next round. Raises `UserError` for other sizes."""
        begin, about = time.monotonic(), (self.name, self.address, free_port())
        deadline, self.spare = begin + self.timeout, False
        while True:
            doc, now = self.look(), time.monotonic()
            if self.me in doc.all():
                self.run = doc.run
            if self.is_closed():
                raise elastic.RendezvousClosedError
            if self.me in doc.members and doc.round > self.round:
                break
            if self.me in doc.waiting:
                deadline = now + self.timeout
                if not self.spare:
                    self.spare = True
                    say(*labelled("waits", "until it joins after a step, or one is lost"))
            elif self.me in doc.here:
                if doc.expected:  # they live, and their ranks have not ended yet
                    deadline = min(now, begin + BACK_SECONDS) + self.timeout
                if self._ready(doc, begin):
                    self.change(lambda found: self._form(found, begin))
            else:
                self.change(lambda found: self._arrive(found, about))
            if now > deadline:
                raise elastic.RendezvousTimeoutError(self._who_is_missing(doc))
            time.sleep(0.05)
        self.spare, self.round = False, doc.round
        self.begun, self.begun_at = time.monotonic(), self.reached()
        return doc

    def is_over(self) -> bool:
        """Return whether this round has ended. Raises `RendezvousClosedError` if the run has."""
        if self.is_closed():
            raise elastic.RendezvousClosedError
        return self.document.round != self.round

    def is_closed(self) -> bool:
        """Return whether this run has ended."""
        doc = self.look()
        return self.run >= 0 and (doc.run != self.run or bool(doc.closed))

    def leave(self) -> bool:
        """Leave the run to the others: an error of one launcher ends it for nobody.

        Returns whether they hear of it. Where they meet at this machine, it waits for their end.
        """
        end = time.monotonic() + END_SECONDS
        with contextlib.suppress(elastic.RendezvousError):
            while self.holds_store and {*self.look().all()} - {self.me} and time.monotonic() < end:
                time.sleep(0.05)
            if not self.left and self.connected:
                self.change(lambda doc: doc.drop([self.me], "has ended"), END_SECONDS)
            self.left = True
        return self.left

    def look(self) -> Document:
        """Return the newest document. Raises what the thread has met, or that nobody answers."""
        self.heed()
        now = time.monotonic()
        if self.answers != self.heard:
            self.heard, self.unanswered = self.answers, 0.0
        else:
            self.unanswered += min(now - self.last_tick, STILL_SECONDS)
        self.last_tick = now
        patience, text = self.timeout, "nobody answers there in"
        if self.connected:  # the others count from the last beat that they have seen
            patience = max(1.0, self.lost - self.beat_seconds)
            text = "their store has not answered for"
        if self.unanswered > patience:
            self.error = self.error or elastic.RendezvousConnectionError(f"{text} {patience:g} s")
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
                raise elastic.RendezvousConnectionError("no answer of their store")
            with contextlib.suppress(TimeoutError):
                return result.result(0.05)
        return result.result()

    def change_round(self, how: Change) -> Document:
        """Change the document, unless this machine's round or run has ended. Return it then."""

        def change(doc: Document) -> None:
            if doc.round == self.round and not doc.closed and self.me in doc.members:
                how(doc)

        return self.change(change)

    def asked(self, signal: str = "") -> str:
        """Return how the ranks are to end after a step, and by which signals; empty: not.

        It asks for it where machines leave, as this one by a `signal`, or may join, once a later
        step was reported than before: they could keep a run from any step. The run stops where the
        others meet at the machine that leaves, or are too few.
        """

        def leave(doc: Document) -> None:
            doc.leaving[self.me] = signal
            doc.ask = "stop" if self.holds_store else doc.ask

        doc, now = self.look(), time.monotonic()
        if signal and self.me not in doc.leaving:
            doc = self.change_round(leave)
        if doc.round != self.round:
            return ""
        if len(doc.leaving) != self.leaving:
            self.leaving, self.leaving_since = len(doc.leaving), now
        needs = doc.needs(self.usable)
        if needs != "stop" and now < max(self.begun, self.leaving_since) + LEAVE_SECONDS:
            needs = ""
        late, here = now >= self.begun + self.join_seconds, len(doc.members)
        grows = largest(self.usable, here + len(doc.waiting)) > here
        if late and grows and not (needs or doc.ask):
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
        doc = self.change_round(lambda doc: doc.finish(self.me, code))
        patience = time.monotonic() + BACK_SECONDS
        while doc.run == self.run and doc.round == self.round and not doc.closed:
            time.sleep(0.05)
            doc = self.look()
            if time.monotonic() > patience:  # the launchers of the rest may hang
                raise elastic.RendezvousTimeoutError(f"no end of theirs in {BACK_SECONDS:g} s")
        left = doc.round == self.round + 1 and self.me not in doc.all()
        return left if code is None else self.is_closed()

    def ending(self) -> tuple[int | None, str]:
        """Return the exit code of this run, where it has ended, and how, in words."""
        doc = self.document
        return (doc.code, doc.closed) if doc.run == self.run and doc.closed else (None, ENDED)

    def change_in_words(self) -> str:
        """Return why this round has ended."""
        doc, lost = self.look(), "the other machines go on without this one"
        return doc.why if self.me in doc.all() else lost

    def _who_is_missing(self, doc: Document) -> str:
        if self.round < 0:
            came = doc.names(doc.here) or self.name
            return f"only {came} came in {self.timeout:g} s, and {self.usable[0]} are needed"
        missing = doc.names({*doc.was} - {*doc.here}) or "too many"
        return f"{missing} did not come back in {self.timeout:g} s, nor another machine instead"

    def _arrive(self, doc: Document, about: About) -> None:
        bounds = f"NNODES = {self.sizes.asked} and NGPU = {self.sizes.per_machine}"
        if self.run < 0 and (doc.closed or (doc.n and not doc.all())):
            doc.begin_run()
        ended = self.run >= 0 and (doc.closed or doc.run != self.run)
        others = doc.bounds not in ("", bounds)
        if others and not ended and self.live & {*doc.all()}:
            raise UserError(
                f"{self.name} has {bounds}, and the first machine {doc.bounds[:100]}: "
                "give all machines the same"
            )
        just_formed = self.me in doc.members and doc.round > self.round
        if ended or just_formed or others:  # who may all be gone
            return
        if self.me in doc.members:
            doc.end_round(f"ranks on {self.name} have ended")
        doc.bounds = bounds
        doc.arrive(self.me, about)

    def _ready(self, doc: Document, begin: float) -> bool:
        """Return whether the machines that are here may form a round."""
        if doc.members or doc.expected or not largest(self.usable, len(doc.here)):
            return False
        waited = time.monotonic() >= begin + self.timeout - MARGIN_SECONDS
        return waited or len(doc.here) >= self.usable[-1] or self._goes_on(doc)

    def _goes_on(self, doc: Document) -> bool:
        """Return whether a run goes on, of whose machines one is here or was seen to live."""
        return bool({*doc.was} & {*self.live, self.me, *doc.here})

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
                with contextlib.suppress(*(() if self.holds_store else (RuntimeError,))):
                    self.store, self.connected = self.connect(), True
                time.sleep(0 if self.connected else LOOK_SECONDS)  # nobody listens there yet
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
                    raise elastic.RendezvousConnectionError("their store has lost what it knew")
                self._judge()
                if how is not None:
                    result.set_result(self._write(how))
                self.answers += 1
        except RuntimeError as error:  # torch's `DistError`
            self.error = elastic.RendezvousConnectionError(str(error).partition("\n")[0])
        except Exception as error:
            self.error = error

    def _take(self, stored: bytes) -> None:
        if stored == self.bytes:
            return
        doc, before = read_document(self._opened(self._key("document"), stored)), self.document
        if doc.n <= before.n or doc.round < before.round:
            raise elastic.RendezvousStateError("it is older than what this machine has read before")
        if before.n and (doc.meeting != before.meeting or doc.run < before.run):
            raise elastic.RendezvousStateError("it is of other machines than before")
        self.bytes, self.document = stored, doc

    def _write(self, how: Change) -> Document:
        """Change the document at the store by `how`. Return what lies there then."""
        key = self._key("document")
        while True:
            how(doc := deepcopy(self.document))
            if doc == self.document:
                return doc
            doc.n, doc.by = doc.n + 1, self.me
            read_document(text := doc.text())  # what others would refuse ends this machine alone
            wanted, old = self._sealed(key, text), self.bytes
            found = self.store.compare_set(key, old.decode(), wanted)
            self.answers += 1  # of many that write at once each has to try again
            if found == old:  # so it answers for a key that is not there any more
                raise elastic.RendezvousConnectionError("their store has lost what it knew")
            self._take(found)
            if found == wanted.encode():
                return doc

    def _judge(self) -> None:
        """Drop machines whose beats have not changed for too long, while this machine looked."""
        now, doc = time.monotonic(), self.document
        if doc.closed or now - self.last_look < STILL_SECONDS:
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
        with contextlib.suppress(elastic.RendezvousStateError, ValueError):
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
        _, _, text = stored[: LARGEST + 100].decode(errors="replace").partition(" ")
        if hmac.compare_digest(self._sealed(key, text).encode(), stored):
            return text
        none = "it is no document of machines without an RDZV_TOKEN"
        why = "it is not signed by the RDZV_TOKEN of this machine" if self.secret else none
        raise elastic.RendezvousStateError(why)
