"""Starting from the weights of a run, a checkpoint or a file, also with the optimizer's state."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import ROOT, run_command
from tests.support.ranks import run_ranks
from tests.support.tiny import listen, metrics, tiny_tables, train, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.training.build import build_trainer

CHECKPOINT = "runs/adamw/checkpoints/step-00000006"


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
            tables_of(folder, name, {"name": name, "lr": 1e-3}, 6)
            for name in ("adamw", "mars-adamw", "mars-lion")
        ),
    )
    places = [str(folder / "runs" / "adamw"), str(folder / "weights"), "--to", "safetensors"]
    code, out, err = run_command("export", places, ROOT)
    assert code == 0 and "36,000 weights" in out, err
    return folder


def tables_of(folder, run, optimizer, steps=3, source=None, state=False, **overrides):
    """A run that starts from a `source` in the folder, with its optimizer's `state` or without."""
    if source is not None:
        overrides["checkpoint"] = {"init_from": str(folder / source), "init_optimizer": state}
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


def all_started(*runs):
    """What each run starts from, or the line with which it does not."""
    found = []
    for tables in runs:
        try:
            found.append(started(tables))
        except UserError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("size,sources", [(1, ["runs/adamw"]), (4, [CHECKPOINT, "weights"])])
def test_weights_only(folder, size, sources):
    runs = [
        tables_of(folder, f"from-{size}-{number}", {"name": "mars-m"}, source=source)
        for number, source in enumerate(sources)
    ]
    expected = load_file(folder / "weights" / "model.safetensors")
    for of_rank in run_ranks(all_started, size, *runs):
        for step, position, weights, states, origin in of_rank:
            assert (step, position) == (0, 0) and "weights of" in origin
            assert set(weights) == set(expected)
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
            assert all(not value.any() for state in states.values() for value in state.values())


def check_same(states, saved):
    for name, state in states.items():
        assert all(torch.equal(value, saved[name][key]) for key, value in state.items())


def test_state_is_taken_where_it_means_the_same(folder):
    """Lion's momentum is not mars-m's input.

    adamw's averages fit the vectors that mars-m gives to AdamW, and its momentum of clipped
    corrections.
    """
    like = {name: {"name": name, "lr": 1e-3} for name in ("adamw", "mars-adamw")}
    lean, mars_m = {"name": "mars-lion", "clip": 0.0}, {"name": "mars-m"}
    adamw, mars, *others = run_ranks(
        all_started,
        1,
        *(tables_of(folder, name, settings, 6) for name, settings in like.items()),
        tables_of(folder, "from-adamw", mars_m, source="runs/adamw", state=True),
        tables_of(folder, "from-lion", mars_m, source="runs/mars-lion", state=True),
        tables_of(folder, "lean", lean, source="runs/mars-lion", state=True),
    )[0]
    taken = (15, 13, 5)  # the last are the vectors' AdamW alone
    for count, (*_, origin) in zip(taken, others, strict=True):
        assert f"optimizer's state of {count} of 15 tensors" in origin
    runs = [
        tables_of(
            folder, f"mars-from-{name}", like["mars-adamw"], source=f"runs/{name}", state=True
        )
        for name in like
    ]
    (step, _, _, states, origin), (_, _, _, same, whole) = run_ranks(all_started, 2, *runs)[0]
    assert step == 0 and "state of 15 of 15 tensors (10 without a last gradient)" in origin
    for state in states.values():
        assert state.pop("last_grad", torch.tensor(math.nan)).isnan().all()  # there is none
        assert all(value.any() for value in state.values())
    check_same(states, adamw[3])
    assert "15 of 15 tensors" in whole and "without" not in whole
    check_same(same, mars[3])
    assert "continue  from the weights of" in listen(2, runs[0])
    assert len(metrics(runs[0])) == 3


def test_exact_mode_starts_without_the_look_ahead_of_another_run(folder):
    exact = {"name": "mars-adamw", "mode": "exact"}
    tables = tables_of(folder, "exact", exact, source="runs/mars-adamw", state=True)
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


# checkpoint.init_from, what else the config says, and the line.
MISFITS = [
    ("nowhere", {}, "init_from: .*nowhere is neither a checkpoint nor a run with one"),
    ("hf:none", {}, "there is no folder .*/none$"),
    ("theirs", {}, "init_from: .*/theirs is a folder of transformers: write hf:.*theirs$"),
    ("none.safetensors", {}, "cannot read .*none.safetensors"),
    ("broken.safetensors", {}, "cannot read .*broken.safetensors"),
    (
        "part.safetensors",
        {},
        r"part.safetensors has tok_embed.weight not at all, the config's model in \[320, 32\]",
    ),
    (
        "weights/model.safetensors",
        {"checkpoint": {"init_optimizer": True}},
        "checkpoint.init_optimizer: .*weights only",
    ),
    (
        "runs/adamw",
        {"model": {"n_embd": 64}},
        r"has tok_embed.weight in shape \[320, 32\], the config's model in \[320, 64\]",
    ),
    (
        "runs/adamw",
        {"training": {"seq_len": 16}},
        r"has pos_embed.weight in shape \[32, 32\]",
    ),
]


def test_what_does_not_fit_is_one_line(folder):
    (folder / "broken.safetensors").write_bytes(b"no weights")
    save_file({"norm.weight": torch.ones(32)}, folder / "part.safetensors")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text("{}")
    runs = []
    for source, overrides, _ in MISFITS:
        name = source.removeprefix("hf:")
        place = {"init_from": source.replace(name, str(folder / name))}
        tables = tables_of(folder, "wrong", {"name": "adamw"}, checkpoint=place)
        for section, table in overrides.items():
            tables[section] = tables.get(section, {}) | table
        runs.append(tables)
    [lines] = run_ranks(all_started, 1, *runs)
    for line, (*_, message) in zip(lines, MISFITS, strict=True):
        assert re.search(message, line), line


def test_a_run_with_a_checkpoint_of_its_own_goes_on_from_that(folder):
    tables = tables_of(folder, "own", {"name": "adamw", "lr": 1e-3}, source="weights")
    train(2, tables)
    tables["training"]["steps"] = 4
    assert "continue  from step 3" in listen(2, tables)
