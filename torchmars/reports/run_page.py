"""The page of runs: curves, configs and what differs between them, events, checkpoints, samples."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tomli_w

from torchmars.config.toml_files import Tables
from torchmars.metrics.events import Event
from torchmars.records.run import SPEED, Run
from torchmars.reports.charts import LOSS, Chart, charts_of, other_charts_of
from torchmars.reports.curves import axes, buckets_for, thinned
from torchmars.reports.numbers import DASH, duration, short
from torchmars.reports.page import page

# A long run has thousands of events; a table of them all would slow the page down.
MOST_EVENTS = 1000
# A curve of more rows is smoothed at first, by 1% of its steps.
NOISY = 300


@dataclass(frozen=True)
class Entry:
    """An event of a run, in words."""

    run: str
    kind: str
    step: int
    seconds: float
    """Since 1970; 0 where it is not known."""
    text: str
    from_step: int = 0
    """The step that a rollback went back from."""

    @property
    def time(self) -> str:
        """When it was, for people."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.seconds)) if self.seconds else ""

    def json(self) -> dict[str, Any]:
        """Return the event as the page's script reads it."""
        facts = {"kind": self.kind, "step": self.step, "time": self.seconds, "text": self.text}
        return facts | ({"from": self.from_step} if self.from_step else {})


def run_page(runs: list[Run], renewed_every: int | None = None) -> str:
    """Return the page of `runs`. Raises `UserError` without plotly."""
    names = set().union(*(run.series for run in runs))
    names -= {name for name in names if is_always_zero(name, runs)}
    charts, others = charts_of(names), other_charts_of(names)
    entries = [entries_of(run) for run in runs]
    listed = sorted((each for of_run in entries for each in of_run), key=when)
    shown = listed[-MOST_EVENTS:]
    views = [view(run, number) for number, run in enumerate(runs)]
    parts = {
        "runs": "Run" if len(runs) == 1 else "Runs",
        "differences": "Differences" if len(runs) > 1 else "",
        "curves": "Curves",
        "events": "Events" if shown else "",
        "checkpoints": "Checkpoints" if any(run["checkpoints"] for run in views) else "",
        "samples": "Samples" if any(run["samples"] for run in views) else "",
        "configs": "Configs",
        "about": "How to read this page",
    }
    return page(
        "run_page.html",
        {
            "runs": [
                drawn(run, [*charts, *others], len(runs), of_run)
                for run, of_run in zip(runs, entries)
            ],
            "charts": [chart_json(chart, runs) for chart in charts],
            "others": [chart_json(chart, runs) for chart in others],
            "progress": [{"kind": "progress", "title": "Progress", "large": True}],
            "steps": max([1, *(last_step(run) for run in runs)]),
            "smooth": 50 if is_noisy(runs) else 0,
        },
        renewed_every,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=f"{runs[0].folder.absolute()}." if len(runs) == 1 else "",
        sections=[(id, name) for id, name in parts.items() if name],
        runs=views,
        differences=differences([run.config for run in runs]),
        has_others=bool(others),
        has_steps=True,
        has_events=bool(shown),
        events=shown,
        events_left_out=len(listed) - len(shown),
        kinds=dict(Counter(each.kind for each in shown)),
        has_checkpoints=any(run["checkpoints"] for run in views),
        has_samples=any(run["samples"] for run in views),
    )


def when(entry: Entry) -> tuple[float, int]:
    """Return what events are sorted by. Those whose time is not known come by their step."""
    return (entry.seconds, entry.step)


def is_always_zero(name: str, runs: list[Run]) -> bool:
    """Return whether a count of mishaps says that there were none."""
    return name == "train/skipped_steps" and not any(
        np.any(run.series[name].values) for run in runs if name in run.series
    )


def is_noisy(runs: list[Run]) -> bool:
    """Return whether a run has so many rows that its curves are read better smoothed."""
    return any(len(run.series[LOSS.pattern].steps) > NOISY for run in runs if has_loss(run))


def has_loss(run: Run) -> bool:
    """Return whether a run has reported a loss."""
    return LOSS.pattern in run.series


def last_step(run: Run) -> int:
    """Return the last step that a run has reported, 0 without one."""
    return max((int(series.steps[-1]) for series in run.series.values()), default=0)


def drawn(run: Run, charts: list[Chart], runs: int, entries: list[Entry]) -> dict[str, Any]:
    """Return what the scripts draw of a run."""
    names = {name for chart in charts for name in chart.names} & set(run.series)
    return {
        "name": run.name,
        "axes": axes(run),
        "curves": {
            name: thinned(run.series[name], buckets_for(runs)).json() for name in sorted(names)
        },
        "events": [each.json() for each in entries],
    }


