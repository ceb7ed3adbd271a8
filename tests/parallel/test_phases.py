"""What a model tells of its backward pass while it makes it, and batches that are prefetched."""

import dataclasses

import torch

from tests.models.test_gpt2 import ARGS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchmars.models.documents import document_starts
from torchmars.models.gpt2 import GPT2
from torchmars.parallel import cuts
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

LAYOUTS = {"fsdp": ParallelismConfig(), "replicas": ParallelismConfig(dp_replicate=2)}
LAYOUTS["pipeline"] = ParallelismConfig(pp=2)


def phases_on(parallelism):
    """The phases of a backward pass of two microbatches, with the gradients that then are."""
    cuts.ONE_UNIT_BYTES = 0
    prefetched = False

    def find_starts(tokens):
        assert not prefetched, "a batch was made ready twice"
        return document_starts(tokens, 7)

    layout = Layout.create(torch.device("cpu"), parallelism.degrees(2))
    with torch.device("meta"):
        whole = GPT2(dataclasses.replace(ARGS, n_layer=2))
    training = TrainingConfig(
        dtype="float32", seq_len=24, global_batch_size=4 * layout.data.size, microbatch_size=2
    )
    model = ParallelModel(
        whole,
        parallelism,
        training,
        ActivationCheckpointConfig(),
        layout,
        layout.device,
        find_starts=find_starts,
    )
    model.init_weights(seed=0)
    phases = []

    def enter(phase):
        missing = [name for name, weight in model.weights.items() if weight.grad is None]
        phases.append((phase, missing))

    batch = [torch.randint(64, (2, 25)) for _ in range(2)]
    model.backward(batch, enter)
    gradients = gradients_of(model)
    found = list(phases)
    for weight in model.weights.values():
        weight.grad = None
    model.batches.prefetch(batch)
    prefetched = True
    model.backward(batch)
    same = all(map(torch.equal, gradients, gradients_of(model)))
    return found, list(model.weights), same


def gradients_of(model):
    return [weight.grad.to_local() for weight in model.weights.values()]


def phases_on_each():
    return {name: phases_on(parallelism) for name, parallelism in LAYOUTS.items()}


def test_a_backward_pass_tells_of_its_phases_and_takes_a_prefetched_batch():
    for found in run_ranks(phases_on_each, 2):
        of_microbatch = ["forward", "backward", "reduce"]
        for name in ("fsdp", "replicas"):
            phases, _, _ = found[name]
            assert [phase for phase, _ in phases] == ["forward", *of_microbatch, *of_microbatch]
        phases, weights, _ = found["fsdp"]
        missing = phases[3][1]  # the blocks have their gradients, the rest not yet
        assert "tok_embed.weight" in missing and len(missing) < len(weights)
        assert not phases[4][1]
        phases, _, _ = found["pipeline"]
        # Then the two copies of the tied table exchange their gradients.
        assert [phase for phase, _ in phases] == ["pipeline", "reduce"]
        assert all(same for _, _, same in found.values()), "a prefetched batch has other gradients"
