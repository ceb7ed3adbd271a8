"""Stop and resume: bit for bit on the same layout, to rounding on others; the same run or none."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    copy_run,
    listen_on,
    metrics,
    run_folder_of,
    same,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.checkpoint.resume import check_same_run
from torchmars.checkpoint.state_dict import load_copy
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.data.loader import Loader
from torchmars.data.manifest import read_manifest
from torchmars.data.windows import MixedWindows
from torchmars.exchange.export import export
from torchmars.exchange.saved_model import load_sharded_model, open_model
from torchmars.models import build_meta_model
from torchmars.storage.local import LOCAL
from torchmars.storage.storage import MANIFEST
from torchmars.training.build import build_trainer
from torchmars.training.optimizer import build_optimizer

# Layouts that a run is saved on and goes on on: ranks and parallelism.
LAYOUTS = {"one": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2x2": (4, {"dp_replicate": 2})}
NAMES = ("mars-adamw", "exact")  # exact: mars-adamw in exact mode
MORE_NAMES = (*NAMES, "mars-m", "adamw")
# The other rules, and the other mode and forms. narrow: the state is kept as NARROW says.
OTHERS = ("mars-lion", "mars-shampoo", "lion", "muon")
RULES = (*OTHERS, "exact mars-m", "lean mars-lion", "narrow mars-m")
NARROW = {"momentum_dtype": "bfloat16", "last_grad_dtype": "bfloat16"}
SAVED, STEPS = 4, 8


def tables_of(folder, run, name, layout="fsdp2", **overrides):
    form, _, rule = name.rpartition(" ")
    optimizer = {
        "name": "mars-adamw" if rule == "exact" else rule,
        "lr": 1e-3 if "lion" in rule else 6e-3,
    }
    optimizer |= {"mode": "exact"} if "exact" in name else {}
    optimizer |= {"clip": 0.0} if form == "lean" else {}
    optimizer |= NARROW if form == "narrow" else {}
    return tiny_tables(
        folder,
        run={"name": f"{run}-{name}"},
        optimizer=optimizer,
        parallelism=LAYOUTS[layout][1],
        checkpoint={"interval": SAVED},
        **overrides,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with one uninterrupted run on two ranks for each optimizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_text(folder)
    train_straight(folder, "fsdp2", NAMES)
    return folder


def train_straight(folder, layout, names):
    """Train an uninterrupted run of each optimizer on a layout, unless they are there."""
    runs = [tables_of(folder, layout, name, layout, training={"steps": STEPS}) for name in names]
    if missing := [run for run in runs if not run_folder_of(run).exists()]:
        train(LAYOUTS[layout][0], *missing)


def test_a_checkpoint_every_interval_and_at_the_end(folder):
    found = checkpoints(run_folder_of(tables_of(folder, "fsdp2", "exact")) / "checkpoints")
    assert [path.name for path in found] == ["step-00000004", "step-00000008"]
    manifest = manifests.read(found[0])
    assert (manifest.step, manifest.position, manifest.world_size) == (4, 4 * 16, 2)


# From each layout to one rank and to four; to the others as well with -m slow.
QUICK = [("fsdp2", "fsdp4")]
MATRIX = full_but(QUICK, product(LAYOUTS, ("one", "fsdp4"))) + [
    pytest.param(*pair, marks=pytest.mark.slow) for pair in product(LAYOUTS, ("fsdp2", "hsdp2x2"))
]


@pytest.mark.parametrize("layout,there", MATRIX)
def test_losses_on_every_layout_after_a_checkpoint_of_every_layout(folder, layout, there):
    """The layout matrix: saved on each, resumed on each, also with another microbatch size."""
    names = NAMES if (layout, there) in QUICK else MORE_NAMES
    train_straight(folder, layout, names)
    runs = {}
    for name in names:
        runs[name] = tables = tables_of(
            folder, f"{layout}-{there}", name, there, training={"steps": STEPS}
        )
        if layout != there:
            tables["training"]["microbatch_size"] = 2
        copy_run(tables_of(folder, layout, name, layout), tables, keep_until=SAVED)
    train(LAYOUTS[there][0], *runs.values())
    for name, tables in runs.items():
        same(
            metrics(tables_of(folder, layout, name, layout)),
            metrics(tables),
            tolerance=0 if layout == there else 1e-5,
        )


SOME = ("mars-adamw", "exact mars-m")
OF_ALL = [name for name in (*MORE_NAMES, *RULES) if name not in SOME]


@pytest.mark.parametrize("names", [SOME, pytest.param(OF_ALL, marks=FULL)], ids=["some", "others"])
def test_every_rule_resumes_bit_for_bit_with_dropout(tmp_path, names):
    """Losses, validation losses, telemetry and every byte of the last checkpoint's tensors."""
    write_text(tmp_path)
    settings = {
        "training": {"steps": STEPS},
        "model": {"dropout": 0.1},
        "validation": {"interval": 4, "windows": 4},
    }
    straight = [tables_of(tmp_path, "straight", name, **settings) for name in names]
    resumed = [tables_of(tmp_path, "resumed", name, **settings) for name in names]
    train(2, *straight)
    for whole, cut in zip(straight, resumed):
        copy_run(whole, cut, keep_until=SAVED)
    train(2, *resumed)
    for whole, cut in zip(straight, resumed):
        assert reports(whole) == reports(cut)
        files = [
            manifests.read(run_folder_of(tables) / "checkpoints" / f"step-{STEPS:08d}").files
            for tables in (whole, cut)
        ]
        assert {name: file for name, file in files[0].items() if name != ".metadata"} == {
            name: file for name, file in files[1].items() if name != ".metadata"
        }
    dry = tables_of(tmp_path, "dry", names[0], training={"steps": 1})
    train(2, dry)
    assert metrics(dry)[1] != metrics(straight[0])[1]  # dropout does something


