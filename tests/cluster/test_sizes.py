"""With how many machines an elastic run goes, and the start of one that does not."""

import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.mistakes import mistake
from tests.support.tiny import tiny_config, write_config
from torchmars.cluster.environment import read_environment
from torchmars.cluster.sizes import MinMax, read_bounds, sizes_of
from torchmars.commands import train
from torchmars.config import ParallelismConfig, TrainingConfig
from torchmars.core.errors import UserError
from torchmars.planning import plan
from torchmars.records.gpus import GIB


def config_of(batch, microbatch=None, **parallelism):
    """What `sizes_of` reads of a config."""
    training = TrainingConfig(global_batch_size=batch, microbatch_size=microbatch)
    return SimpleNamespace(training=training, parallelism=ParallelismConfig(**parallelism))


@pytest.mark.parametrize(
    "text,bounds",
    [("4", (4, 4)), ("2:4", (2, 4)), ("3:3", (3, 3)), ("1:100000", (1, 100_000))],
)
def test_bounds(text, bounds):
    read = read_bounds(text, "NNODES")
    assert read == bounds and read.elastic == (bounds[0] < bounds[1])
    assert read_bounds(str(read), "NNODES") == read


@pytest.mark.parametrize(
    "text", ["4:2", "0:2", "2:", "a:b", "", ":2", "2:4:6", "0", "-1:2", "2: 4", "1:100001", "٣:4"]
)
def test_bounds_that_are_none(text):
    assert mistake(read_bounds, text, "NNODES").startswith(
        "error: NNODES must be a whole number from 1 to 100000, or MIN:MAX of them as in 2:4, got "
    )


@pytest.mark.parametrize(
    "asked,ranks,config,usable,microbatch",
    [
        ((2, 4), 8, config_of(512), [2, 4], 16),
        ((2, 4), 8, config_of(480), [2, 3, 4], 5),
        ((2, 4), 8, config_of(512, 2), [2, 4], 2),
        ((2, 4), 8, config_of(480, 4), [3], 4),  # 30, 20 or 15 of each rank
        ((4, 4), 1, config_of(8), [4], 2),
        ((1, 3), 4, config_of(96, tp=2), [1, 2, 3], 8),
        ((1, 3), 4, config_of(96, tp=4, cp=2), [2], 96),
        ((1, 4), 2, config_of(32, pp=2), [1, 2, 4], 4),
        ((1, 2), 4, config_of(32, pp=2, pp_schedule="Interleaved1F1B"), [1, 2], 2),
        ((1, 4), 2, config_of(32, ep=4), [2, 4], 4),
        ((1, 4), 2, config_of(32, dp_replicate=4), [2, 4], 4),
        ((2, 4), 2, config_of(36, dp_shard=6), [3], 6),
        ((1, 40), 1, config_of(64), [1, 2, 4, 8, 16, 32], 2),  # no batch is as large
    ],
)
def test_usable_sizes(asked, ranks, config, usable, microbatch):
    sizes = sizes_of(config, MinMax(*asked), ranks)
    assert (sizes.usable, sizes.microbatch_size) == (usable, microbatch)
    assert sizes.ranks == [ranks * each for each in usable]


def test_the_words_of_the_start():
    [line] = sizes_of(config_of(512), MinMax(2, 4), 8).in_words()
    assert line == "elastic   2 or 4 machines: 16 or 32 ranks; microbatches of 16"
    [line] = sizes_of(config_of(480), MinMax(2, 4), 8).in_words()
    assert line == "elastic   2, 3 or 4 machines: 16, 24 or 32 ranks; microbatches of 5"
    [line] = sizes_of(config_of(2**16), MinMax(1, 50_000), 1).in_words()
    assert line == (
        "elastic   1, 2, ... or 32768 machines: 1, 2, ... or 32768 ranks; microbatches of 2"
    )


@pytest.mark.parametrize(
    "asked,config,reason",
    [
        ((3, 3), config_of(512), "training.global_batch_size = 512 does not divide over 24"),
        ((5, 7), config_of(512), "training.global_batch_size = 512 does not divide over 56"),
        (
            (1, 3),
            config_of(512, tp=5),
            "parallelism.tp = 5 does not divide 24 ranks",
        ),
        ((2, 4), config_of(512, 7), "training.microbatch_size = 7 does not divide the 16 sequ"),
    ],
)
def test_no_usable_size(asked, config, reason):
    assert reason in mistake(sizes_of, config, MinMax(*asked), 8)


