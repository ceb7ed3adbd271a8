import timm
import torch
from torch import nn

from torchmars.optim import MARS, param_groups

model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=4)
optimizer = MARS(param_groups(model, "mars-m", lr=5e-3), max_grad_norm=1.0)
images = torch.rand(32, 3, 32, 32) + torch.arange(4).repeat(8)[:, None, None, None]
labels = torch.arange(4).repeat(8)
for _ in range(30):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
