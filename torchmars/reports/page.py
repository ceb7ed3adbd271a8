"""A page of HTML that holds all that it shows: text, figures, and the library that draws them."""

import base64
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchmars.core.errors import file_errors, needs_package
from torchmars.core.files import write_durably

DASH = "–"  # where nothing is known
# Of runs, optimizers, or the measurements of one run: seen on white and on black.
COLORS = "#3178d0 #d2600f #26934a #b350a6 #a37a00 #0f90a5 #d64550 #7d63dd #7b8a1c #7a8591".split()


@dataclass(frozen=True)
class PageFigure:
    """A figure that plotly draws. page.js has its styles, and says how it looks."""

    title: str
    traces: list[dict[str, Any]]
    """Plotly's, except: style; color, a number; run, whose box hides it; group, of a legend."""
    note: str
    x: dict[str, Any]
    """What is special of the axis, for plotly; log: whether the reader may make it logarithmic."""
    y: dict[str, Any]
    large: bool = False
    by_steps: bool = False
    """Whether x is the steps of runs, for which the reader may choose tokens or time."""


@dataclass(frozen=True)
class Section:
    """A section of a page: what is given of this, in this order."""

    title: str
    texts: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    figures: Sequence[PageFigure] = ()
    columns: dict[str, str] = field(default_factory=dict)
    """Of a table: how cells look, by title: number, state, code, text, run, or nothing special."""
    rows: Sequence[Sequence[Any]] = ()
    """Cells: a text; or one with an address; or, of a run, its name and number."""
    folds: Sequence[tuple[str, str]] = ()
    """Texts that are folded under their titles."""
    folded: bool = False
    """Whether all of it is folded."""


def page(
    title: str, subtitle: str, sections: list[Section], renewed_every: int | None, axes: Any = None
) -> str:
    """Return a page. One that is `renewed_every` so many seconds reloads itself as often.

    `axes` are those of figures by steps: their titles, and of each run where some steps are on
    them. A section of nothing is left out. Raises `UserError` without plotly.
    """
    # Jinja escapes all but what the template calls safe: our own files.
    loader = PackageLoader("torchmars.reports", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    sections = [e for e in sections if e.texts or e.facts or e.rows or e.figures or e.folds]
    figures = [asdict(figure) for section in sections for figure in section.figures]
    data = {"figures": figures, "axes": axes, "colors": COLORS}
    files = resources.files("torchmars.reports")
    text = environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        axes=axes,
        css=(files / "page.css").read_text(encoding="utf-8"),
        script=(files / "page.js").read_text(encoding="utf-8"),
        plotly=plotly(),
        data=packed(json.dumps(data, allow_nan=False)),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        colors=COLORS,
        renewed_every=renewed_every,
    )
    # Names of files and texts of events may have what no UTF-8 file can: half of a pair of UTF-16.
    return text.encode(errors="backslashreplace").decode()


@cache
def plotly() -> str:
    """Return plotly.js, as `packed`. Raises `UserError` if the package is not there."""
    with needs_package("plotly", "a report", "report"):
        from plotly.offline import get_plotlyjs
    return packed(get_plotlyjs())


def packed(text: str) -> str:
    """Return a text gzipped, in base64. Browsers since 2023 can read that by themselves."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def write_page(file: Path, text: str) -> None:
    """Write a page, so that a reader finds the old one or the new one. Raises `UserError`."""
    with file_errors(f"cannot write {file}", "name another by --out"):
        write_durably(file, text)
