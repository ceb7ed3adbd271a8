"""The page of runs: what it says, and what it does in a browser."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from tests.support.browser import BUTTONS_IN_THE_WAY, PATIENCE, browser, draw, open_page
from tests.support.full import FULL
from tests.support.records import made_run
from torchmars.metrics.events import Event
from torchmars.records.run import read_run
from torchmars.reports.events import entries_of, some_of
from torchmars.reports.page import plotly
from torchmars.reports.run_page import differences, run_page

pytest.importorskip("plotly")

HOSTILE_NAMES = ['"]', "'\\", "constructor", "__proto__", "%{x}", "hidden", "$a_1$"]
HOSTILE = "</script><script>console.log('ran')</script><b>bold</b>"


def write_events(folder):
    rows = [
        {"event": "started", "step": 0, "ranks": 2, "machines": 1, "origin": None, "changes": []},
        {"event": "saved", "step": 20, "checkpoint": "step-20", "seconds": 0.25, "mib": 12.5},
        {"event": "started", "step": 20, "ranks": 1, "machines": 1, "origin": "from step 20"},
        {"event": "spike", "step": 45, "loss": 9.5, "action": "rollback"},
        {"event": "rollback", "step": 20, "from_step": 45, "checkpoint": "step-20"},
        {"event": "sample", "step": 50, "text": HOSTILE},
        {"event": "unheard-of", "step": 51, "what": "of a later version"},
        {"event": "stopped", "step": 60, "signal": "SIGTERM"},
    ]
    lines = [json.dumps({"time": 1.8e9 + number} | row) for number, row in enumerate(rows)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def test_events_in_words(tmp_path):
    folder = made_run(tmp_path / "run", 60)
    write_events(folder)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 61, "train/skipped_steps": 3.0}) + "\n")
    entries = entries_of(read_run(folder), "run")
    words = [(each.kind, each.step, each.text) for each in entries]
    assert words == [
        ("started", 0, "2 ranks, 1 machine"),
        ("saved", 20, "step-20: 12.5 MiB in 0.25 s"),
        ("started", 20, "the run was killed before, from step 20, 1 rank, 1 machine"),
        ("spike", 45, "loss 9.5000, the run goes back"),
        ("rollback", 20, "back from step 45 to step-20"),
        ("unheard-of", 51, "what of a later version"),
        ("stopped", 60, "by SIGTERM"),
        ("skipped", 61, "3 since the report before"),
    ]
    assert [each.from_step for each in entries if each.kind == "rollback"] == [45]


def write_hostile_names(folder):
    """Add events and measurements of names that scripts, selectors and templates must not read."""
    rows = [{"time": 1.81e9, "event": name, "step": 60} for name in HOSTILE_NAMES]
    with (folder / "events.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 701} | dict.fromkeys(HOSTILE_NAMES, 1.0)) + "\n")


class CountedStep(int):
    """A step that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        CountedStep.compared += 1
        return int(self) < int(other)

    def __gt__(self, other):
        CountedStep.compared += 1
        return int(self) > int(other)


def test_many_events_take_little_time_and_room(tmp_path):
    run = read_run(made_run(tmp_path / "run", 3000))
    rng, kinds = random.Random(0), ("saved", "sample", "rollback")
    run.events.extend(
        Event(rng.choice(kinds), CountedStep(number - rng.randrange(9)), 1.8e9, {"from_step": 0})
        for number in range(10, 3000)
    )
    run.series["train/skipped_steps"].values[:] = np.arange(3000.0)
    entries = entries_of(run, "run")
    assert CountedStep.compared < 100 * len(entries)
    skipped = [n for n, each in enumerate(entries) if each.kind == "skipped"]
    assert len(skipped) == 2999 and [entries[n].step for n in skipped] == list(range(2, 3001))
    for number in skipped:  # it comes before the first event of a later step
        others = [each.step for each in entries[:number] if each.kind != "skipped"]
        assert max(others, default=0) <= entries[number].step
        after = next((each for each in entries[number:] if each.kind != "skipped"), None)
        assert after is None or after.step > entries[number].step
    drawn = some_of(entries, 200)
    assert Counter(each.kind for each in drawn) == {"saved": 200, "rollback": 200, "skipped": 200}
    assert drawn[0] is entries[0] and drawn[-1] is entries[-1]
    text = run_page([run])
    assert text.count("<tr data-kind=") == 1000 and text.count('<details id="sample-') == 100
    assert len(text) - len(plotly()) < 2**20


