"""python -m torchmars.plan: its figures against formulas."""

import re
import sys

import pytest

from tests.support.commands import run_command
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    run_folder_of,
    tiny_config,
    tiny_tables,
    train,
    write_config,
    write_text,
)
from torchmars.cluster import connection
from torchmars.commands.plan import main
from torchmars.config.load import config_from_tables
from torchmars.planning.advice import advice
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK
from torchmars.planning.plan import plan_rank


def planned(function, *cases):
    """What a function finds of plans, in one process that has no other group."""
    [found] = run_ranks(of_each, 1, function, cases)
    return found


def of_each(function, cases):
    found = []
    for case in cases:
        connection.stop()
        found.append(function(*case))
    return found


def simulate(tables, world_size, per_node):
    """The simulation of rank 0 of many."""
    plan = plan_rank(config_from_tables(tables, "in a test"), world_size, per_node)
    simulation = plan.simulation
    sent = {
        (kind.phase, kind.operation, len(kind.ranks)): (
            simulation.traffic.times[kind],
            simulation.traffic.sent[kind],
        )
        for kind in simulation.traffic.sent
    }
    return simulation.checkpoint, sent, list(advice(plan))


def activations(tables, per_node):
    """The activations of one rank."""
    return plan_rank(config_from_tables(tables, "in a test"), 1, per_node).simulation.activations


def stored(tables, world_size):
    """The bytes of one rank's weights, of the whole checkpoint, and of the whole weights."""
    plan = plan_rank(config_from_tables(tables, "in a test"), world_size, 0).simulation
    return plan.weights, plan.checkpoint, 4 * sum(p.numel() for p in plan.model.whole.parameters())


def test_a_moving_average_is_counted(tmp_path):
    without, with_average = planned(
        stored, *((tiny_tables(tmp_path, training={"ema_decay": decay}), 2) for decay in (0.0, 0.9))
    )
    assert with_average[0] == 2 * without[0] == without[2]
    assert with_average[1] == without[1] + without[2]


def test_a_compiled_loss_keeps_no_probabilities(tmp_path):
    tables = tiny_tables(
        tmp_path, training={"seq_len": 128, "global_batch_size": 4, "dtype": "float32"}
    )
    tables["model"] |= {"n_layer": 1, "vocab_size": 16384}
    off = tables | {"training": tables["training"] | {"compile": False}}
    eager, default, on_a_cpu = planned(activations, (off, 1), (tables, 1), (tables, 0))
    probabilities = 4 * 128 * 16384 * 4  # of 4 sequences, in float32
    assert 0.9 * probabilities <= eager - default <= 1.1 * probabilities
    assert on_a_cpu == eager


def test_documents_apart_take_a_mask_where_no_kernel_serves(tmp_path):
    def tables(apart, dtype):
        return tiny_tables(
            tmp_path,
            model={"n_layer": 1},
            data={"separate_documents": apart},
            training={"seq_len": 128, "global_batch_size": 4, "dtype": dtype},
        )

    single, half = ("float32", 0), ("bfloat16", 1)
    cases = [(tables(apart, dtype), n) for dtype, n in (single, half) for apart in (False, True)]
    together, apart, half_together, half_apart = planned(activations, *cases)
    mask = 4 * 128 * 128 * 4  # of 4 sequences, in float32
    assert half_apart == half_together and mask <= apart - together <= 1.5 * mask


def timed(tables, world_size, per_node):
    """The time of a step, and what it is made of: FLOPs, bytes, the bubble, the owners' FLOPs."""
    plan = plan_rank(config_from_tables(tables, "in a test"), world_size, per_node)
    sent, waited = plan.simulation.traffic.sent, plan.simulation.traffic.waited
    passes = [kind for kind in sent if kind.phase == "forward and backward"]
    layers = sum(waited[kind] for kind in passes)
    weights = sum(sent[kind] for kind in passes) - layers
    optimizer = sum(size for kind, size in sent.items() if kind.phase == "optimizer")
    flops = plan.flops_per_token * plan.config.training.tokens_per_step / world_size
    return plan.seconds, flops, layers, weights, optimizer, plan.bubble or 0.0, plan.largest_load


TIMED = [
    (0, None, 1, {}),
    (1, NETWORK, 1, {}),
    (2, NVLINK, 1, {}),
    (2, NVLINK, 4 / 3, {"activation_checkpoint": {"mode": "full"}}),
    (2, NVLINK, 1, {"parallelism": {"tp": 2}}),
    (2, NVLINK, 1, {"parallelism": {"cp": 2}}),
    (2, NVLINK, 1, {"parallelism": {"pp": 2}, "optimizer": {"name": "muon"}}),
]


