"""Experts over ranks: gradients beside every other technique, rows that travel, what is refused."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from tests.models.test_llama import ARGS, model_of
from tests.models.test_moe import EXPERTS
from tests.support import gradients
from tests.support.full import FULL
from tests.support.layouts import LAYOUTS_WITH_EXPERTS
from tests.support.ranks import run_ranks
from tests.support.traffic import TrafficCounter
from torchmars.config import ActivationCheckpointConfig, Degrees, ParallelismConfig, TrainingConfig
from torchmars.core.errors import UserError
from torchmars.parallel import fsdp
from torchmars.parallel.checks import check_experts
from torchmars.parallel.cuts import ONE_UNIT_BYTES
from torchmars.parallel.experts import Dispatch
from torchmars.parallel.fsdp import stack_placement

# A layout, further settings of it, and activation checkpointing. Blocks are compiled.
CASES = [
    ("TP 2, EP 2", {}, "selective"),
    ("EP 2", {"reshard_after_forward": "always"}, "full"),
    ("EP 2", {"reshard_after_forward": "never"}, "none"),
]
ON_FOUR = [("FSDP 4, EP 2", {"accumulate": "whole"}, "none")]


def gradients_of_cases(cases, apart):
    """The results of `compiled_gradients_on` for each of `cases`, in one process group."""
    world = torch.distributed.get_world_size()
    results = []
    for layout, settings, mode in cases:
        parallelism = ParallelismConfig(**LAYOUTS_WITH_EXPERTS[layout][1] | settings)
        training = gradients.training_on(world, compile=True)
        checkpointing = ActivationCheckpointConfig(mode)
        case = "moe", parallelism, training, checkpointing, apart
        results.append(gradients.compiled_gradients_on(*case))
    return results


@FULL
@pytest.mark.parametrize(
    "ranks,cases,apart",
    [(2, CASES, False), (4, ON_FOUR, False), (2, CASES[:1], True)],
    ids=["two", "four", "documents apart"],
)
def test_gradients_of_compiled_blocks_are_those_of_one_plain_model(ranks, cases, apart):
    expected = gradients.plain_gradients("moe", apart)
    for case, found in zip(cases, zip(*run_ranks(gradients_of_cases, ranks, cases, apart))):
        gradients.compare(found, case, expected)


def one_unit_gradients():
    parallelism = ParallelismConfig(ep=2)
    keep_all = ActivationCheckpointConfig()
    return gradients.gradients_on(
        "moe", parallelism, gradients.training_on(4), keep_all, one_unit_bytes=ONE_UNIT_BYTES
    )


def test_experts_of_a_model_that_is_one_unit_are_units():
    results = run_ranks(one_unit_gradients, 4)
    gradients.compare(results, "one unit", gradients.plain_gradients("moe"))


def gathered_ahead(parallelism):
    """What FSDP gathers ahead of each unit and of each one's experts, and gradients."""
    keep_all, ahead = ActivationCheckpointConfig(), {}
    with mock.patch.dict(fsdp.UNIT_BYTES, cpu=2**17):  # two blocks without their experts, not three
        layout, model, batch = gradients.model_on(
            "moe", parallelism, gradients.training_on(4), keep_all
        )
    blocks = model.parts[0].model.blocks
    named = {f"block {number}": block for number, block in blocks.items()}
    named |= {f"experts {number}": block.mlp.experts for number, block in blocks.items()}
    # Private, torch 2.11 to 2.15. The blocks of a unit have one state.
    states = {name: module._get_fsdp_state() for name, module in named.items()}
    for name, state in states.items():
        ahead[name] = [
            [next(each for each, its in states.items() if its is other) for other in others]
            for others in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        ]
    loss = model.backward(batch)
    return ahead, (layout.mean_loss(loss), gradients.gathered_gradients(model))


def test_experts_of_blocks_that_are_one_unit_are_gathered_ahead():
    results = run_ranks(gathered_ahead, 4, ParallelismConfig(ep=2))
    for ahead, _ in results:
        assert ahead == {
            "block 0": [["experts 0", "block 2"], []],
            "block 1": [["experts 0", "block 2"], []],
            "block 2": [["experts 2"], ["block 0", "experts 1"]],
            "block 3": [["experts 2"], ["block 0", "experts 1"]],
            "experts 0": [["experts 1"], []],
            "experts 1": [[], ["experts 0"]],
            "experts 2": [["experts 3"], []],
            "experts 3": [[], ["experts 2"]],
        }
    gradients.compare([found for _, found in results], "units", gradients.plain_gradients("moe"))


