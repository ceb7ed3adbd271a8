"""torchmars plan --find: the layouts that a rule of thumb proposes, and the rows of their plans."""

import math
from dataclasses import asdict, replace

import pytest

from tests.support.tiny import tiny_tables
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel.checks import check_layout
from torchmars.planning import find
from torchmars.planning.assumptions import NETWORK, NVLINK
from torchmars.planning.find import (
    CAREFUL,
    OFF,
    PLANNED,
    Found,
    expert_degrees,
    find_layouts,
    layout_options,
    layouts,
    propose,
    why_whole,
)
from torchmars.planning.thumb import RuleOfThumb, state_bytes
from torchmars.training.optimizer import build_optimizer

WORLD_SIZE, PER_NODE, GIB = 16, 8, 2**30


def large(folder, **training):
    """A config of 1.2 billion parameters."""
    tables = tiny_tables(
        folder,
        model={"name": "llama", "n_layer": 16, "n_head": 16, "n_embd": 2048, "vocab_size": 32_000},
        training={"global_batch_size": 32, "seq_len": 2048} | training,
    )
    return config_from_tables(tables, "in a test")


def mixture(folder, **parallelism):
    """A config of 30 billion parameters, most of them experts'."""
    tables = tiny_tables(folder, parallelism=parallelism, training={"seq_len": 2048})
    tables["model"] = {"name": "llama", "size": "qwen3-30b-a3b"}
    return config_from_tables(tables, "in a test")


def rule_of(config, world_size=WORLD_SIZE, per_node=PER_NODE, state=8):
    model = build_meta_model(config.model, 257, config.training.seq_len)
    return RuleOfThumb(model, state, world_size, per_node)


def test_layouts_that_are_proposed_divide_and_fit_and_the_fastest_is_first(tmp_path):
    config, free = large(tmp_path), 10 * GIB
    rule = rule_of(config)
    proposed = propose(list(layouts(config, rule)), rule, free)
    assert len(proposed) == PLANNED
    seconds = [rule.seconds(each) for each in proposed[:-CAREFUL]]
    assert seconds == sorted(seconds)
    assert all(rule.memory(each) < free for each in proposed)
    assert all(OFF * rule.memory(each) < free for each in proposed[-CAREFUL:])
    for each in proposed:
        degrees = each.parallelism.degrees(WORLD_SIZE)
        size, microbatches = each.training.microbatches(degrees.data, each.parallelism.stages)
        assert size * microbatches * degrees.data == 32 and PER_NODE % degrees.tp == 0
        check_layout(each, degrees, rule.model)
    assert propose(proposed, rule, min(map(rule.memory, proposed))) == []


@pytest.mark.parametrize("training", [{"compile": True}, {"dtype": "bfloat16"}])
def test_every_way_to_use_the_memory_goes_with_its_layout(tmp_path, training):
    """What is computed again does not go with compiled blocks and tensor parallelism."""
    config = large(tmp_path, **training)
    rule = rule_of(config)
    found = list(layouts(config, rule))
    for each in found:
        check_layout(each, each.parallelism.degrees(WORLD_SIZE), rule.model)
    modes = {(each.parallelism.tp > 1, each.activation_checkpoint.mode) for each in found}
    assert ((True, "full") in modes) != ("compile" in training)
    assert {(False, "full"), (True, "none")} <= modes


def test_ranks_that_are_no_power_of_2(tmp_path):
    config = large(tmp_path, global_batch_size=48)
    rule = rule_of(config, world_size=24)
    degrees = [each.parallelism.degrees(24) for each in layouts(config, rule)]
    assert {each.pp for each in degrees} == {1, 2, 3, 4, 6, 8, 12}
    assert {each.tp for each in degrees} == {1, 2}  # two heads of keys and values
    assert all(math.prod(each[:5]) == 24 for each in degrees)


def test_options_are_what_differs_from_the_config(tmp_path):
    config = large(tmp_path)
    full = replace(config.activation_checkpoint, mode="full")
    other = replace(config, activation_checkpoint=full)
    assert layout_options(config, config) == ""
    assert layout_options(other, config) == "--activation_checkpoint.mode full"
    assert layout_options(config, other) == "--activation_checkpoint.mode none"


def test_memory_and_time_of_the_options(tmp_path):
    """What keeps less costs more work; a whole gradient takes 4 bytes for each parameter."""
    config = large(tmp_path, microbatch_size=1)
    rule = rule_of(config, per_node=WORLD_SIZE)  # one machine: nothing waits

    def figures(mode="none", accumulate="sharded"):
        activations = replace(config.activation_checkpoint, mode=mode)
        parallelism = replace(config.parallelism, accumulate=accumulate)
        each = replace(config, activation_checkpoint=activations, parallelism=parallelism)
        return rule.memory(each), rule.seconds(each)

    none, selective, full = figures(), figures("selective"), figures("full")
    assert full[0] < selective[0] < none[0] and none[1] < selective[1] < full[1]
    whole = figures(accumulate="whole")
    assert whole[0] - none[0] == 4 * rule.parameters and whole[1] <= none[1]


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
    found = state_bytes(build_optimizer(config, model)) / model.parameter_count
    assert found == pytest.approx(state, rel=1e-2)


def test_experts_are_dealt_out_within_machines(tmp_path):
    """Over every common divisor of the ranks of a machine and of the experts."""
    model = rule_of(mixture(tmp_path)).model
    assert [expert_degrees(model, ranks) for ranks in (1, 6, 8)] == [[1], [1, 2], [1, 2, 4, 8]]
    assert expert_degrees(rule_of(large(tmp_path)).model, 8) == [1]
    config = mixture(tmp_path)
    found = layouts(config, rule_of(config, world_size=2))
    assert {each.parallelism.ep for each in found} == {1, 2}


