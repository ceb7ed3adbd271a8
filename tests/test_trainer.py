"""The same run on every layout, and what a run reports."""

import pytest

from tests.tiny import metrics, tiny_tables, train, write_text

LAYOUTS = {"one": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2x2": (4, {"dp_replicate": 2}),
           "replicas": (2, {"dp_replicate": 2})}
VARIANTS = [(name, microbatch) for name in ("mars-adamw", "adamw") for microbatch in (None, 2)]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Loss by step of 20 steps, for every layout, optimizer and microbatch size."""
    folder = tmp_path_factory.mktemp("layouts")
    write_text(folder)
    result = {}
    for layout, (size, parallelism) in LAYOUTS.items():
        runs = [tiny_tables(folder, run={"name": f"{layout}-{name}-{microbatch}"}, optimizer={"name": name, "lr": 6e-3},
                            training={} if microbatch is None else {"microbatch_size": microbatch}, parallelism=parallelism,
                            validation={"interval": 10, "windows": 7})
                for name, microbatch in VARIANTS]
        train(size, *runs)
        for variant, run in zip(VARIANTS, runs):
            result[layout, *variant] = metrics(run), metrics(run, "validation/loss")
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name,microbatch", VARIANTS)
def test_same_losses_on_every_layout(losses, layout, name, microbatch):
    expected, expected_validation = losses["one", name, None]
    actual, validation = losses[layout, name, microbatch]
    assert list(actual) == list(range(1, 21))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert sorted(validation) == [10, 20]
    assert validation == pytest.approx(expected_validation, rel=1e-5)


def test_loss_falls(losses):
    loss, _ = losses["fsdp2", "mars-adamw", None]
    assert loss[20] < 0.6 * loss[1]


def test_optimizers_differ(losses):
    assert losses["one", "mars-adamw", None][0][20] != pytest.approx(losses["one", "adamw", None][0][20], rel=1e-3)
