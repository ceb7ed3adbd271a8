"""The truth of a run: the family's own module, on one process, in float64.

It knows no `torchmars.parallel`: losses, clip and QK-clip are written here once more. What a family
computes is compared with transformers in tests/models, and what a rule does in tests/optim.
"""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from torchmars.models import attention, build_run_model
from torchmars.models.base import factors_of
from torchmars.models.initialize import init_weights
from torchmars.training.optimizer import Schedule, build_optimizer


class OneLoss:
    """A run's model and optimizer on one process. It is told the weights before each pass.

    `end` begins a document where documents are apart. In float32 it is what one rank is at best.
    """

    def __init__(self, config, vocab_size, end, dtype=torch.float64):
        self.training, self.dtype = config.training, dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.end = end if config.data.separate_documents else None
        meta = build_run_model(config, vocab_size)
        self.model, factors = meta.to_empty(device="cpu"), factors_of(meta, config.transfer)
        init_weights(self.model, config.run.seed, None, factors and factors.std)
        self.initial = {name: each.detach().clone() for name, each in self.tensors().items()}
        self.model.to(dtype).eval()
        free = replace(config.training, max_grad_norm=0.0)  # gradients are clipped here
        config = replace(config, training=free)
        self.optimizer = build_optimizer(config, self.model)
        self.schedule, self.routed = Schedule(config, self.optimizer), self.model.routed()
        for number, mixture in self.routed.items():
            mixture.router.register_forward_hook(partial(self.note_choice, number))
        experts = {number: len(each.router.weight) for number, each in self.routed.items()}
        self.counts = {number: torch.zeros(size, dtype=dtype) for number, size in experts.items()}
        self.before, self.found, self.router_losses = self.counts, {}, []
        self.made = 0

    def tensors(self):
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def take(self, tensors):
        with torch.no_grad():
            for name, value in self.tensors().items():
                value.copy_(tensors[name])

    @contextlib.contextmanager
    def exactly(self):
        """Let what the model computes in float32 be as exact as the rest; note largest logits."""
        with pytest.MonkeyPatch.context() as patch:
            if self.dtype == torch.float64:
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            mix, of_block = attention.mix_by_torch, iter(self.model.blocks)

            def noted(q, k, v, mask, dropout, scale):
                self.note_logits(next(of_block), q.detach(), k.detach(), mask, scale)
                return mix(q, k, v, mask, dropout, scale)

            patch.setattr(attention, "mix_by_torch", noted)
            yield

    def pieces(self, windows):
        """What is computed alone of windows [batch, T + 1], all or a document, and its place."""
        if self.end is None:
            yield slice(None), slice(None), windows
            return
        for row, window in enumerate(windows):
            begins = [0, *(n for n in range(1, len(window)) if window[n] == self.end)]
            for begin, end in zip(begins, [*begins[1:], len(window) - 1]):
                if begin < end:
                    yield row, slice(begin, end), window[None, begin : end + 1]

    def backward(self, windows, ahead=False, exact=False):
        """Return the mean loss of windows, and the gradients with all that is added to the loss."""
        self.optimizer.zero_grad()
        own, targets = self.training, windows[:, 1:].numel()
        self.found = {number: torch.zeros_like(each) for number, each in self.counts.items()}
        self.nearest, self.largest = float("inf"), {}
        self.shares = self.before if exact and not ahead else self.counts
        total = 0.0
        for *_, piece in self.pieces(windows):
            self.router_losses = []
            with self.exactly():
                logits = self.model.head(self.model(piece[:, :-1])).to(self.wide)
            loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum")
            added = own.z_loss * logits.logsumexp(-1).square().sum() + sum(self.router_losses)
            ((loss + added) / targets).backward()
            total += loss.item() / targets
        gradients = {name: each.grad for name, each in self.model.named_parameters()}
        return total, {name: each.clone() for name, each in gradients.items()}

    def note_choice(self, number, router, args, output):
        """Count a router's choices, and add the losses of its tokens."""
        logits, own = F.linear(args[0].to(self.wide), router.weight.to(self.wide)), self.training
        scores = logits.softmax(-1) if router.bias is None else logits.sigmoid()
        chosen = output[1].flatten().bincount(minlength=scores.shape[1])
        self.found[number] = self.found.get(number, 0) + chosen
        last = self.shares[number] / self.shares[number].sum().clamp(min=1)
        likely = (scores / scores.sum(-1, keepdim=True)).sum(0)
        self.router_losses.append(own.balance_loss * len(last) * (last * likely).sum())
        self.router_losses.append(own.router_z_loss * logits.logsumexp(-1).square().sum())
        ranked = (scores if router.bias is None else scores + router.bias).sort(descending=True)[0]
        used = output[1].shape[1] if output[1].ndim > 1 else 1
        gap = (ranked[:, used - 1] - ranked[:, used]).min().item()
        self.nearest = min(self.nearest, gap)

    def note_logits(self, number, q, k, mask, scale):
        """Note the largest logit of each head of a block."""
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
        logits = logits * (q.shape[3] ** -0.5 if scale is None else scale)
        if mask is None:
            mask = torch.ones(logits.shape[2:], dtype=torch.bool).tril()
        seen = mask if mask.dtype == torch.bool else mask == 0
        largest = logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3))
        self.largest[number] = torch.maximum(self.largest.get(number, largest), largest)

    def clip(self):
        """Clip the gradients' norm; return it as it was."""
        weights = [*self.model.parameters()]
        norm = torch.stack([each.grad.norm() for each in weights]).norm()
        if limit := self.training.max_grad_norm:
            for each in weights:
                each.grad *= min(1.0, limit / (norm + 1e-6))
        return norm.item()

    @torch.no_grad()
    def step(self):
        """Make a step of clipped gradients, scale heads down, and move routers' biases."""
        self.made += 1
        self.schedule.apply(self.made)
        self.optimizer.step()
        if limit := self.training.qk_clip:
            for block, largest in self.largest.items():
                gammas = [min(1.0, limit / each.item()) for each in largest.clamp(min=1e-30)]
                weights = dict(self.model.blocks[block].attn.named_parameters())
                scale_heads(weights, self.model.args, gammas)
        self.before, self.counts = self.counts, self.found
        for number, mixture in self.routed.items():
            if mixture.router.bias is not None:
                found = self.found[number].double()
                move = (found.mean() - found).sign() * self.training.balance_rate
                mixture.router.bias += move - move.mean()

    @torch.no_grad()
    def losses(self, windows):
        """Return the loss of each target of windows."""
        self.found, found = {}, torch.empty(windows[:, 1:].shape, dtype=self.wide)
        for row, places, piece in self.pieces(windows):
            with self.exactly():
                logits = self.model.head(self.model(piece[:, :-1])).to(self.wide)
            each = F.cross_entropy(logits.mT, piece[:, 1:], reduction="none")
            found[row, places] = each if self.end is None else each[0]
        return found

    @torch.no_grad()
    def next_logits(self, tokens):
        """Return the logits after tokens [batch, length], of which the last is no target."""
        self.found, rows = {}, []
        for row in tokens:
            ends = [] if self.end is None else (row == self.end).nonzero().flatten().tolist()
            with self.exactly():
                rows.append(self.model.head(self.model(row[None, max([0, *ends]) :])[:, -1])[0])
        return torch.stack(rows)


