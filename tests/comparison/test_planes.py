"""Losses over betas and gamma: the best of other settings, and what is not done."""

import itertools

import pytest

from tests.support.records import compared_planes
from torchmars.comparison.planes import planes_of, shading, text_at


def test_each_point_has_the_best_of_the_other_settings():
    mars, muon = planes_of(compared_planes())
    assert (mars.betas, mars.gammas) == (["0.9 0.99", "0.95 0.99"], ["0.05", "0.2", "0.4"])
    assert (muon.betas, muon.gammas) == (["0.9 0.99", "0.95 0.99"], [""])
    said = {point: text_at(trial) for point, trial in mars.points.items()}
    assert said == {
        ("0.9 0.99", "0.05"): "1.4700",
        ("0.9 0.99", "0.2"): "1.4200",
        ("0.9 0.99", "0.4"): "1.4600",  # one of its rates diverged
        ("0.95 0.99", "0.05"): "1.4900",
        ("0.95 0.99", "0.2"): "×",  # both diverged
        ("0.95 0.99", "0.4"): "",  # one diverged, one has not ended
    }
    assert mars.points["0.9 0.99", "0.2"].settings["lr"] == 0.02
    assert [text_at(trial) for trial in muon.points.values()] == ["1.4400", "1.4800"]


def test_the_lowest_loss_of_all_has_the_strongest_shade():
    planes = planes_of(compared_planes())
    shade = shading(planes)
    trials = [trial for plane in planes for trial in plane.points.values()]
    known = sorted((each for each in trials if each.loss is not None), key=lambda each: each.loss)
    shades = [shade(each) for each in known]
    assert shades[0] == 0 and shades[-1] == 1 and shades == sorted(shades)
    assert {shade(each) for each in trials if each.loss is None} == {1}
    # 1.44 and 1.46 of 1.42 to 1.49: the roots of 2/7 and of 4/7.
    assert shades[1:3] == pytest.approx([0.5345, 0.7559], abs=1e-4)


def test_there_is_none_where_nothing_of_it_was_tuned():
    found = compared_planes()
    for name, values in itertools.product(("gamma", "betas"), (2, 1, 0)):
        grid = {key: value for key, value in found.grid.items() if key == "lr"}
        grid |= {name: found.grid[name][:values]} if values else {}
        assert bool(planes_of(type(found)(**vars(found) | {"grid": grid}))) is (values > 1)
