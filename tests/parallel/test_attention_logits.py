"""The largest logits of attention, of compiled blocks and in exact mode.

Those of each layout are in test_composition.py.
"""

import pytest
import torch

from tests.support import gradients
from tests.support.full import FULL
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig


def found_on(mode, compile):
    """What one rank finds in a step, by block and head, and its loss, watched and not."""
    of_model = ParallelismConfig(), gradients.training_on(1, compile)
    _, model, batch = gradients.model_on("llama", *of_model, ActivationCheckpointConfig(mode))
    logits, losses = model.attention_logits, [model.backward(batch)]
    assert logits.figures() == {}
    logits.measures = True
    losses.append(model.backward(batch))
    return logits.result().clone(), losses


def compiled_and_not(mode):
    """`found_on` with blocks that are traced and cut in two, not made into code, and without."""
    compile_block = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block: compile_block(block, backend="aot_eager")
    return found_on(mode, True), found_on(mode, False)


@FULL
@pytest.mark.parametrize("mode", ["full", "none"])
def test_compiled_blocks_say_the_same_and_losses_keep_their_bits(mode):
    [((compiled, of_compiled), (plain, losses))] = run_ranks(compiled_and_not, 1, mode)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)
    assert plain.amin() > 0 and torch.equal(*losses) and torch.equal(*of_compiled)


def of_a_look_ahead():
    nothing = ParallelismConfig(), gradients.training_on(1), ActivationCheckpointConfig()
    _, model, batch = gradients.model_on("gpt2", *nothing)
    model.attention_logits.measures = True
    model.backward(batch, ahead=True)
    before = model.attention_logits.figures()
    model.backward(batch)
    return before, len(model.attention_logits.figures())


def test_a_look_ahead_is_not_watched():
    assert run_ranks(of_a_look_ahead, 1) == [({}, 5)]
