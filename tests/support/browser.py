"""Pages of HTML in a real browser without a window."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()
PATIENCE = 120_000  # ms
# Buttons of figures that lie on a legend, or reach out of their figure.
BUTTONS_IN_THE_WAY = """[...document.querySelectorAll("figure")].flatMap(figure => {
  const box = each => each.getBoundingClientRect();
  const whole = box(figure), legends = [...figure.querySelectorAll(".legend")].map(box);
  return [...figure.querySelectorAll(".modebar-btn")].filter(each => {
    const { left, right, top, bottom } = box(each);
    return left < whole.left || right > whole.right || legends.some(legend =>
      right > legend.left && left < legend.right && bottom > legend.top && top < legend.bottom);
  }).map(each => figure.querySelector("h3").textContent);
})"""
DRAWN = ".plot .main-svg"
ALL_IN_VIEW_DRAWN = """[...document.querySelectorAll(".plot")].every(plot => {
  const { top, bottom } = plot.getBoundingClientRect();
  const inView = bottom > Math.max(top, 0) && top < innerHeight && plot.checkVisibility();
  return !inView || plot.drawn;
})"""


@dataclass
class Opened:
    """A page that is open, and what it has said and asked for."""

    page: Any
    messages: list[str] = field(default_factory=list)
    """Of its console, and its errors."""
    requests: list[str] = field(default_factory=list)
    """Addresses that it asked for."""

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true. Raises `TimeoutError`."""
        deadline = time.monotonic() + PATIENCE / 1000
        # Not wait_for_function: the page forbids that texts are run.
        while not self.page.evaluate(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(condition)
            time.sleep(0.01)


def draw(opened: Opened, titles: list[str]) -> None:
    """Scroll the figures of these titles into view, and wait until they are drawn."""
    for title in titles:
        heading = opened.page.get_by_role("heading", name=title, exact=True)
        heading.scroll_into_view_if_needed(timeout=PATIENCE)
        opened.wait(ALL_IN_VIEW_DRAWN)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start Debian's chromium, with a folder of its own. Skip the test where it is not there."""
    import pytest

    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def open_page(started: Any, file: Path, address: str = "", **options: Any) -> Opened:
    """Open a file, and wait until its first figure is drawn."""
    options = {"viewport": {"width": 1280, "height": 900}} | options
    opened = Opened(started.new_context(**options).new_page())
    opened.page.on("console", lambda message: opened.messages.append(message.text))
    opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
    opened.page.on("request", lambda request: opened.requests.append(request.url))
    opened.page.goto(file.as_uri() + address)
    # On a phone the first figure may begin below what is seen, and only what is near that is drawn.
    opened.page.locator("figure").first.scroll_into_view_if_needed(timeout=PATIENCE)
    opened.page.wait_for_selector(DRAWN, timeout=PATIENCE)
    return opened