def test_what_differs():
    one = {"run": {"name": "a"}, "optimizer": {"lr": 0.1, "name": "lion"}, "only": {"here": True}}
    two = {"run": {"name": "b"}, "optimizer": {"lr": 0.2, "name": "lion"}}
    assert differences([one, two]) == {"optimizer.lr": ["0.1", "0.2"], "only.here": ["True", ""]}


def test_what_users_write_is_shown_as_text(tmp_path):
    """An old run without events, one whose texts are hostile, one that has written nothing."""
    old, new = made_run(tmp_path / "old", 5), made_run(tmp_path / "<i>new & shiny", 60)
    empty = made_run(tmp_path / "empty", 0)
    (empty / "metrics.jsonl").unlink()
    write_events(new)
    text = run_page([read_run(folder) for folder in (old, new, empty)])
    assert HOSTILE not in text and "console.log(&#39;ran&#39;)" in text
    assert "<i>new" not in text and "&lt;i&gt;new &amp; shiny" in text
    assert "<title>3 runs</title>" in text
    assert "http-equiv" in run_page([read_run(empty)])


@FULL
def test_in_a_browser(tmp_path):
    folders = [made_run(tmp_path / "<b>first", 700), made_run(tmp_path / "second", 60, seed=1)]
    write_events(folders[0])
    write_hostile_names(folders[0])
    runs = [read_run(folder) for folder in folders]
    file, alone = tmp_path / "report.html", tmp_path / "alone.html"
    file.write_text(run_page(runs))
    alone.write_text(run_page(runs[:1]))
    with browser() as started:
        opened = open_page(started, file, color_scheme="light")
        page = opened.page
        first = page.locator("figure").first
        assert first.locator("h3").inner_text() == "Training loss"
        assert page.evaluate("document.querySelector('.plot').data.length") >= 4
        assert "smoothed over 7 steps" in first.inner_text()  # 1% of the longest run
        page.get_by_label("log y").check()
        page.get_by_label("x axis").select_option("tokens")
        page.get_by_label("smoothing").fill("0")
        page.get_by_label("theme").select_option("dark")
        shown = page.evaluate(
            "(({layout}) => [layout.yaxis.type, layout.xaxis.title.text])"
            "(document.querySelector('.plot'))"
        )
        assert shown == ["log", "tokens"] and "smoothed" not in first.inner_text()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, dark[4:-1].split(","))) < 60
        page.get_by_role("checkbox", name="second").uncheck()
        names = page.evaluate("document.querySelector('.plot').data.map(trace => trace.name)")
        assert "second" not in names and "&lt;b&gt;first" in names
        page.get_by_role("checkbox", name="rollback").uncheck()
        assert not page.locator("tr[data-kind=rollback]").is_visible()
        for kind in HOSTILE_NAMES:
            row = page.locator("tbody tr").filter(has=page.get_by_text(kind, exact=True))
            assert row.is_visible()
            page.get_by_role("checkbox", name=kind).uncheck()
            assert not row.is_visible()
        first.focus()
        page.keyboard.press("+")
        zoomed = page.evaluate("settings.range")
        assert zoomed is not None
        page.locator("#others summary").click()
        page.evaluate("scrollTo(0, 700)")
        opened.wait("history.state.scrolled === 700")
        page.reload()
        page.wait_for_selector("figure[aria-busy=false]", timeout=PATIENCE)
        opened.wait("scrollY === 700")
        assert page.locator("#others[open]").count() == 1
        kept = page.evaluate("[settings.x, settings.logy, settings.smooth, settings.range]")
        assert kept == ["tokens", True, 0, pytest.approx(zoomed)]
        assert page.locator("html[data-theme=dark]").count() == 1
        assert opened.messages == [] and set(map(base, opened.requests)) == {file.as_uri()}

        one = open_page(started, alone)
        for width in (1280, 390):
            one.page.set_viewport_size({"width": width, "height": 900})
            draw(one, ["Loss", "Time of a step", "Progress"])
            assert one.page.locator(".legend").count() == 3
            assert one.page.evaluate(BUTTONS_IN_THE_WAY) == []
        with one.page.expect_download() as saved:
            one.page.locator("figure").first.get_by_label("save as SVG").click()
        assert saved.value.suggested_filename == "Loss.svg" and one.messages == []

        phone = open_page(started, file, viewport={"width": 390, "height": 844}, has_touch=True)
        phone.page.evaluate(
            "document.querySelectorAll('details').forEach(each => each.open = true)"
        )
        for figure in phone.page.locator("figure").all()[:6]:
            figure.scroll_into_view_if_needed()
        phone.page.locator("figure").first.get_by_label("zoom in").tap()
        assert phone.page.evaluate("settings.range") is not None
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert phone.messages == []


def base(address):
    return address.partition("#")[0]
