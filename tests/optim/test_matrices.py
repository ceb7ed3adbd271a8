"""Matrices: batches, flattening and splits of parameters, and their orthogonalisation."""

import pytest
import torch
from torch import nn

from tests.optim import reference
from tests.optim.reference import gradients, orthogonalized
from tests.support.steps import BASE, meant, relative, run
from torchmars.config.deepseek import DeepseekArgs
from torchmars.config.gpt2 import GPT2Args
from torchmars.config.llama import LlamaArgs
from torchmars.models.deepseek import Deepseek
from torchmars.models.gpt2 import GPT2
from torchmars.models.initialize import init_weights
from torchmars.models.llama import Llama
from torchmars.optim import MARS, param_groups
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS

orthogonalize = ORTHOGONALIZERS["newton-schulz"]


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo", "muon"])
def test_batches_flattening_and_splits_are_separate_matrices(rule):
    """Experts, a convolution and a fused QKV weight equal the same matrices as own parameters."""
    whole = {
        "experts": torch.randn(3, 6, 4),
        "conv": torch.randn(6, 4, 3, 3),
        "qkv": torch.randn(12, 6),
        "uneven": torch.randn(10, 6),
    }
    sequences = {
        name: gradients(tuple(value.shape), 5, seed)
        for seed, (name, value) in enumerate(whole.items())
    }
    options = {
        "experts": {},
        "conv": {"flatten": True},
        "qkv": {"split": 3},
        "uneven": {"split": (6, 2, 2)},
    }
    cut = {
        "experts": lambda x: list(x),
        "conv": lambda x: [x.flatten(1)],
        "qkv": lambda x: list(x.chunk(3)),
        "uneven": lambda x: list(x.split((6, 2, 2))),
    }
    # Nothing reaches this clip. Without one a stack keeps other buffers than a matrix.
    settings = meant(rule, {"clip": 1e9}) | BASE | {"rule": rule, "matrix_dtype": torch.float32}
    for name, value in whole.items():
        together = nn.Parameter(value.clone())
        parts = [nn.Parameter(part.clone()) for part in cut[name](value)]
        run(
            MARS([{"params": [together], **options[name]}], **settings),
            [together],
            [sequences[name]],
        )
        run(MARS(parts, **settings), parts, list(zip(*(cut[name](g) for g in sequences[name]))))
        for one, other in zip(cut[name](together), parts):
            assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ["mars-m", "mars-shampoo", "muon"])
def test_parts_that_take_turns_and_parts_of_columns_are_separate_matrices(rule):
    """As Falcon's heads, GPT-2's Conv1D, and experts of gpt-oss. In float64."""
    heads = [[0, 1, 8, 9], [2, 3, 4, 10, 11, 12], [5, 6, 7, 13, 14, 15]]
    cases = [
        ((16, 6), {"split": (2, 3, 3)}, lambda x: [x[rows] for rows in heads]),
        ((4, 15), {"split": 3, "transposed": True}, lambda x: [y.T for y in x.chunk(3, 1)]),
        ((4, 15), {"split": (9, 6), "transposed": True}, lambda x: [x[:, :9].T, x[:, 9:].T]),
        (
            (3, 4, 10),
            {"split": (1, 1), "transposed": True},
            lambda x: [x[:, :, ::2].mT, x[:, :, 1::2].mT],
        ),
        ((3, 10, 4), {"split": (1, 1)}, lambda x: [x[:, ::2], x[:, 1::2]]),
        ((6, 2, 5), {"flatten": True, "split": 2}, lambda x: list(x.flatten(1).chunk(2))),
    ]
    lean = {"clip": None} if rule != "muon" else {}
    for number, (shape, options, cut) in enumerate(cases):
        sequence = gradients(shape, 4, number, torch.float64)
        together = nn.Parameter(gradients(shape, 1, 9, torch.float64)[0].clone())
        parts = [nn.Parameter(part.clone().contiguous()) for part in cut(together.detach())]
        settings = {"rule": rule, "weight_decay": 0.1, "equilibrate": True} | lean
        of_parts = list(zip(*(cut(g) for g in sequence)))
        for params, given, own in (([together], [sequence], options), (parts, of_parts, {})):
            group = {"params": params, **settings, **own}
            run(MARS([group], matrix_dtype=torch.float64), params, given)
        for one, other in zip(cut(together.detach()), parts):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-12)