class Doubling(nn.Module):
    """Experts that multiply by their number among all, plus one: `first` is that of the first."""

    def __init__(self, first):
        super().__init__()
        self.first, self.asked = first, []

    def forward(self, rows, counts):
        self.asked.append(counts.tolist())
        numbers = torch.arange(len(counts)) + self.first + 1
        return rows * numbers.repeat_interleave(counts)[:, None]


def dispatched(all_counts, experts):
    """The outputs and gradients of rows that travel, and what this rank's experts were asked."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts = torch.tensor(all_counts[rank])
    rows = torch.arange(counts.sum() * 2.0).view(-1, 2) + 100 * rank
    rows.requires_grad_()
    own = Doubling(rank * experts // ranks)
    outputs = Dispatch(torch.distributed.group.WORLD)(own, rows, counts)
    (outputs * 3).sum().backward()
    return rows.detach(), outputs.detach(), rows.grad, own.asked


# Ranks without rows, experts without rows, and a rank whose experts get none.
@pytest.mark.parametrize(
    "all_counts", [[[1, 0, 2, 3], [0, 4, 0, 1]], [[0, 0, 0, 0], [2, 1, 0, 0]], [[0] * 4, [0] * 4]]
)
def test_rows_come_back_in_their_order_from_the_ranks_of_their_experts(all_counts):
    for rank, (rows, outputs, gradient, asked) in enumerate(
        run_ranks(dispatched, 2, all_counts, 4)
    ):
        factors = torch.arange(1.0, 5).repeat_interleave(torch.tensor(all_counts[rank]))[:, None]
        assert torch.equal(outputs, rows * factors)
        assert torch.equal(gradient, (3 * factors).expand_as(rows))
        total = torch.tensor(all_counts).sum(dim=0)
        assert asked == [total[rank * 2 : rank * 2 + 2].tolist()]


@pytest.mark.parametrize("shards,shape,dim", [(4, (8, 6, 4), None), (4, (6, 8, 4), 1)])
def test_stacks_are_cut_by_matrices_where_these_divide(shards, shape, dim):
    class Mesh:
        ndim = 1

        def size(self, axis):
            return shards

    placement = stack_placement(Mesh())(nn.Parameter(torch.empty(shape)))
    assert placement is None if dim is None else placement.dim == dim
    assert stack_placement(Mesh())(nn.Parameter(torch.empty(6, 8))) is None


@pytest.mark.parametrize(
    "degrees,options,message",
    [
        (
            Degrees(dp_shard=2, ep=2),
            {},
            "ep = 2 does not divide the 0 experts of",
        ),
        (Degrees(dp_shard=3, ep=3), EXPERTS, "ep = 3 does not divide the 8 experts"),
        (Degrees(), EXPERTS | {"n_expert_inner": 20}, "matrices of 20 x 64: .* multiples of 8"),
    ],
)
def test_what_ranks_cannot_share_is_refused(degrees, options, message):
    model = model_of(dataclasses.replace(ARGS, **options))
    with pytest.raises(UserError, match=message):
        check_experts(degrees, model)


def test_ranks_that_ep_does_not_divide_are_refused():
    with pytest.raises(UserError, match="ep = 4 does not divide the 6 ranks of .*dp_shard"):
        ParallelismConfig(dp_replicate=2, tp=2, ep=4).degrees(12)


TIMES = ("all-gather", "reduce-scatter", "all-to-all")


def exchanges(cases):
    """How often this rank takes part in each operation of a step of one microbatch, by its ranks.

    `cases` are settings of the layout, and activation checkpointing.
    """
    training = TrainingConfig(global_batch_size=8, seq_len=24, dtype="float32", microbatch_size=2)
    found = []
    for settings, mode in cases:
        counter, parallelism = TrafficCounter(), ParallelismConfig(ep=2, **settings)
        checkpointing = ActivationCheckpointConfig(mode)
        gradients.gradients_on("moe", parallelism, training, checkpointing, around=counter)
        times = {(kind.operation, len(kind.ranks)): n for kind, n in counter.times.items()}
        found.append([times.get((name, 2), 0) for name in TIMES])
    return found


@FULL
def test_experts_are_gathered_once_a_pass_and_rows_travel_twice():
    """In each of four blocks, on two pairs: experts, and rows with their numbers before."""
    kept = {"reshard_after_forward": "never"}
    cases = [({}, "none"), (kept, "none"), ({}, "selective"), ({}, "full")]
    for found in run_ranks(exchanges, 4, cases):
        numbers, there, back = 4, 2 * 4, 2 * 4
        assert found == [
            [8, 4, numbers + there + back],
            [4, 4, numbers + there + back],
            [8, 4, numbers + there + back],
            [8, 4, 2 * numbers + 2 * there + back],
        ]
