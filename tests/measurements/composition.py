"""Measure what composes, and print the table of docs/composition.md.

Run `python -m tests.measurements.composition`: it trains each case on 2 to 4 ranks, without a fault
and with each, writes docs/composition.json and puts the table into the page. With `--print` it only
prints the table of the records that are there.
"""

import argparse
import json
import re
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.support import faults
from tests.support.composition import (
    FAMILIES,
    Drawn,
    Findings,
    apart,
    case,
    judged,
    merged,
    observe,
)
from tests.support.gradients import gathered
from tests.support.one_loss import OneLoss
from tests.support.ranks import run_ranks
from tests.support.tiny import write_text
from torchmars.cluster import connection
from torchmars.config import ParallelismConfig
from torchmars.config.load import config_from_tables
from torchmars.training.build import build_trainer
from torchmars.training.trainer import Trainer

Fault = Callable[[pytest.MonkeyPatch], None]

DOCS = Path(__file__).parents[2] / "docs"
RECORDS, PAGE = DOCS / "composition.json", DOCS / "composition.md"


class Row(NamedTuple):
    """What composes, and which figures of a case say that it does."""

    what: str
    wrong: str
    """What could be wrong without an error."""
    seen: str
    """Where it was so."""
    case: str
    figure: str = "gradient"
    """Of `Findings`, beside the gradient."""
    fault: Fault | None = None


LLAMA, MOE, GLM = FAMILIES["Llama"], FAMILIES["Qwen3-MoE"], FAMILIES["GLM-4.5"]
DEEPSEEK, GPT2 = FAMILIES["DeepSeek"], FAMILIES["GPT-2"] | {"bias": True}
DEEP = {"n_layer": 4}
BUSY = {"balance_loss": 0.1, "router_z_loss": 0.01}
# Ranks, model, two layouts, rule, tokens of a chunk of the loss, and sections.
CASES: dict[str, tuple] = {
    "TP x FSDP": (
        *(4, LLAMA | {"qkv_bias": True, "qk_norm": True, "qk_norm_whole": True}),
        *([{"tp": 2}, {"pp": 2, "dp_replicate": 2}], "mars-adamw", 37),
        {"training": {"z_loss": 0.1, "max_grad_norm": 0.05, "microbatch_size": 1}},
    ),
    "TP, biases": (2, GPT2, [{"tp": 2}, {"cp": 2}], "mars-adamw", None, {}),
    "PP, tied": (
        *(2, GPT2 | DEEP, [{"pp": 2, "pp_schedule": "Interleaved1F1B"}, {"tp": 2}]),
        *("mars-m", None, {"training": {"microbatch_size": 1, "max_grad_norm": 0.05}}),
    ),
    "HSDP": (
        *(4, GPT2, [{"dp_replicate": 2}, {"dp_replicate": 2}], "mars-m", None),
        {"training": {"max_grad_norm": 0.05, "microbatch_size": 1}},
    ),
    "experts, TP": (
        *(2, MOE, [{"tp": 2}, {"ep": 2}], "mars-adamw", None),
        {"training": BUSY | {"microbatch_size": 2}},
    ),
    "experts, EP": (
        *(4, MOE | {"n_expert_shared": 1}, [{"ep": 2, "cp": 2}, {"pp": 2, "ep": 2}]),
        *("mars-adamw", None, {"training": BUSY}),
    ),
    "experts, PP, recomputed": (
        *(2, GLM | DEEP, [{"pp": 2}, {"ep": 2}], "mars-adamw", None),
        {"training": BUSY, "activation_checkpoint": {"mode": "full"}},
    ),
    "exact, EP": (2, MOE, [{"ep": 2}, {"tp": 2}], "mars-adamw, exact", None, {"training": BUSY}),
    "CP, windows, documents": (
        *(2, LLAMA | {"window": 20, "window_blocks": "sf"}),
        *([{"cp": 2}, {"cp": 2, "cp_method": "ulysses"}], "mars-adamw", None),
        {"data": {"separate_documents": True, "packing": "best_fit"}},
    ),
    "CP 4": (
        *(4, GPT2, [{"cp": 4}, {"cp": 2, "tp": 2}], "mars-adamw", None),
        {"data": {"separate_documents": True}},
    ),
    "latents, TP": (
        *(2, DEEPSEEK | {"n_group": 4, "topk_group": 2}, [{"tp": 2}, {"cp": 2, "ep": 2}]),
        *("mars-m", None, {"training": BUSY | {"qk_clip": 0.02}}),
    ),
    "Muon, TP x FSDP": (
        *(4, LLAMA, [{"tp": 2}, {"tp": 2}], "muon", None),
        {"training": {"microbatch_size": 1}},
    ),
    "two models": (
        *(4, MOE, [{"tp": 2, "ep": 2}], "mars-adamw", None),
        {"training": BUSY},
    ),
}