def scale_heads(weights, args, gammas):
    """Multiply each head's logits by its gamma: the rows of its queries, and of its keys.

    `weights` are those of one attention by name. Heads that share keys leave these what the largest
    of them needs. A latent model's key with positions is every head's, and stays.
    """
    heads, width = len(gammas), getattr(args, "head_width", args.n_embd // args.n_head)
    if "kv_b.weight" in weights:
        q, kv = weights.get("q_b.weight", weights.get("q.weight")), weights["kv_b.weight"]
        own, of_kv = args.qk_nope_head_dim, args.qk_nope_head_dim + args.v_head_dim
        for head, gamma in enumerate(gammas):
            q[head * width : head * width + own] *= gamma**0.5
            q[head * width + own : (head + 1) * width] *= gamma
            kv[head * of_kv : head * of_kv + own] *= gamma**0.5
        return
    groups = getattr(args, "n_kv_head", heads)
    for kind in ("weight", "bias"):
        if f"qkv.{kind}" in weights:
            q, k, _ = weights[f"qkv.{kind}"].chunk(3)
        elif f"q.{kind}" in weights:
            q, k = weights[f"q.{kind}"], weights[f"k.{kind}"]
        else:
            continue
        for group in range(groups):
            members = range(group * heads // groups, (group + 1) * heads // groups)
            kappa = min(gammas[head] for head in members) ** 0.5
            k[group * width : (group + 1) * width] *= kappa
            for head in members:
                q[head * width : (head + 1) * width] *= gammas[head] / kappa
