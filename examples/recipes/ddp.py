import torch
from torch import nn

from torchmars.optim import MARS, param_groups

torch.distributed.init_process_group("gloo")  # on GPUs: "nccl", and move model and tokens there
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))
model = nn.parallel.DistributedDataParallel(model)
optimizer = MARS(param_groups(model, "mars-m", lr=2e-2), max_grad_norm=1.0)
for _ in range(100):
    tokens = torch.randint(100, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if torch.distributed.get_rank() == 0:
    print("loss", loss.item())