def test_all_sizes_share_microbatches():
    """Of which each rank has a whole number, as many as a pipeline has stages or more."""
    few = st.integers(1, 6)

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(few, few, st.integers(1, 400), st.none() | few, st.integers(1, 3), st.integers(1, 3))
    def check(fewest, ranks, batch, microbatch, pp, tp):
        asked, config = MinMax(fewest, fewest + 4), config_of(batch, microbatch, pp=pp, tp=tp)

        def goes(machines):
            try:
                data = config.parallelism.degrees(machines * ranks).data
                config.training.microbatches(data, pp)
            except UserError:
                return False
            return True

        usable = [each for each in range(fewest, fewest + 5) if goes(each)]
        if not usable:
            assert mistake(sizes_of, config, asked, ranks)
            return
        sizes = sizes_of(config, asked, ranks)
        assert sizes.usable == usable and microbatch in (None, sizes.microbatch_size)
        shared = config_of(batch, sizes.microbatch_size, pp=pp, tp=tp)
        for number in sizes.ranks:
            data = shared.parallelism.degrees(number).data
            size, steps = shared.training.microbatches(data, pp)
            assert size == sizes.microbatch_size and size * steps * data == batch and steps >= pp

    check()


MANY = {"RDZV_ENDPOINT": "n1:29400"}


@pytest.mark.parametrize(
    "variables,message",
    [
        *[({"NNODES": text}, "NNODES must be ") for text in ("4:2", "0:2", "2:", "a:b", ":2")],
        ({"NNODES": ""}, "NNODES is empty"),
    ],
)
def test_variables_of_an_elastic_run_that_do_not_go(variables, message):
    said = mistake(read_environment, MANY | variables)
    assert message in said and "\n" not in said.strip()


def start(monkeypatch, **variables):
    """Let `torchmars train` of tiny.toml check itself, as a command of its own would."""
    environment = {"PATH": os.environ["PATH"], "NGPU": "8"} | MANY | variables
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["train", "--prepare", "tiny.toml"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    return ended.value.code


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tiny_config(tmp_path, training={"global_batch_size": 32}), tmp_path / "tiny.toml")
    return tmp_path


def test_a_start_without_a_usable_size(place, monkeypatch, capsys):
    assert start(monkeypatch, NNODES="5:7") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: training.global_batch_size = 32 does not divide over 56 ")
    assert err.count("\n") == 1


def kept_memory(config):
    """Bytes of weights, gradients and state of a rank of 8."""
    [rank] = plan.plan_run(config, 8, 8).ranks
    return rank.weights + rank.gradients + rank.optimizer_state


def test_a_start_on_gpus_too_small_for_the_fewest(place, monkeypatch, capsys):
    """And none that asks for a GPU's memory where the number of machines is fixed."""
    config = tiny_config(place, training={"global_batch_size": 32})
    monkeypatch.setattr(plan, "gpu_memory", lambda: int(0.75 * kept_memory(config)))
    assert start(monkeypatch, NNODES="1:2") == 2
    out, err = capsys.readouterr()
    assert out.startswith("elastic   1 or 2 machines: 8 or 16 ranks")
    assert err.startswith("error: NNODES = 1:2: 8 ranks would be too few: weights, ")
    assert err.endswith("raise MIN, or set parallelism.cpu_offload\n") and err.count("\n") == 1


def test_what_ranks_keep_is_counted(place, monkeypatch):
    """And a GPU that has room for it is large enough; machines without GPUs are not checked."""
    config = tiny_config(place, training={"global_batch_size": 32})
    sizes = sizes_of(config, MinMax(1, 2), 8)
    for memory in (None, GIB, kept_memory(config)):
        monkeypatch.setattr(plan, "gpu_memory", lambda memory=memory: memory)
        plan.check_gpu_memory(config, sizes)
    parameters = plan.plan_run(config, 8, 8).whole.parameter_count
    assert 16 * parameters / 8 <= kept_memory(config) <= 24 * parameters / 8
