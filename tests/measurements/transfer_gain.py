"""Measure what [transfer] brings at 8 million parameters, after tuning at half a million.

python -m tests.measurements.transfer_gain FOLDER --text FILE [--rules adamw,muon] [--jobs 2]

Each rule is tuned on a Llama 64 wide: six rates, and three of lr_rest for muon and mars-m. One of
256 is then trained with three seeds, the same for all: with these rates as they are ("kept"), with
[transfer], and under adamw with the rate over 4 ("by hand"). "transfer" begins with 0.08 at the
base (wide_llama.py) and is tuned with it; the others begin with 0.02. It goes on where it was
stopped.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.measurements.transfer_study import HAVE_REST, RULES, parse_options, torchmars
from torchmars.comparison.statistics import mean_with_interval

Rates = dict[str, float]

# A short run on a text, whose loss is measured at its end.
SHORT = """
[data]
source = "text:{text}"
num_workers = 0
[training]
steps = 200
global_batch_size = 8
seq_len = 128
[schedule]
warmup_steps = 20
[validation]
interval = 200
windows = 128
[checkpoint]
at_end = false
interval = 0
"""
CONFIG = (
    SHORT
    + """
[run]
plugins = ["tests.measurements.wide_llama"]
[model]
name = "{model}"
n_layer = 10
n_head = {heads}
n_kv_head = {heads}
n_embd = {width}
n_inner = {inner}
tied = false
"""
)
BASE, LARGE = 64, 256
TRANSFER = "\n[transfer]\nn_head = 2\nn_kv_head = 2\nn_embd = 64\nn_inner = 192\n"
GRID = ",".join(f"{0.001 * 2**power:g}" for power in range(1, 7))
REST = "0.008,0.016,0.032"


def main() -> None:
    """Make the study of the command line, and print a line for each arm."""
    options = parse_options(__doc__)
    for rule in options.rules.split(","):
        trials = Trials(options.folder, rule, options.text.resolve(), options.jobs)
        kept, based = trials.tune("llama"), trials.tune("wide-llama")
        arms = {"kept": ("llama", kept), "transfer": ("wide-llama", based)}
        if rule == "adamw":
            by_hand = {name: rate * BASE / LARGE for name, rate in kept.items()}
            arms["by hand"] = ("llama", by_hand)
        losses = {}
        for arm, (model, rates) in arms.items():
            losses[arm] = trials.train(arm, model, rates)
            print(rule, arm, rates, losses[arm], "mean", statistics.fmean(losses[arm]))
            for other in losses:
                pairs = zip(losses[arm], losses[other], strict=True)
                apart = mean_with_interval([mine - its for mine, its in pairs])
                print(f"  minus {other}: {apart}", flush=True)


@dataclass(frozen=True)
class Trials:
    """The trials of one rule."""

    folder: Path
    rule: str
    text: Path
    jobs: str

    def tune(self, model: str) -> Rates:
        """Return the best rates of the base, of all that are tried with one seed."""
        rest = ("--lr-rest-grid", REST) if self.rule in HAVE_REST else ()
        grid = ("--lr-grid", GRID, *rest, "--widen", "--seeds", "1")
        best = self.compare("tuning", model, BASE, *grid)["best"]
        return {name: float(rate) for name, rate in best.items()}

    def train(self, arm: str, model: str, rates: Rates) -> list[float]:
        """Return the last validation losses of the large model with three seeds."""
        grid = [f"--{name.replace('_', '-')}-grid={rate:g}" for name, rate in rates.items()]
        return list(self.compare(arm, model, LARGE, *grid, "--seeds", "3")["losses"])

    def compare(self, purpose: str, model: str, width: int, *options: str) -> dict[str, Any]:
        """Run torchmars compare at one width, and return what it found of the rule."""
        folder = self.folder / f"{self.rule}-{model}-{purpose.replace(' ', '-')}"
        config, own = folder.with_suffix(".toml"), self.folder / f"{self.rule}.toml"
        sizes = {"width": width, "heads": width // 32, "inner": 3 * width}
        transfer = TRANSFER if purpose == "transfer" else ""
        config.write_text(CONFIG.format(model=model, text=self.text, **sizes) + transfer)
        own.write_text(f"[optimizer]\n{RULES[self.rule][0]}\n")
        shared = ("--optimizers", str(own), "--jobs", self.jobs, "--folder", str(folder))
        torchmars("compare", str(config), *shared, *options)
        [found] = json.loads((folder / "results.json").read_text())["contenders"]
        return dict(found)


if __name__ == "__main__":
    main()
