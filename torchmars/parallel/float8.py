"""Linear layers whose matrix products are computed in float8, by torchao.

Only the products change: parameters keep their names, shapes and float32 values. Where they are
gathered in float8, their local tensors are wrappers of torchao's around those values, and
`optim.tensors` sees through them. Source: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", arXiv 2209.05433.
"""

import importlib.util

import torch
from torch import nn

from torchmars.config.float8 import Float8Config
from torchmars.core.device import is_gpu, multiplies_float8
from torchmars.core.errors import UserError
from torchmars.models import Model

UNIT = 16  # both sizes of a matrix must be multiples of it, for the GPU's instructions


def check_package(config: Float8Config) -> None:
    """Raise `UserError` if float8 is asked for, and torchao is not installed."""
    if config.recipe != "none" and importlib.util.find_spec("torchao") is None:
        raise UserError(
            "training.float8.recipe needs the package torchao: pip install 'torchmars[float8]'"
        )


def convert_layers(model: Model, config: Float8Config, device: torch.device) -> None:
    """Let the linear layers of the blocks of `model` compute in float8, in place.

    Raises `UserError` for a device that cannot, and where torchao is not installed.
    """
    if config.recipe == "none":
        return
    check_package(config)
    if not (config.emulate or multiplies_float8(device)):
        on_gpu = is_gpu(device.type)
        name = torch.get_device_module(device).get_device_name(device) if on_gpu else "a CPU"
        raise UserError(
            f'training.float8.recipe = "{config.recipe}" needs a GPU that multiplies float8 '
            f'(compute capability 8.9 or later), not {name}: set it to "none"'
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if config.recipe == "rowwise":
        layers = Float8LinearConfig.from_recipe_name("rowwise")
        # The recipe has no such option, and its result is frozen.
        object.__setattr__(layers, "emulate", config.emulate)
    else:
        layers = Float8LinearConfig(
            enable_fsdp_float8_all_gather=config.all_gather, emulate=config.emulate
        )
    for block in model.blocks.values():
        convert_to_float8_training(block, config=layers, module_filter_fn=is_converted)


def is_converted(module: nn.Module, name: str) -> bool:
    """Return whether a layer of a block computes in float8."""
    return isinstance(module, nn.Linear) and not any(
        size % UNIT for size in (module.in_features, module.out_features)
    )


def converted_rows(model: Model) -> set[int]:
    """Return the numbers of rows of the weights that compute in float8."""
    modules = (module for block in model.blocks.values() for module in block.modules())
    return {
        module.out_features
        for module in modules
        if isinstance(module, nn.Linear) and is_converted(module, "")
    }


def update_scales(part: nn.Module) -> None:
    """Compute the scales that weights are gathered in float8 with, after the weights have changed.

    One all-reduce for all of them. Without it each gather would make one for each weight.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(part)
