"""Print which gamma would have served recorded runs of mars-m or mars-shampoo best.

python -m tests.measurements.best_gamma RUN ...

The model: gradients are g_t = mu_t + noise. The mean mu makes a random walk, whose steps have the
squared size d; the noise of each batch is independent, of the squared size s. Without a clip the
momentum is the sum of w_k g_{t-k}, where w_0 = (1 - b) (1 - gamma) + gamma, and from k = 1 on
w_k = (1 - b) (1 - gamma) b^k. Then, with S = ||mu||^2,

    ||g||^2 = S + s,    <g, h> = S - d / 2,
    ||m||^2 = S - d / 2 sum w_k w_l |k - l| + s sum w_k^2,

which telemetry has, relative to ||g||^2: so S, d and s are known. The expected squared error of the
momentum, ||m - mu||^2, is d (1 - gamma)^2 b^2 / (1 - b^2) + s sum w_k^2. A mean over steps comes
before the three are solved for: those of one step are mostly noise.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from torchmars.records.run import Run, read_run

GAMMAS = [number / 200 for number in range(41)]
SHOWN = 0.0, 0.025, 0.05, 0.1


def weights(gamma: float, beta: float) -> Tensor:
    """Return w_k for k = 0, 1, ..., [400] in float64."""
    w = (1 - beta) * (1 - gamma) * beta ** torch.arange(400, dtype=torch.float64)
    w[0] += gamma
    return w


def moments(cosine: float, momentum: float, gamma: float, beta: float) -> tuple[float, float]:
    """Return d and s in parts of ||g||^2, from means of <g, h> and ||m||^2 in the same."""
    w, lags = weights(gamma, beta), torch.arange(400, dtype=torch.float64)
    apart = w @ (lags[:, None] - lags[None]).abs() @ w
    rows = [[1, 0, 1], [1, -0.5, 0], [1, -0.5 * float(apart), float(w @ w)]]
    found = torch.linalg.solve(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor([1.0, cosine, momentum], dtype=torch.float64),
    )
    return max(float(found[1]), 0.0), max(float(found[2]), 0.0)


def error(gamma: float, beta: float, d: float, s: float) -> float:
    """Return the expected squared error of the momentum, in parts of ||g||^2."""
    w = weights(gamma, beta)
    return d * (1 - gamma) ** 2 * beta**2 / (1 - beta**2) + s * float(w @ w)


def thirds(run: Run) -> None:
    """Print, for each third of a run but its first steps, what telemetry tells and what follows."""
    optimizer = run.config["optimizer"]
    gamma, (beta, _) = optimizer["gamma"], optimizer["betas"]
    cosines, momenta = (run.series[f"train/matrix/{name}"] for name in ("cosine", "momentum"))
    steps = cosines.steps
    for place in range(3):
        some = (
            (steps > 1) & (3 * steps > place * steps[-1]) & (3 * steps <= (place + 1) * steps[-1])
        )
        cosine, momentum = cosines.values[some].mean(), (momenta.values[some] ** 2).mean()
        drift, noise = moments(cosine, momentum, gamma, beta)
        best = min(GAMMAS, key=lambda each: error(each, beta, drift, noise))
        errors = [error(each, beta, drift, noise) for each in (*SHOWN, best)]
        relative = " | ".join(f"{each / errors[0]:.3f}" for each in errors[1:])
        third = ("first", "second", "last")[place]
        print(f"| {run.name} | {third} | {cosine:.3f} | {drift:.4f} | {best:.3f} | {relative} |")


def main() -> None:
    """Print it."""
    print("| run | third | cosine | d | best gamma | error at 0.025 | at 0.05 | at 0.1 | at best |")
    print("|" + "---|" * 9)
    for folder in sys.argv[1:]:
        thirds(read_run(Path(folder)))


if __name__ == "__main__":
    main()
