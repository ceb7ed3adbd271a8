"""How much of the package one step passes: what somebody reads who follows it."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import run_ranks
from torchmars import optim
from torchmars.optim import MARS, param_groups

FOLDER = Path(optim.__file__).parent


def sharded_model():
    """A parameter of each role, cut by rows over all ranks."""
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(11, 8), "norm": nn.LayerNorm(8)}
    layers |= {"up": nn.Linear(8, 6, bias=False), "head": nn.Linear(6, 11, bias=False)}
    model, mesh = nn.ModuleDict(layers), init_device_mesh("cpu", (2,))
    for module in layers.values():
        for name, parameter in list(module.named_parameters()):
            shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard))
    return model


def functions_of_the_third_step():
    """Return file and name of each function that the third step of mars-m calls on this rank."""
    model = sharded_model()
    optimizer = MARS(param_groups(model, "mars-m"), max_grad_norm=1.0, compile=False)
    found = set()

    def watch(frame, event, _):
        code = frame.f_code
        file = Path(code.co_filename)
        # Comprehensions, lambdas and generator expressions are part of the function around them.
        if event == "call" and file.is_relative_to(FOLDER) and not code.co_name.startswith("<"):
            found.add((str(file.relative_to(FOLDER)), code.co_qualname))

    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number + 1)
        sys.setprofile(watch if number == 2 else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return found


def test_a_step_passes_sixty_functions_in_nine_files():
    """On each of two ranks: the one that owns the matrix, and the other."""
    for found in run_ranks(functions_of_the_third_step, 2):
        files = {file for file, _ in found}
        assert {"mars.py", "passes.py", "rules.py", "matrices/exchange.py"} <= files
        assert len(found) <= 60, sorted(found)
        assert len(files) <= 9, sorted(files)
