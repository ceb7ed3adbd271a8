"""A page of HTML of runs, or of a comparison: one file to mail, without a script."""

import base64
import html
import re
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from string import Template
from typing import Any

import numpy as np
import tomli_w
from matplotlib.figure import Figure
from numpy.typing import NDArray

from torchmars.comparison.results import Comparison
from torchmars.comparison.tables import (
    comparison_in_words,
    contender_rows,
    difference_rows,
    states_text,
    trial_rows,
)
from torchmars.config.load import flattened
from torchmars.core.console import harmless
from torchmars.core.words import short
from torchmars.records.events import Event
from torchmars.records.overview import state_of
from torchmars.records.run import BITS, SPEED, Run
from torchmars.reports.charts import LOSS, VALIDATION
from torchmars.reports.figures import comparison_figure, drawn, run_names, runs_figure, title_of

DASH = "–"  # where nothing is known
MOMENT = "%Y-%m-%d %H:%M:%S"
MOST_EVENTS = 200  # that a page shows, the newest
# The folders of an absolute path: they tell of the author's machine, so that a page has only what
# follows them. A path in quotes may have spaces.
FOLDERS = re.compile(
    r"""(?<=["'])(?:~\w*)?/(?=[^\s/])(?:[^/"'\n:,]+/)*"""
    r"""|(?:file://|(?<![\w./~<)\]]))(?:~\w*)?/(?=[^\s/])(?:[^\s/"'<>|]+/)*"""
)
# Nothing may be fetched, from wherever, and nothing runs: the page holds all that it shows.
PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #8884; --quiet: #777; }
body { margin: 0 auto; max-width: 1080px; padding: 12px 20px 40px; overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 16px 0 0; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; }
.quiet, th { color: var(--quiet); }
.wide { overflow-x: auto; }
img { width: 100%; min-width: 640px; margin-top: 20px; }
table { border-collapse: collapse; font-size: 0.88rem; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; font-weight: normal; padding: 5px 24px 5px 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th, td:not(:last-child) { white-space: nowrap; }
td:last-child:not(:first-child) { min-width: 10rem; }
summary { cursor: pointer; margin: 8px 0; }
pre { white-space: pre-wrap; font-size: 0.85rem; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">Written $written by <code>torchmars plot --html</code>.</p>
$body
</body>
</html>
""")


def run_page(runs: Sequence[Run], every: bool = False) -> str:
    """Return the page of runs: how far they are, their figure, events and settings.

    The figure has `every` panel, or the main ones.
    """
    names = run_names(runs)
    title = title_of(names)
    facts = [facts_of(run, name) for run, name in zip(runs, names)]
    events = [(event, name) for run, name in zip(runs, names) for event in run.events]
    events = [each for each in events if each[0].kind != "sample"]
    events.sort(key=lambda each: each[0].time)
    newest = [
        [time.strftime(MOMENT, time.localtime(event.time)), name, f"{event.step:,}", event.kind]
        + [told(event)]
        for event, name in events[-MOST_EVENTS:]
    ]
    more = f"The newest {MOST_EVENTS} of {len(events):,}." if len(events) > MOST_EVENTS else ""
    return page(
        title,
        html_table([[*facts[0]], *([*each.values()] for each in facts)]),
        image(runs_figure(runs, every), title),
        section("Settings that differ", html_table(differing_settings(runs, names))),
        section(
            "Events", paragraph(more), html_table([["time", "run", "step", "event", ""], *newest])
        ),
        section("Settings", *map(unfolding, names, [tomli_w.dumps(run.config) for run in runs])),
    )


def comparison_page(found: Comparison) -> str:
    """Return the page of a comparison: what was found, and how."""
    return page(
        found.name,
        paragraph(comparison_in_words(found).replace("`", "")),
        html_table(contender_rows(found)),
        section("Differences", html_table(difference_rows(found))),
        image(comparison_figure(found), found.name),
        section("Trials", paragraph(f"{states_text(found)}."), html_table(trial_rows(found))),
    )


def told(event: Event) -> str:
    """Return what an event says beside its kind and step: its facts, but those of no value."""
    facts = {name: value for name, value in event.facts.items() if value not in (None, "", [])}
    return ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in facts.items()
    )


def facts_of(run: Run, name: str) -> dict[str, str]:
    """Return how far a run is, by what a column is called; a dash is what is not known."""
    last = itemgetter(-1)
    return {
        "run": name,
        "state": state_of(run),
        "step": f"{run.last_step:,} of {run.steps:,}",
        "training loss": of_values(run, LOSS.pattern, last),
        "validation loss": of_values(run, VALIDATION, last),
        "its lowest": of_values(run, VALIDATION, np.min),
        "bits per byte": of_values(run, BITS, last),
        "tokens": short(float(run.tokens(np.array([run.last_step]))[0])),
        "tokens/s, median": of_values(run, SPEED, np.median, ",.0f"),
    }


def of_values(
    run: Run, name: str, pick: Callable[[NDArray[np.float64]], Any], digits: str = ".4f"
) -> str:
    """Return one of the finite values of a measurement, a dash where there are none."""
    values = run.finite(name)
    return format(pick(values), digits) if len(values) else DASH


def differing_settings(runs: Sequence[Run], names: list[str]) -> list[list[str]]:
    """Return the settings that differ between runs, with the value of each, after the headings."""
    flat = [flattened(run.config) for run in runs]
    settings = [name for name in dict.fromkeys(chain(*flat)) if name != "run.name"]
    rows = [
        [name, *(repr(of_run[name]) if name in of_run else "" for of_run in flat)]
        for name in settings
    ]
    return [["setting", *names], *(row for row in rows if len(set(row[1:])) > 1)]


def page(title: str, *parts: str) -> str:
    """Return a page of HTML with `parts`, which are HTML, after its title, which is text."""
    written = time.strftime(MOMENT)
    return PAGE.substitute(title=text(title), written=written, body="\n".join(parts))


def section(title: str, *parts: str) -> str:
    """Return `parts` under a heading; nothing if there are none."""
    return "".join([f"<h2>{text(title)}</h2>\n", *parts]) if any(parts) else ""


def paragraph(words: str) -> str:
    """Return a paragraph; nothing of no words."""
    return f"<p>{text(words)}</p>\n" if words else ""


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, the first of them headings, as a table; nothing without a second."""
    if len(rows) < 2:
        return ""
    lines = [
        f"<tr>{''.join(f'<{tag}>{text(cell)}</{tag}>' for cell in row)}</tr>\n"
        for tag, row in zip(chain(["th"], repeat("td")), rows)
    ]
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>\n'


def unfolding(title: str, words: str) -> str:
    """Return a text under its title, which unfolds it."""
    return f"<details><summary>{text(title)}</summary><pre>{text(words)}</pre></details>\n"


def image(figure: Figure | None, title: str) -> str:
    """Return a figure as an SVG in the page: in an address, so that nothing in it can act."""
    if figure is None:
        return ""
    address = f"data:image/svg+xml;base64,{base64.b64encode(drawn(figure, 'svg')).decode()}"
    return f'<div class="wide"><img alt="{text(title)}" src="{address}"></div>\n'


def text(words: str) -> str:
    """Return a text for a page: without what steers, without folders of this machine, escaped."""
    return html.escape(FOLDERS.sub("", harmless(words)))
