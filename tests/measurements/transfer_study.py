"""The study of docs/transfer.md: do best rates stay over width and depth, with [transfer] or not?

python -m tests.measurements.transfer_study FOLDER --text FILE [--rules adamw,muon] [--jobs 2]

For each rule 84 trials of 120 steps: widths 32, 64 and 128 with 2 blocks, 8 blocks with width 32,
each larger one also without [transfer]; six rates a factor of two apart, or more where the best is
at an edge; three seeds at the best rate and its neighbours. lr_rest of muon and mars-m is first
tuned at the base. It goes on where it was stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CONFIG = """
[run]
plugins = ["tests.measurements.wide_llama"]
[model]
name = "wide-llama"
n_layer = 2
n_head = 2
n_kv_head = 2
n_embd = 32
n_inner = 96
tied = false
[data]
source = "text:{text}"
num_workers = 0
[training]
steps = 120
global_batch_size = 8
seq_len = 64
[schedule]
warmup_steps = 12
[validation]
interval = 120
[checkpoint]
at_end = false
interval = 0
"""
RULES = {
    "adamw": ('name = "adamw"', 0.002),
    "mars-adamw": ('name = "mars-adamw"', 0.002),
    "muon": ('name = "muon"', 0.004),
    "mars-m": ('name = "mars-m"\ngamma = 0.1', 0.004),
}
REST = "0.016,0.032,0.064"
HAVE_REST = ("muon", "mars-m")


def main() -> None:
    """Make the study of the command line."""
    options = parse_options(__doc__)
    config = options.folder / "base.toml"
    config.write_text(CONFIG.format(text=options.text.resolve()))
    for rule in options.rules.split(","):
        table, least = RULES[rule]
        own = options.folder / f"{rule}.toml"
        own.write_text(f"[optimizer]\n{table}\n")
        rest = best_rest(config, own, options.jobs) if rule in HAVE_REST else None
        named = [f"optimizer.{line.replace(' = ', '=')}" for line in table.splitlines()]
        named += [] if rest is None else [f"optimizer.lr_rest={rest}"]
        torchmars(
            *("transfer", str(config), *(f"--{each}".replace('"', "") for each in named)),
            *("--transfer.n_embd", "32", "--transfer.depth", "1/L"),
            *("--widths", "32,64,128", "--depths", "2,8", "--without", "--widen"),
            *("--lr-grid", ",".join(f"{least * 2**power:g}" for power in range(6))),
            *("--seeds", "3", "--jobs", options.jobs, "--folder", str(options.folder / rule)),
        )
        print(f"{rule}, lr_rest {rest}\n{(options.folder / rule / 'table.md').read_text()}")


def parse_options(doc: str | None) -> argparse.Namespace:
    """Return the options of a study, whose folder is there then."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--jobs", default="2")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def best_rest(config: Path, own: Path, jobs: str) -> float:
    """Return the best lr_rest of the base, of three, each with three rates of matrices."""
    folder = own.with_name(f"{own.stem}-rest")
    torchmars(
        *("compare", str(config), "--optimizers", str(own), "--lr-grid", REST),
        *("--lr-rest-grid", REST, "--seeds", "1", "--jobs", jobs, "--folder", str(folder)),
    )
    [found] = json.loads((folder / "results.json").read_text())["contenders"]
    return float(found["best"]["lr_rest"])


def torchmars(*arguments: str) -> None:
    """Run a command of torchmars."""
    subprocess.run([sys.executable, "-m", "torchmars", *arguments], check=True)


if __name__ == "__main__":
    main()