def chart_json(chart: Chart, runs: list[Run]) -> dict[str, Any]:
    """Return a chart as the scripts read it. The loss of a run alone has its validation beside."""
    facts = asdict(chart) | {"kind": "curves"}
    del facts["pattern"]
    if chart.title == LOSS.title:
        facts |= {"large": True, "marks": True}
        if len(runs) == 1 and "validation/loss" in runs[0].series:
            facts |= {"title": "Loss", "names": [*chart.names, "validation/loss"]}
    return facts


def view(run: Run, index: int) -> dict[str, Any]:
    """Return what the template says of a run."""
    return {
        "index": index,
        "name": run.name,
        "state": state_of(run),
        "facts": facts(run),
        "config": tomli_w.dumps(run.config),
        "checkpoints": checkpoints_of(run),
        "samples": [
            (each.step, str(each.facts.get("text", "")))
            for each in reversed(run.events)
            if each.kind == "sample"
        ],
    }


def state_of(run: Run) -> str:
    """Return what a run does."""
    return "stopped"


def facts(run: Run) -> dict[str, str]:
    """Return how far a run is, by name; a dash stands for what is not known."""
    step, planned = last_step(run), run.config["training"]["steps"]
    here = np.array([step])
    validation = run.series.get("validation/loss")
    best = np.nanmin(validation.values) if validation is not None else None
    speed = run.series.get(SPEED)
    written = run.folder / "metrics.jsonl"
    return {
        "step": f"{step:,} of {planned:,}",
        "training loss": last(run, LOSS.pattern, ".4f"),
        "validation loss": last(run, "validation/loss", ".4f"),
        "best validation": DASH if best is None else f"{best:.4f}",
        "tokens": short(float(run.tokens(here)[0])),
        "training time": duration(float(run.seconds(here)[0])),
        "tokens/s, median": DASH if speed is None else f"{np.nanmedian(speed.values):,.0f}",
        "last report": time.strftime("%Y-%m-%d %H:%M", time.localtime(written.stat().st_mtime))
        if written.exists()
        else DASH,
    }


def last(run: Run, name: str, spec: str) -> str:
    """Return the last value of a measurement."""
    series = run.series.get(name)
    return DASH if series is None else format(series.values[-1], spec)


def differences(configs: list[Tables]) -> dict[str, list[str]]:
    """Return the settings that differ between `configs`, and their values in each."""
    flat = [flattened(config) for config in configs]
    names = dict.fromkeys(name for each in flat for name in each)
    found = {name: [each.get(name, "") for each in flat] for name in names}
    return {
        name: values
        for name, values in found.items()
        if len(set(values)) > 1 and name not in ("run.name", "run.folder")
    }


def flattened(tables: Tables, prefix: str = "") -> dict[str, str]:
    """Return the settings of a config by their dotted names, with values as text."""
    flat = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat


def checkpoints_of(run: Run) -> list[dict[str, str | int]]:
    """Return the checkpoints that a run has, the newest first, with what its events say of them."""
    saved = {event.step: event.facts for event in run.events if event.kind == "saved"}
    losses = run.series.get("validation/loss")
    by_step = dict(zip(losses.steps.tolist(), losses.values.tolist())) if losses else {}
    return [
        {
            "step": step,
            "loss": f"{by_step[step]:.4f}" if step in by_step else "",
            "mib": number(saved.get(step, {}).get("mib"), ",.1f"),
            "seconds": number(saved.get(step, {}).get("seconds"), ".2f"),
            "folder": f"checkpoints/step-{step:08d}",
        }
        for step in reversed(run.checkpoints)
    ]


def number(value: Any, spec: str) -> str:
    """Return a number of an event, or nothing."""
    return format(value, spec) if isinstance(value, int | float) else ""


def entries_of(run: Run) -> list[Entry]:
    """Return the events of a run, and the skipped steps that its metrics tell."""
    found = [entry(run, event) for event in run.events if event.kind != "sample"]
    return found + skips(run)


def entry(run: Run, event: Event) -> Entry:
    """Return an event in words."""
    facts = event.facts
    from_step = facts.get("from_step") if event.kind == "rollback" else 0
    return Entry(
        run.name,
        event.kind,
        event.step,
        event.time,
        describe(event),
        from_step if isinstance(from_step, int) else 0,
    )


def describe(event: Event) -> str:
    """Return what an event's facts say."""
    return ", ".join(f"{name} {value}" for name, value in event.facts.items() if value)


def skips(run: Run) -> list[Entry]:
    """Return where the optimizer skipped steps, as far as reports tell."""
    series = run.series.get("train/skipped_steps")
    if series is None:
        return []
    more = np.diff(np.nan_to_num(series.values), prepend=0.0)
    return [
        Entry(run.name, "skipped", int(step), 0.0, f"{count:.0f} since the report before")
        for step, count in zip(series.steps, more)
        if count > 0
    ]
