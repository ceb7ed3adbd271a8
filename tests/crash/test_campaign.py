"""Twenty events of all kinds in the life of one elastic run, drawn by a seed."""

import os
import random
import signal
import time

import pytest

from tests.support.commands import ranks_of
from tests.support.elastic import IN_MEMORY, Machines, elastic_tables
from tests.support.machines import wait_for
from tests.support.tiny import metrics
from torchmars.checkpoint.memory import shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.PLACE.is_dir(), reason="needs /dev/shm")
EVENTS = 20


class Campaign:
    """Events of a run of at least one and at most `most` machines."""

    def __init__(self, machines, most, seed):
        self.machines, self.most, self.chance = machines, most, random.Random(seed)
        self.standing = []
        """Machines that were stopped, and are not in the run."""

    @property
    def present(self):
        """Names of the machines that should be in the run."""
        return [name for name in self.machines.living if name not in self.standing]

    def draw(self):
        """Choose an event that is possible now."""
        there, events = len(self.present), []
        if there > 1:
            events += [self.kill, self.kill_launcher, self.stand_still, self.cut, self.leave]
        if there > 2:
            events += [self.kill_two] * 3
        if there < self.most:
            events += [self.wake] * 5 if self.standing else [self.join] * 5
        if there + 1 < self.most and not self.standing:
            events += [self.join_two] * 2
        return self.chance.choice([*events, self.kill_rank])

    def one(self):
        first = self.machines.first()
        return first if self.chance.random() < 0.5 else self.chance.choice(self.present)

    def kill(self):
        self.machines.lose(self.one())

    def kill_two(self):
        self.machines.lose(self.one())
        time.sleep(self.chance.random())
        self.machines.lose(self.chance.choice(self.present))

    def kill_launcher(self):
        launcher = self.machines.living.pop(self.one())
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()

    def kill_rank(self):
        [present, *_] = ranks_of(self.machines.living[self.one()].pid)  # others wait to be one
        os.kill(present, signal.SIGKILL)

    def stand_still(self):
        self.standing.append(name := self.one())
        self.machines.send(name, signal.SIGSTOP)

    def wake(self):
        self.machines.send(self.standing.pop(), signal.SIGCONT)

    def cut(self):
        name = self.one()
        self.machines.ways[name].cut = True
        assert self.machines.living.pop(name).wait() == 69

    def leave(self):
        assert self.machines.leave(self.one()) == 75

    def join(self):
        self.machines.start()

    def join_two(self):
        self.machines.start()
        time.sleep(5 * self.chance.random())
        self.machines.start()

    def settle(self, before):
        """Wait until the machines that should be in the run have made three steps in a new start.

        There were so many starts `before`.
        """

        def settled():
            started = self.machines.events("started")[-1]
            there = set(started["names"]) == set(self.present)
            new = len(self.machines.starts) > before
            return new and there and self.machines.reached >= started["step"] + 3

        wait_for(settled, *self.machines.living.values())


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 4])
def test_a_campaign_costs_two_steps_an_event(tmp_path, most):
    """Losses stay those of a run that nothing happens to, at a rate where two sizes agree."""
    tables = elastic_tables(tmp_path, optimizer={"lr": 1e-5}, training={"global_batch_size": 12})
    with Machines(tables, f"1:{most}", starts=2 * EVENTS, cuts=True) as machines:
        machines.start(most)
        machines.wait_for_start(1)
        campaign = Campaign(machines, most, seed=most)
        for number in range(EVENTS):
            event = campaign.draw()
            before, changes = len(machines.starts), len(machines.events("left", "joined"))
            reached, began = machines.reached, time.monotonic()
            event()
            campaign.settle(before)
            new, name = machines.starts[before:], event.__name__
            print(f"{number} {name}: {time.monotonic() - began:.1f} s, {len(new)} starts")
            most_starts = 2 if name in ("kill_two", "join_two") else 1
            assert 1 <= len(new) <= most_starts, (name, machines.starts)
            if name == "kill_two":  # both parts of a copy may be gone
                continue
            for step, _, origin in new:
                assert step >= reached - 2, (name, reached, new)
                assert origin == IN_MEMORY.format(step), (name, new)
            again = [row["steps_again"] for row in machines.events("left", "joined")[changes:]]
            assert max(again, default=0) <= (0 if name in ("leave", "join", "wake") else 2), name
        for name in campaign.standing:
            machines.lose(name)
        assert set(machines.end()) == {75}
        machines.check_metrics()
    # The same steps without any event.
    losses = metrics(tables)
    straight = tables | {"run": tables["run"] | {"name": "straight"}}
    straight["training"] = tables["training"] | {"steps": min(60, max(losses))}
    with Machines(straight, "1") as machines:
        machines.start()
        assert [each.wait() for each in machines.living.values()] == [0]
    for step, loss in metrics(straight).items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step
