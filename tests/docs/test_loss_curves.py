"""The script behind the picture of README.md draws the losses of runs."""

import json
import subprocess
import sys
from xml.etree import ElementTree

from tests.docs.pages import ROOT

SCRIPT = ROOT / "docs" / "figures" / "loss_curves.py"
PICTURE = ROOT / "docs" / "figures" / "loss_curves.svg"
SVG = "{http://www.w3.org/2000/svg}"


def make_run(folder, name, losses):
    """Make the folder of a run of these losses, with a validation after the last step."""
    folder.mkdir()
    (folder / "config.toml").write_text(f'[optimizer]\nname = "{name}"\n')
    lines = [{"step": step, "train/loss": loss} for step, loss in losses]
    lines.append({"step": losses[-1][0], "validation/loss": losses[-1][1]})
    lines.append({"step": losses[-1][0], "train/loss": None})  # a loss that was not finite
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_draws_each_run(tmp_path):
    one = make_run(tmp_path / "one", "mars-adamw", [(1, 4.0), (10, 3.0), (20, 2.5)])
    two = make_run(tmp_path / "two", "adamw", [(1, 4.0), (20, 2.6)])
    file = tmp_path / "losses.svg"
    subprocess.run([sys.executable, SCRIPT, file, f"{one},{two}", two], check=True)
    figure = ElementTree.parse(file).getroot()
    curves = [curve.get("points").split() for curve in figure.iter(SVG + "polyline")]
    assert [len(points) for points in curves] == [2, 1, 1]  # not the first
    heights = [float(point.split(",")[1]) for point in curves[0]]
    assert heights == sorted(heights)  # a lower loss is further down
    assert len(list(figure.iter(SVG + "circle"))) == 3
    labels = [text.text for text in figure.iter(SVG + "text")]
    assert [label for label in labels if "adamw" in label] == ["mars-adamw", "adamw", "adamw"]


def test_picture_has_the_runs_that_readme_names():
    labels = [text.text for text in ElementTree.parse(PICTURE).getroot().iter(SVG + "text")]
    rules = [label for label in labels if label in ("mars-adamw", "adamw", "mars-m", "muon")]
    assert rules == ["mars-adamw", "adamw", "mars-m", "muon"]
