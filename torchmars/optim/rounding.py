"""Stochastic rounding of an optimizer's state to bfloat16, by random bits without a generator.

A number is rounded up or down with the probabilities that make its expectation the number itself.
So what round to nearest would lose at every step is kept on average. Sources: Zamirai et al.,
"Revisiting BFloat16 Training", arXiv 2010.06192; Ozkara et al., "Stochastic Rounding for LLM
Training: Theory and Practice", arXiv 2502.20566. Both round weights so.

The bits are a hash of the optimizer's seed, the parameter's name, its step and the number of the
element in the whole tensor. They are the same on every layout and after every resume.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmars.optim.tensors import local_intervals, local_part


class ParameterRounding(NamedTuple):
    """What the random bits of a parameter's state are made of, beside its step."""

    seed: Tensor
    """A hash of the optimizer's seed and the parameter's name: 0-d int32 on its device."""
    first: Tensor
    """The number of this rank's first element in the whole tensor: likewise."""
    shape: tuple[int, ...]
    """Of this rank's part, with the outermost dim of its memory first. Dims that count on from one
    another are one: it has more than one where an inner dim is cut."""
    rises: tuple[int, ...]
    """By how much the numbers of the elements rise along each of these dims, modulo 2^32."""


class TensorRounding(NamedTuple):
    """What the random bits of one tensor's state are made of in one step."""

    key: Tensor
    """A hash of `ParameterRounding.seed` and the step, 0-d int32."""
    first: Tensor
    rises: tuple[int, ...]


def parameter_roundings(
    parameters: Sequence[Tensor], names: Sequence[str], seed: int
) -> dict[Tensor, ParameterRounding]:
    """Return what the random bits of each parameter are made of."""
    result = {}
    for parameter, name in zip(parameters, names, strict=True):
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "little", signed=True)
        device = local_part(parameter).device
        shape, rises = _memory_dims(parameter)
        result[parameter] = ParameterRounding(
            seed=torch.tensor(number, dtype=torch.int32, device=device),
            # On the device: kernels for GPUs take an integer of the CPU as one of 64 bits.
            first=torch.tensor(_first_number(parameter), dtype=torch.int32, device=device),
            shape=shape,
            rises=rises,
        )
    return result


def tensor_roundings(
    roundings: Mapping[Tensor, ParameterRounding],
    parameters: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> list[TensorRounding | None]:
    """Return the rounding of each of `parameters` after so many `steps`; None where there is none.

    Nothing waits for the device.
    """
    each = [roundings[parameter] for parameter in parameters if parameter in roundings]
    if not each:
        return [None] * len(parameters)
    seeds, counts = torch.stack([one.seed for one in each]), torch.stack(list(steps)).int()
    keys = hashed(seeds + counts).unbind()
    return [TensorRounding(key, one.first, one.rises) for key, one in zip(keys, each, strict=True)]


def random_bits(
    rounding: TensorRounding | None, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return 16 random bits for each element of a tensor, for its momentum and its last gradient.

    They are int32 numbers of at least 0 and below 2^16, of the shape of `like`: that is
    `ParameterRounding.shape`. Both are None where there is no stochastic rounding.
    """
    if rounding is None:
        return None, None
    numbers = torch.zeros((), dtype=torch.int32, device=like.device)
    for size, rise in zip(like.shape, rounding.rises):
        along = torch.arange(size, dtype=torch.int32, device=like.device)
        numbers = numbers[..., None] + along * rise
    bits = hashed((numbers + rounding.first) ^ rounding.key)
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def stochastically_rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return `values` rounded to numbers that bfloat16 has, up or down by chance, in float32.

    `bits` are those of `random_bits`. bfloat16 is the upper half of a float32. So the lower half is
    the distance to the next bfloat16 towards zero, and adding 16 random bits carries into the upper
    half with the right probability. Numbers that bfloat16 has stay as they are. So do those beyond
    its largest, infinities and NaN: casting them to bfloat16 rounds to nearest.
    """
    values = values.float()
    pattern = values.view(torch.int32)
    rounded = ((pattern + bits) & ~0xFFFF).view(torch.float32)
    below_largest = (pattern & 0x7FFFFFFF) < 0x7F7F0000  # without the sign they compare as numbers
    return torch.where(below_largest, rounded, values)


def hashed(numbers: Tensor) -> Tensor:
    """Return a hash of each of the int32 `numbers`, int32: lowbias32, by Chris Wellons (2018).

    Its source is https://github.com/skeeto/hash-prospector, in the public domain. A bit of the
    input that flips lets each bit of the result flip half of the time. Products of int32 wrap
    around in torch. A shift to the right repeats the sign bit, hence the masks.
    """
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * 0x7FEB352D
    numbers = numbers ^ ((numbers >> 15) & 0x1FFFF)
    numbers = numbers * _int32(0x846CA68B)
    return numbers ^ ((numbers >> 16) & 0xFFFF)


def _int32(number: int) -> int:
    """Return `number` modulo 2^32 in the range of int32."""
    return (number + 2**31) % 2**32 - 2**31


def _rises(shape: Sequence[int]) -> list[int]:
    """Return by how much the number of an element rises along each dim of the whole tensor."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _first_number(parameter: Tensor) -> int:
    """Return the number of this rank's first element in the whole tensor, modulo 2^32."""
    starts = [start for start, _ in local_intervals(parameter)]
    return _int32(sum(start * rise for start, rise in zip(starts, _rises(parameter.shape))))


def _memory_dims(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `ParameterRounding.shape` and `ParameterRounding.rises`."""
    local, rises = local_part(parameter), _rises(parameter.shape)
    dims: list[tuple[int, int]] = []
    for dim in sorted(range(local.ndim), key=local.stride, reverse=True):
        size, rise = local.shape[dim], rises[dim]
        if size == 1:
            continue
        if dims and dims[-1][1] == size * rise:
            dims[-1] = dims[-1][0] * size, rise
        else:
            dims.append((size, rise))
    dims = dims or [(local.numel(), 1)]
    return tuple(size for size, _ in dims), tuple(_int32(rise) for _, rise in dims)
