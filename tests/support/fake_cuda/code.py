"""`python -m tests.support.fake_cuda.code < COUNTS.json`: torch's code of the optimizer for GPUs.

For each count of tensors in a call it prints a line of JSON: for each kernel how often its code
starts something, and what it copies between devices.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Private, torch 2.11 to 2.15: the parts of torch.compile that need no GPU.
from torch._inductor import scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree, _triton

from tests.support.fake_cuda import device as fake_device
from torchmars.optim.kernels import inner_products, inner_products_of_stacks
from torchmars.optim.rules.adamw import MomentFactors, mars_adamw_
from torchmars.optim.rules.correction import Corrections
from torchmars.optim.update import mars_momentum_, step_along_

ELEMENTS = 768 * 3072  # of a tensor


def code_of(fake: FakeTensorMode, kernel: Callable[..., Any], tensors: Any, factors: Any) -> str:
    """Return the code that torch writes for a call of `kernel`."""
    given, form = _pytree.tree_flatten((tensors, factors))
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]

    def call(*values: Tensor) -> Any:
        everything = list(given)
        for place, value in zip(places, values):
            everything[place] = value
        return kernel(*_pytree.tree_unflatten(everything, form))

    inputs = [given[place] for place in places]
    with fake:
        functional = torch.func.functionalize(call, remove="mutations_and_views")
        traced = make_fx(functional, decomposition_table=select_decomp_table())(*inputs)
        graph = GraphLowering(
            traced, example_inputs=inputs, is_inference=True, shape_env=fake.shape_env
        )
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            written = graph.codegen()[0]
    return getattr(written, "value", written)


def codes(count: int) -> dict[str, str]:
    """Return the code of a call of each kernel on `count` tensors."""
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with fake:

        def tensors(width: int) -> list[tuple[Tensor, ...]]:
            return [
                tuple(torch.empty(ELEMENTS, device="cuda") for _ in range(width))
                for _ in range(count)
            ]

        scale, applied = torch.empty((), device="cuda"), torch.empty((), device="cuda").bool()
        each, flags = torch.empty(count, device="cuda"), torch.empty(count, device="cuda").bool()
        corrections = Corrections(scale, each, each.clone(), flags, applied, True)
        host = [torch.empty(()) for _ in range(5)]
        moments = MomentFactors(scale, applied, *host, each.clone(), each.clone(), cautious=False)
        of_stacks = corrections._replace(stacks=True)
        calls = [
            ("", inner_products, tensors(2), None),
            ("", inner_products_of_stacks, tensors(2), None),
            ("", mars_adamw_, tensors(5), (corrections, moments)),
            (" of stacks", mars_adamw_, tensors(5), (of_stacks, moments)),
            ("", mars_momentum_, tensors(3), (corrections, host[0])),
            (" of stacks", mars_momentum_, tensors(3), (of_stacks, host[0])),
            ("", step_along_, tensors(2), (each, scale, False)),
        ]
    return {kernel.__name__ + what: code_of(fake, kernel, *given) for what, kernel, *given in calls}


def main() -> None:
    """Print the counts of all that is asked for."""
    fake_device.pretend()
    with (
        mock.patch.object(_triton, "has_triton", lambda: True),
        mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"),
        mock.patch.object(scheduler, "has_triton", lambda: True),
    ):
        for count in json.load(sys.stdin):
            found = {
                name: {
                    "launches": len(re.findall(r"\.run\(", code)),
                    "copies": len(re.findall(r"\.(?:cpu|cuda|copy_)\(", code)),
                }
                for name, code in codes(count).items()
            }
            print(json.dumps(found), flush=True)
    os._exit(0)  # torch would end what it believes are GPUs


if __name__ == "__main__":
    main()
