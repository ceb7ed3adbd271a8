import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from torchmars.optim import MARS


class MarsContainer(OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name):
        return MARS

    @staticmethod
    def _build_impl_kwargs(config):
        return {}  # MARS chooses its kernels itself


def group(pattern, **settings):
    return ParamGroupConfig(pattern=pattern, optimizer_name="MARS", optimizer_kwargs=settings)


config = MarsContainer.Config(
    param_groups=[
        group(r"^(0|3)\.", rule="mars-adamw", lr=2e-2),  # embedding and head
        group(r"\.bias$", rule="adamw", lr=2e-2),
        group(".*", rule="mars-m", lr=2e-2),
    ],
    optimizer_factory_kwargs_by_name={"MARS": {"max_grad_norm": 1.0}},  # titan's own: infinity
)
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 100))
optimizers = MarsContainer(config, model_parts=[model])
for _ in range(100):
    tokens = torch.randint(100, (256,))
    loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 1) % 100)
    optimizers.zero_grad()
    loss.backward()
    optimizers.step()
optimizers.load_state_dict(optimizers.state_dict())
print("loss", loss.item())
