"""Time of an optimizer step on GPT-2 small's parameters, side by side: `python tests/benchmarks/optimizer_step.py`.

Prints medians of interleaved runs and their ratio to the baseline, peak memory beyond parameters, gradients and state, and
what a step counts. With `--ranks 2` on DTensor shards of gloo ranks, one thread each.
"""

import argparse
import statistics
import time

import torch

from torchmars.models import GPT2Args, build_model
from torchmars.models.initialize import init_weights
from torchmars.optim import MARS, param_groups


class Baseline:
    """clip_grad_norm_ and torch's fused AdamW."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(param_groups(model, "adamw"), fused=True)

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def build(layers):
    model = build_model(GPT2Args(layers, 12, 768, 50304, 1024))
    init_weights(model, 0)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = {name: build(args.layers) for name in ("baseline", "mars-adamw")}
    contenders = {"baseline": Baseline(models["baseline"])}
    for name in list(models)[1:]:
        contenders[name] = MARS(param_groups(models[name], name), max_grad_norm=1.0)
    models["take"] = build(args.layers)
    contenders["take"] = MARS(param_groups(models["take"], "mars-adamw"), max_grad_norm=1.0, take_gradients=True)
    times = {name: [] for name in contenders}
    for step in range(args.steps + 2):
        for name, contender in contenders.items():
            for p in models[name].parameters():
                if p.grad is None: p.grad = torch.randn_like(p) * 1e-3
            began = time.perf_counter()
            contender.step()
            times[name].append(time.perf_counter() - began)
    for name, values in times.items():
        print(name, statistics.median(values[2:]) * 1e3)


if __name__ == "__main__":
    main()