def reports(tables):
    """All that metrics.jsonl says, but for times and memory."""
    lines = [
        json.loads(line)
        for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines()
    ]
    clocks = ("/tokens_per_second", "/memory_gib", "_ms")
    return [
        {name: value for name, value in line.items() if not name.endswith(clocks)} for line in lines
    ]


def test_a_finished_run_goes_on_with_more_steps(folder):
    tables = tables_of(folder, "longer", "mars-adamw", training={"steps": STEPS})
    copy_run(tables_of(folder, "fsdp2", "mars-adamw"), tables, keep_until=STEPS)
    train(2, tables)  # says that the run is complete
    assert max(metrics(tables)) == STEPS
    tables["training"]["steps"] = STEPS + 2
    train(2, tables)
    assert list(metrics(tables)) == list(range(1, STEPS + 3))


def windows_read(tables):
    """Every window that this rank takes while it trains; the loader reads some more ahead."""
    taken, batch, peek = [], MixedWindows.batch, Loader.peek

    def noted_batch(self, places, pinned=False):
        tokens = batch(self, places, pinned)
        tokens.places = places
        return tokens

    def noted_peek(self):
        new, found = self._peeked is None, peek(self)
        taken.extend(place for tokens in found if new for place in tokens.places)
        return found

    MixedWindows.batch, Loader.peek = noted_batch, noted_peek
    config = config_from_tables(tables, "in a test")
    build_trainer(config, connection.start(config.parallelism)).run()
    return taken


def test_the_same_windows_are_read_each_once(folder):
    """3 steps on two ranks and 2 on four read what 5 on one rank read."""

    def tables(run, **training):
        return tiny_tables(folder, run={"name": run}, training=training)

    whole = sum(run_ranks(windows_read, 1, tables("whole", steps=5)), [])
    first = sum(run_ranks(windows_read, 2, tables("parts", steps=3)), [])
    rest = sum(run_ranks(windows_read, 4, tables("parts", steps=5, microbatch_size=2)), [])
    assert (len(first), len(rest)) == (3 * 16, 2 * 16)
    assert sorted(first) == sorted(whole[: 3 * 16]) and sorted(rest) == sorted(whole[3 * 16 :])
    assert len(set(whole)) == len(whole)


