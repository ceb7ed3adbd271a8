"""The page of runs: curves, configs and what differs between them, events, checkpoints, samples."""

import time
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from torchmars.checkpoint.folder import step_folder
from torchmars.config.toml_files import Tables, flattened
from torchmars.core.words import duration, short
from torchmars.records.overview import last_written, state_of
from torchmars.records.run import BITS, SPEED, Run
from torchmars.reports.charts import LOSS, VALIDATION, charts_of, names_measured, run_names
from torchmars.reports.events import decimal, told
from torchmars.reports.page import DASH, Section, page
from torchmars.reports.run_figures import axes_of, figure_of, progress_figure, when

# A long run has thousands of events: a page of them all would be large and slow. So many of the
# newest are shown, and so many samples of each run.
MOST_EVENTS, MOST_SAMPLES = 1000, 100
ABOUT = (
    "Training time is the time of the steps: without validations, saves, and the time between a "
    "stop and the next start. Losses of training are those of one step each. A red stretch in the "
    "figure of the loss has steps that a rollback undid: they were made again with other data.",
    "Learning rates are optimizer.lr on its schedule: of a run with [transfer] those of its base.",
    "Drag over a figure to zoom, over all curves at once along x; double-click to go back. A click "
    "in a legend hides a curve, the box of a run hides the run. The buttons of a figure zoom too, "
    "and save it as SVG. What is set stays when the page is loaded again. The page loads nothing "
    "from a network.",
    "A noisy curve is pale behind its means over 3% of its rows; of more than six runs the means "
    "stand alone. A curve of many rows is thinned: its rows are cut into buckets, and of each the "
    "first, the last, the least and the greatest value are drawn. So no spike is lost. Zooming "
    "does not bring the others back.",
)


def run_page(runs: list[Run], renewed_every: int | None = None) -> str:
    """Return the page of `runs`. Raises `UserError` without plotly."""
    names = run_names(runs)
    charts, others = charts_of(names_measured(runs))
    if len(runs) == 1 and {LOSS.pattern, VALIDATION} <= set(runs[0].series):
        charts[0] = replace(charts[0], title="Loss", names=(LOSS.pattern, VALIDATION))
    events = [(number, *each) for number, run in enumerate(runs) for each in told(run)]
    if len(runs) > 1:
        events.sort(key=lambda each: each[1].time)
    newest = events[-MOST_EVENTS:]
    columns = {"time": "", "run": "", "step": "number", "event": "state", "what": "text"}
    sections = [
        overview_section(runs, names),
        Section("Curves", figures=[figure_of(each, runs, names, newest) for each in charts]),
        Section(
            "More measurements",
            figures=[figure_of(each, runs, names, newest) for each in others],
            folded=True,
        ),
        config_differences([run.config for run in runs], names),
        Section(
            "Events",
            [f"The newest {MOST_EVENTS:,} of {len(events):,}."] * (len(events) > len(newest)),
            columns=columns,
            rows=[(when(e), names[n], f"{e.step:,}", e.kind, words) for n, e, words in newest],
            figures=[progress_figure(newest)] if newest else [],
        ),
        checkpoint_section(runs, names),
        Section("Samples", folds=[each for pair in zip(runs, names) for each in samples_of(*pair)]),
        Section("Configs", folds=[(name, tomli_w.dumps(e.config)) for e, name in zip(runs, names)]),
        Section("How to read this page", ABOUT),
    ]
    title, place = f"{len(runs)} runs", ""
    if len(runs) == 1:
        title, place = runs[0].name, f"{runs[0].folder.absolute()}."
    return page(title, place, sections, renewed_every, axes_of(runs))


def overview_section(runs: list[Run], names: list[str]) -> Section:
    """Return how far each run is, and what could not be read."""
    texts = [
        f"Damaged lines of the metrics and events of {name} that are left out: {run.damaged}"
        for run, name in zip(runs, names)
        if run.damaged
    ]
    known = [facts_of_run(run) for run in runs]
    if len(runs) == 1:
        return Section("Run", texts, known[0])
    columns = {"run": "run", "state": "state"} | dict.fromkeys([*known[0]][1:], "number")
    rows = [((name, at), *known[at].values()) for at, name in enumerate(names)]
    return Section("Runs", texts, columns=columns, rows=rows)


def facts_of_run(run: Run) -> dict[str, str]:
    """Return how far a run is, by name; a dash stands for what is not known."""
    step, last = run.last_step, itemgetter(-1)
    here, written = np.array([step]), time.localtime(last_written(run.folder))
    return {
        "state": state_of(run),
        "step": f"{step:,} of {run.steps:,}",
        "training loss": of_values(run, LOSS.pattern, last),
        "validation loss": of_values(run, VALIDATION, last),
        "bits per byte": of_values(run, BITS, last),
        "best validation": of_values(run, VALIDATION, np.min),
        "tokens": short(float(run.tokens(here)[0])),
        "training time": duration(float(run.seconds(here)[0])),
        "tokens/s, median": of_values(run, SPEED, np.median, ",.0f"),
        "last write": time.strftime("%Y-%m-%d %H:%M", written),
    }


def of_values(
    run: Run, name: str, pick: Callable[[NDArray[np.float64]], Any], digits: str = ".4f"
) -> str:
    """Return one of the finite values of a measurement, a dash where there are none."""
    values = run.finite(name)
    return format(pick(values), digits) if len(values) else DASH


def config_differences(configs: list[Tables], names: list[str]) -> Section:
    """Return the settings that differ between `configs`, with their values in each."""
    flat = [{name: str(value) for name, value in flattened(config).items()} for config in configs]
    settings = dict.fromkeys(name for of_run in flat for name in of_run)
    values = {name: [of_run.get(name, "") for of_run in flat] for name in settings}
    for name in ("run.name", "run.folder"):
        values.pop(name, None)
    found = {name: of_runs for name, of_runs in values.items() if len(set(of_runs)) > 1}
    text = ["Nothing but their names."] * (len(configs) > 1 and not found)
    rows = [*zip(names, *found.values())] if found else []
    columns = {"run": ""} | dict.fromkeys(found, "code")
    return Section("What differs between the configs", text, columns=columns, rows=rows)


def checkpoint_section(runs: list[Run], names: list[str]) -> Section:
    """Return the checkpoints that runs have, the newest of each first, with what is known."""
    rows = []
    for run, name in zip(runs, names):
        saves = {event.step: event.facts for event in run.events if event.kind == "saved"}
        validation = run.series.get(VALIDATION)
        losses = dict(zip(validation.steps.tolist(), validation.values)) if validation else {}
        for step in reversed(run.checkpoints):
            loss = f"{losses[step]:.4f}" if step in losses else DASH
            size, seconds = DASH, DASH
            if saved := saves.get(step):
                size, seconds = decimal(saved.get("mib"), 1), decimal(saved.get("seconds"), 2)
            folder = f"checkpoints/{step_folder(run.folder, step).name}"
            rows.append((name, f"{step:,}", loss, size, seconds, folder))
    numbers = ("step", "validation loss", "MiB", "seconds to save")
    columns = {"run": ""} | dict.fromkeys(numbers, "number") | {"folder": "code"}
    return Section("Checkpoints", columns=columns, rows=rows)


def samples_of(run: Run, name: str) -> list[tuple[str, str]]:
    """Return the newest of what the model has written, with titles."""
    samples = [event for event in run.events if event.kind == "sample"][: -MOST_SAMPLES - 1 : -1]
    return [
        (f"{name}, after step {each.step:,}", str(each.facts.get("text", ""))) for each in samples
    ]
