"""torchmars plan: its figures against formulas, what it prints, and what it warns of."""

import re
import sys
from collections import Counter

import pytest

from tests.support.full import FULL
from tests.support.tiny import (
    run_folder_of,
    tiny_config,
    tiny_tables,
    train,
    write_config,
    write_text,
)
from torchmars.commands.plan import main
from torchmars.config.load import config_from_tables, load_config, validate
from torchmars.planning.plan import FLOPS, NETWORK, NVLINK, plan_run
from torchmars.planning.report import memory, transferred
from torchmars.training.summary import base_line

GIB = 2**30


def planned(tables, world_size, per_node):
    """The plan of a run."""
    return plan_run(config_from_tables(tables, "in a test"), world_size, per_node)


def sent(plan):
    """How many bytes the first rank sends, by operation and number of ranks."""
    found = Counter()
    for each in plan.sent:
        found[each.operation, len(each.group)] += each.size
    return found


def test_a_moving_average_is_counted(tmp_path):
    without, averaged = (
        planned(tiny_tables(tmp_path, training={"ema_decay": decay}), 2, 0) for decay in (0.0, 0.9)
    )
    whole = 4 * without.whole.parameter_count
    assert averaged.ranks[0].weights == 2 * without.ranks[0].weights == whole
    assert averaged.checkpoint == without.checkpoint + whole


MEASURED = [
    ("gpt2_small.toml", 8, 1024, {"mars_adamw": 5.1}),
    ("gpt2_small.toml", 16, 1024, {"adamw": 6.9, "mars_adamw": 7.3, "mars_m": 6.9}),
    ("gpt2_small.toml", 64, 1024, {"mars_adamw": 21.2, "mars_m": 20.7}),
    ("llama_1b.toml", 4, 2048, {"mars_adamw": 32.6, "mars_m": 28.0}),
    ("llama_8b.toml --model.n_layer 4", 2, 8192, {"mars_adamw": 43.0, "mars_m": 35.9}),
]


@pytest.mark.parametrize("args,batch,length,peaks", MEASURED)
def test_no_peak_is_below_what_was_measured_on_a_gpu(args, batch, length, peaks):
    """GiB of docs/benchmarks.md. Compiled blocks keep less of norms, which the formula leaves."""
    sizes = {"global_batch_size": batch, "microbatch_size": batch, "seq_len": length}
    options = [text for name, size in sizes.items() for text in (f"--training.{name}", str(size))]
    for rule, measured in peaks.items():
        file, *more = args.split()
        files = [file, f"optimizers/{rule}.toml", *more, "--parallelism.tp", "1"]
        plan = plan_run(load_config([*files, *options], "in a test"), 1, 1)
        assert 0.95 * measured <= plan.largest.peak / GIB <= 1.25 * measured


@pytest.mark.parametrize("per_node,speed,again", [(1, NETWORK, 0), (2, NVLINK, 1)])
def test_the_time_of_a_step(tmp_path, per_node, speed, again):
    """The passes, and beyond them what FSDP sends. The table of exact plans has other layouts."""
    mode = "full" if again else "none"
    tables = tiny_tables(tmp_path, activation_checkpoint={"mode": mode})
    plan = planned(tables, 2, per_node)
    compute = plan.flops / 2 * (1 + again / 3) / FLOPS
    weights = sum(each.size for each in plan.passes[0]) / speed
    assert plan.seconds == pytest.approx(max(weights, compute))
    assert planned(tables, 2, 0).seconds is None  # on CPUs


@pytest.mark.parametrize("schedule,stages", [("1F1B", 4), ("Interleaved1F1B", 8)])
def test_the_bubble_of_stages(tmp_path, schedule, stages):
    """(p - 1) / (n + p - 1), n of each stage of a rank, and the head as much as so many blocks."""
    tables = tiny_tables(
        tmp_path,
        model={"n_layer": 16},
        parallelism={"pp": 4, "pp_schedule": schedule},
    )
    plan = planned(tables, 4, 4)
    head, rounds = plan.costs.head_in_blocks, plan.microbatches[1] * stages / 4
    idle = (16 + head) / 4 / (4 + head)
    assert plan.bubble == pytest.approx(1 - idle * rounds / (rounds + 3))


