"""The document of the machines, and its changes: no clock, no store."""

import json
import random
from dataclasses import asdict

import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError

from torchmars.cluster.document import LARGEST, Document, read_document

IDS = [f"{number:016x}" for number in range(9)]


def document(members=3, waiting=0, **parts):
    """A document of a round of some machines, m0 and so on."""
    made = Document("f" * 16, round=4)
    made.members, made.waiting = IDS[:members], IDS[members : members + waiting]
    made.machines = {each: (f"m{n}", f"10.0.0.{n}", 4000 + n) for n, each in enumerate(IDS)}
    vars(made).update(parts)
    return made


def test_a_round_has_the_machines_of_the_last_one_first_and_in_their_order():
    """Rank 0 stays where it was, unless that machine is lost; the rest are spares."""
    doc = document(members=3, waiting=2)
    doc.drop([IDS[1]], "fell silent")
    assert (doc.round, doc.members, doc.why) == (5, [], "m1 fell silent")
    assert doc.expected == [IDS[0], IDS[2]] and doc.here == IDS[3:5]
    for each in (IDS[2], IDS[0]):
        doc.arrive(each, doc.machines[each])
    doc.form(3)
    assert doc.members == [IDS[0], IDS[2], IDS[3]] and doc.waiting == [IDS[4]]


def test_a_second_loss_while_machines_meet_is_told_with_the_first():
    doc = document()
    doc.drop([IDS[1]], "fell silent")
    doc.drop([IDS[2]], "has ended")
    assert doc.why == "m1 fell silent, m2 has ended" and doc.round == 5
    doc.drop([IDS[7]], "fell silent")  # no machine of this run
    assert doc.expected == [IDS[0]] and doc.round == 5


def test_failures_count_once_a_round_and_again_with_progress():
    doc = document()
    for step, failures in ((7, 1), (7, 2), (8, 1), (8, 2), (8, 3)):
        doc.fail(step, 2, 9, "rank 1 failed")
        assert doc.failures == failures
        assert bool(doc.closed) == (failures > 2)
        doc.members = IDS[:3]
    assert doc.code == 9 and doc.closed == "rank 1 failed"


@pytest.mark.parametrize("most", [0, 1])
def test_a_rank_that_ended_in_an_endless_line_is_told_of(most):
    """As a bar that a program of the user's has drawn over itself."""
    doc = document()
    doc.fail(0, most, 1, "\r 99%" * LARGEST)
    assert read_document(doc.text()).closed or doc.round == 5


def test_the_last_machine_that_is_done_ends_the_run_or_the_round():
    doc = document()
    for each in IDS[:3]:
        assert not doc.closed
        doc.finish(each, 75)
    assert doc.closed and doc.code == 75
    doc = document(waiting=1, leaving={IDS[1]: "SIGTERM"}, ask="memory")
    for each in IDS[:3]:
        doc.finish(each, None)
    assert doc.why == "m1 leaves, m3 joins" and not doc.ask and not doc.leaving
    assert doc.expected == [IDS[0], IDS[2]] and doc.here == [IDS[3]]


@pytest.mark.parametrize(
    "usable,members,waiting,leaving,needs",
    [
        ([1, 2, 3], 3, 0, 1, "memory"),
        ([1, 2, 3], 2, 0, 1, "memory"),
        ([1, 2, 3], 1, 0, 1, "stop"),
        ([1, 2, 3], 1, 1, 1, "save"),  # that one has no part of a copy
        ([1, 3], 3, 0, 1, "save"),  # one of the two that stay will have no place
        ([2, 3], 2, 0, 1, "stop"),
        ([2, 3], 2, 1, 1, "save"),
        ([1, 2, 3], 3, 0, 2, "save"),
        ([1, 2, 3], 3, 0, 3, "stop"),
        ([1, 2, 3], 3, 0, 0, ""),
    ],
)
def test_how_the_others_go_on_without_machines(usable, members, waiting, leaving, needs):
    leave = dict.fromkeys(IDS[:leaving], "SIGTERM")
    assert document(members, waiting, leaving=leave).needs(usable) == needs