def judge_case(folder: Path, name: str, fault: Fault | None = None) -> Findings:
    """Train a case and judge it; with a fault its first run only."""
    ranks, model, layouts, rule, chunk, sections = CASES[name]
    called = "-".join([*name.replace(",", "").split(), fault.__name__ if fault else "runs"])
    if name == "two models":
        fault = beside_another
    layouts = layouts[:1] if fault else layouts
    runs = case(folder, called, model, layouts, rule, **sections)
    return judged([Drawn(ranks, runs, chunk)], fault)[0]


def beside_another(patch: pytest.MonkeyPatch) -> None:
    """Let a run of another layout make a step on the same ranks before each step."""
    step, others = Trainer.train_step, []

    def both(trainer: Trainer):
        if not others:
            run = replace(trainer.config.run, name="another")
            config = replace(trainer.config, run=run, parallelism=ParallelismConfig())
            others.append(None)  # it is none for itself
            others[0] = build_trainer(config, connection.start(config.parallelism))
        if trainer is not others[0]:
            step(others[0])
            others[0].flags.result()
        return step(trainer)

    patch.setattr(Trainer, "train_step", both)


ROWS = [
    Row(
        "TP × z-loss",
        "each rank uses only its own rows of the vocabulary, and has another loss",
        "Megatron-LM 7452 (label smoothing)",
        *("TP x FSDP", "gradient", faults.z_loss_of_own_rows),
    ),
    Row(
        "TP × losses of tokens, next logits",
        "logits are gathered, and then summed over ranks again",
        "Megatron-LM 7452",
        *("TP x FSDP", "tokens"),
    ),
    Row(
        "two models × the same ranks",
        "one uses the process groups of the other",
        "Megatron-LM 7452 (four findings)",
        *("two models", "gradient"),
    ),
    Row(
        "TP × vectors cut by heads × clip",
        "the norm lacks the heads of other ranks",
        "Megatron-LM 7530",
        *("TP x FSDP", "norm", faults.norm_of_own_shards),
    ),
    Row(
        "CP × mean of the loss",
        "the gradient is divided by cp twice",
        "Megatron-LM 7513",
        *("CP 4", "gradient", faults.part_of_the_loss),
    ),
    Row(
        "TP × norms, routers, whole experts",
        "no sum in the backward pass: copies drift apart",
        "Megatron-LM 1446; torchtitan 1805, 2387 (mended); NeMo-RL 3716",
        *("experts, TP", "copies", faults.no_sum_at_whole_weights),
    ),
    Row(
        "checkpoint × other stages",
        "a stage gets the layers of another, and loading reports nothing",
        "Megatron-LM 7452",
        *("PP, tied", "keys"),
    ),
    Row(
        "Muon × shards × resuming",
        "the run continues from another model, or does not load",
        "Megatron-LM 6920; 2625, 2617",
        *("Muon, TP x FSDP", "keys"),
    ),
    Row(
        "resuming × random numbers",
        "all ranks get the state of rank 0, or none is saved",
        "Automodel 3437; torchtitan `dcp.py`",
        *("Muon, TP x FSDP", "keys"),
    ),
    Row(
        "PP × scale of the loss",
        "the gradient is a sum over microbatches",
        "torchtitan 2972 (mended)",
        *("PP, tied", "gradient", faults.sum_of_microbatches),
    ),
    Row(
        "EP × FSDP",
        "gradients of experts are times ep",
        "pytorch 160285; Megatron-LM 5956 (mended)",
        *("experts, EP", "gradient", faults.experts_times_ep),
    ),
    Row(
        "TP × latents that heads share",
        "the gradient of the shared key is of one rank's heads",
        "torchtitan 1373",
        *("latents, TP", "gradient", faults.latents_of_own_heads),
    ),
    Row(
        "TP × bias after a partial sum",
        "the bias is added by each rank",
        "torchtitan 2106",
        *("TP, biases", "gradient"),
    ),
    Row(
        "TP × loss in chunks",
        "the gradient of one chunk is taken for the whole",
        "torchtitan 3412 (mended)",
        *("TP x FSDP", "gradient", faults.last_chunk_only),
    ),
    Row(
        "PP × clip",
        "the norm is of one stage, or depends on the cut",
        "torchtitan 596 (mended), 4135",
        *("PP, tied", "norm", faults.norm_of_one_stage),
    ),
    Row(
        "HSDP, EP or TP × clip",
        "copies are counted, or shards are missed",
        "RLinf 1558; Automodel 3816; VeOmni 862; NeMo-RL 3788",
        *("HSDP", "norm", faults.norm_of_all_copies),
    ),
    Row(
        "a layout × losses of routers",
        "their strength follows tp, cp, pp or accumulation",
        "Megatron-LM 3672, 5047, 5007, 7481; Automodel 1408; verl 6609",
        *("experts, TP", "gradient", faults.balance_of_every_part),
    ),
    Row(
        "recomputation × counts of experts",
        "tokens are counted twice",
        "torchtitan 1593, 4772",
        *("experts, PP, recomputed", "counts", faults.counts_of_recomputation),
    ),
    Row(
        "PP × biases of routers",
        "the biases of some layers do not move",
        "torchtitan 3686, 4494 (mended)",
        *("experts, PP, recomputed", "way", faults.last_bias_stays),
    ),
    Row(
        "groups of experts × balance",
        "experts are counted that the router did not choose",
        "ISEEKYAN/Megatron-LM 223",
        *("latents, TP", "counts"),
    ),
    Row(
        "PP × reported loss",
        "it is divided by ranks that have no loss",
        "torchtitan 1759 (mended), 3111",
        *("PP, tied", "loss", faults.loss_of_all_ranks),
    ),
    Row(
        "PP × tied table",
        "the gradients of the two uses are not added, or counted twice in the norm",
        "Megatron-LM 6500, 7228; torchtitan refuses it",
        *("PP, tied", "gradient", faults.tied_gradient_dropped),
    ),
    Row(
        "CP × windows",
        "windows are dropped, and the loss is plausible",
        "accelerate 4177 (refused since)",
        *("CP, windows, documents", "gradient", faults.windows_dropped),
    ),
    Row(
        "CP × documents",
        "positions or masks ignore the documents",
        "torchtitan 2679: refused with flex",
        *("CP 4", "gradient", faults.positions_of_the_sequence),
    ),
    Row(
        "any cut × initial weights",
        "ranks draw the same values",
        "torchtitan 514 (mended); pytorch 168058",
        *("TP x FSDP", "initial weights", faults.initial_weights_alike),
    ),
    Row(
        "EP × loading",
        "every rank gets the experts of rank 0",
        "transformers 45662",
        *("experts, EP", "keys"),
    ),
    Row(
        "Muon × copies under TP and replicas",
        "whole copies are gathered as if they were shards",
        "Megatron-LM 7395; 5034 (mended)",
        *("Muon, TP x FSDP", "way"),
    ),
    Row(
        "exact mode × balance × EP",
        "the two gradients of a batch use different shares",
        "here alone",
        *("exact, EP", "gradient", faults.shares_of_another_step),
    ),
]


