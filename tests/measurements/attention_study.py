"""Do heads that are orthogonalised apart, or a clip of attention logits, make a lower loss?

python -m tests.measurements.attention_study FOLDER --text FILE [--jobs 2]

A small Llama, DeepSeek and GPT-2, without norms of queries and keys, are trained with muon and
mars-m: whole matrices ("plain"), each head apart ("heads"), and plain with training.qk_clip
("clip"). Each arm has its own best of five rates and three seeds there. It prints losses, the
largest logit at the end, and differences of arms seed by seed, with 95% intervals.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from tests.measurements.transfer_gain import SHORT
from tests.measurements.transfer_study import parse_options, torchmars
from tests.support.tiny import metrics
from torchmars.comparison.statistics import mean_with_interval

CONFIG = (
    SHORT
    + """
[model]
name = "{name}"
size = "nano"
n_layer = 4
n_head = 4
n_embd = 128
{more}
[metrics]
attention = true
"""
)
MODELS = {"llama": "n_inner = 384", "deepseek": "n_inner = 384", "gpt2": ""}
RATES = "0.008,0.016,0.032,0.064,0.128"
RULES = {"muon": 'name = "muon"', "mars-m": 'name = "mars-m"\ngamma = 0.1'}
LIMIT = 20  # Kimi K2's is 100; small models pass 20 at the highest rates
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("\nper_head = false", ()),
    "heads": ("\nper_head = true", ()),
    "clip": ("\nper_head = false", ("--training.qk_clip", str(LIMIT))),
}


def main() -> None:
    """Make the study of the command line, and print its lines."""
    options = parse_options(__doc__)
    for name, more in MODELS.items():
        config = options.folder / f"{name}.toml"
        text = options.text.resolve()
        config.write_text(CONFIG.format(name=name, more=more, text=text))
        for rule in RULES:
            found = {arm: train(options.folder, config, rule, arm, options.jobs) for arm in ARMS}
            for arm, contender in found.items():
                losses, plain = contender["losses"], found["plain"]["losses"]
                pairs = zip(losses, plain, strict=True)
                apart = mean_with_interval([mine - its for mine, its in pairs])
                print(
                    f"{name} {rule} {arm}: lr {contender['best']['lr']}, "
                    f"loss {statistics.fmean(losses):.4f}, largest logit {contender['logit']:.1f}, "
                    f"minus plain {apart}",
                    flush=True,
                )


def train(folder: Path, config: Path, rule: str, arm: str, jobs: str) -> dict[str, Any]:
    """Return what `torchmars compare` found of an arm, with the "logit" of its best trials."""
    where = folder / f"{config.stem}-{rule}-{arm}"
    own, (setting, options) = where.with_suffix(".toml"), ARMS[arm]
    own.write_text(f"[optimizer]\n{RULES[rule]}{setting}\n")
    grid = ("--lr-grid", RATES, "--seeds", "3", "--jobs", jobs, "--folder", str(where))
    torchmars("compare", str(config), "--optimizers", str(own), *grid, *options)
    results = json.loads((where / "results.json").read_text())
    [contender] = results["contenders"]
    best = [each for each in results["trials"] if each["settings"] == contender["best"]]
    logits = [largest_logit(where / each["folder"]) for each in best]
    return dict(contender) | {"logit": statistics.fmean(logits)}


def largest_logit(run: Path) -> float:
    """Return the largest logit of a run's last reported step."""
    tables = {"run": {"name": run.name, "folder": str(run.parent)}}
    return float([*metrics(tables, "train/attention/largest_logit").values()][-1])


if __name__ == "__main__":
    main()
