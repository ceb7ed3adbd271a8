"""The page of runs: curves, configs and what differs between them, events, checkpoints, samples."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
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
from torchmars.reports.charts import (
    LOSS,
    Chart,
    charts_of,
    measurements,
    names_of,
    short_names,
)
from torchmars.reports.curves import axes, buckets_for, thinned
from torchmars.reports.events import Entry, decimal, entries_of, samples_of, some_of
from torchmars.reports.page import DASH, page

TRAINING, VALIDATION = "train/loss", "validation/loss"
# A long run has thousands of events: a page of them all would be large and slow. So many are in
# the table, so many of each kind in the charts, and so many samples of each run are shown.
MOST_EVENTS, MOST_MARKS, MOST_SAMPLES = 1000, 200, 100
# The curves of a run of more rows are smoothed at first, by 1% of the steps.
NOISY, ONE_PERCENT = 300, 50


def run_page(runs: list[Run], renewed_every: int | None = None) -> str:
    """Return the page of `runs`. Raises `UserError` without plotly."""
    measured, names = measurements(runs), names_of(runs)
    charts, others = charts_of(measured)
    entries = [entries_of(run, name) for run, name in zip(runs, names)]
    listed = [each for of_run in entries for each in of_run]
    if len(runs) > 1:
        listed.sort(key=lambda each: each.seconds or 0.0)
    shown = listed[-MOST_EVENTS:]
    views = [view(run, name, number) for number, (run, name) in enumerate(zip(runs, names))]
    sections = {
        "runs": "Run" if len(runs) == 1 else "Runs",
        "curves": "Curves",
        "differences": "Differences" if len(runs) > 1 else "",
        "events": "Events" if shown else "",
        "checkpoints": "Checkpoints" if any(run["checkpoints"] for run in views) else "",
        "samples": "Samples" if any(run["samples"] for run in views) else "",
        "configs": "Configs",
    }
    data: dict[str, Any] = {
        "runs": [
            drawn(run, name, measured, buckets_for(len(runs)), of_run)
            for run, name, of_run in zip(runs, names, entries)
        ],
        "charts": [chart_json(chart, runs) for chart in charts],
        "others": [chart_json(chart, runs) for chart in others],
        "progress": [{"kind": "progress", "title": "Progress", "large": True}],
        "steps": max(1, *(run.last_step for run in runs)),
        "smooth": ONE_PERCENT if is_noisy(runs) else 0,
    }
    return page(
        "run_page.html",
        data,
        renewed_every,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=f"{runs[0].folder.absolute()}." if len(runs) == 1 else "",
        sections=sections,
        has_steps=True,
        runs=views,
        differences=differences([run.config for run in runs]),
        has_others=bool(others),
        events=shown,
        events_left_out=len(listed) - len(shown),
        kinds=Counter(each.kind for each in shown),
        most_marks=MOST_MARKS,
        most_samples=MOST_SAMPLES,
        damaged=[(name, run.damaged) for run, name in zip(runs, names) if run.damaged],
    )


def is_noisy(runs: list[Run]) -> bool:
    """Return whether a run has so many rows that its curves are read better smoothed."""
    return any(len(run.series[TRAINING].steps) > NOISY for run in runs if TRAINING in run.series)


def drawn(
    run: Run, name: str, measured: set[str], buckets: int, entries: list[Entry]
) -> dict[str, Any]:
    """Return what the scripts draw of a run."""
    curves = {each: thinned(run.series[each], buckets) for each in measured & set(run.series)}
    return {
        "name": name,
        "axes": axes(run),
        "curves": {each: curves[each].json() for each in sorted(curves)},
        "events": [each.json() for each in some_of(entries, MOST_MARKS)],
    }


def chart_json(chart: Chart, runs: list[Run]) -> dict[str, Any]:
    """Return a chart as the scripts read it. The loss of a run alone has its validation beside."""
    facts = asdict(chart) | {"kind": "curves"}
    if chart.pattern == LOSS.pattern:
        facts |= {"large": True, "marks": True}
        if len(runs) == 1 and VALIDATION in runs[0].series:
            facts |= {"title": "Loss", "names": [TRAINING, VALIDATION]}
    return facts | {"labels": short_names(facts["names"])}


def view(run: Run, name: str, index: int) -> dict[str, Any]:
    """Return what the template says of a run."""
    return {
        "index": index,
        "name": name,
        "state": state_of(run),
        "facts": facts(run),
        "config": tomli_w.dumps(run.config),
        "checkpoints": checkpoints_of(run),
        "samples": samples_of(run)[:MOST_SAMPLES],
    }


def facts(run: Run) -> dict[str, str]:
    """Return how far a run is, by name; a dash stands for what is not known."""
    step, last = run.last_step, itemgetter(-1)
    here, written = np.array([step]), time.localtime(last_written(run.folder))
    return {
        "step": f"{step:,} of {run.steps:,}",
        "training loss": of_values(run, TRAINING, last),
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


def differences(configs: list[Tables]) -> dict[str, list[str]]:
    """Return the settings that differ between `configs`, with their values in each."""
    flat = [{name: str(value) for name, value in flattened(config).items()} for config in configs]
    found = {
        name: [settings.get(name, "") for settings in flat]
        for name in dict.fromkeys(name for settings in flat for name in settings)
        if name not in ("run.name", "run.folder")
    }
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def checkpoints_of(run: Run) -> list[dict[str, str]]:
    """Return the checkpoints that a run has, the newest first, with what is known of them."""
    saves = {event.step: event.facts for event in run.events if event.kind == "saved"}
    validation = run.series.get(VALIDATION)
    losses = dict(zip(validation.steps.tolist(), validation.values)) if validation else {}
    return [
        {
            "step": f"{step:,}",
            "loss": f"{losses[step]:.4f}" if step in losses else DASH,
            "mib": decimal(saves[step].get("mib"), 1) if step in saves else DASH,
            "seconds": decimal(saves[step].get("seconds"), 2) if step in saves else DASH,
            "folder": f"checkpoints/{step_folder(run.folder, step).name}",
        }
        for step in reversed(run.checkpoints)
    ]
