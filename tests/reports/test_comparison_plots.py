"""The pictures of a comparison: what is written in them."""

import re
from dataclasses import replace

import pytest

from tests.support.full import FULL
from tests.support.records import compared_planes, made_comparison
from torchmars.reports.comparison_plots import plot_comparison

pytest.importorskip("matplotlib")


def texts(svg):
    """The texts in an SVG, which matplotlib draws as shapes and leaves as comments."""
    return [line.strip()[5:-4] for line in svg.read_text().splitlines() if "<!--" in line]


def test_losses_over_betas_and_gamma(tmp_path):
    found, file = compared_planes(), tmp_path / "loss_by_betas_gamma.svg"
    assert file in plot_comparison(found, tmp_path)
    said = texts(file)
    assert {"mars-m", "muon", "betas", "gamma", "0.05", "0.2", "0.4"} <= set(said)
    assert said.count("0.9 0.99") == said.count("0.95 0.99") == 2  # rows of both
    numbers = [each for each in said if each.startswith("1.") or each == "×"]
    assert sorted(numbers) == sorted(
        ["1.4700", "1.4200", "1.4600", "1.4900", "×", "1.4400", "1.4800"]
    )
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_tokens_are_written_as_millions(tmp_path):
    plot_comparison(made_comparison(), tmp_path)
    file = tmp_path / "loss_by_tokens.svg"
    assert "2 M" in texts(file) and not [each for each in texts(file) if "e6" in each]
    colors = set(re.findall("#[0-9a-f]{6}", file.read_text()))
    assert "#808080" in colors and not {"#ffffff", "#000000"} & colors


@FULL
def test_a_picture_of_an_earlier_call_does_not_stay(tmp_path):
    """This call names one gamma and one pair of betas."""
    for suffix in ("png", "svg"):
        (tmp_path / f"loss_by_betas_gamma.{suffix}").touch()
    alone = {"lr": [0.01, 0.02], "gamma": [0.2], "betas": [[0.9, 0.99]]}
    written = plot_comparison(replace(compared_planes(), grid=alone), tmp_path)
    assert len(written) == 6 and not list(tmp_path.glob("loss_by_betas_gamma.*"))
