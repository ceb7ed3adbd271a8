"""What a step that does not log waits for, and what a report does."""

import itertools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15

from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, train_here, write_text
from torchmars.cluster import connection
from torchmars.cluster.failures import FALLOUT_MESSAGE


class Waits(TorchDispatchMode):
    """What each step does in its order, as far as a rank may wait for it."""

    def __init__(self):
        super().__init__()
        self.control = None
        self.in_optimizer = False
        self.steps = []

    def note(self, what):
        if self.steps:
            self.steps[-1].append(what)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if op.namespace == "c10d":
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            if dist.ProcessGroup.unbox(group).group_name == self.control:
                expected = op._schema.arguments
                given = [*args, *(each.default_value for each in expected[len(args) :])]
                begins = dict(zip([each.name for each in expected], given)).get("async_op")
                self.note(f"{name} {'begins' if begins else 'waits'}")
        elif name == "_local_scalar_dense" and not self.in_optimizer:
            self.note("number")
        return op(*args, **(kwargs or {}))


def steps_of(tables):
    """Train; return what each step does, as far as a rank may wait for it."""
    waits = Waits()

    def note_before(function, what):
        def call(*args):
            waits.note(what)
            return function(*args)

        return call

    def in_optimizer(inside):
        def set_inside(*_):
            waits.in_optimizer = inside  # it decides by numbers on a CPU only: nothing waits there

        return set_inside

    def watch(trainer):
        waits.control = trainer.layout.control.group_name
        part, optimizer = trainer.model.parts[0], trainer.optimizer
        part.register_forward_pre_hook(lambda *_: waits.note("backward"))
        optimizer.register_step_pre_hook(lambda *_: waits.note("optimizer"))
        optimizer.register_step_pre_hook(in_optimizer(True))
        optimizer.register_step_post_hook(in_optimizer(False))
        trainer.schedule.apply = begin_before(trainer.schedule.apply)
        trainer.agreed_events = note_before(trainer.agreed_events, "result")

    def begin_before(apply):
        def call(step):
            waits.steps.append([])
            return apply(step)

        return call

    with waits:
        train_here(tables, change=watch)
    return waits.steps


def test_a_step_that_does_not_log_waits_for_no_message_and_no_number(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, training={"steps": 7}, metrics={"log_interval": 3})
    for steps in run_ranks(steps_of, 2, tables):
        for step in steps[1], steps[3], steps[4]:  # those after the first that do not log
            assert step == ["allreduce_ begins", "backward", "optimizer", "result"]
        assert steps[2] == [*steps[1], "number"]  # the loss


def fails_alone(tables):
    """Train; rank 1 fails in its third step, when all ranks have begun to tell each other."""
    calls = itertools.count()

    def fail(*_):
        if next(calls) == 2:
            raise RuntimeError("rank 1 is broken")

    def break_rank_1(trainer):
        if trainer.layout.world.rank == 1:
            trainer.model.parts[0].register_forward_pre_hook(fail)

    try:
        train_here(tables, change=break_rank_1)
    except RuntimeError as error:
        return str(error)
    finally:
        connection.stop()  # as the end of its process does


def test_what_a_failed_rank_has_begun_holds_up_no_rank(tmp_path):
    write_text(tmp_path)
    failures = run_ranks(fails_alone, 2, tiny_tables(tmp_path))
    assert failures[1] == "rank 1 is broken" and FALLOUT_MESSAGE.search(
        f"RuntimeError: {failures[0]}"
    )
