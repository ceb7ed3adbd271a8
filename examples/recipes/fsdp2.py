import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchmars.optim import MARS, param_groups

torch.distributed.init_process_group("gloo")  # on GPUs: "nccl", and move model and tokens there
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))
for module in (model[1], model[3], model):
    fully_shard(module)
optimizer = MARS(param_groups(model, "mars-m", lr=2e-2), max_grad_norm=1.0)
for _ in range(100):
    tokens = torch.randint(100, (256,))
    nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100).backward()
    optimizer.step()
    optimizer.zero_grad()
loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100)
if torch.distributed.get_rank() == 0:
    print("loss", loss.item())