@pytest.mark.parametrize(
    "overrides,message",
    [
        ({"run": {"seed": 1}}, "made with run.seed = 0, the config says 1"),
        ({"model": {"n_layer": 3}}, "made with model.n_layer = 2, the config says 3"),
        ({"model": {"n_layer": None}}, "n_layer = 2, the config says None"),
        (
            {"model": {"vocab_size": 512}},
            "made with model.vocab_size = None, the config says 512: set it back",
        ),
        ({"training": {"seq_len": 64}}, "made with training.seq_len = 32, the config says 64"),
        (
            {"optimizer": {"name": "adamw"}},
            "made with optimizer.name = mars-adamw, the config says adamw",
        ),
        (
            {"optimizer": {"matrix": {"rule": "mars-lion", "clip": 0.0}}},
            r"rule and state \(mars-adamw .*\(mars-lion momentum step\)",
        ),
    ],
)
def test_another_run_does_not_continue_this_one(folder, overrides, message):
    tables = tables_of(folder, "fsdp2", "mars-adamw")
    for section, table in overrides.items():
        tables[section] = tables.get(section, {}) | table
    config, path, manifest = newest(tables)
    with pytest.raises(UserError, match=message):
        check_same_run(path, manifest, config, manifest.data_fingerprint, meta_optimizer(config))
    config, path, manifest = newest(
        tables_of(folder, "fsdp2", "mars-adamw", training={"steps": STEPS})
    )
    with pytest.raises(UserError, match="trained on other tokens"):
        check_same_run(path, manifest, config, "other", meta_optimizer(config))
    assert (
        check_same_run(path, manifest, config, manifest.data_fingerprint, meta_optimizer(config))
        == []
    )


def newest(tables):
    """The config of `tables`, the newest checkpoint of its run and that one's manifest."""
    config = config_from_tables(tables, "in a test")
    path = checkpoints(config.checkpoints)[-1]
    return config, path, manifests.read(path)


def meta_optimizer(config):
    return build_optimizer(
        config,
        build_meta_model(
            config.model, read_manifest(Path(config.data.path)).vocab_size, config.training.seq_len
        ),
    )


def test_what_may_change_is_told(folder):
    changed = {
        "training": {"global_batch_size": 8, "steps": 30, "stop_after": 20},
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "linear"},
        "validation": {"interval": 3},
        "parallelism": {"dp_replicate": 2},
    }
    tables = tables_of(folder, "fsdp2", "mars-adamw")
    for section, table in changed.items():
        tables[section] = tables.get(section, {}) | table
    config, path, manifest = newest(tables)
    told = check_same_run(path, manifest, config, manifest.data_fingerprint, meta_optimizer(config))
    assert told == [
        f"training.steps {STEPS} -> 30",
        "training.stop_after None -> 20",
        "training.global_batch_size 16 -> 8",
        "optimizer.lr 0.006 -> 0.001",
        "optimizer.lr_1d 0.003 -> 0.0005",
        "schedule.name cosine -> linear",
    ]


def test_a_changed_batch_reads_on_where_the_data_was(folder):
    for name in ("mars-adamw", "exact"):
        tables = tables_of(
            folder, "halved", name, training={"steps": STEPS, "global_batch_size": 8}
        )
        copy_run(tables_of(folder, "fsdp2", name), tables, keep_until=SAVED)
        first, second = (set(part) for part in run_ranks(windows_read, 2, tables))
        assert (
            len(first | second) == (STEPS - SAVED + (name == "exact")) * 8
        )  # exact mode looks one step ahead
        assert manifests.read(newest(tables)[1]).position == SAVED * 16 + (STEPS - SAVED) * 8


