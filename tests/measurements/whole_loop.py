"""Measure the tokens per second of whole runs, side by side.

    python -m tests.measurements.whole_loop gpt2|llama|ranks|bfloat16 [--steps 40] [--turns 3]

`gpt2` and `llama`: our loop with mars-adamw and with adamw, as a user starts it (data, loss, step,
logging), beside the plainest loop of transformers' model of the same sizes with clip_grad_norm_ and
torch's fused AdamW, on one batch that is in memory: 10 million parameters, 8 x 256 tokens, float32,
one process, two threads. `ranks`: gpt2 nano by FSDP on two ranks of one thread each,
beside one rank of two threads. `bfloat16`: ours in bfloat16, beside float32.

The kinds take turns, each in a process of its own. Of each the first quarter of the steps is not
counted. The tables have the median over the turns, the smallest and the largest; the ratio to the
kind that is marked with "*", of the medians; and the share of the peak of float32 matrix products
that was measured before each turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import run_folder_of, tiny_tables, write_config, write_text
from torchmars.config.gpt2 import GPT2Args
from torchmars.config.load import config_from_tables
from torchmars.core.words import table
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import build_meta_model

LOG_INTERVAL, BATCH, LENGTH, ROWS = 5, 8, 256, 8192
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"name": "gpt2", "n_layer": 6, "n_head": 5, "n_embd": 320, "vocab_size": ROWS},
    "llama": {
        "name": "llama",
        "n_layer": 6,
        "n_head": 5,
        "n_kv_head": 5,
        "n_embd": 320,
        "n_inner": 864,
        "vocab_size": ROWS,
        "tied": True,
    },
}
TRAINING = {"global_batch_size": BATCH, "seq_len": LENGTH, "dtype": "float32"}
QUICKSTART = {
    "model": {"name": "gpt2", **GPT2Args.sizes["nano"], "vocab_size": 320},
    "training": TRAINING | {"seq_len": 128},
}
# What each part of the benchmark compares: the ranks and the tables of a run of ours, or the name
# of a model of transformers. The first kind is what the others are compared with.
PARTS: dict[str, dict[str, tuple[int, dict[str, dict]] | str]] = {
    **{
        name: {
            "transformers": name,
            "ours, mars-adamw": (1, {"model": model, "training": TRAINING}),
            "ours, adamw": (
                1,
                {"model": model, "training": TRAINING, "optimizer": {"name": "adamw"}},
            ),
        }
        for name, model in MODELS.items()
    },
    "ranks": {"1 rank, 2 threads": (1, QUICKSTART), "FSDP, 2 ranks of 1": (2, QUICKSTART)},
    "bfloat16": {
        "float32": (1, {"model": MODELS["gpt2"], "training": TRAINING}),
        "bfloat16": (
            1,
            {"model": MODELS["gpt2"], "training": TRAINING | {"dtype": "bfloat16"}},
        ),
    },
}


def run_ours(folder: Path, name: str, ranks: int, tables: dict[str, dict], steps: int) -> float:
    """Train as a user does; return the tokens per second of the counted steps."""
    tables = tiny_tables(
        folder,
        **tables | {"run": {"name": name}, "training": tables["training"] | {"steps": steps}},
        metrics={"log_interval": LOG_INTERVAL},
    )
    config = config_from_tables(tables, "in the benchmark")
    file = folder / f"{name}.toml"
    write_config(config, file)
    environment = os.environ | {"NGPU": str(ranks), "OMP_NUM_THREADS": str(2 // ranks)}
    command = [sys.executable, "-m", "torchmars", "train", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    seconds, counted, last = 0.0, 0, 1
    for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        if "train/tokens_per_second" not in found:
            continue
        if last >= steps // 4:
            tokens = (found["step"] - last) * tokens_per_step(tables)
            seconds, counted = seconds + tokens / found["train/tokens_per_second"], counted + tokens
        last = found["step"]
    return counted / seconds


def run_theirs(name: str, steps: int) -> float:
    """Train a model of transformers in a process of its own; return the same."""
    command = [sys.executable, "-m", "tests.measurements.whole_loop", name, "--theirs"]
    out = subprocess.run(
        [*command, "--steps", str(steps)],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    ).stdout
    return float(out.split()[-1])


def train_theirs(name: str, steps: int) -> None:
    """Train a model of transformers in this process, and print its tokens per second."""
    import transformers

    ours = MODELS[name]
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=ROWS,
            n_positions=LENGTH,
            n_embd=ours["n_embd"],
            n_layer=ours["n_layer"],
            n_head=ours["n_head"],
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=ROWS,
            max_position_embeddings=LENGTH,
            hidden_size=ours["n_embd"],
            intermediate_size=ours["n_inner"],
            num_hidden_layers=ours["n_layer"],
            num_attention_heads=ours["n_head"],
            num_key_value_heads=ours["n_kv_head"],
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(ROWS, (BATCH, LENGTH))
    began = 0.0
    for step in range(1, steps + 1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_INTERVAL == 0:
            print(step, loss.item())
        if step == steps // 4:
            began = time.perf_counter()
    print(BATCH * LENGTH * (steps - steps // 4) / (time.perf_counter() - began))


def matrix_peak(size: int = 2048, times: int = 5) -> float:
    """Return the FLOP/s of float32 matrix products on two threads, the best of some."""
    torch.set_num_threads(2)
    left, right = torch.randn(2, size, size).unbind()
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def tokens_per_step(tables: dict[str, dict]) -> int:
    return tables["training"]["global_batch_size"] * tables["training"]["seq_len"]


def flops_per_token(tables: dict[str, dict]) -> int:
    config = config_from_tables(tables, "in the benchmark")
    tokens = load_tokenizer(config.data.tokenizer).vocab_size
    return build_meta_model(config.model, tokens, config.training.seq_len).flops_per_token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.theirs:
        return train_theirs(options.part, options.steps)
    kinds = PARTS[options.part]
    tables = next(kind[1] for kind in kinds.values() if not isinstance(kind, str))
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    peaks = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, documents=400)
        flops = flops_per_token(tiny_tables(folder, **tables))
        for turn in range(options.turns):
            peaks.append(matrix_peak())
            for number, (name, kind) in enumerate(kinds.items()):
                if isinstance(kind, str):
                    rate = run_theirs(kind, options.steps)
                else:
                    rate = run_ours(folder, f"run-{turn}-{number}", *kind, options.steps)
                rates[name].append(rate)
    peak = statistics.median(peaks)
    print(f"matrix products: {peak / 1e9:.0f} GFLOP/s, {min(peaks) / 1e9:.0f} to", end=" ")
    print(f"{max(peaks) / 1e9:.0f}; {flops / 1e6:.1f} MFLOPs a token")
    base = statistics.median(next(iter(rates.values())))
    lines = [("kind", "tokens/s", "from", "to", "ratio", "of the peak")]
    for name, found in rates.items():
        rate, mark = statistics.median(found), " *" if name == next(iter(rates)) else ""
        figures = f"{rate:,.0f}", f"{min(found):,.0f}", f"{max(found):,.0f}"
        lines.append((name + mark, *figures, f"{rate / base:.2f}", f"{rate * flops / peak:.0%}"))
    print("\n".join(table(lines, right=range(1, 6))))


if __name__ == "__main__":
    main()