# Rows of figures of their own, beside `Findings`.
BFLOAT16 = Row(
    "EP × bfloat16",
    "only on EP are experts weighed or reduced in bfloat16",
    "VeOmni 1199",
    *("bfloat16", "one rank"),
)
DROPOUT = Row(
    "TP × dropout",
    "masks of ranks are alike, or copies drop otherwise",
    "pytorch 168058; Megatron-LM 1256",
    *("dropout", "pairs of masks alike"),
)


def in_bfloat16(folder: Path) -> dict[str, float]:
    """Return the largest error of an expert's gradient in the first pass, on EP and on one rank."""
    found = {}
    for name, ranks, layout in (("one rank", 1, {}), ("gradient", 4, {"ep": 4})):
        training = {"dtype": "bfloat16", "global_batch_size": 16}
        runs = case(folder, f"bfloat16-{ranks}", MOE, [layout], training=training)[:1]
        seen = run_ranks(observe, ranks, [Drawn(ranks, runs)])
        exact = OneLoss(config_from_tables(runs[0], "a case"), 257, 256)
        first = [rank[0][0]["passes"][0] for rank in seen]
        exact.take(merged(Findings(), [each["before"] for each in first]))
        _, truth = exact.backward(first[0]["windows"])
        ours = merged(Findings(), [each["gradients"] for each in first])
        found[name] = max(apart(ours[each], truth[each]) for each in ours if "experts" in each)
    return found