def test_another_run_begins_where_one_has_ended():
    doc = document(closed="the run has ended", code=75, n=40)
    doc.begin_run()
    assert (doc.n, doc.run, doc.round) == (40, 1, 5)
    assert not doc.closed and not doc.all() and doc.meeting == "f" * 16


GOOD = asdict(document(waiting=1))
HOSTILE = {
    "nothing": "",
    "text": "hello",
    "a list": "[]",
    "a number": "7",
    "cut short": json.dumps(GOOD)[:-9],
    "too long": " " * 2**21,
    "a deep list": "[" * 100_000,
    "a large number": '{"n": ' + "9" * 10_000 + "}",
    "a part too many": GOOD | {"more": 1},
    "a round of text": GOOD | {"round": "1"},
    "a round that is true": GOOD | {"round": True},
    "a round of a fraction": GOOD | {"round": 1.0},
    "a round before the first": GOOD | {"round": -1},
    "a round too large": GOOD | {"round": 2**60},
    "no exit code": GOOD | {"code": 256},
    "no name of a meeting": GOOD | {"meeting": "a\0"},
    "an unknown question": GOOD | {"ask": "rm"},
    "a member of another list": GOOD | {"here": IDS[:1]},
    "a member twice": GOOD | {"members": [IDS[0], IDS[0]]},
    "an unknown member": GOOD | {"members": ["e" * 16]},
    "a member that is a list": GOOD | {"members": [[IDS[0]]]},
    "no member is done": GOOD | {"done": [IDS[3]]},
    "a machine without an address": GOOD | {"machines": GOOD["machines"] | {IDS[0]: ["m0"]}},
    "an address of words": GOOD | {"machines": GOOD["machines"] | {IDS[0]: ["m", "a b", 4000]}},
    "a port of text": GOOD | {"machines": GOOD["machines"] | {IDS[0]: ["m", "a", "4000"]}},
    "a port too large": GOOD | {"machines": GOOD["machines"] | {IDS[0]: ["m", "a", 10**6]}},
    "no name of a machine": GOOD | {"machines": {"m0": ["m0", "a", 4000]}},
    "a signal with a line": GOOD | {"leaving": {IDS[0]: "A\nB"}},
    "a signal of nobody": GOOD | {"leaving": {"e" * 16: "SIGTERM"}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_text_that_is_no_document_is_refused(case):
    value = HOSTILE[case]
    with pytest.raises(RendezvousStateError, match="it is no document of machines"):
        read_document(value if isinstance(value, str) else json.dumps(value))


def test_what_others_write_is_a_document_or_refused():
    """Random values in random places, of which nothing else comes than these two."""
    chance, read = random.Random(0), 0
    values = [
        None,
        True,
        -1,
        0,
        2**70,
        0.5,
        "",
        "x",
        "\x1b[2J\n",
        "\ud800",
        IDS[0],
        [],
        [IDS[1]],
        {},
    ]
    for _ in range(300):
        raw = json.loads(json.dumps(GOOD))
        for _ in range(chance.randint(1, 3)):
            place = chance.choice(
                [raw, *[each for each in raw.values() if each and type(each) is dict]]
            )
            place[chance.choice([*place])] = chance.choice(values)
        try:
            doc = read_document(json.dumps(raw))
        except RendezvousStateError:
            continue
        read += 1
        texts = [doc.why, doc.closed, doc.bounds, doc.by, doc.names(doc.all())]
        assert all(text.isprintable() for text in texts)
    assert 0 < read < 300


def test_a_document_is_read_as_it_was_written():
    doc = document(waiting=2, leaving={IDS[1]: "SIGUSR1"})
    assert read_document(doc.text()) == doc