def test_names_that_are_not_checkpoints(folder, tmp_path):
    found = checkpoints(run_folder_of(tables_of(folder, "fsdp2", "exact")) / "checkpoints")
    shutil.copytree(found[0], tmp_path / "step-00000004")
    for name in ("step-00000012.partial", "step-00000016.deleted", "step-x", "other"):
        shutil.copytree(found[0], tmp_path / name)
    (tmp_path / "step-00000020").write_text("")
    shutil.copytree(found[0], tmp_path / "step-100000000")
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 100000000]
    with pytest.raises(
        DamagedCheckpoint, match="step-100000000/manifest.json is of step 4, not of the one"
    ):
        manifests.read(tmp_path / "step-100000000")  # else its steps would count as made
    LOCAL.set_aside(tmp_path / "step-100000000")
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4]


@FULL
def test_a_validation_that_a_stop_left_out_is_made_once(tmp_path):
    """metrics.jsonl has it once.

    The run is stopped at a step with a validation, resumed, killed after it, and resumed.
    """
    write_text(tmp_path)
    settings = {"validation": {"interval": 4, "windows": 4}, "schedule": {"name": "constant"}}
    straight = tables_of(tmp_path, "straight", "adamw", training={"steps": STEPS}, **settings)
    train(1, straight)
    cut = tables_of(tmp_path, "cut", "adamw", training={"steps": STEPS}, **settings)
    copy_run(straight, cut, keep_until=SAVED)
    path = run_folder_of(cut) / "checkpoints" / f"step-{SAVED:08d}"
    manifest = manifests.read(path)
    manifest.validation_loss = None  # as a stop leaves it
    (path / MANIFEST).write_text(manifest.text())
    for _ in range(2):
        run_ranks(made_steps, 1, cut, 2)
    train(1, cut)
    assert sorted(map(str, reports(cut))) == sorted(map(str, reports(straight)))


