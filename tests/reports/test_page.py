"""The page of runs, and of a comparison: what it says, and what it does not."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.support.records import made_comparison, made_run
from torchmars.records.events import Event
from torchmars.records.run import read_run
from torchmars.reports.page import comparison_page, run_page, text

HOSTILE = "</script><script>console.log('ran')</script><b>bold</b>"


def write_events(folder, *more):
    rows = [
        {"event": "started", "step": 0, "ranks": 2, "machines": 1, "origin": None, "changes": []},
        {"event": "saved", "step": 20, "checkpoint": "step-20", "seconds": 0.25, "mib": 12.5},
        {"event": "started", "step": 20, "ranks": 1, "machines": 1, "origin": "from step 20"},
        {"event": "spike", "step": 45, "loss": 9.5},
        {"event": "unheard-of", "step": 51, "what": "of a later version"},
        {"event": "stopped", "step": 60, "signal": "SIGTERM"},
        *more,
    ]
    lines = [json.dumps({"time": 1.8e9 + number} | row) for number, row in enumerate(rows)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def shown(page):
    """The words of a page, and its tags."""
    words, tags = [], []
    parser = HTMLParser()
    parser.handle_data = words.append
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(page)
    return " ".join(words), tags


def test_a_page_of_runs(tmp_path):
    folders = [made_run(tmp_path / "a", 60, lr=0.1), made_run(tmp_path / "b", 60, lr=0.2)]
    write_events(folders[1])
    words, tags = shown(run_page([read_run(folder) for folder in folders]))
    assert (
        words.count("60 of 60") == 2
        and "checkpoint step-20, seconds 0.25, mib 12.5" in words
        and "seq_len = 256" in words
    )
    differ = words[words.index("Settings that differ") : words.index("Events")]
    assert differ.split() == "Settings that differ setting a b optimizer.lr 0.1 0.2".split()
    assert [each for each, _ in tags].count("img") == 1
    words, tags = shown(run_page([read_run(made_run(tmp_path / "begun", 0))]))
    assert "0 of 0" in words and "img" not in dict(tags) and "differ" not in words


def test_a_page_has_no_script_and_asks_for_nothing(tmp_path):
    """Whatever names and texts of a run are."""
    folder = made_run(tmp_path / "<i>new & shiny", 60)
    write_events(folder, {"event": HOSTILE, "step": 60, "message": HOSTILE + "\x1b[31m\ud800"})
    page = run_page([read_run(folder)])
    words, tags = shown(page)
    assert HOSTILE in words and "<i>new & shiny" in words and "\\x1b[31m" in words
    assert not {"script", "i", "b", "link", "a"} & {tag for tag, _ in tags}
    assert all(each["src"].startswith("data:") for tag, each in tags if tag == "img")
    assert "url(" not in page and page.encode()
    assert {"$title", "$body"}.isdisjoint(re.findall(r"\$\w+", page))


def test_a_page_names_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made_run(tmp_path / "run", 60)
    with (folder / "config.toml").open("a") as stream:
        stream.write(
            f'[data]\npath = "{tmp_path}/My Texts/books"\nsource = "text:{tmp_path}/x.txt"\n'
        )
    write_events(folder, {"event": "failed", "step": 60, "message": f"{tmp_path}/x: no file"})
    page = run_page([read_run(folder)])
    words, _ = shown(page)
    assert 'path = "books"' in words and 'source = "text:x.txt"' in words and "x: no file" in words
    assert str(tmp_path) not in page and tmp_path.name not in page and "My Texts" not in words


@pytest.mark.parametrize(
    "said, is_shown",
    [
        ("cannot write /home/me/a/b.txt: full", "cannot write b.txt: full"),
        ("~/a/b and ~me/c, file:///home/me/d", "b and c, d"),
        ("--data.path=/home/me/x", "--data.path=x"),
        ("20 tok/s, 3/4, a / b, (ms)/s", "20 tok/s, 3/4, a / b, (ms)/s"),
        ("s3://bucket/run and https://host/page", "s3://bucket/run and https://host/page"),
        ("runs/a/checkpoints", "runs/a/checkpoints"),
    ],
)
def test_folders_are_cut_off(said, is_shown):
    assert text(said) == is_shown


def test_many_events_leave_the_page_small(tmp_path):
    run = read_run(made_run(tmp_path / "run", 3000))
    run.events.extend(Event("saved", number, 1.8e9, {}) for number in range(3000))
    page = run_page([run])
    assert "The newest 200 of 3,000." in page and page.count("<td>saved</td>") == 200
    assert "<td>2,999</td>" in page and len(page) < 2**20


def test_a_page_of_a_comparison(tmp_path):
    words, tags = shown(comparison_page(made_comparison()))
    assert "mars-adamw - adamw" in words and "23.0% (15.0% to 31.0%)" in words
    assert "shown" in words and "16 done, 2 diverged." in words
    assert "books.toml: each trial has 1,200 steps" in words
    assert [each for each, _ in tags].count("table") == 3 and "img" in dict(tags)
