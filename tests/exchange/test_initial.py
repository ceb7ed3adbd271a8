"""Starting from the weights of a run, a checkpoint or a file, also with the optimizer's state."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import ROOT, run_command
from tests.support.ranks import run_ranks
from tests.support.tiny import listen, metrics, tiny_tables, train, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs of adamw, mars-adamw and mars-lion, of 6 steps on two ranks each.

    The weights of the first one are exported.
    """
    folder = tmp_path_factory.mktemp("initial")
    write_text(folder)
    train(
        2,
        *(
            tables_of(folder, name, {"name": name, "lr": 1e-3}, steps=6)
            for name in ("adamw", "mars-adamw", "mars-lion")
        ),
    )
    places = [str(folder / "runs" / "adamw"), str(folder / "weights"), "--to", "safetensors"]
    code, out, err = run_command("export", places, ROOT)
    assert code == 0 and "36,000 weights" in out, err
    return folder


def tables_of(folder, run, optimizer, steps, **overrides):
    return tiny_tables(
        folder, run={"name": run}, optimizer=optimizer, training={"steps": steps}, **overrides
    )


def whole_of(tensor):
    """The tensor itself, or all of one that is sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def started(tables):
    """Return the whole weights and optimizer's state that a run starts from, and their origin."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    whole = {name: whole_of(value) for name, value in trainer.model.weights.items()}
    states = {
        name: {key: whole_of(value) for key, value in trainer.optimizer.state[parameter].items()}
        for name, parameter in trainer.model.weights.items()
    }
    reached = trainer.state.step, trainer.loader.position
    return *reached, whole, states, trainer.resumed.origin


@pytest.mark.parametrize(
    "source,size",
    [("runs/adamw", 1), ("runs/adamw/checkpoints/step-00000006", 4), ("weights", 4)],
)
def test_weights_only(folder, source, size):
    tables = tables_of(
        folder,
        f"from-{size}",
        {"name": "mars-m"},
        3,
        checkpoint={"init_from": str(folder / source)},
    )
    for step, position, weights, states, origin in run_ranks(started, size, tables):
        expected = load_file(folder / "weights" / "model.safetensors")
        assert (
            (step, position) == (0, 0) and set(weights) == set(expected) and "weights of" in origin
        )
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert all(not value.any() for state in states.values() for value in state.values())


def whole_state(folder, name):
    """The optimizer's state at the end of a run, on one rank."""
    return run_ranks(started, 1, tables_of(folder, name, {"name": name, "lr": 1e-3}, 6))[0][3]


def test_mars_starts_from_an_adamw_run_with_its_moving_averages(folder):
    tables = tables_of(
        folder,
        "mars-from-adamw",
        {"name": "mars-adamw", "lr": 1e-3},
        3,
        checkpoint={"init_from": str(folder / "runs" / "adamw"), "init_optimizer": True},
    )
    step, _, _, states, origin = run_ranks(started, 2, tables)[0]
    saved = whole_state(folder, "adamw")
    assert (
        step == 0 and "optimizer's state of 15 of 15 tensors (10 without a last gradient)" in origin
    )
    for name, state in states.items():
        assert state.pop("last_grad", torch.tensor(math.nan)).isnan().all()  # there is none
        assert all(torch.equal(value, saved[name][key]) for key, value in state.items())
        assert all(value.any() for value in state.values())
    assert "continue  from the weights of" in listen(2, tables)
    assert len(metrics(tables)) == 3


def test_state_of_another_meaning_is_not_taken(folder):
    """Lion's momentum is not mars-m's input.

    adamw's averages fit the vectors that mars-m gives to AdamW, and its momentum of clipped
    corrections.
    """
    for source, taken in (("adamw", 15), ("mars-lion", 13)):
        tables = tables_of(
            folder,
            f"mars-m-from-{source}",
            {"name": "mars-m"},
            3,
            checkpoint={"init_from": str(folder / "runs" / source), "init_optimizer": True},
        )
        assert f"optimizer's state of {taken} of 15 tensors" in run_ranks(started, 1, tables)[0][4]
    tables = tables_of(
        folder,
        "lean-from-lion",
        {"name": "mars-lion", "clip": 0.0},
        3,
        checkpoint={"init_from": str(folder / "runs" / "mars-lion"), "init_optimizer": True},
    )
    assert (
        "optimizer's state of 5 of 15 tensors" in run_ranks(started, 1, tables)[0][4]
    )  # the vectors' AdamW alone
    tables = tables_of(
        folder,
        "same",
        {"name": "mars-adamw", "lr": 1e-3},
        3,
        checkpoint={"init_from": str(folder / "runs" / "mars-adamw"), "init_optimizer": True},
    )
    _, _, _, states, origin = run_ranks(started, 2, tables)[0]
    saved = whole_state(folder, "mars-adamw")
    assert "15 of 15 tensors" in origin and "without" not in origin
    assert all(
        torch.equal(value, saved[name][key])
        for name, state in states.items()
        for key, value in state.items()
    )


