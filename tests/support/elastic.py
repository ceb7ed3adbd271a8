"""The machines of an elastic run, that come and go."""

import contextlib
import json
import signal

from tests.support.machines import (
    NEVER,
    Way,
    free_endpoint,
    machine,
    machine_of_first_rank,
    signal_all,
    start_store,
    tree_of,
    wait_for,
)
from tests.support.same_end import tables_of
from tests.support.tiny import metrics, run_folder_of, write_text

MANY = 100_000  # steps: the run ends by a signal
IN_MEMORY = "from step {}: the copy in memory"


class Machines:
    """The launchers of an elastic run that meet at a store apart, by name."""

    def __init__(self, tables, nodes, join_seconds=300, starts=4, cuts=False):
        """Where `cuts`, each machine has a way of its own to the store."""
        self.tables, self.nodes, self.join_seconds = tables, nodes, join_seconds
        self.starts_of_each, self.cuts = starts, cuts
        self.living, self.ways, self.stack = {}, {}, contextlib.ExitStack()
        self.number = 0

    def __enter__(self):
        self.endpoint = self.stack.enter_context(free_endpoint())
        self.store = start_store(self.endpoint)
        return self

    def __exit__(self, *exception):
        for each in self.living.values():
            signal_all(tree_of(each), signal.SIGKILL)
            each.wait()
        self.store.kill()
        self.store.communicate()
        self.stack.close()

    def start(self, count=1, stand=NEVER):
        """Start machines; return the name of the last one.

        Where it has rank 0, it will `stand` somewhere, as `machine` describes.
        """
        for _ in range(count):
            name, self.number = f"m{self.number}", self.number + 1
            if self.cuts:
                self.ways[name] = self.stack.enter_context(Way(self.endpoint))
            self.living[name] = machine(
                self.tables,
                name,
                self.ways[name].address if self.cuts else self.endpoint,
                stand,
                join_seconds=self.join_seconds,
                nodes=self.nodes,
                starts=self.starts_of_each,
            )
        return name

    def send(self, name, number):
        """Send a signal to all processes of a machine."""
        signal_all(tree_of(self.living[name]), number)

    def lose(self, name):
        """Kill a machine; return the last step that was reported."""
        self.send(name, signal.SIGKILL)
        self.living.pop(name).wait()
        return self.reached

    @property
    def reached(self):
        file = run_folder_of(self.tables) / "metrics.jsonl"
        return max(metrics(self.tables), default=0) if file.exists() else 0

    @property
    def starts(self):
        """(step, machines, origin) of each start."""
        rows = self.events("started")
        return [(row["step"], row["machines"], row["origin"]) for row in rows]

    def wait_for_start(self, number):
        """Wait until the ranks have started so often, and have made three steps."""
        wait_for(lambda: len(self.starts) >= number, *self.living.values())
        begun = self.starts[-1][0]
        wait_for(lambda: self.reached >= begun + 3, *self.living.values())
        assert len(self.starts) == number, self.starts

    def first(self):
        """Return the name of the machine that has rank 0."""
        return machine_of_first_rank(self.tables)

    def events(self, *kinds):
        file = run_folder_of(self.tables) / "events.jsonl"
        rows = map(json.loads, file.read_text().splitlines()) if file.exists() else []
        return [row for row in rows if row["event"] in kinds]

    def said(self, name):
        return (run_folder_of(self.tables).parent.parent / f"{name}.log").read_text()

    def leave(self, name, number=signal.SIGTERM, ranks=False):
        """Send a signal to the launcher of a machine, or to its ranks too; return its exit code."""
        launcher = self.living.pop(name)
        signal_all(tree_of(launcher) if ranks else [launcher.pid], number)
        code = launcher.wait()
        print(self.said(name))
        return code

    def end(self, *names):
        """Stop the run by a signal to the named machines, or to all; return the codes of all.

        Prints what the machines have said, which pytest shows where a test fails.
        """
        for name in names or self.living:
            self.living[name].send_signal(signal.SIGTERM)
        codes = [each.wait() for each in self.living.values()]
        print(*map(self.said, self.living), sep="\n")
        self.living.clear()
        return codes

    def check_metrics(self):
        """Every step was reported, once."""
        file = run_folder_of(self.tables) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [row["step"] for row in rows if "train/loss" in row]
        assert steps == list(range(1, len(steps) + 1))


def elastic_tables(folder, steps=MANY, **changes):
    write_text(folder)
    tables = tables_of(folder, "elastic", steps, {"model": {"dropout": 0.0}})
    tables["checkpoint"] = {"interval": MANY, "memory_interval": 1}
    tables["validation"] = {"interval": 0}
    tables["metrics"] = tables.get("metrics", {}) | {"log_interval": 1}
    for section, table in changes.items():
        tables[section] = tables.get(section, {}) | table
    return tables
