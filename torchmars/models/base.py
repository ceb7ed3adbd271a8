"""A model beside the base whose learning rates it takes: the section [transfer]."""

from dataclasses import replace

import torch

from torchmars.config.model import TransferConfig, shape_fields
from torchmars.config.model_args import COMMON, Multipliers
from torchmars.core.errors import UserError
from torchmars.models.model import Model
from torchmars.optim.scaling import TransferFactors, transfer_factors


def base_of(model: Model, transfer: TransferConfig) -> Model:
    """Return the base of a model, without memory: it has the model's settings except its shape.

    Raises `UserError` if the family has no such base.
    """
    kind, args, shape = model.settings, model.args, {}
    if transfer.size is not None:
        if transfer.size not in kind.sizes:
            sizes = ", ".join(kind.sizes)
            raise UserError(f'transfer.size = "{transfer.size}" is none of the sizes {sizes}')
        common = {name: getattr(args, name) for name in COMMON}
        named = kind(**common | dict(kind.sizes[transfer.size]))
        shape = {name: getattr(named, name) for name in shape_fields(kind)}
    shape |= transfer.shape()
    try:
        like = replace(args, **shape, multipliers=Multipliers())
        like.check()
        with torch.device("meta"):
            base = type(model)(like)
    except UserError as error:
        raise UserError(f"transfer: its base cannot be built: {error}") from None
    for name, value in shape.items():
        own = getattr(args, name)
        if None not in (own, value) and (own == 0) != (value == 0):  # such as experts
            raise UserError(
                f"transfer: its base has {name} = {value}, where model.{name} = {own}: both must "
                "be of one kind"
            )
    return base


def factors_of(model: Model, transfer: TransferConfig) -> TransferFactors | None:
    """Return what lets a model take the learning rates of its base; None where no base is named.

    Their `std` are of the model's own `init_std`. Raises `UserError`.
    """
    if not transfer.named:
        return None
    base = base_of(model, transfer)
    # A class that derives from a family may have blocks of its own: it says itself what it applies.
    applied = vars(type(model)).get("multipliers", Model.multipliers)
    try:
        factors = transfer_factors(
            model, base, depth=transfer.depth, decay=transfer.decay, applied=applied
        )
    except ValueError as error:
        raise UserError(f"transfer: {error}") from None
    if transfer.depth == "none":
        return factors
    # What begins smaller in deeper models has the multiplier for that: it begins as in the base.
    std = dict(factors.std)
    for name, twin in factors.twins.items():
        own, of_base = model.init_std(name), base.init_std(twin.name)
        if own and of_base:
            std[name] = std.get(name, 1.0) * of_base / own
    return replace(factors, std=std)


def multiplied(model: Model, transfer: TransferConfig) -> Model:
    """Return a model like `model`, which has no memory, that applies its multipliers.

    Raises `UserError` if its family does not apply one that is not 1.
    """
    factors = factors_of(model, transfer)
    if factors is None or {*factors.multipliers.values()} == {1}:
        return model
    return type(model)(replace(model.args, multipliers=Multipliers(**factors.multipliers)))