def dropped(tables: dict[str, dict]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return what this rank drops in a pass, and the gradients of the weights."""
    masks, own = [], F.dropout
    config = config_from_tables(tables, "a case")
    trainer = build_trainer(config, connection.start(config.parallelism))

    def noted(x: torch.Tensor, *args: object) -> torch.Tensor:
        masks.append(own(torch.ones_like(x), *args) == 0)
        return x.masked_fill(masks[-1], 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", noted)
        trainer.model.backward(trainer.loader.step())
    trainer.loader.close()
    return masks, {name: gathered(each.grad) for name, each in trainer.model.weights.items()}


def with_dropout(folder: Path) -> dict[str, float]:
    """Return how many pairs of masks of two ranks are alike, and what is dropped of 0.2."""
    runs = case(folder, "dropout", GPT2 | {"dropout": 0.2}, [{"tp": 2}])
    (one, gradients), (other, copies) = run_ranks(dropped, 2, runs[0])
    found = Findings()
    merged(found, [gradients, copies])
    alike = sum(map(torch.equal, one, other))
    share = torch.cat([each.flatten() for each in one + other]).float().mean().item()
    return {"pairs of masks alike": alike, "dropped": share, "copies": found.worst["copies"]}


def figures(found: Findings) -> dict[str, float]:
    """Return the figures of a case. Raises `AssertionError` for a near tie."""
    assert not found.tied
    return {
        name: float(f"{each:.1e}") for name, each in ({"one rank": found.own} | found.worst).items()
    }


def measured() -> dict[str, dict[str, float]]:
    """Return the figures of each case and, with the fault of each row, of its first run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, documents=60, words=100)
        records = {name: figures(judge_case(folder, name)) for name in CASES}
        for row in ROWS:
            if row.fault:
                records[fault_of(row)] = figures(judge_case(folder, row.case, row.fault))
        return records | {"bfloat16": in_bfloat16(folder), "dropout": with_dropout(folder)}


def fault_of(row: Row) -> str:
    """Return what the records call a row's fault."""
    return f"{row.case}: {row.fault.__name__}" if row.fault else ""


def table(records: dict[str, dict[str, float]]) -> str:
    """Return the page's table: in HTML, since its lines are short."""

    def shown(figures: dict[str, float], figure: str) -> str:
        gradient = [f"{figures['gradient']:.0e}"] if "gradient" in figures else []
        more = [f"{figure} {figures.get(figure, 0):.1g}"] if figure != "gradient" else []
        return ", ".join(gradient + more)

    head = "what composes", "what could be wrong without an error", "seen elsewhere"
    head += "largest difference of a gradient from float64", "with the fault"
    lines = ["<table>", *in_html("th", *head)]
    for row in (*ROWS, BFLOAT16, DROPOUT):
        without = shown(records[row.case], row.figure)
        broken = shown(records[fault_of(row)], row.figure) if row.fault else "–"
        lines += in_html("td", row.what, row.wrong, row.seen, without, broken)
    return "\n".join([*lines, "</table>"])


def in_html(kind: str, *cells: str) -> list[str]:
    """Return a row of a table, `kind` of its cells, in lines of less than 100 bytes."""
    text = " ".join(f"<{kind}>{cell}</{kind}>" for cell in cells)
    text = re.sub("`(.*?)`", r"<code>\1</code>", text)
    return textwrap.wrap(f"<tr>{text}</tr>", 96, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Measure, write the records, and put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="only print the table of the records")
    if parser.parse_args().print:
        print(table(json.loads(RECORDS.read_text())))
        return
    records = measured()
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    before, rest = PAGE.read_text().split("<table>")
    PAGE.write_text(before + table(records) + rest.split("</table>")[1])


if __name__ == "__main__":
    main()
