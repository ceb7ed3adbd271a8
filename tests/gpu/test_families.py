"""Steps of each family on a GPU: compiled, in bfloat16, with a fused kernel for attention."""

import re

import pytest

from tests.gpu.device import ON_GPU, sized
from tests.gpu.timing import kernels_of
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables, write_text
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer

pytestmark = pytest.mark.gpu

# Kernels of attention that make no tensor of all logits.
FUSED = re.compile("flash|fmha|sdpa", re.IGNORECASE)
FAMILIES = [
    ("gpt2", "nano"),
    ("llama", "nano"),
    ("llama", "smollm-nano"),
    ("llama", "olmo-nano"),
    ("llama", "moe-nano"),
    ("llama", "glm-nano"),
    ("deepseek", "nano"),
]
WITH_DOCUMENTS = [each for each in FAMILIES if each[1] in ("nano", "smollm-nano")]


def tables_of(folder, name, size, **overrides):
    """Return the tables of a run whose learning rate is constant."""
    tables = tiny_tables(folder, **overrides)
    tables["model"] = {"name": name, "size": size, **sized({}, {"n_layer": 2})}
    tables["training"] |= {"steps": 6, **sized({"seq_len": 512, "global_batch_size": 8}, {})}
    tables["optimizer"] = {"name": "mars-m", "lr": 1e-3} | overrides.get("optimizer", {})
    tables["schedule"] = {"name": "constant", "warmup_steps": 0}
    return tables


def steps_of(tables):
    """Return the losses of four steps, the kernels of a fifth, and its figures of attention."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    trainer.model.attention_logits.measures = config.metrics.attention
    losses = [trainer.train_step()[0].item() for _ in range(4)]
    kernels = {name: round(count) for name, (_, count) in kernels_of(trainer.train_step, 1).items()}
    figures = trainer.model.attention_logits.figures()
    trainer.loader.close()
    trainer.checkpointer.saver.release()
    return losses, kernels, figures


def steps_of_each(*runs):
    return [steps_of(tables) for tables in runs]


def compiled_and_eager(folder, *family, **overrides):
    """Return what `steps_of` finds in bfloat16, compiled, and in float32, eager."""
    write_text(folder, documents=200)
    tables = tables_of(folder, *family, **overrides)
    eager = tables["training"] | {"dtype": "float32", "compile": False}
    compiled = eager | sized({"dtype": "bfloat16", "compile": True}, {})
    [found] = run_ranks(
        steps_of_each, 1, *(tables | {"training": each} for each in (compiled, eager))
    )
    return found


@pytest.mark.parametrize(
    "family,apart",
    [*((each, False) for each in FAMILIES), *((each, True) for each in WITH_DOCUMENTS)],
)
def test_a_compiled_step_has_fused_attention(tmp_path, family, apart):
    """`apart`: attention stays inside documents."""
    data = {"separate_documents": apart}
    (losses, kernels, _), (expected, *_) = compiled_and_eager(tmp_path, *family, data=data)
    found = {name[:100]: count for name, count in kernels.items() if FUSED.search(name)}
    print(*family, found, losses, expected)
    assert expected[3] < expected[0]
    assert losses == pytest.approx(expected, rel=5e-3)
    assert found or not ON_GPU


@pytest.mark.parametrize("family", [("llama", "nano"), ("deepseek", "nano")], ids=" ".join)
def test_logits_are_watched_and_clipped(tmp_path, family):
    overrides = {"metrics": {"attention": True}, "training": {"qk_clip": 0.1}}
    (losses, _, found), (expected, _, figures) = compiled_and_eager(tmp_path, *family, **overrides)
    print(*family, found, figures)
    assert losses == pytest.approx(expected, rel=5e-3)
    assert 0.05 < max(figures.values()) < 0.2  # about the limit
    assert found == pytest.approx(figures, rel=0.1)


def kernels_of_update(tables):
    """Return the kernels and copies of an optimizer's step, by name, and how many."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    for _ in range(3):
        trainer.train_step()
    trainer.model.backward(trainer.loader.step())
    found = kernels_of(trainer.optimizer.step, 1)
    trainer.loader.close()
    trainer.checkpointer.saver.release()
    return {name[:100]: round(count) for name, (_, count) in found.items()}


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m"])
def test_an_update_with_rates_of_a_base_starts_no_more_kernels(tmp_path, rule):
    write_text(tmp_path, documents=200)
    tables = tables_of(tmp_path, "llama", "nano", optimizer={"name": rule})
    tables["training"] |= sized({"dtype": "bfloat16", "compile": True}, {})
    base = {"transfer": {"n_embd": 128, "n_head": 2, "n_kv_head": 1, "n_inner": 352}}
    [alone], [transferred] = (run_ranks(kernels_of_update, 1, tables | each) for each in ({}, base))
    print(
        rule, alone, {name: each for name, each in transferred.items() if alone.get(name) != each}
    )
    assert sum(transferred.values()) == sum(alone.values()) or not ON_GPU
