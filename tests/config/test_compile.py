"""Whether a run compiles its blocks, where its config does not say."""

import dataclasses

import pytest
import torch

from tests.support.tiny import tiny_config
from torchmars.config.ranks import eager_note, resolve_compile

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    "named,device,able,saved,expected",
    [
        (None, CUDA, True, None, True),
        (None, CPU, True, None, False),
        (None, CUDA, False, None, False),
        (False, CUDA, True, None, False),
        (True, CPU, True, None, True),
        (None, CUDA, True, False, False),  # begun without
        (None, CPU, True, True, True),  # begun on GPUs
        (False, CUDA, True, True, False),
    ],
)
def test_what_is_not_named_is_as_it_began_or_as_it_pays(
    tmp_path, named, device, able, saved, expected
):
    config = tiny_config(tmp_path, training={} if named is None else {"compile": named})
    began = None if saved is None else {"training": {"compile": saved}}
    resolved = resolve_compile(config, device, able, 1, began)
    assert resolved.training.compile is expected
    assert resolve_compile(resolved, device, able, 1, None) == resolved
    changed = dataclasses.replace(resolved.training, compile=named)
    assert dataclasses.replace(resolved, training=changed) == config


def test_a_run_that_cannot_compile_does_not_and_says_why(tmp_path):
    config = tiny_config(tmp_path, activation_checkpoint={"mode": "full"})
    config = resolve_compile(config, CUDA, True, 2, None)
    assert config.training.compile is False
    note = eager_note(config, CUDA, True, 2)
    assert note.startswith("blocks are not compiled: ") and 'choose "selective"' in note
    assert "C compiler" in eager_note(config, CUDA, False, 2)
    assert eager_note(config, CPU, True, 2) is None
