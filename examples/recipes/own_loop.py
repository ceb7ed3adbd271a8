import torch
from torch import nn

from torchmars.optim import MARS, param_groups

model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))
optimizer = MARS(param_groups(model, "mars-m", lr=2e-2), max_grad_norm=1.0)  # it clips itself
for _ in range(100):
    tokens = torch.randint(100, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
