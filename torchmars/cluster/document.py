"""The document on which the machines of a run agree: who is in the round, who waits, who is lost.

It lies as JSON at a store that all reach. A change is a function of it, with no clock and no store.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import AfterValidator, StringConstraints
from torch.distributed.elastic.rendezvous import RendezvousStateError

from torchmars.core.check import Interval, adapter

LARGEST = 1 << 20  # characters of a document
LONGEST = 1000  # characters of a text in it
ENDED = "the run has ended"  # in a way that a rank has told
# How ranks are asked to end after a step. A later one asks for more: that a copy of it is complete
# in memory, or a checkpoint; that the run stops.
ASKS = ("", "memory", "save", "stop")


def harmless(text: str, most: int = LONGEST) -> str:
    """Return a text of another machine as this one may print it, in a line."""
    return "".join(each if each.isprintable() else "?" for each in text[:most])


# What `read_document` believes of a stranger.
Id = Annotated[str, StringConstraints(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Interval(0, 2**53)]
Last = Annotated[int, Interval(-1, 2**53)]
Text = Annotated[str, AfterValidator(harmless)]
Name = Annotated[str, AfterValidator(lambda name: harmless(name, 100))]
Address = Annotated[str, StringConstraints(max_length=300, pattern=r"^[\w.:%-]+$")]
Ask = Annotated[str, StringConstraints(pattern=f"^({'|'.join(ASKS)})$")]
Signal = Annotated[str, StringConstraints(pattern="^[A-Z0-9]{1,20}$")]
About = tuple[Name, Address, Annotated[int, Interval(1, 65_535)]]


@dataclass
class Document:
    """All that the machines agree on. A machine is named by the 16 hex digits of its launcher.

    `meeting` is a name of this store's machines: with `round`, which grows over all runs that meet
    there in turn, it fences what they share. `n` counts changes, and `by` made the last one: no two
    write the same bytes, and nobody reads a document whose `n` is not higher than what it has seen.
    """

    meeting: Id
    n: Count = 0
    by: Text = ""
    run: Count = 0
    round: Count = 0
    bounds: Text = ""  # the numbers of machines and ranks that were asked for, in words
    why: Text = ""  # the round before has ended
    closed: Text = ""  # how the run has ended
    code: Annotated[int, Interval(0, 255)] = 0  # with which it has
    failed_in: Last = -1  # the last round in which ranks failed, the step by then,
    failed_at: Count = 0
    failures: Count = 0  # and how often they have since the run got further
    ask: Ask = ""  # how the ranks of this round are to end after a step
    # Of the round that goes on, in the order of their ranks; none while machines meet.
    members: list[Id] = field(default_factory=list)
    was: list[Id] = field(default_factory=list)  # members of the round before,
    expected: list[Id] = field(default_factory=list)  # who live and have not come back yet
    here: list[Id] = field(default_factory=list)  # have come to the next round
    waiting: list[Id] = field(default_factory=list)  # for a place, while a round goes on
    done: list[Id] = field(default_factory=list)  # members whose ranks have ended as they should
    leaving: dict[Id, Signal] = field(default_factory=dict)  # members sent a signal, and its name
    machines: dict[Id, About] = field(default_factory=dict)  # name, address, free port there

    def all(self) -> list[str]:
        """Return everyone who should live."""
        return [*self.members, *self.expected, *self.here, *self.waiting]

    def names(self, machines: Iterable[str]) -> str:
        """Return the names of machines, in words."""
        return ", ".join(sorted({self.machines[each][0] for each in machines}))

    def text(self) -> str:
        """Return the text of which `read_document` makes this again."""
        return json.dumps(asdict(self))

    def begin_run(self) -> None:
        """Let another run begin, since the one before has ended."""
        new = Document(self.meeting, self.n, run=self.run + 1, round=self.round + 1)
        vars(self).update(vars(new))

    def arrive(self, machine: str, about: About) -> None:
        """Let a machine come to the next round, or wait for a place in this one."""
        self._take_out({machine})
        (self.waiting if self.members else self.here).append(machine)
        known = {*self.all(), *self.was}
        self.machines = {each: it for each, it in self.machines.items() if each in known}
        self.machines[machine] = about

    def form(self, most: int) -> None:
        """Form the round of the first `most` machines that are here.

        First come those of the last round, in their order: they have copies of the run.
        """
        order = [each for each in self.was if each in self.here]
        order += [each for each in self.here if each not in order]
        self.members, self.waiting = order[:most], order[most:] + self.waiting
        self.here, self.expected = [], []

    def end_round(self, why: str) -> None:
        """End the round that goes on: its machines meet again."""
        self.was, self.expected, self.members = self.members, list(self.members), []
        self.here, self.waiting = self.waiting, []
        self.done, self.ask, self.why, self.round = [], "", why[:LONGEST], self.round + 1

    def drop(self, machines: Iterable[str], why: str) -> None:
        """Take machines out. If they were in the round, it ends for the reason `why`."""
        gone = {*machines} & {*self.all()}
        named = f"{self.names(gone & {*self.members, *self.expected})} {why}"
        if gone & {*self.members}:
            self.end_round(named)
        elif gone & {*self.expected}:
            self.why += f", {named}"
        self._take_out(gone)

    def close(self, code: int, how: str) -> None:
        """End the run for all machines."""
        self.closed, self.code = how[:LONGEST], code

    def finish(self, machine: str, code: int | None) -> None:
        """Note that ranks of a member ended well; the last ends the run, without code the round."""
        self.done += {machine} - {*self.done}
        if not {*self.done} >= {*self.members}:
            return
        if code is not None:
            self.close(code, ENDED)
            return
        whys = ((self.leaving, "leaves"), (self.waiting, "joins"))
        self.end_round(", ".join(f"{self.names(each)} {why}" for each, why in whys if each))
        self._take_out({*self.leaving})

    def fail(self, step: int, most: int, code: int, what: str) -> None:
        """Count a failure, once a round, since progress; end the round, or above `most` the run."""
        if self.failed_in != self.round:
            self.failures = 1 if step > self.failed_at else self.failures + 1
            self.failed_in, self.failed_at = self.round, max(step, self.failed_at)
        if self.failures > most:
            self.close(code, what)
        else:
            self.end_round(what)

    def needs(self, usable: Sequence[int]) -> str:
        """Return how the ranks have to end after a step, since machines leave."""
        stay = len(self.members) - len(self.leaving)
        if not self.leaving:
            return ""
        if not largest(usable, stay + len(self.waiting)):
            return "stop"
        # With several, or with one that has no place any more, parts of the copies go.
        return "memory" if len(self.leaving) == 1 and largest(usable, stay) == stay > 0 else "save"

    def _take_out(self, gone: set[str]) -> None:
        for group in (self.members, self.expected, self.here, self.waiting):
            group[:] = [each for each in group if each not in gone]
        self.leaving = {each: name for each, name in self.leaving.items() if each not in gone}


def largest(usable: Sequence[int], machines: int) -> int:
    """Return with how many of so many machines the run goes; 0: with none."""
    return max((each for each in usable if each <= machines), default=0)


def read_document(text: str) -> Document:
    """Return the document in a text. Raises `RendezvousStateError` unless it can be one."""
    try:
        if len(text) > LARGEST:
            raise ValueError
        found: Document = adapter(Document).validate_json(text, strict=True, extra="forbid")
        alone = found.all()
        named = {*alone, *found.was, *found.leaving}
        if not (
            len(alone) == len({*alone})
            and {*found.done} <= {*found.members}
            and named <= found.machines.keys()
        ):
            raise ValueError
        return found
    except ValueError:
        raise RendezvousStateError("it is no document of machines") from None