def made_steps(tables, count):
    """Train `count` steps and stop there without saving, as one that is killed."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    original, made = trainer.train_step, 0

    def train_step():
        nonlocal made
        made += 1
        if made > count:
            raise KeyboardInterrupt
        return original()

    trainer.train_step = train_step
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


@FULL
def test_a_run_keeps_the_dtypes_that_it_began_with(tmp_path):
    """Begun where bfloat16 is slow, and gone on where it is fast; and the other way round."""
    write_text(tmp_path)

    def run(name, **optimizer):
        return tiny_tables(
            tmp_path,
            run={"name": name},
            optimizer={"name": "muon"} | optimizer,
            training={"steps": STEPS},
            checkpoint={"interval": SAVED},
        )

    straight, begun_fast = run("straight"), run("fast")
    slow = listen_on([False], straight)[0]
    assert "float32 compute" in slow and "matrices in float32" in slow
    assert saved_dtypes_of(straight) == ("float32", "float32")
    assert "matrices in bfloat16" in listen_on([True], begun_fast)[0]
    assert saved_dtypes_of(begun_fast) == ("float32", "bfloat16")

    kept, changed = run("kept"), run("changed", matrix_dtype="bfloat16")
    copy_run(straight, kept, keep_until=SAVED)
    copy_run(straight, changed, keep_until=SAVED)
    kept_said, changed_said = listen_on([True], kept, changed)
    assert "matrices in float32" in kept_said and "changed " not in kept_said
    assert metrics(kept) == metrics(straight) and saved_dtypes_of(kept) == ("float32", "float32")
    assert len(re.findall("^changed ", changed_said, re.MULTILINE)) == 1
    assert "changed   optimizer.matrix_dtype float32 -> bfloat16" in changed_said
    assert saved_dtypes_of(changed) == ("float32", "bfloat16")


def saved_dtypes_of(tables):
    """What the newest checkpoint says that its run computes in."""
    saved = newest(tables)[2].config
    return saved["training"]["dtype"], saved["optimizer"]["matrix_dtype"]


def test_a_compute_dtype_that_changes_is_listed(folder):
    for dtype, changes in (("float32", []), ("bfloat16", ["training.dtype float32 -> bfloat16"])):
        tables = tables_of(folder, "fsdp2", "mars-adamw", training={"steps": STEPS, "dtype": dtype})
        config, path, manifest = newest(tables)
        manifest.config["training"]["dtype"] = "float32"
        fingerprint, optimizer = manifest.data_fingerprint, meta_optimizer(config)
        assert check_same_run(path, manifest, config, fingerprint, optimizer) == changes


def bfloat16_run(folder, name, steps, **sections):
    """The tables of a run in bfloat16."""
    return tiny_tables(
        folder,
        run={"name": name},
        optimizer={"name": "mars-m", "lr": 6e-3},
        training={"steps": steps, "dtype": "bfloat16", "ema_decay": 0.5},
        schedule={"name": "constant", "warmup_steps": 0},
        **sections,
    )


def test_a_run_in_bfloat16_goes_from_one_rank_to_two_and_back(tmp_path):
    """A rank alone has plain tensors and computes with copies; two have shards."""
    write_text(tmp_path)
    straight = bfloat16_run(tmp_path, "straight", 6)
    train(1, bfloat16_run(tmp_path, "moved", 2), straight)
    train(2, bfloat16_run(tmp_path, "moved", 4))
    moved = bfloat16_run(tmp_path, "moved", 6)
    train(1, moved)
    expected, found = metrics(straight), metrics(moved)
    assert found.keys() == expected.keys() and expected[5] < 0.9 * expected[1]
    assert [found[step] for step in (1, 2)] == [expected[step] for step in (1, 2)]
    assert found == pytest.approx(expected, rel=5e-3)


def stale_copies(folder):
    """After which ways to new weights a rank alone would compute with others."""
    stale = []

    def check(way, model):
        weights, copies = model.copies.weights, model.copies.copies
        same = (torch.equal(one.bfloat16(), other) for one, other in zip(weights, copies))
        assert len(weights) == len(copies) > 0
        if not all(same):
            stale.append(way)
        # What the next way has to replace.
        with torch.no_grad():
            torch._foreach_zero_(copies)

    def built(name, **sections):
        config = config_from_tables(bfloat16_run(folder, name, 4, **sections), "in a test")
        trainer = build_trainer(config, connection.start(config.parallelism))
        trainer.loader.close()
        return trainer

    first = built("first")
    check("initial weights", first.model)
    first.model.follow_weights()
    first.train_step()
    check("a step", first.model)
    first.state.step = 1
    first.save()
    first.checkpointer.saver.close()
    first.train_step()
    resumed = first.checkpointer.load_newest()
    assert resumed.state.step == 1
    check("a load", first.model)
    first.checkpointer.saver.release()
    run = run_folder_of(bfloat16_run(folder, "first", 4))
    second = built("first")
    check("a resume", second.model)
    state = second.checkpointer._tensors()
    parts = {name: tensor.clone() for name, tensor in state.items()}
    manifest = second.checkpointer._manifest(second.state)
    load_copy(parts, manifest, second.layout, second.model, second.optimizer, second.average.values)
    check("a copy in memory", second.model)
    second.checkpointer.saver.release()
    check("a run", built("other", checkpoint={"init_from": str(run)}).model)
    export(open_model(run), folder / "bare", "safetensors")
    source = str(folder / "bare")
    check("bare weights", built("third", checkpoint={"init_from": source}).model)
    check("an evaluation", load_sharded_model(run, second.layout, "bfloat16")[0])
    return stale


def test_a_rank_alone_computes_with_the_weights_that_it_has(tmp_path):
    write_text(tmp_path)
    assert run_ranks(stale_copies, 1, tmp_path) == [[]]