def test_newton_schulz():
    matrices = torch.randn(
        3, 8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    result = orthogonalize(matrices)
    for matrix, one in zip(matrices, result):
        torch.testing.assert_close(one, orthogonalized(matrix))
    singular = torch.linalg.svdvals(result)
    assert (singular > 0.5).all() and (singular < 1.3).all()
    torch.testing.assert_close(orthogonalize(matrices.mT), result.mT)
    assert not orthogonalize(torch.zeros(1, 3, 4)).any()
    for rounded, dtype in (
        (matrices.bfloat16(), None),
        (matrices.bfloat16(), torch.float32),
        (matrices.float(), None),
    ):
        together = orthogonalize(rounded, dtype)
        assert together.dtype == (dtype or rounded.dtype)
        alone = [orthogonalize(rounded[i : i + 1], dtype)[0] for i in range(3)]
        assert all(torch.equal(one, other) for one, other in zip(alone, together))
    assert orthogonalize.flops(8, 20) == orthogonalize.flops(20, 8) == 5 * (4 * 64 * 20 + 2 * 512)


SHAPE = {"vocab_size": 16, "seq_len": 8, "n_layer": 2, "n_embd": 24}
LATENT = {"q_lora_rank": 7, "kv_lora_rank": 9, "v_head_dim": 5}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2}
# Of each model the rows of the pieces of its matrices; all others are whole.
BY_HEAD = {
    "GPT-2": (lambda: GPT2(GPT2Args(**SHAPE, n_head=3)), {"attn.qkv.weight": [8] * 9}),
    "Llama": (
        lambda: Llama(LlamaArgs(**SHAPE, n_head=4, n_kv_head=2, n_inner=40, head_dim=5)),
        {"attn.q.weight": [5] * 4, "attn.k.weight": [5] * 2, "attn.v.weight": [5] * 2},
    ),
    "DeepSeek": (
        lambda: Deepseek(DeepseekArgs(**SHAPE, **LATENT, n_head=3, n_inner=40)),
        {
            "attn.q_b.weight": [6, 2] * 3,
            "attn.kv_b.weight": [6, 5] * 3,
            "attn.kv_a.weight": [9, 2],
        },
    ),
}


@pytest.mark.parametrize("name", BY_HEAD)
def test_heads_are_matrices_of_their_own_where_that_is_asked_for(name):
    """As in float64, one head at a time, under every rule that orthogonalises."""
    make, rows = BY_HEAD[name]
    for rule in ("mars-m", "mars-shampoo", "muon"):
        model, lean = make(), meant(rule, {"clip": None})
        init_weights(model, seed=0)
        model.double()
        groups = param_groups(model, rule, lr=6e-3, weight_decay=0.1, per_head=True, **lean)
        of_rule = [group for group in groups if group["rule"] == rule]
        named = {each: weight for group in of_rule for each, weight in group["params"]}
        assert {end for end in rows if any(each.endswith(end) for each in named)} == {*rows}
        options = {"equilibrate": True}
        for group in of_rule:
            group |= options
        starts = {each: weight.detach().clone() for each, weight in named.items()}
        given = {each: gradients(tuple(w.shape), 4, 1, torch.float64) for each, w in named.items()}
        run(MARS(of_rule, matrix_dtype=torch.float64), [*named.values()], [*given.values()])
        for each, weight in named.items():
            sizes = next((pieces for end, pieces in rows.items() if each.endswith(end)), None)
            sizes = [len(weight)] if sizes is None else sizes
            of_parts = zip(starts[each].split(sizes), *(g.split(sizes) for g in given[each]))
            settings = {"lr": 6e-3, "weight_decay": 0.1} | options
            for part, (start, *sequence) in zip(weight.split(sizes), of_parts, strict=True):
                if rule == "muon":
                    expected = reference.muon(start, sequence, momentum=0.95, **settings)
                else:
                    expected, _ = reference.mars(start, sequence, rule=rule, clip=None, **settings)
                assert relative(part - start, expected - start) < 1e-5, (rule, each)
