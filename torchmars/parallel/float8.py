"""Linear layers whose matrix products are computed in float8, by torchao.

Only the products change: parameters keep their names, shapes and float32 values. Source:
Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

import importlib.util

import torch
from torch import nn

from torchmars.config.training import Float8Config
from torchmars.core.device import is_gpu, multiplies_float8
from torchmars.core.errors import UserError, missing_package
from torchmars.models import Model

UNIT = 16  # both sizes of a matrix must be multiples of it, for the GPU's instructions


def check_package(config: Float8Config) -> None:
    """Raise `UserError` if float8 is asked for, and torchao is not installed."""
    if config.recipe != "none" and importlib.util.find_spec("torchao") is None:
        raise missing_package("torchao", "training.float8.recipe", "float8")


def convert_layers(
    model: Model, config: Float8Config, device: torch.device, emulate: bool = False
) -> None:
    """Let the linear layers of the blocks of `model` compute in float8, in place.

    Tests `emulate` it: numbers are rounded to float8 and multiplied as usual, on any device. Raises
    `UserError` for a device that cannot, and where torchao is not installed.
    """
    if config.recipe == "none":
        return
    check_package(config)
    if not (emulate or multiplies_float8(device)):
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
        object.__setattr__(layers, "emulate", emulate)
    else:
        layers = Float8LinearConfig(emulate=emulate)
    for block in model.blocks.values():
        convert_to_float8_training(block, config=layers, module_filter_fn=is_converted)


def is_converted(module: nn.Module, name: str) -> bool:
    """Return whether a layer of a block computes in float8."""
    return isinstance(module, nn.Linear) and not any(
        size % UNIT for size in (module.in_features, module.out_features)
    )