@FULL
def test_a_checkpoint_has_the_planned_size(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(tmp_path, model={"n_embd": 128}, training={"steps": 1})
    train(2, tables)
    size = sum(file.stat().st_size for file in run_folder_of(tables).glob("checkpoints/*/*.distcp"))
    expected = planned(tables, 2, 0).checkpoint
    assert expected < size < 1.05 * expected  # beside the tensors, each has a header


ACCUMULATED = [(1, "sharded", 1, 1), (3, "sharded", 3, 1), (3, "reduced", 3, 3), (3, "whole", 1, 1)]


@pytest.mark.parametrize("accumulation_steps,accumulate,scattered,exchanged", ACCUMULATED)
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
    found = sent(planned(tables, replicas * shards, 8))
    blocks, rest = layers * (12 * width + 2) * width, (rows + length + 1) * width
    matrices = layers * 12 * width**2
    # Of the 6 heads of qkv, 64 rows each, 4 lie whole on one of 4 shards of 96 rows: they stay.
    travelling = matrices - layers * 3 * 4 / 6 * width**2
    ring = (shards - 1) / shards
    exact = pytest.approx
    assert found == {
        # In bfloat16; blocks twice, the rest stays from forward to backward.
        ("all-gather", shards): exact(accumulation_steps * ring * 2 * (2 * blocks + rest)),
        ("reduce-scatter", shards): exact(scattered * ring * 4 * (blocks + rest)),
        ("all-reduce", replicas): exact(
            exchanged * 2 * (replicas - 1) / replicas * 4 * (blocks + rest) / shards
        ),
        ("all-to-all of matrices", shards): exact(
            2 * ring * 2 * travelling / shards / replicas, rel=0.05
        ),
        ("all-gather of matrices", replicas): exact(
            (replicas - 1) / replicas * 2 * matrices / shards, rel=0.05
        ),
    }


def test_matrices_travel_in_their_dtype(tmp_path):
    """Two bytes for bfloat16, and four for float32."""
    tables = [
        tiny_tables(tmp_path, optimizer={"name": "muon", "matrix_dtype": dtype, "per_head": False})
        for dtype in ("bfloat16", "float32")
    ]
    narrow, wide = (sent(planned(each, 2, 0))["all-to-all of matrices", 2] for each in tables)
    matrices, there_and_back = 2 * 12 * 32**2, 2
    assert narrow == pytest.approx(2 * there_and_back * matrices / 2 / 2, rel=0.05)
    assert wide == 2 * narrow


def test_what_does_not_fit_is_said(tmp_path):
    def fit(per_node, **model):
        training = {"seq_len": 1024, "global_batch_size": 32, "microbatch_size": 1}
        return memory(planned(tiny_tables(tmp_path, model=model, training=training), 2, per_node))

    large = {"n_layer": 8, "n_embd": 12032, "n_head": 94}
    assert "does not fit" not in "".join(fit(2) + fit(0, **large))
    said = "does not fit a GPU of 80 GiB, which leaves about 72: lower training.seq_len"
    assert said in fit(2, **large)[-1]


def test_traffic_is_along_the_axes(tmp_path):
    """Tensor parallelism sends activations along tp, FSDP weights and gradients."""
    tables = tiny_tables(
        tmp_path,
        model={"name": "llama", "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 64},
        training={"seq_len": 64, "microbatch_size": 4},
        parallelism={"tp": 2},
    )
    plan = planned(tables, 8, 8)
    assert {(each.operation, each.along) for each in plan.passes[0]} == {
        ("all-gather", "tp"),
        ("reduce-scatter", "tp"),
        ("all-reduce", "tp"),
        ("all-gather", "fsdp"),
        ("reduce-scatter", "fsdp"),
    }


BASE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "n_inner": 768}
LARGE = {"name": "llama", "n_layer": 10, "n_head": 12, "n_kv_head": 6, "n_embd": 768}


def test_each_role_is_told_with_what_it_gets_of_a_base():
    def of(transfer):
        tables = {"model": LARGE | {"n_inner": 2304, "tied": False}, "transfer": transfer}
        optimizer = {"name": "muon", "lr": 0.01}
        return plan_run(validate([("in a test", tables | {"optimizer": optimizer})]), 1, 1)

    plan = of(BASE | {"depth": "1/L"})
    lines = transferred(plan)
    rows = {tuple(re.split(r"\s\s+", line)) for line in lines}
    # lr 0.01 / 3^(1/2), decay 0.1 * 3^(1/2); proj begins at 0.02 / (2 * 2)^(1/2) / 3^(1/2).
    assert ("matrix", "20", "0.01155", "0.005774", "0.1732", "1e-08") in rows
    # A head of q, k or v is 64 x 768, and 64 x 256 in the base: lr 0.01 / 3, decay 0.1 * 3.
    assert ("matrix", "30", "0.01155", "0.003333", "0.3", "1e-08") in rows
    assert ("matrix", "20", "0.005774", "0.005774", "0.1732", "1e-08") in rows
    assert ("head", "1", "0.02", "0.01", "0.1", "3.333e-09") in rows
    assert ("vector", "20", "ones", "0.01", "0.1", "6.667e-10") in rows
    advice = " ".join(lines[-2:])
    assert "root of the batch" in advice and "tokens^-0.32" in advice and "arXiv" in advice
    text = base_line(plan.config, plan.whole)
    assert text.startswith("2 layers, 4 heads (2 of keys and values), width 256 (MLP 768)")
    assert text.endswith("multipliers logits 0.333333, residual 0.2, attention 1")
    assert transferred(of({})) == []


def told(monkeypatch, capsys, *args):
    """What `torchmars plan ARGS` prints, and its error."""
    monkeypatch.setattr(sys, "argv", ["torchmars plan", *args])
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2
    return capsys.readouterr()


def test_the_command(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path), config)
    out, err = told(monkeypatch, capsys, str(config), "--world-size", "16")
    assert err == "" and "matrices in" not in out
    for part in (
        "FSDP over 16 ranks (cuda, nccl), bfloat16 compute",
        "16 x 32 tokens a step",
        "optimizer state",
        "a checkpoint",
        "16 ranks on 2 machines",
        "none: no rule of this run",
        "512 a step, 10,240 to the end",
        "is not prepared yet",
        "the peak is in ",
    ):
        assert part in out
    out, err = told(monkeypatch, capsys, str(config), "--world-size", "5")
    assert err.startswith("error: training.global_batch_size = 16 does not divide over 5")
    assert out == "" and err.count("\n") == 1


