import lightning
import torch
from torch import nn

from torchmars.optim import MARS, param_groups


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(100, 64), nn.GELU(), nn.Linear(64, 100))

    def training_step(self, tokens):
        return nn.functional.cross_entropy(self.model(tokens), (7 * tokens + 1) % 100)

    def configure_optimizers(self):
        return MARS(param_groups(self.model, "mars-m", lr=2e-2), max_grad_norm=1.0)


tokens = torch.randint(100, (100 * 256,))
trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=None)  # MARS clips
trainer.fit(module := Module(), torch.utils.data.DataLoader(tokens, 256))
print("loss", module.training_step(tokens[:256]).item())