@pytest.mark.parametrize("per_node,speed,again,sections", full_but([TIMED[4], TIMED[6]], TIMED))
def test_the_time_of_a_step(tmp_path, per_node, speed, again, sections):
    tables = tiny_tables(tmp_path, **sections)
    [(seconds, flops, layers, weights, optimizer, bubble, owned)] = planned(
        timed, (tables, 2, per_node)
    )
    if speed is None:
        assert seconds is None
        return
    degrees = sections.get("parallelism", {})
    assert (layers > 0) == ("tp" in degrees or "cp" in degrees)
    assert (bubble > 0) == ("pp" in degrees)
    compute = flops * again / FLOPS
    passes = (compute + layers / speed) / (1 - bubble)
    meanwhile = max(0, weights / speed - compute)
    assert (owned > 0) == ("optimizer" in sections)
    assert seconds == pytest.approx(passes + meanwhile + optimizer / speed + owned / FLOPS)


def test_a_checkpoint_has_the_planned_size(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, model={"n_embd": 128}, training={"steps": 1})
    train(2, tables)
    size = sum(file.stat().st_size for file in run_folder_of(tables).glob("checkpoints/*/*.distcp"))
    [(expected, _, _)] = planned(simulate, (tables, 2, 0))
    assert expected < size < 1.05 * expected  # beside the tensors, each has a header


ACCUMULATED = [(1, "sharded", 1, 1), (3, "sharded", 3, 1), (3, "reduced", 3, 3), (3, "whole", 1, 1)]


@pytest.mark.parametrize(
    "accumulation_steps,accumulate,scattered,exchanged", full_but(ACCUMULATED[1:2], ACCUMULATED)
)
def test_traffic_is_that_of_the_formulas(
    tmp_path, accumulation_steps, accumulate, scattered, exchanged
):
    """HSDP over 2 replicas of 4 shards, mars-m.

    FSDP's volume is that of Rajbhandari et al. 2020, section 7.2; whole matrices come on top.
    """
    replicas, shards, layers, width, rows, length = 2, 4, 8, 128, 320, 64
    tables = tiny_tables(
        tmp_path,
        model={"n_layer": layers, "n_head": 2, "n_embd": width},
        parallelism={"dp_replicate": replicas, "accumulate": accumulate},
        optimizer={"name": "mars-m"},
        training={
            "global_batch_size": 8 * accumulation_steps,
            "microbatch_size": 1,
            "seq_len": length,
        },
    )
    [(_, sent, _)] = planned(simulate, (tables, replicas * shards, 8))
    blocks, rest = layers * (12 * width + 2) * width, (rows + length + 1) * width
    matrices = layers * 12 * width**2
    # Of the 6 heads of qkv, 64 rows each, 4 lie whole on one of 4 shards of 96 rows: they stay.
    travelling = matrices - layers * 3 * 4 / 6 * width**2
    ring = (shards - 1) / shards
    units = 1  # all blocks together have 3 MiB in bfloat16
    passes = "forward and backward"
    gathered = (
        accumulation_steps * ring * 2 * (2 * blocks + rest)
    )  # in bfloat16; blocks twice, the rest stays from forward to backward
    assert sent[passes, "all-gather", shards] == (
        accumulation_steps * (2 * units + 1),
        pytest.approx(gathered, rel=1e-6),
    )
    assert sent[passes, "reduce-scatter", shards] == (
        scattered * (units + 1),
        pytest.approx(scattered * ring * 4 * (blocks + rest), rel=1e-6),
    )
    assert sent[passes, "all-reduce", replicas] == (
        exchanged * (units + 1),
        pytest.approx(
            exchanged * 2 * (replicas - 1) / replicas * 4 * (blocks + rest) / shards, rel=1e-6
        ),
    )
    buckets = sent["optimizer", "all-to-all", shards][0] // 2
    assert sent["optimizer", "all-to-all", shards] == (
        2 * buckets,
        pytest.approx(2 * ring * 2 * travelling / shards / replicas, rel=0.05),
    )
    assert sent["optimizer", "all-gather", replicas] == (
        buckets + 1,  # the heads that stay, which replicas share out too
        pytest.approx((replicas - 1) / replicas * 2 * matrices / shards, rel=0.05),
    )
    assert sent["optimizer", "all-reduce", shards][0] == 1
    numbers = 1 + 3 * (6 * layers + 3)  # of the step, and the products of each tensor
    assert sent["optimizer", "all-reduce", replicas] == (1, 8 * numbers)
    assert len(sent) == 7