def test_exact_mode_starts_without_the_look_ahead_of_another_run(folder):
    tables = tables_of(
        folder,
        "exact",
        {"name": "mars-adamw", "mode": "exact"},
        3,
        checkpoint={"init_from": str(folder / "runs" / "mars-adamw"), "init_optimizer": True},
    )
    assert all(run_ranks(forgotten, 2, tables))


def forgotten(tables):
    """Whether a run starts without any last gradient, which is what NaN stands for."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    states = [trainer.optimizer.state[each] for each in trainer.model.weights.values()]
    kept = [whole_of(state["last_grad"]) for state in states if "last_grad" in state]
    return len(kept) == 10 and all(each.isnan().all() for each in kept)


def test_an_export_that_cannot_be_written_is_one_line(folder):
    places = [str(folder / "runs" / "adamw"), "/proc/no/weights"]
    code, _, err = run_command("export", places, ROOT)
    assert code == 2 and err.startswith("error: cannot write") and err.count("\n") == 1


def test_the_first_step_without_a_last_gradient_is_not_corrected():
    """AdamW's averages, no last gradient.

    The first step is AdamW's on the clipped gradient. The second is corrected by the first's.
    """
    from torchmars.optim import MARS

    torch.manual_seed(0)
    start, averages = (
        torch.randn(6, 5, dtype=torch.float64),
        (torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)),
    )
    gradients = [torch.randn(6, 5, dtype=torch.float64) for _ in range(3)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = MARS([parameter], lr=0.01, rule="mars-adamw", clip=None, max_grad_norm=1.0)
    state = optimizer.state[parameter]
    (
        state["exp_avg"].copy_(averages[0]),
        state["exp_avg_sq"].copy_(averages[1]),
        state["step"].fill_(7),
    )
    x, m, v, last = start.clone(), *averages, None
    for count, gradient in enumerate(gradients, start=8):
        parameter.grad = gradient.clone()
        if last is None:
            optimizer.skip_next_correction([parameter])
        optimizer.step()
        g = gradient * min(1.0, 1 / (gradient.norm().item() + 1e-6))
        c = g if last is None else g + 0.025 * 0.95 / 0.05 * (g - last)
        m, v, last = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c, g
        x = x - 0.01 * (m / (1 - 0.95**count)) / ((v / (1 - 0.99**count)).sqrt() + 1e-8)
        assert torch.allclose(parameter.detach(), x, rtol=1e-9, atol=1e-12)


MISFITS = [
    (
        {"checkpoint": {"init_from": "nowhere"}},
        "checkpoint.init_from: nowhere is neither a checkpoint nor a run with one",
    ),
    ({"checkpoint": {"init_from": "hf:FOLDER/none"}}, "there is no folder .*/none$"),
    (
        {"checkpoint": {"init_from": "FOLDER/theirs"}},
        "checkpoint.init_from: .*/theirs is a folder of transformers: write hf:.*theirs$",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/none.safetensors"}},
        "cannot read .*none.safetensors",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/broken.safetensors"}},
        "cannot read .*broken.safetensors",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/part.safetensors"}},
        r"part.safetensors has tok_embed.weight not at all, the config's model in \[320, 32\]",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/weights/model.safetensors", "init_optimizer": True}},
        "checkpoint.init_optimizer: .*weights only",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/runs/adamw"}, "model": {"n_embd": 64}},
        r"has tok_embed.weight in shape \[320, 32\], the config's model in \[320, 64\]",
    ),
    (
        {"checkpoint": {"init_from": "FOLDER/runs/adamw"}, "training": {"seq_len": 16}},
        r"has pos_embed.weight in shape \[32, 32\]",
    ),
]


@pytest.mark.parametrize("overrides,message", MISFITS)
def test_what_does_not_fit_is_one_line(folder, overrides, message):
    (folder / "broken.safetensors").write_bytes(b"no weights")
    save_file({"norm.weight": torch.ones(32)}, folder / "part.safetensors")
    (folder / "theirs").mkdir(exist_ok=True)
    (folder / "theirs" / "config.json").write_text("{}")
    overrides = {
        section: {
            key: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
            for key, value in table.items()
        }
        for section, table in overrides.items()
    }
    tables = tables_of(folder, "wrong", {"name": "adamw"}, 3)
    for section, table in overrides.items():
        tables[section] = tables.get(section, {}) | table
    with pytest.raises(AssertionError, match=message):
        run_ranks(started, 1, tables)


def test_a_run_with_a_checkpoint_of_its_own_goes_on_from_that(folder):
    tables = tables_of(
        folder,
        "own",
        {"name": "adamw", "lr": 1e-3},
        3,
        checkpoint={"init_from": str(folder / "weights")},
    )
    train(2, tables)
    tables["training"]["steps"] = 4
    assert "continue  from step 3" in listen(2, tables)
