"""Steps of MARS on CPU tensors, with Triton's kernels in its interpreter and without them."""

import importlib
import os
import sys

import torch

# Blocks of 1024: a whole one and a part, one element, an empty shard, a stack, a view anywhere.
SHAPES = [(40, 30), (1,), (0,), (3, 8, 5), (33, 33)]
STEPS = 2
TECHNIQUES = {
    "": {},
    "lean": {"clip": None},
    "exact": {"exact": True},
    "narrow": {"momentum_dtype": torch.bfloat16, "last_grad_dtype": torch.bfloat16},
}


def interpret():
    """Let Triton's kernels be interpreted in this process, in which none was made.

    That is decided when Triton is imported, which torch may have done.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load = builder.create_masked_load

    def load_where(self, pointers, mask, *others):
        """Triton 3.9 gives a mask that is one comparison of a number the number's own dtype."""
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *others)

    builder.create_masked_load = load_where


def with_kernels(optimizer):
    """Let an optimizer of CPU tensors take kernels, as one on a GPU."""
    found = importlib.import_module("torchmars.optim.gpu.launches")
    optimizer.launcher = found.Launcher(optimizer.plans, optimizer.exact)
    return optimizer


def gradient(shape, seed, technique):
    """The gradient of a step: of a stack the second matrix is 0, of the last tensor a view."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if len(shape) == 3:
        values[1] = 0
    if technique == "nan" and seed < 100 and values.numel() == 1:
        values.fill_(float("nan"))
    if technique == "bfloat16 gradients":
        values = values.bfloat16()
    if shape == (33, 33):  # at an address that 16 does not divide
        return torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(shape).copy_(values)
    return values


def steps(rule, technique, kernels, dtype=torch.float32):
    """Return the numbers after some steps: weights, state, norms, telemetry and skipped steps."""
    # Here, since a process that interprets must not have imported what needs Triton.
    from torchmars.optim import MARS

    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]
    if technique == "bfloat16 gradients":
        for parameter in parameters:
            parameter.grad_dtype = None
    if rule in ("mars-m", "mars-shampoo", "muon"):
        groups = [
            {"params": [each for each in parameters if each.ndim > 1]},
            {"params": [each for each in parameters if each.ndim == 1], "rule": "adamw"},
        ]
    else:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-2}]
    optimizer = MARS(
        groups,
        lr=1e-3,
        weight_decay=0.1,
        rule=rule,
        max_grad_norm=1.0,
        matrix_dtype="float32",
        compile=False,
        **TECHNIQUES.get(technique, {}),
    )
    if kernels:
        with_kernels(optimizer)
        if technique == "two floats":
            optimizer.launcher.in_float64 = False
    norms = []

    def give(step):
        for number, parameter in enumerate(parameters):
            given = gradient(tuple(parameter.shape), 100 * step + number, technique)
            parameter.grad = given.to(dtype) if dtype == torch.float64 else given

    for step in range(STEPS):
        if technique == "exact":
            give(10 + step)
            parameters[1].grad = None  # no h of the next step
            optimizer.look_ahead()
        give(step)
        if technique == "absent" and step:  # a gradient, and the last one of another parameter
            parameters[0].grad = None
            optimizer.skip_next_correction(parameters[-1:])
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    state = [value for each in parameters for value in optimizer.state[each].values()]
    return {
        "weights": [each.detach() for each in parameters],
        "state": state,
        "norms": torch.stack(norms),
        "telemetry": optimizer.telemetry(),
        "skipped": optimizer.skipped,
    }


def steps_of(cases):
    """Return the steps of each case with kernels: to be called in a process of its own."""
    interpret()
    return [steps(*case, kernels=True) for case in cases]


def sharded_steps(rule, replicas, kernels):
    """Return the weights after some steps on ranks that have shards, and copies, of a model."""
    if kernels:
        interpret()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchmars.optim import MARS, param_groups

    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards")
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.LayerNorm(40))
    fully_shard(model, mesh=mesh)
    optimizer = MARS(
        param_groups(model, rule), max_grad_norm=1.0, matrix_dtype="float32", compile=False
    )
    if kernels:
        with_kernels(optimizer)
    norms = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator)
            parts = whole.chunk(ranks // replicas)
            parameter.grad = torch.zeros_like(parameter)
            local = parameter.grad.to_local()
            local.copy_(parts[mesh.get_local_rank("shards")])
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
    return [each.full_tensor().detach() for each in model.parameters()], norms
