"""Exact mode with a part of each batch: whose gradients correct, and on which layouts."""

import pytest
import torch
from torch.nn import functional as F

from tests.parallel.test_gradients import gathered
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import listen, metrics, tiny_tables, train_here, write_text
from torchmars.config.load import config_from_tables
from torchmars.data.order import place_of_sample
from torchmars.models import build_model

STEPS, BATCH, FRACTION = 4, 16, 0.25
LAYOUTS = {
    "1 rank": (1, {}, 2),
    "1 rank, by 4": (1, {}, 4),
    "FSDP 2": (2, {}, 2),
    "FSDP 2, whole": (2, {"accumulate": "whole"}, 1),
    "HSDP 2x2": (4, {"dp_replicate": 2}, 1),
    "HSDP 2x2, reduced": (4, {"dp_replicate": 2, "accumulate": "reduced"}, 1),
    "TP 2": (2, {"tp": 2}, 4),
    "CP 2": (2, {"cp": 2}, 2),
}


def tables_of(folder, layout, **overrides):
    _, parallelism, size = LAYOUTS[layout]
    name = layout.replace(" ", "-").replace(",", "")
    return tiny_tables(
        folder,
        run={"name": name},
        training={"steps": STEPS, "microbatch_size": size, "dtype": "float32"},
        optimizer={"name": "mars-m", "mode": "exact", "exact_fraction": FRACTION}
        | {"matrix_dtype": "float32", "gamma": 0.3},
        parallelism=parallelism,
        **overrides,
    )


def compared(tables):
    """Train, and return how far the gradients that correct are from those of a plain model."""
    apart = []

    def watch(trainer):
        optimizer, loader = trainer.optimizer, trainer.loader
        names = {parameter: name for name, parameter in trainer.model.weights.items()}

        def compare(first, divided):
            config = trainer.config
            plain = build_model(config.model, trainer.model.whole.vocab_rows, 32)
            samples = range(first, first + int(FRACTION * BATCH))
            windows = torch.stack(
                [
                    loader.windows[
                        place_of_sample(
                            sample, loader.shares, loader.windows.lengths, config.run.seed
                        )
                    ]
                    for sample in samples
                ]
            )
            weights = {name: gathered(value) for name, value in trainer.model.weights.items()}
            plain.load_state_dict(weights, strict=False)
            logits = plain.head(plain(windows[:, :-1]))
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / divided
            loss.backward()
            wanted = dict(plain.named_parameters())
            for parameter, name in names.items():
                grad = gathered(parameter.grad)
                error = (grad - wanted[name].grad).norm() / wanted[name].grad.norm()
                apart.append(float(error))

        look_ahead, take_subset = optimizer.look_ahead, optimizer.take_subset

        def ahead():
            compare(trainer.state.position, divided=1)
            look_ahead()

        def subset():
            compare(trainer.state.position - BATCH, divided=1 / FRACTION)
            take_subset()

        optimizer.look_ahead, optimizer.take_subset = ahead, subset

    train_here(tables, change=watch)
    return max(apart), len(apart)


@pytest.mark.parametrize("layout", full_but(["1 rank", "FSDP 2"], LAYOUTS))
def test_the_first_samples_of_a_batch_correct(tmp_path, layout):
    write_text(tmp_path)
    [(apart, count), *_] = run_ranks(compared, LAYOUTS[layout][0], tables_of(tmp_path, layout))
    assert apart < 1e-5 and count > 2 * STEPS


@FULL
def test_losses_are_those_of_one_rank(tmp_path):
    write_text(tmp_path)
    losses = {}
    for layout, (ranks, _, _) in LAYOUTS.items():
        tables = tables_of(tmp_path, layout)
        run_ranks(train_here, ranks, tables)
        losses[layout] = [*metrics(tables).values()]
    for found in losses.values():
        assert found == pytest.approx(losses["1 rank"], rel=1e-5)


@pytest.mark.parametrize("fraction,batch", [(0.07, 100), (0.29, 100), (0.14, 50), (0.5, 2)])
def test_a_fraction_that_divides_is_one_whatever_floats_make_of_it(fraction, batch):
    tables = {
        "data": {"source": "text", "files": ["x.txt"]},
        "training": {"global_batch_size": batch, "microbatch_size": 1},
        "optimizer": {"name": "mars-adamw", "mode": "exact", "exact_fraction": fraction},
    }
    config = config_from_tables(tables, "in a test")
    assert config.subset_microbatches(1) == round(fraction * batch)


@pytest.mark.parametrize(
    "overrides,words",
    [
        ({"training": {"microbatch_size": 16}}, "no whole microbatches of 16 on each of 1 ranks"),
        ({"optimizer": {"mode": "approx"}}, 'has no meaning without optimizer.mode = "exact"'),
        ({"optimizer": {"exact_fraction": 1.5}}, "at most 1"),
        ({"parallelism": {"pp": 2}}, "cannot go with parallelism.pp = 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, overrides, words):
    write_text(tmp_path)
    tables = tables_of(tmp_path, "1 rank")
    for section, values in overrides.items():
        tables[section] = tables[section] | values
    said = listen(2 if "parallelism" in overrides else 1, tables).strip().splitlines()[-1]
    assert said.startswith("error: ") and words in said