@pytest.mark.parametrize(
    "args,message",
    [
        (("--world-size", "12"), "--world-size 12 does not fill machines of --gpus-per-node 8"),
        ((), "the following arguments are required: --world-size"),
        (("--world-size", "0"), "--world-size must be a whole number from 1 to 100000, or MIN:MAX"),
        (("--world-size", "8:"), "--world-size must be a whole number from 1 to 100000, or MIN"),
        (("--world-size", "8:12"), "--world-size 8:12 does not fill machines of --gpus-per-node 8"),
        (("--world-size", "8:16", "--find"), "--find takes one number of ranks, got --world-size"),
        (("--world-size", "24:40"), "training.global_batch_size = "),
    ],
)
def test_mistakes_on_the_command_line(args, message, monkeypatch, capsys):
    err = told(monkeypatch, capsys, *args).err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "gpus,asked,sizes,batch,copies",
    [
        # Of 1, 2 and 4 machines. One alone keeps no copies of another.
        (4, "4:16", "1, 2 or 4 machines: 4, 8 or 16 ranks", "4 ranks x 4", (2, 2)),
        (4, "8:16", "2 or 4 machines: 8 or 16 ranks", "8 ranks x 2", (4, 2)),
        (0, "2:4", "2 or 4 machines: 2 or 4 ranks", "2 ranks x 2", (4, 2)),
    ],
)
def test_the_plan_of_an_elastic_run(
    tmp_path, monkeypatch, capsys, gpus, asked, sizes, batch, copies
):
    """It is that of the fewest ranks, with microbatches that go with all."""
    config = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path, checkpoint={"memory_interval": 1}), config)
    options = str(config), "--world-size", asked, "--gpus-per-node", str(gpus)
    out, err = told(monkeypatch, capsys, *options)
    assert err == ""
    fewest = sizes.split(" machines: ")[1].split()[0].rstrip(",")
    assert out.startswith(f"elastic   {sizes}")
    assert f"planned   {fewest} ranks, the fewest: memory is the tightest there\n" in out
    assert batch in out and f"for {copies[0]} copies\n" in out
    kept = {row: int(re.search(rf" {row} .* ([\d,]+)\n", out)[1].replace(",", "")) for row in KEPT}
    both = (copies[0] + copies[1]) * max(gpus, 1) * sum(kept.values())
    assert f"({both:,} bytes) there while {2 * int(fewest)} ranks become {fewest}, until" in out


KEPT = "weights", "optimizer state"