@pytest.mark.parametrize(
    "model,units",
    [
        ({"size": "small", "n_layer": 12}, 4),  # 13.5 MiB each in bfloat16: four, and the rest
        pytest.param({"size": "medium", "n_layer": 5}, 4, marks=FULL),  # 24 MiB: two, and one
        pytest.param({"size": "xl", "n_layer": 3}, 4, marks=FULL),  # 58.6 MiB: each is alone
    ],
    ids=lambda value: str(value),
)
def test_small_blocks_are_units_together(tmp_path, model, units):
    tables = tiny_tables(
        tmp_path,
        model={"name": "gpt2"} | model,
        optimizer={"name": "adamw"},
        training={"global_batch_size": 8, "seq_len": 32},
    )
    for key in ("n_head", "n_embd"):
        del tables["model"][key]
    [(_, sent, _)] = planned(simulate, (tables, 8, 8))
    assert sent["forward and backward", "all-gather", 8][0] == 2 * units - 1
    assert sent["forward and backward", "reduce-scatter", 8][0] == units


@FULL
def test_matrices_travel_in_their_dtype(tmp_path):
    """Two bytes for bfloat16, and four for float32."""
    tables = [
        tiny_tables(tmp_path, optimizer={"name": "muon", "matrix_dtype": dtype, "per_head": False})
        for dtype in ("bfloat16", "float32")
    ]
    found = planned(simulate, *((each, 2, 0) for each in tables))
    narrow, wide = (sent["optimizer", "all-to-all", 2] for _, sent, _ in found)
    matrices, there_and_back = 2 * 12 * 32**2, 2
    assert narrow[1] == pytest.approx(2 * there_and_back * matrices / 2 / 2, rel=0.05)
    assert wide == (narrow[0], 2 * narrow[1])


def test_what_an_expert_would_warn_of(tmp_path):
    batch = {"seq_len": 1024, "global_batch_size": 64, "steps": 100_000}
    short = {"model": {"n_layer": 2, "n_embd": 64, "n_head": 1}}
    short |= {"training": batch | {"seq_len": 512}}
    cases = [
        (8, {"model": {"n_layer": 2, "n_embd": 64}, "training": batch}),
        (64, short),
        (64, short | {"parallelism": {"dp_replicate": 8}}),
        (
            2,
            {
                "model": {"n_layer": 8, "n_embd": 12012},
                "training": {"seq_len": 1024, "global_batch_size": 4, "microbatch_size": 1},
            },
        ),
    ]
    data = {"tokenizer": "gpt2", "files": ["x.txt"]}
    tables = ((tiny_tables(tmp_path, data=data, **each), size, 8) for size, each in cases)
    fine, wide, inside, poor = ("\n".join(said) for _, _, said in planned(simulate, *tables))
    assert fine == ""
    assert "rank 0 has" not in wide
    assert "512 tokens of a microbatch" in wide
    assert "parallelism.dp_replicate = 8 gathers inside machines" in wide
    assert "tokens of a microbatch" not in inside
    assert "does not fit a GPU of 80 GiB" in poor
    assert "width 12012 is not a multiple of 64" in poor


def warnings_of(tmp_path, model, per_node, words, *layouts):
    """Return the warnings with one of `words` of plans on 8 ranks, by layout."""
    training = {"seq_len": 64, "global_batch_size": 32, "microbatch_size": 4}
    tables = (
        tiny_tables(tmp_path, model=model, training=training, parallelism=each) for each in layouts
    )
    found = planned(simulate, *((each, 8, per_node) for each in tables))
    return [[line for line in said if any(word in line for word in words)] for *_, said in found]


@FULL
def test_warnings_of_axes(tmp_path):
    model = {"n_layer": 4, "n_head": 4, "n_embd": 64}
    words = ("parallelism.tp", "pipeline")
    [across], [waits] = warnings_of(tmp_path, model, 2, words, {"tp": 4}, {"pp": 4})
    assert across.startswith("parallelism.tp = 4 reaches across machines of 2 GPUs")
    # 4 microbatches, and the head costs more than a block: over 3 / 7.
    assert waits.startswith("the ranks of the pipeline wait ")
    assert 'or parallelism.pp_schedule = "Interleaved1F1B"' in waits


