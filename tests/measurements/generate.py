"""Measure tokens per second of generation by GPT-2 small on the CPU, with and without the cache.

    python -m tests.measurements.generate [TOKENS] [ROUNDS]

Weights are random. After a prompt of 64 tokens the likeliest TOKENS (16) are drawn. The two ways
take turns, so that a busy machine slows both; their tokens are compared. It prints the median of
ROUNDS (2), and how busy the machine was.
"""

import os
import statistics
import sys
import time
from copy import deepcopy

import torch

from torchmars.config import model_config
from torchmars.evaluation.sampling import Draw, predict_anew, predict_with_cache, sample
from torchmars.models import build_model
from torchmars.models.initialize import init_weights

PROMPT = 64


def main() -> None:
    count, rounds = [*map(int, sys.argv[1:]), *[16, 2][len(sys.argv) - 1 :]]
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    model = build_model(model_config(size="small"), 50257, 1024).eval()
    init_weights(model, 0)
    prompt = torch.randint(50257, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    other = deepcopy(model)  # a cache changes its model
    ways = {
        "with the cache": lambda: predict_with_cache(other, PROMPT + count),
        "without": lambda: predict_anew(lambda x: model.head(model(x)[:, -1]), model.seq_len),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for _ in range(rounds):
        for name, predict in ways.items():
            began = time.perf_counter()
            greedy = Draw(temperature=0)
            tokens[name] = list(sample(predict(), [prompt], count, vocab_size=50257, draw=greedy))
            seconds[name].append(time.perf_counter() - began)
    assert tokens["with the cache"] == tokens["without"]
    for name, times in seconds.items():
        print(f"{name}: {count / statistics.median(times):.1f} tokens/s")
    print(f"{torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
