"""A model whose mixture of experts derives from none of the package, as a plugin may have one."""

import torch
import torch.nn.functional as F
from torch import nn

from torchmars.models.grouped import grouped_mm
from torchmars.models.llama import Llama
from torchmars.models.moe import as_it_is, at_home


class Chooser(nn.Module):
    """Gives each token the expert of its largest logit, weighted by a sigmoid of it."""

    bias = pressure = None
    z_loss = 0.0

    def __init__(self, width, experts):
        super().__init__()
        self.local, self.weight = as_it_is, nn.Parameter(torch.empty(experts, width))

    def forward(self, tokens):
        largest, chosen = (tokens @ self.local(self.weight).T).max(-1)
        return largest.sigmoid(), chosen


class Squares(nn.Module):
    """Experts of two layers with the square of a ReLU between."""

    def __init__(self, width, experts, inner):
        super().__init__()
        self.local = as_it_is
        self.widen = nn.Parameter(torch.empty(experts, inner, width))
        self.proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        inner = F.relu(grouped_mm(rows, self.local(self.widen), ends)).square()
        return grouped_mm(inner, self.local(self.proj), ends)


class OneOfMany(nn.Module):
    """Each token uses one expert. Rows go to it in the order of experts."""

    shared, counted = None, None

    def __init__(self, width, experts, inner):
        super().__init__()
        self.dispatch = at_home
        self.router, self.experts = Chooser(width, experts), Squares(width, experts, inner)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        counts = torch.bincount(chosen, minlength=len(self.router.weight))
        if self.counted is not None:
            self.counted.add_(counts)
        order = chosen.argsort(stable=True)
        outputs = self.dispatch(self.experts, tokens[order], counts)
        return (outputs[order.argsort()] * weights[:, None]).view_as(x)


class OwnMixtures(Llama):
    """A Llama whose blocks but the first have such experts."""

    def __init__(self, args):
        super().__init__(args)
        self.experts = 8
        for number in [*self.blocks][1:]:
            self.blocks[number].mlp = OneOfMany(args.n_embd, self.experts, args.n_inner)

    def routed(self):
        return {number: self.blocks[number].mlp for number in self.blocks if number != "0"}

    def used_parameters(self, name, parameter):
        return parameter.numel() // (self.experts if ".experts." in name else 1)
