"""What the held-out loss is made of, and what a validation asks of the device."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from torchmars.training.validation import Validation

# Windows of two parts, of 3 tokens each; the loss of a token is its number.
WINDOWS = {(0, n): torch.tensor([9, n, n + 1]) for n in range(4)}
WINDOWS |= {(1, n): torch.tensor([9, 10 * n, 10 * n + 1]) for n in range(3)}


class Windows(dict):
    lengths = (4, 3)


def validation_of(batch_size):
    data = Mock(parts=[None, None], names=["a", "b"], weights=[0.5, 0.5])
    data.bits_per_byte = lambda split, loss, shares: (split, shares)
    layout = Mock(device=torch.device("cpu"), data=SimpleNamespace(rank=0, size=1), loss_parts=2)
    layout.on_all = lambda work: work()
    layout.add_up_losses = Mock(side_effect=lambda values: 2 * values)  # of two ranks alike
    model = Mock(layout=layout)
    model.losses = lambda tokens: tokens[:, 1:].float()
    return Validation(Mock(windows=6), model, data, Windows(WINDOWS), batch_size, Mock())


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_losses_of_parts_are_added_up_at_once(batch_size):
    validation = validation_of(batch_size)
    loss, (split, targets), of_parts = validation.losses()
    # The windows 0, 1 and 2 of both parts.
    a, b = [0, 1, 1, 2, 2, 3], [0, 1, 10, 11, 20, 21]
    assert of_parts == {"a": sum(a) / 6, "b": sum(b) / 6}
    assert loss == sum(a + b) / 12 and split == "validation" and targets == [6, 6]
    [call] = validation.layout.add_up_losses.call_args_list
    assert call.args[0].shape == (2, 2)  # whatever the number of batches and of parts
