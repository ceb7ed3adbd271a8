"""torchmars.optim in an environment with torch alone: each rule makes steps that lower a loss."""

import importlib.util

import torch

from torchmars.optim import MARS, param_groups
from torchmars.optim.rules import RULES

ABSENT = (
    "numpy",
    "annotated_types",
    "pydantic",
    "psutil",
    "safetensors",
    "tiktoken",
    "torchdata",
    "tqdm",
)
present = [name for name in ABSENT if importlib.util.find_spec(name)]
assert not present, f"this environment has {present}"
for rule in RULES:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20))
    optimizer = MARS(param_groups(model, rule, lr=1e-2), max_grad_norm=1.0)
    tokens, losses = torch.arange(20), []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(tokens), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], (rule, losses)
print(f"torch {torch.__version__} alone: {', '.join(RULES)}")
