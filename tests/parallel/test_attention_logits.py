"""The largest logits of attention by block and head: on every layout those of one plain model."""

import dataclasses
from functools import cache

import pytest
import torch

from tests.models.test_gpt2 import ARGS
from tests.support import gradients
from tests.support.full import FULL
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.config.model_args import Multipliers
from torchmars.models.attention import CausalAttention
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama
from torchmars.optim.tensors import local_intervals, local_part

NAME = "attention/largest_logit"
PLAIN = dataclasses.replace(gradients.WIDE, qk_norm=False, qkv_bias=True)
gradients.MODELS["llama without norms"] = lambda: Llama(PLAIN)
WINDOWED = dataclasses.replace(PLAIN, window=5, window_blocks="sf")
gradients.MODELS["llama of windows"] = lambda: Llama(WINDOWED)
SCALED = {"multipliers": Multipliers(attention=0.5), "scale_attn_by_inverse_layer_idx": True}
OF_BASE = dataclasses.replace(ARGS, n_layer=4, bias=True, **SCALED)
gradients.MODELS["gpt2 of a base"] = lambda: GPT2(OF_BASE)


def enlarge(weights):
    """Let logits be large, and heads unlike: biases are not 0, and rows of many sizes."""
    with torch.no_grad():
        for name, weight in weights:
            if ".attn." in name and "norm" not in name and "proj" not in name:
                rows = torch.linspace(0.5, 2, weight.shape[0])[slice(*local_intervals(weight)[0])]
                if weight.ndim == 1:
                    local_part(weight).copy_(rows.sin())
                else:
                    local_part(weight).mul_(6 * rows[:, None])


@cache
def plain_logits(name, apart=False):
    """Those of one plain model [blocks, heads], which gets one document after the other.

    All logits of a sequence are made at once, in float64.
    """
    model, mix = gradients.MODELS[name](), CausalAttention.mix
    init_weights(model, seed=0)
    enlarge(model.named_parameters())
    gradients.set_buffers(model.buffers())
    found, of_pass = [], []

    def noted(self, q, k, v, sight, dropout):
        scale = q.shape[3] ** -0.5 if self.scale is None else self.scale
        of_group = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        every = q.double() @ of_group.mT * scale
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        window = (sight and sight.window) or q.shape[2]
        unseen = (distance < 0) | (distance >= window)
        of_pass.append(every.masked_fill(unseen, -torch.inf).amax((0, 2, 3)))
        return mix(self, q, k, v, sight, dropout)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(CausalAttention, "mix", noted)
        for windows in gradients.documents(gradients.WINDOWS) if apart else [gradients.WINDOWS]:
            of_pass.clear()
            model(windows[:, :-1])
            found.append(torch.stack(of_pass))
    return torch.stack(found).amax(0)


def found_on(layout, name, mode="none", apart=False, compile=False):
    """What a rank has after a step, before and after a validation: by block and head, and figures.

    And its losses, with and without the logits being watched.
    """
    ranks, parallelism = LAYOUTS[layout][0], ParallelismConfig(**LAYOUTS[layout][1])
    training = gradients.training_on(ranks, compile)
    of_model = name, parallelism, training, ActivationCheckpointConfig(mode), apart
    _, model, batch = gradients.model_on(*of_model)
    enlarge(model.weights.items())
    logits, losses = model.attention_logits, [model.backward(batch)]
    assert logits.figures() == {}
    logits.measures = True
    losses.append(model.backward(batch))
    found = dict(zip(logits.blocks, logits.result().clone(), strict=True))
    model.losses(gradients.WINDOWS)
    return found, logits.figures(), losses


def all_found(cases):
    return [found_on(*case) for case in cases]


def check(case, results):
    expected = plain_logits(case[1], apart=case[3] if len(case) > 3 else False)
    assert expected.amin() > 0.01 and expected.unique().numel() == expected.numel()
    by_block = {f"{NAME}/{block}": row.amax().item() for block, row in enumerate(expected)}
    for found, figures, losses in results:
        for block, row in found.items():
            torch.testing.assert_close(row.double(), expected[int(block)], rtol=1e-6, atol=0)
        assert figures == pytest.approx(by_block | {NAME: expected.amax().item()}, rel=1e-6), case
        assert torch.equal(*losses), case
    assert {name for found, _, _ in results for name in found} == {*map(str, range(len(expected)))}


LLAMA, LATENT = "llama without norms", "deepseek without latents of queries"
CASES = [
    ("TP 2", "gpt2", "selective"),
    ("CP 2 Ulysses", LLAMA, "full", True),
    ("PP 2", "llama of windows", "none"),
]
OTHERS = [
    ("TP 2", "deepseek", "selective", True),
    ("CP 2 Ulysses", LATENT, "full"),
    ("CP 2", "llama of windows", "none", True),
    ("FSDP 2", "gpt2 of a base", "full"),
    ("TP 2", LLAMA, "full", True),
    ("CP 2", "gpt2", "none", True),
    ("CP 2", "llama", "selective"),
    ("PP 2 Interleaved1F1B", "gpt2", "full", True),
    ("PP 2 GPipe", "gpt2", "none"),
]
MORE = [
    ("TP 2 x CP 2", "gpt2 of a base", "selective"),
    ("TP 2 x CP 2 Ulysses", LLAMA, "none", True),
    ("HSDP 2x2", "moe", "full"),
    ("TP 2 x CP 2 Ulysses", LATENT, "none", True),
    ("PP 2 x TP 2", LLAMA, "none", True),
]


@pytest.mark.parametrize(
    "ranks,cases",
    [(2, CASES), pytest.param(2, OTHERS, marks=FULL), pytest.param(4, MORE, marks=FULL)],
    ids=["some", "others", "more"],
)
def test_they_are_those_of_one_plain_model_and_losses_keep_their_bits(ranks, cases):
    for case, results in zip(cases, zip(*run_ranks(all_found, ranks, cases)), strict=True):
        check(case, results)


def compiled_found_on(*case):
    """As `found_on`, with blocks that are traced and cut in two, but not made into code."""
    compile_block = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block: compile_block(block, backend="aot_eager")
    return found_on(*case, compile=True)


@FULL
@pytest.mark.parametrize("mode", ["full", "none"])
def test_compiled_blocks_say_the_same(mode):
    for name in ("gpt2", LLAMA):
        check((None, name), run_ranks(compiled_found_on, 1, "1 rank", name, mode))


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
