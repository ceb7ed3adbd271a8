"""The page of runs: what it says, and what it does in a browser."""

import json

import pytest

from tests.support.browser import BUTTONS_IN_THE_WAY, PATIENCE, browser, draw, open_page
from tests.support.full import FULL
from tests.support.records import TOKENS_PER_STEP, made_run
from torchmars.metrics.events import Event
from torchmars.records.run import read_run
from torchmars.reports.charts import charts_of
from torchmars.reports.events import told
from torchmars.reports.page import plotly
from torchmars.reports.run_figures import figure_of, progress_figure
from torchmars.reports.run_page import config_differences, run_page

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
    words = [(event.kind, event.step, text) for event, text in told(read_run(folder))]
    assert words == [
        ("started", 0, "2 ranks, 1 machine"),
        ("saved", 20, "step-20: 12.5 MiB in 0.25 s"),
        ("started", 20, "the run was killed before, from step 20, 1 rank, 1 machine"),
        ("spike", 45, "loss 9.5000, the run goes back"),
        ("rollback", 20, "back from step 45 to step-20"),
        ("unheard-of", 51, "what of a later version"),
        ("stopped", 60, "by SIGTERM"),
    ]


def write_hostile_names(folder):
    """Add events and measurements of names that scripts, selectors and templates must not read."""
    rows = [{"time": 1.81e9, "event": name, "step": 60} for name in HOSTILE_NAMES]
    with (folder / "events.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 701} | dict.fromkeys(HOSTILE_NAMES, 1.0)) + "\n")


def test_many_events_and_samples_leave_the_page_small(tmp_path):
    run = read_run(made_run(tmp_path / "run", 3000))
    kinds = ("saved", "sample", "rollback")
    run.events.extend(
        Event(kinds[number % 3], number, 1.8e9, {"from_step": 0, "text": f"text {number}"})
        for number in range(3000)
    )
    text = run_page([run])
    rows = [text.count(f'<td class="state" data-is="{kind}">') for kind in kinds]
    assert rows == [500, 0, 500]
    assert "The newest 1,000 of 2,000." in text and '<td class="number">2,999</td>' in text
    assert text.count("<pre>text ") == 100 and "text 2998" in text and "text 1</pre>" not in text
    assert len(text) - len(plotly()) < 2**20


def test_what_differs():
    one = {"run": {"name": "a"}, "optimizer": {"lr": 0.1, "name": "lion"}, "only": {"here": True}}
    two = {"run": {"name": "b"}, "optimizer": {"lr": 0.2, "name": "lion"}}
    found = config_differences([one, two], ["a", "b"])
    assert list(found.columns) == ["run", "optimizer.lr", "only.here"]
    assert found.rows == [("a", "0.1", "True"), ("b", "0.2", "")]
    assert config_differences([one, one], ["a", "b"]).texts == ["Nothing but their names."]
    assert not config_differences([one], ["a"]).texts


def test_a_red_stretch_is_what_a_rollback_undid(tmp_path):
    folder = made_run(tmp_path / "run", 60)
    write_events(folder)
    run = read_run(folder)
    events = [(0, *each) for each in told(run)]
    loss = figure_of(charts_of(set(run.series))[0][0], [run], ["run"], events)
    (undone,) = [trace for trace in loss.traces if trace["style"] == "undone"]
    assert (min(undone["x"]), max(undone["x"])) == (20, 45)
    (line,) = [trace for trace in progress_figure(events).traces if trace["style"] == "path"]
    # A gap before each start; a rollback goes back from where the run was.
    assert line["y"] == [None, 0, 20, None, 20, 45, 45, 20, 51, 60]


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


SHOWN = "document.querySelector('.plot').data.map(trace => trace.hovertemplate ?? '')"
RANGES = "plots.filter(plot => plot.drawn).map(plot => plot.layout.xaxis.range)"


@FULL
def test_in_a_browser(tmp_path):
    folders = [made_run(tmp_path / "<b>first", 700), made_run(tmp_path / "second", 60, seed=1)]
    write_events(folders[0])
    write_hostile_names(folders[0])
    runs = [read_run(folder) for folder in folders]
    file, alone = tmp_path / "report.html", tmp_path / "alone.html"
    file.write_text(run_page(runs, 600))
    alone.write_text(run_page(runs[:1]))
    with browser() as started:
        opened = open_page(started, file, color_scheme="dark")
        page = opened.page
        first = page.locator("figure").first
        assert first.locator("h3").inner_text() == "Training loss"
        assert "means over 3% of them" in first.inner_text()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, dark[4:-1].split(","))) < 60
        page.get_by_label("log y").check()
        page.get_by_label("x axis").select_option("tokens")
        layout = page.evaluate(
            "(({layout}) => [layout.yaxis.type, layout.xaxis.title.text])(plots[0])"
        )
        assert layout == ["log", "tokens"]
        last = page.evaluate("Math.max(...plots[0].data.flatMap(trace => trace.x))")
        assert last == pytest.approx(700 * TOKENS_PER_STEP, rel=2e-3)
        page.get_by_role("checkbox", name="second").uncheck()
        assert not any("second" in each for each in page.evaluate(SHOWN))
        assert any("&#60;b&#62;first" in each for each in page.evaluate(SHOWN))
        for kind in HOSTILE_NAMES:
            row = page.locator("tbody tr").filter(has=page.get_by_text(kind, exact=True))
            assert row.count() >= 1
        box = page.locator(".plot .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 52, steps=4)
        page.mouse.up()
        opened.wait("set.range !== null")
        zoomed = page.evaluate("set.range")
        ranges = page.evaluate(RANGES)
        assert len(ranges) > 1 and all(each == pytest.approx(zoomed) for each in ranges)
        page.get_by_text("More measurements", exact=True).last.click()
        page.get_by_role("link", name="Events").click()
        opened.wait("history.state !== null")  # of a history entry of its own
        page.evaluate("scrollTo(0, 700)")
        page.reload()
        page.wait_for_selector(".plot .main-svg", timeout=PATIENCE)
        opened.wait("scrollY === 700")
        assert page.locator("details[open]").count() == 1
        kept = page.evaluate("[set.x, set.logy, set['run-1'], set.range]")
        assert kept == ["tokens", True, False, pytest.approx(zoomed)]
        draw(opened, ["Training loss"])
        assert not any("second" in each for each in page.evaluate(SHOWN))
        page.locator("#all").uncheck()
        assert page.evaluate("plots[0].data.length") == 0
        assert opened.messages == [] and set(map(base, opened.requests)) == {file.as_uri()}

        one = open_page(started, alone)
        draw(one, ["Loss", "Time of a step", "Progress"])
        assert one.page.locator(".legend").count() == 3
        one.page.locator(".plot").first.hover()
        with one.page.expect_download() as saved:
            one.page.locator("figure").first.locator("[data-title^=Download]").click()
        assert saved.value.suggested_filename.endswith(".svg") and one.messages == []

        phone = open_page(started, file, viewport={"width": 390, "height": 844}, has_touch=True)
        phone.page.evaluate(
            "document.querySelectorAll('details').forEach(each => each.open = true)"
        )
        draw(phone, ["Training loss", "Validation loss", "Time of a step", "Progress"])
        assert phone.page.evaluate(BUTTONS_IN_THE_WAY) == []
        phone.page.locator("figure").first.locator("[data-title='Zoom in']").tap()
        assert phone.page.evaluate("set.range") is not None
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert phone.messages == []


@FULL
def test_a_page_that_is_rewritten_is_loaded_again(tmp_path):
    """Unless the reader does not want it."""
    file, run = tmp_path / "report.html", made_run(tmp_path / "run", 60)
    file.write_text(run_page([read_run(run)], 3600))  # not while it is opened: that takes time
    with browser() as started:
        opened = open_page(started, file)
        opened.page.get_by_label("log y").check()
        opened.page.get_by_label("renew").uncheck()
        file.write_text(run_page([read_run(run)], 1))
        opened.page.reload()
        write_events(run)
        file.write_text(run_page([read_run(run)], 1))
        opened.page.wait_for_timeout(1500)
        rollbacks = opened.page.locator("td[data-is=rollback]")
        assert rollbacks.count() == 0
        opened.page.get_by_label("renew").check()
        rollbacks.wait_for(timeout=PATIENCE)
        assert opened.page.get_by_label("log y").is_checked() and opened.messages == []


@FULL
def test_printed(tmp_path):
    """All figures are there, light, without buttons, also those that were not in view."""
    file = tmp_path / "report.html"
    file.write_text(run_page([read_run(made_run(tmp_path / "run", 60))]))
    with browser() as started:
        page = open_page(started, file, color_scheme="dark").page
        page.pdf()
        assert page.evaluate("plots.filter(plot => plot.checkVisibility() && !plot.drawn)") == []
        page.emulate_media(media="print")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert min(map(int, light[4:-1].split(","))) > 200
        assert not page.locator("#controls").is_visible()


def base(address):
    return address.partition("#")[0]
