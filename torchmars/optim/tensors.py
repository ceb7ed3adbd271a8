"""A tensor as one rank's loops see it: local, flat, and laid out in memory like its parameter."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from torchmars.optim.matrices.shapes import Interval, intervals

# All that the state of a parameter has in common with it: shape, stride, dtype, device, and where
# its shards lie.
Layout = tuple[
    torch.Size,
    tuple[int, ...],
    torch.dtype,
    torch.device,
    DeviceMesh | None,
    tuple[Placement, ...],
]
# The parameters of each group, and their layouts.
Known = list[dict[Tensor, Layout]]

_PLAIN = (Tensor, Parameter)
_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without gradient tracking.

    A tensor that only wraps another, such as a weight that FSDP is to gather in another dtype, has
    no memory of its own: the result is the one inside. Raises `TypeError` if that has not the same
    values, as in a quantised weight.
    """
    return innermost(tensor).detach()


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor that has the values of this rank's part: `local_part` without `detach`."""
    if type(tensor) in _PLAIN:  # nearly all of them: a step asks for each
        return tensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) in _PLAIN or not hasattr(local, "__tensor_flatten__"):
        return local
    # The protocol of torch's wrappers: first the attributes that hold tensors.
    (name, *_), _ = local.__tensor_flatten__()
    inner = getattr(local, name)
    if (inner.shape, inner.dtype) != (local.shape, local.dtype):
        raise TypeError(
            f"a {type(local).__name__} of {local.dtype} has its values in a tensor of {inner.dtype}"
        )
    return innermost(inner)


def unwrapped(tensor: Tensor) -> Tensor:
    """Return a tensor, or DTensor, that shares memory with `tensor`, in no wrapper.

    Without gradient tracking.
    """
    if not isinstance(tensor, DTensor):
        return local_part(tensor)
    return DTensor.from_local(
        local_part(tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_intervals(tensor: Tensor) -> tuple[Interval, ...]:
    """Return which part of the whole tensor this rank has: an interval for each dim."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a rank has parts of tensors of its own meshes only
    return intervals(tensor.shape, mesh.shape, tensor.placements, coordinate)


def flat_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each dense tensor as one dim, in the order of its memory."""
    local = map(innermost, tensors)
    return flat_slices((each, 0, each.numel()) for each in local)


def flat_slices(slices: Iterable[tuple[Tensor, int, int]]) -> list[Tensor]:
    """Return elements of dense tensors in the order of their memory, as one dim that shares it.

    Each slice is a tensor, its first element, and how many elements there are.

    Autograd is not told that the results are views: torch.compile would make kernels for every
    shape that a view comes from, and takes longer to check views. They are also made faster so.
    """
    # Private, torch 2.11 to 2.15.
    with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
        return [
            tensor.as_strided((count,), (1,), tensor.storage_offset() + first)
            for tensor, first, count in slices
        ]


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, laid out in memory like its part of the parameter.

    Kernels need both alike. Raises `ValueError` for a sparse gradient.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise ValueError("params must have dense gradients, got a sparse one")
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        gradient = gradient.redistribute(placements=parameter.placements)
    local, like = innermost(gradient), innermost(parameter)
    return local if local.stride() == like.stride() else torch.empty_like(like).copy_(local)


def layout_of(parameter: Tensor) -> Layout:
    """Return the layout of `parameter`: a step asks for it of each."""
    layout = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    if isinstance(parameter, DTensor):
        return *layout, parameter.device_mesh, tuple(parameter.placements)
    return *layout, None, ()


def unchanged(groups: Sequence[dict[str, Any]], known: Known) -> bool:
    """Return whether the groups have the parameters of `known`, in their order, as they lay."""
    now = [{each: layout_of(each) for each in group["params"]} for group in groups]
    return known == now and all([*map(id, a)] == [*map(id, b)] for a, b in zip(known, now))
