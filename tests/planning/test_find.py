"""torchmars plan --find: the layouts that it offers."""

from dataclasses import replace

import pytest

from tests.support.tiny import tiny_tables
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel.checks import check_layout
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK, RESERVED
from torchmars.planning.confirm import confirmed_table
from torchmars.planning.find import estimate, find_layouts
from torchmars.planning.work import Work
from torchmars.training.optimizer import build_optimizer

WORLD_SIZE, PER_NODE = 16, 8


def large(folder, **training):
    """A config of 1.2 billion parameters."""
    tables = tiny_tables(
        folder,
        model={"name": "llama", "n_layer": 16, "n_head": 16, "n_embd": 2048, "vocab_size": 32_000},
        training={"global_batch_size": 32, "seq_len": 2048} | training,
    )
    return config_from_tables(tables, "in a test")


def test_layouts_divide_and_fit_and_the_fastest_is_first(tmp_path):
    config, memory = large(tmp_path), 10 * 2**30
    found = find_layouts(config, WORLD_SIZE, PER_NODE, memory)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert all(each.memory < memory - RESERVED for each in found)
    assert len(found) < len(find_layouts(config, WORLD_SIZE, PER_NODE, 4 * memory))
    for each in found:
        degrees = each.config.parallelism.degrees(WORLD_SIZE)
        size, microbatches = each.config.training.microbatches(degrees.data)
        assert size * microbatches * degrees.data == 32 and PER_NODE % degrees.tp == 0
    model = build_meta_model(config.model, 257, config.training.seq_len)
    for each in found[:20]:
        check_layout(each.config, each.config.parallelism.degrees(WORLD_SIZE), model)


def test_nothing_fits(tmp_path):
    with pytest.raises(UserError, match="no layout of --world-size 16 fits --memory 8 GiB"):
        find_layouts(large(tmp_path), WORLD_SIZE, PER_NODE, 8.2 * 2**30)


def test_ranks_that_are_no_power_of_2(tmp_path):
    for each in find_layouts(large(tmp_path, global_batch_size=48), 24, PER_NODE, 80 * 2**30):
        assert each.config.parallelism.degrees(24).tp in (1, 2, 4, 8)


def test_options_are_what_differs_from_the_config(tmp_path):
    config = large(tmp_path)
    best = find_layouts(config, WORLD_SIZE, PER_NODE, 80 * 2**30)[0]
    assert best.options(best.config) == ""
    full = replace(config.activation_checkpoint, mode="full")
    other = replace(best.config, activation_checkpoint=full)
    mode = best.config.activation_checkpoint.mode
    assert best.options(other) == f"--activation_checkpoint.mode {mode}"


def test_memory_and_time_of_the_options(tmp_path):
    """What keeps less costs more work; a whole gradient takes 4 bytes for each parameter."""
    config = large(tmp_path, microbatch_size=1)
    model = build_meta_model(config.model, 257, config.training.seq_len)
    work = Work.of(model)

    def figures(mode="none", accumulate="auto"):
        activations = replace(config.activation_checkpoint, mode=mode)
        parallelism = replace(config.parallelism, accumulate=accumulate)
        each = replace(config, activation_checkpoint=activations, parallelism=parallelism)
        found = estimate(each, work, WORLD_SIZE, WORLD_SIZE)  # one machine: nothing waits
        return found.memory, found.seconds

    none, selective, full = figures(), figures("selective"), figures("full")
    assert full[0] < selective[0] < none[0] and none[1] < selective[1] < full[1]
    whole = figures(accumulate="whole")
    assert whole[0] - none[0] == 4 * work.parameters and whole[1] <= none[1]


@pytest.mark.parametrize(
    "optimizer,state",
    [
        ({"name": "lion"}, 4),
        ({"name": "adamw"}, 8),
        ({"name": "mars-adamw"}, 12),
        ({"name": "mars-adamw", "mode": "exact"}, 16),
        ({"name": "mars-adamw", "last_grad_dtype": "bfloat16"}, 10),
    ],
)
def test_the_bytes_of_the_optimizer_are_those_of_its_rule(tmp_path, optimizer, state):
    config = config_from_tables(tiny_tables(tmp_path, optimizer=optimizer), "in a test")
    model = build_meta_model(config.model, 257, config.training.seq_len)
    work = Work.of(model).with_optimizer(build_optimizer(config, model))
    assert work.state == pytest.approx(state, rel=1e-2) and work.owner_flops == 0


def test_orthogonalisation_costs_time(tmp_path):
    config = large(tmp_path)
    muon = config_from_tables(tiny_tables(tmp_path, optimizer={"name": "muon"}), "in a test")
    model = build_meta_model(config.model, 257, config.training.seq_len)
    without = Work.of(model)
    work = without.with_optimizer(build_optimizer(muon, model))
    less, more = (estimate(config, each, WORLD_SIZE, PER_NODE).seconds for each in (without, work))
    assert work.owner_flops > 0
    assert more - less == pytest.approx(work.owner_flops / WORLD_SIZE / FLOPS)


def mixture(folder, **parallelism):
    tables = tiny_tables(folder, parallelism=parallelism, training={"seq_len": 2048})
    tables["model"] = {"name": "llama", "size": "qwen3-30b-a3b"}
    return config_from_tables(tables, "in a test")


def test_experts_are_dealt_out_within_machines(tmp_path):
    """Over every common divisor of the ranks of a machine and of the experts, by their bytes."""
    config = mixture(tmp_path)
    found = find_layouts(config, WORLD_SIZE, PER_NODE, 80 * 2**30)
    assert {each.config.parallelism.ep for each in found} == {1, 2, 4, 8}
    [best, *_] = [each for each in found if each.config.parallelism.ep == 8]
    assert "--parallelism.ep 8" in best.options(config)
    assert all(each.config.parallelism.degrees(WORLD_SIZE) for each in found)
    gpt2 = {each.config.parallelism.ep for each in find_layouts(large(tmp_path), 8, 8, 80 * 2**30)}
    assert gpt2 == {1}


def test_what_ep_costs_and_saves(tmp_path):
    """Gathered experts are cut by ep, and rows travel twice in a pass of each of 48 blocks."""
    config = mixture(tmp_path)
    work = Work.of(build_meta_model(config.model, 257, config.training.seq_len))

    def figures(ep, per_node):
        parallelism = replace(config.parallelism, ep=ep)
        return estimate(replace(config, parallelism=parallelism), work, WORLD_SIZE, per_node)

    one, eight = figures(1, PER_NODE), figures(8, PER_NODE)
    assert one.memory - eight.memory == pytest.approx(10 * work.block_experts * 7 / 8)
    rows = 2 * 2048 * 8 * 2048 * 7 / 8  # bytes: tokens, choices, width
    slower = figures(8, 4).seconds - eight.seconds  # over the network, not within the machine
    assert slower == pytest.approx(4 * 48 * rows * (1 / NETWORK - 1 / NVLINK))


@pytest.mark.full
def test_exact_plans_of_what_was_found(tmp_path):
    config = config_from_tables(tiny_tables(tmp_path), "in a test")
    [heading, line] = confirmed_table(find_layouts(config, 2, 2, 80 * 2**30)[:1], config, 2, 2)
    estimated, planned, off, _, _, *_ = line.split()
    assert heading.split()[:3] == ["GiB", "planned", "off"]
    assert float(estimated) < 1 and float(planned) < 1 and off[-1] == "%"
