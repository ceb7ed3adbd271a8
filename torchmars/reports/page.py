"""A page of HTML that holds all that it shows: text, data, and the library that draws it."""

import base64
import gzip
import json
import time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torchmars.core.errors import UserError, missing_package
from torchmars.core.files import write_durably

DASH = "–"  # where nothing is known
ABOUT = {"about": "How to read this page"}  # the section that every page has
STYLES = ("page.css", "charts.css")
SCRIPTS = ("page.js", "charts.js", "run_charts.js", "comparison_charts.js")


def page(
    template: str,
    data: dict[str, Any],
    renewed_every: int | None,
    sections: dict[str, str],
    **texts: Any,
) -> str:
    """Return a page.

    `template` is a file beside this one. It is given `texts`, and escapes them. `data` is what the
    scripts draw. A page that is `renewed_every` so many seconds reloads itself as often. Of
    `sections` those with a name are there. Raises `UserError` without plotly.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("torchmars.reports", "."), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template(template).render(
        css=Markup("".join(map(own_file, STYLES))),
        script=Markup("\n".join([*map(own_file, SCRIPTS), "start();"])),
        plotly=plotly(),
        data=packed(json.dumps(data, allow_nan=False)),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        renewed_every=renewed_every,
        sections={id: name for id, name in sections.items() if name} | ABOUT,
        dash=DASH,
        **texts,
    )
    # Names of files and texts of events may have what no UTF-8 file can: half of a pair of UTF-16.
    return text.encode(errors="backslashreplace").decode()


@cache
def plotly() -> str:
    """Return plotly.js, as `packed`. Raises `UserError` if the package is not there."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_package("plotly", "a report", "report") from None
    return packed(get_plotlyjs())


def packed(text: str) -> str:
    """Return a text gzipped, in base64. Browsers since 2023 can read that by themselves."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def own_file(name: str) -> str:
    """Return the text of a file beside this one."""
    return (resources.files("torchmars.reports") / name).read_text(encoding="utf-8")


def write_page(file: Path, text: str) -> None:
    """Write a page, so that a reader finds the old one or the new one. Raises `UserError`."""
    try:
        write_durably(file, text)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: name another by --out") from None
