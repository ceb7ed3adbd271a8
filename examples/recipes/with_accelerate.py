import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

from torchmars.optim import MARS, param_groups

accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))
optimizer = MARS(param_groups(model, "mars-m", lr=2e-2), max_grad_norm=1.0)
model, optimizer = accelerator.prepare(model, optimizer)  # no accelerator.clip_grad_norm_
for _ in range(100):
    tokens = torch.randint(100, (256,), device=accelerator.device)
    loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
accelerator.print("loss", loss.item())