def test_experts_of_qwen3_and_what_ep_costs_and_saves(tmp_path):
    """48 blocks of 128 experts, three matrices of 768 x 2048 each, of which a token uses 8."""
    config = mixture(tmp_path)
    rule, of_block = rule_of(config), 128 * 3 * 768 * 2048
    assert (rule.experts, rule.rows, rule.inner) == (48 * of_block, 8 * 2048, 8 * 768)
    eight = replace(config, parallelism=replace(config.parallelism, ep=8))
    assert rule.memory(config) - rule.memory(eight) > 10 * of_block * 7 / 8
    rows = 2 * 2048 * 8 * 2048 * 7 / 8  # bytes: tokens, choices, width
    slower = rule_of(config, per_node=4).seconds(eight) - rule.seconds(eight)  # over the network
    assert slower == pytest.approx(4 * 48 * rows * (1 / NETWORK - 1 / NVLINK))


@pytest.mark.parametrize(
    "degrees,copies",
    [
        ({"dp_shard": 8}, 1),
        ({"dp_shard": 8, "ep": 4}, 1),
        ({"dp_shard": 2, "cp": 2, "tp": 4, "ep": 8}, 1),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, 2),  # tp's ranks repeat what is not dealt out
        ({"pp": 2, "dp_shard": 2, "tp": 4, "ep": 2}, 1),
        ({"dp_shard": 1, "tp": 8, "ep": 8}, 1),
    ],
)
def test_what_all_ranks_hold_is_the_model(tmp_path, degrees, copies):
    config = mixture(tmp_path, **degrees)
    ranks = math.prod(each for name, each in degrees.items() if name != "ep")
    rule = rule_of(config, world_size=ranks)
    computed, held = rule.share(config)
    pp, tp, ep = (degrees.get(name, 1) for name in ("pp", "tp", "ep"))
    others = rule.parameters - rule.experts
    assert held * ranks == pytest.approx(others + copies * rule.experts)
    assert computed == pytest.approx(others / pp / tp + rule.experts / pp / ep)


def test_rows_say_why_experts_are_whole(tmp_path):
    config = mixture(tmp_path)
    [why] = why_whole(config, rule_of(config))
    assert why.startswith("ep 1: experts fit whole; ep 2 would change a step by about ")
    [why] = why_whole(config, rule_of(config, world_size=1))
    assert why == "ep 1: nothing else divides the ranks of a stage and the experts"
    dealt = replace(config, parallelism=replace(config.parallelism, ep=2))
    assert why_whole(dealt, rule_of(config)) == []
    assert why_whole(large(tmp_path), rule_of(large(tmp_path))) == []


def test_a_row_comes_as_soon_as_it_is_planned(tmp_path, monkeypatch):
    """Those that do not fit say so, and the fastest that fits is named last."""
    planned = []

    def plan_all(proposed, *_):
        for each, (seconds, peak) in zip(
            proposed, ((2.0, 1 << 40), (1.5, 9 << 30), (1.0, 8 << 30))
        ):
            planned.append(each)
            yield Found(seconds, peak, 0.25, 4)

    monkeypatch.setattr(find, "plan_all", plan_all)
    lines = find_layouts(large(tmp_path), WORLD_SIZE, PER_NODE, 80 * GIB)
    assert next(lines).split() == ["s/step", "GiB", "waiting", "microbatches", "options"]
    assert next(lines).endswith("# does not fit") and len(planned) == 1
    assert next(lines).split()[:4] == ["1.50", "9", "25%", "4"] and len(planned) == 2
    row, best, last = lines
    assert row.split()[4:] and best == "the fastest that fits: " + " ".join(row.split()[4:])
    assert "400 TFLOP/s" in last


def test_a_layout_that_cannot_be_planned_ends_no_table(tmp_path, monkeypatch):
    found = [UserError("does not go together"), Found(1.0, 8 << 30, 0.25, 4)]
    monkeypatch.setattr(find, "plan_all", lambda *_: iter(found))
    _, refused, row, best, _ = find_layouts(large(tmp_path), WORLD_SIZE, PER_NODE, 80 * GIB)
    assert refused.endswith("# does not go together")
    assert best == "the fastest that fits: " + " ".join(row.split()[4:])
    not_divided = find.planned(asdict(large(tmp_path, global_batch_size=7)), WORLD_SIZE, PER_NODE)
    assert isinstance(not_divided, UserError)


def test_nothing_fits(tmp_path):
    with pytest.raises(UserError, match="no layout of --world-size 16 fits --memory 8 GiB") as told:
        list(find_layouts(large(tmp_path), WORLD_SIZE, PER_NODE, 8.2 * GIB))
    config = large(tmp_path)
    rule = rule_of(config, state=12)
    least = min(map(rule.memory, layouts(config, rule))) / GIB + 8
    assert f"the smallest needs about {least:.0f} GiB" in str(told.value)
    with pytest.raises(UserError, match="divides .* training.global_batch_size = 7 .*: change one"):
        list(find_layouts(large(tmp_path, global_batch_size=7), 256, PER_NODE, 80 * GIB))
    with pytest.raises(UserError, match="--find is for GPUs: set --gpus-per-node"):
        list(find_layouts(large(tmp_path), WORLD_SIZE, 0, 80 * GIB))
