"""Runs that go on from the copies of other ranks have the bits that their checkpoint has."""

import os

import pytest
import torch

from tests.support.full import full_but
from tests.support.layouts import LAYOUTS_WITH_EXPERTS
from tests.support.ranks import run_ranks
from tests.support.small_runs import LOSSES, MODELS, RULES
from tests.support.tiny import run_folder_of, tiny_tables, train_here, write_text
from torchmars.checkpoint.memory.shared_memory import MEMORY
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.optim.tensors import local_part
from torchmars.training.build import build_trainer

LAYOUTS = LAYOUTS_WITH_EXPERTS | {"FSDP 3": (3, {})}
STEPS = 3
GPT2, LLAMA = MODELS["GPT-2"], MODELS["Llama"]
EMA = {"ema_decay": 0.9}


def experts(model, rule):
    return MODELS[model], rule, LOSSES[model]


# For each change of a layout the runs: a model, a rule, and settings of training.
CHANGES = {
    ("FSDP 2", "1 rank"): [(GPT2, "mars-adamw", {})],
    ("FSDP 2 x TP 2", "FSDP 3"): [(GPT2, rule, {}) for rule in RULES],
    ("PP 2 x FSDP 2", "TP 2"): [(LLAMA, "mars-m, options", EMA), (LLAMA, "mars-adamw, exact", EMA)],
    ("CP 2", "HSDP 2x2"): [(GPT2, "mars-m, per head", EMA), (GPT2, "mars-adamw, exact", EMA)],
    ("HSDP 2x2, EP 2", "TP 2, EP 2"): [experts("Qwen3-MoE", "mars-m"), experts("DeepSeek", "muon")],
    ("EP 2", "FSDP 3"): [experts("GLM-4.5", "mars-m"), experts("GLM-4.5", "mars-adamw, exact")],
}


def tables_of(folder, number, layout, run, memory=True):
    model, rule, training = run
    return tiny_tables(
        folder,
        run={"name": f"run-{number}"},
        model=model,
        optimizer=RULES[rule],
        parallelism=LAYOUTS[layout][1],
        training={"dtype": "float32", "steps": STEPS, "global_batch_size": 12} | training,
        checkpoint={"memory_interval": int(memory)},
    )


def memory_of(tables):
    folder = run_folder_of(tables).with_suffix(".memory")
    folder.mkdir(exist_ok=True, parents=True)
    os.environ[MEMORY] = str(folder)


def train_with_copies(*runs):
    for tables in runs:
        memory_of(tables)
        train_here(tables)


def resumed(tables):
    """Where a run goes on, and this rank's parts of its state."""
    memory_of(tables)
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    tensors = trainer.checkpointer._tensors()
    parts = {name: local_part(tensor).clone() for name, tensor in tensors.items()}
    trainer.checkpointer.saver.release()
    trainer.loader.close()
    trainer.metrics.close()
    return trainer.resumed, parts


def compare(*runs):
    """Let each run go on from its checkpoint and from its copy in memory."""
    for from_checkpoint, from_memory in runs:
        (saved, expected), (copied, found) = resumed(from_checkpoint), resumed(from_memory)
        assert "the copy in memory" in copied.origin and "step-" in saved.origin
        assert copied.state == saved.state and copied.state.step == STEPS
        assert copied.changes == saved.changes and copied.changes
        assert found.keys() == expected.keys()
        different = [name for name in found if not torch.equal(found[name], expected[name])]
        assert not different


@pytest.mark.parametrize("old,new", full_but([("FSDP 2", "1 rank")], CHANGES))
def test_a_copy_of_other_ranks_has_the_bits_of_a_checkpoint(tmp_path, old, new):
    write_text(tmp_path)
    numbered = [*enumerate(CHANGES[old, new])]
    runs = [tables_of(tmp_path, number, old, run) for number, run in numbered]
    run_ranks(train_with_copies, LAYOUTS[old][0], *runs)
    pairs = [
        [tables_of(tmp_path, number, new, run, memory) for memory in (False, True)]
        for number, run in numbered
    ]
    run_ranks(compare, LAYOUTS[new][0], *pairs)
