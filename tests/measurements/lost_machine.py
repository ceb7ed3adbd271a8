"""Measure how long a run waits after it has lost a machine, until it makes steps again.

    python -m tests.measurements.lost_machine [ROUNDS]

Three launchers of this machine, with one rank each, meet at a rendezvous apart. A tiny run takes
two of them, and the third waits for a place. Then the one with rank 0 is killed, or stops as when
its power fails, and the run goes on from its copies in memory. Prints, for each round, the seconds
to the start of the new ranks' training and to the end of their first step.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.commands import ROOT, Command
from tests.support.machines import free_endpoint, machine, signal_all, tree_of, wait_for
from tests.support.same_end import tables_of
from tests.support.tiny import metrics, run_folder_of, write_text

WAYS = {"killed": signal.SIGKILL, "silent": signal.SIGSTOP}


def seconds(folder: Path, number: signal.Signals) -> tuple[float, float]:
    """Return the seconds from a signal to all processes of rank 0's machine, as in the module."""
    write_text(folder)
    copies = {"checkpoint": {"interval": 10**6, "memory_interval": 1}}
    tables = tables_of(folder, "run", 10**6, copies)
    run = run_folder_of(tables)

    def starts() -> int:
        lines = (run / "events.jsonl").read_text().splitlines()
        return sum(json.loads(line)["event"] == "started" for line in lines)

    with free_endpoint() as endpoint:
        store = Command("rendezvous", [endpoint], ROOT)
        store.stdout.readline()
        machines = [machine(tables, name, endpoint) for name in ("n1", "n2")]
        file = run / "metrics.jsonl"
        wait_for(lambda: file.exists() and max(metrics(tables), default=0) > 10, *machines)
        spare = machine(tables, "n3", endpoint)
        time.sleep(5)  # until it waits
        first, second = sorted(machines, key=lambda each: each.pid)
        tree = tree_of(first)
        signal_all(tree, number)
        began, step = time.monotonic(), max(metrics(tables))
        wait_for(lambda: starts() == 2, second, spare)
        started = time.monotonic() - began
        wait_for(lambda: max(metrics(tables)) > step, second, spare)
        stepped = time.monotonic() - began
        for each in (second, spare):
            signal_all(tree_of(each), signal.SIGKILL)
        signal_all(tree, signal.SIGKILL)
        store.kill()
    return started, stepped


def main() -> None:
    """Print a line for each way to lose a machine."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    for way, number in WAYS.items():
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(seconds(Path(folder), number))
        for what, each in zip(("training starts", "the first step ends"), zip(*found)):
            shown = ", ".join(f"{one:.1f}" for one in sorted(each))
            print(f"{way}: {what} after {statistics.median(each):.1f} s ({shown})", flush=True)


if __name__ == "__main__":
    main()