@FULL
def test_warnings_of_experts(tmp_path):
    model = {"name": "llama", "size": "moe-nano"}
    layouts = {"ep": 4}, {"tp": 2, "ep": 2}, {}, {"ep": 8}, {"tp": 2}
    *none, [across], [repeated] = warnings_of(
        tmp_path, model, 4, ("parallelism.ep", "share"), *layouts
    )
    assert none == [[], [], []]
    assert across.startswith("parallelism.ep = 8 reaches across machines of 4 GPUs")
    assert "2 ranks repeat their weights" in repeated
    assert repeated.endswith("set parallelism.ep = 2, or a multiple of it")


def axes_of_traffic(tables):
    """Along which axes rank 0 of 8 sends what, in the passes of a step."""
    plan = plan_rank(config_from_tables(tables, "in a test"), 8, 8)
    return {
        (kind.operation, plan.axes_of(kind.ranks))
        for kind in plan.simulation.traffic.sent
        if kind.phase == "forward and backward"
    }


def test_traffic_is_along_the_axes(tmp_path):
    """Tensor parallelism sends activations along tp, FSDP weights and gradients along dp_shard."""
    tables = tiny_tables(
        tmp_path,
        model={"name": "llama", "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 64},
        training={"seq_len": 64, "microbatch_size": 4},
        parallelism={"tp": 2},
    )
    [axes] = planned(axes_of_traffic, (tables,))
    assert axes == {
        ("all-gather", "tp"),
        ("reduce-scatter", "tp"),
        ("all-reduce", "tp"),
        ("all-gather", "dp_shard"),
        ("reduce-scatter", "dp_shard"),
    }


def test_the_command(tmp_path):
    config = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path), config)
    code, out, err = run_command("plan", [str(config), "--world-size", "16"], tmp_path)
    assert code == 0, err
    assert "matrices in" not in out
    for part in (
        "FSDP over 16 ranks (cuda, nccl), bfloat16 compute",
        "16 x 32 tokens a step",
        "optimizer state",
        "a checkpoint",
        "16 ranks on 2 machines",
        "none: no rule of this run",
        "512 a step, 10,240 to the end",
        "is not prepared yet",
        "warning ",
    ):
        assert part in out
    code, out, err = run_command("plan", [str(config), "--world-size", "5"], tmp_path)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("error: training.global_batch_size = 16 does not divide over 5")


@pytest.mark.parametrize(
    "args,message",
    [
        (("--world-size", "12"), "--world-size 12 does not fill machines of --gpus-per-node 8"),
        ((), "--world-size is missing"),
        (("--world-size", "0"), "--world-size must be a whole number from 1 to 100000, or MIN:MAX"),
        (("--world-size", "8:"), "--world-size must be a whole number from 1 to 100000, or MIN"),
        (("--world-size", "8:12"), "--world-size 8:12 does not fill machines of --gpus-per-node 8"),
        (("--world-size", "8:16", "--find"), "--find takes one number of ranks, got --world-size"),
        (("--world-size", "24:40"), "no number of machines goes, of 3:5 with 8 ranks each: "),
    ],
)
def test_mistakes_on_the_command_line(args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", *args])
    with pytest.raises(SystemExit, match="2"):
        main()
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "gpus,asked,sizes,batch,copies",
    [
        # Of 1, 2 and 4 machines. One alone keeps no copies of another.
        (4, "4:16", "1, 2 or 4 machines: 4, 8 or 16 ranks; 3 run as 2", "4 ranks x 4", (2, 2)),
        (4, "8:16", "2 or 4 machines: 8 or 16 ranks; 3 run as 2", "8 ranks x 2", (4, 2)),
        (0, "2:4", "2 or 4 machines: 2 or 4 ranks; 3 run as 2", "2 ranks x 2", (4, 2)),
    ],
)
def test_the_plan_of_an_elastic_run(tmp_path, gpus, asked, sizes, batch, copies):
    """It is that of the fewest ranks, with microbatches that go with all."""
    config = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path, checkpoint={"memory_interval": 1}), config)
    options = [str(config), "--world-size", asked, "--gpus-per-node", str(gpus)]
    code, out, err = run_command("plan", options, tmp_path)
    assert code == 0, err
    fewest = sizes.split(" machines: ")[1].split()[0].rstrip(",")
    assert out.startswith(f"elastic   {sizes}")
    assert f"planned   {fewest} ranks, the fewest: memory is the tightest there\n" in out
    assert batch in out and f"for {copies[0]} copies\n" in out
    kept = {row: int(re.search(rf" {row} .* ([\d,]+)\n", out)[1].replace(",", "")) for row in KEPT}
    both = (copies[0] + copies[1]) * max(gpus, 1) * sum(kept.values())
    assert f"({both:,} bytes) there while {2 * int(fewest)} ranks become {fewest}, until" in out


KEPT = "weights", "optimizer state"
