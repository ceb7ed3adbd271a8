"""Faults that others have had where parallelisms compose, put into ranks by replacing a function.

Each takes a `MonkeyPatch`. One whose function is gone fails.
"""

import torch
import torch.distributed as dist

from torchmars.models import initialize
from torchmars.models.attention import Sight
from torchmars.optim.meshes import ModelSums
from torchmars.parallel import balance, experts, loss, part, pipeline, tensor
from torchmars.parallel.layout import Layout


def z_loss_of_own_rows(patch):
    def factor(chunk, z_loss):
        return chunk.part * (1 + 2 * z_loss * (chunk.largest + chunk.total.log()))

    patch.setattr(loss._Chunk, "_factor", factor)


def last_chunk_only(patch):
    add = loss._Sum.add_product

    def replace(self, left, right, last):
        self.value = None
        add(self, left, right, True)

    patch.setattr(loss._Sum, "add_product", replace)


def part_of_the_loss(patch):
    """The mean of a rank's part of a sequence is divided by the ranks that have one."""
    mean = loss.mean_loss
    patch.setattr(part, "mean_loss", lambda *args, **named: mean(*args, **named) / 2)


def sum_of_microbatches(patch):
    patch.setattr(pipeline.Pipeline, "_loss", lambda self, loss, _: loss)


def loss_of_all_ranks(patch):
    """What is reported is divided by the ranks of a pipeline too."""
    patch.setattr(Layout, "loss_parts", property(lambda layout: layout.group("loss").size))


def norm_of_one_stage(patch):
    patch.setattr(Layout, "norm_group", property(lambda layout: None))


def norm_of_own_shards(patch):
    def sum_(self, numbers):
        self._shards = []
        return own(self, numbers)

    own = ModelSums.sum_
    patch.setattr(ModelSums, "sum_", sum_)


def norm_of_all_copies(patch):
    def sum_(self, numbers):
        dist.all_reduce(numbers)
        return numbers.sum(0)[0]

    patch.setattr(ModelSums, "sum_", sum_)


def tied_gradient_dropped(patch):
    def drop(self):
        if self.copy is not None:
            self.copy.grad = None

    patch.setattr(part.TiedTable, "add_gradients", drop)


def experts_times_ep(patch):
    own = experts.own_experts
    patch.setattr(experts, "own_experts", lambda stack, scale: own(stack, 1.0))


def no_sum_at_whole_weights(patch):
    patch.setattr(tensor, "part_of_sum", tensor.own_rows)


def latents_of_own_heads(patch):
    def gathered(*parts, mesh):
        whole = tensor.gathered(torch.cat(parts, dim=-1), mesh).to_local()
        return whole.split([each.shape[-1] for each in parts], dim=-1)

    patch.setattr(tensor, "gathered_as_one", gathered)


def balance_of_every_part(patch):
    own = balance.Balance._set_losses
    patch.setattr(
        balance.Balance, "_set_losses", lambda self, counts, parts: own(self, counts, parts=1)
    )


def counts_of_recomputation(patch):
    own = balance.Balance._count

    def count(self, begins, *args):
        if begins:
            own(self, begins, *args)

    patch.setattr(balance.Balance, "_count", count)


def last_bias_stays(patch):
    own = balance.Balance.finish

    def finish(self, applied):
        layers = [*self.layers.values()][-1:]
        kept = [layer.router.bias.clone() for layer in layers]
        own(self, applied)
        for layer, bias in zip(layers, kept):
            layer.router.bias.copy_(bias)

    patch.setattr(balance.Balance, "finish", finish)


def shares_of_another_step(patch):
    """Both gradients of a batch take the counts known when each is made."""
    own = balance.Balance.around

    def around(self, microbatches, ahead):
        self.exact = False
        return own(self, microbatches, ahead)

    patch.setattr(balance.Balance, "around", around)


def windows_dropped(patch):
    patch.setattr(Sight, "within", classmethod(lambda cls, window, sight, x, dropout: sight))


def positions_of_the_sequence(patch):
    patch.setattr(
        part,
        "document_positions",
        lambda starts, length: torch.arange(length).expand(len(starts), -1),
    )


def initial_weights_alike(patch):
    """Each rank draws its part as if it were the first."""
    own = initialize.local_intervals

    def first(parameter):
        return [(0, end - begin) for begin, end in own(parameter)]

    patch.setattr(initialize, "local_intervals", first)
