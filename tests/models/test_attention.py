"""Which kernel attention calls in which case, and that widths and scales may be any."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.15
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from tests.models.test_documents import END, attention_apart
from torchmars.config.llama import LlamaArgs
from torchmars.models import document_kernel
from torchmars.models.attention import CausalAttention, Sight
from torchmars.models.cache import Cache
from torchmars.models.documents import document_starts
from torchmars.models.llama import Llama


class Calls(TorchFunctionMode):
    """Takes down the calls of `scaled_dot_product_attention`: shapes, mask, and what is not plain.

    Each is (heads and length of q, of k, mask, other arguments). A mask is its dtype and shape, or
    the sizes of torch's lower right one. Unless `run` a call returns its queries.
    """

    def __init__(self, run=True):
        super().__init__()
        self.run, self.seen = run, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            call = dict(zip(names, args)) | kwargs
            q, k, v, mask = (call.pop(name, None) for name in (*names[:3], "attn_mask"))
            assert v.shape[:3] == k.shape[:3]
            if isinstance(mask, CausalBias):
                mask = "lower right", mask.seq_len_q, mask.seq_len_kv
            elif mask is not None:
                mask = mask.dtype, tuple(mask.shape)
            other = {name: value for name, value in call.items() if value}
            self.seen.append((tuple(q.shape[1:3]), tuple(k.shape[1:3]), mask, other))
            if not self.run:
                return q
        return func(*args, **kwargs)


STARTS = document_starts(torch.tensor([[END, 1, 2, END, 4, 5, 6, 7]] * 2), END)
GROUPS, CAUSAL = {"enable_gqa": True}, {"is_causal": True}


def documents(x, dropout=0.0):
    """The sight of documents in sequences of 8 tokens, for blocks that get `x`."""
    return Sight.of_documents(STARTS, 8, x, dropout)


@pytest.mark.parametrize(
    "device,dtype,queries,keys,heads,sight,dropout,expected",
    [
        ("cpu", torch.float32, 8, 8, 4, None, 0.0, (4, None, CAUSAL)),
        ("cpu", torch.float32, 8, 8, 2, None, 0.0, (2, None, CAUSAL | GROUPS)),
        ("cpu", torch.bfloat16, 8, 8, 4, None, 0.1, (4, None, CAUSAL | {"dropout_p": 0.1})),
        ("cpu", torch.float32, 2, 8, 2, None, 0.0, (2, ("lower right", 2, 8), GROUPS)),
        ("cpu", torch.float32, 8, 8, 2, documents, 0.0, (2, (torch.float32, (2, 1, 8, 8)), GROUPS)),
        ("cpu", torch.bfloat16, 2, 6, 4, documents, 0.0, (4, (torch.bfloat16, (2, 1, 2, 6)), {})),
        ("cuda", torch.bfloat16, 8, 8, 2, None, 0.0, (2, None, CAUSAL | GROUPS)),
        ("cuda", torch.float32, 8, 8, 2, None, 0.0, (4, None, CAUSAL)),
        ("cuda", torch.float16, 2, 8, 2, None, 0.0, (2, ("lower right", 2, 8), GROUPS)),
        ("cuda", torch.float32, 2, 8, 2, None, 0.0, (4, ("lower right", 2, 8), {})),
        (
            *("cuda", torch.float32, 8, 8, 2, documents, 0.0),
            (4, (torch.float32, (2, 1, 8, 8)), {}),
        ),
    ],
)
def test_each_case_has_its_call(device, dtype, queries, keys, heads, sight, dropout, expected):
    seen = sight and sight(torch.empty(0, dtype=dtype))
    with FakeTensorMode(allow_non_fake_inputs=True), Calls(run=False) as calls:
        q = torch.empty(2, 4, queries, 16, device=device, dtype=dtype)
        k = torch.empty(2, heads, keys, 16, device=device, dtype=dtype)
        CausalAttention()(q, k, k, seen, dropout)
    called_heads, mask, other = expected
    assert calls.seen == [((4, queries), (called_heads, keys), mask, other)]


def test_a_cache_calls_with_the_mask_of_its_queries_alone():
    shape = {"n_layer": 1, "n_head": 4, "n_embd": 32, "vocab_size": 64, "seq_len": 24}
    model = Llama(LlamaArgs(**shape, n_kv_head=2, n_inner=48)).eval()
    cache = Cache(model, 24)
    with Calls() as calls:
        cache.start([[5, 9, 2]])
        cache.go_on([1])
        cache.start([[5, 9, 2], [3]])
        cache.go_on([1, 2])
    assert calls.seen == [
        ((4, 3), (2, 3), (torch.bool, (1, 1, 3, 3)), GROUPS),
        ((4, 1), (2, 4), None, GROUPS),
        ((4, 3), (2, 3), (torch.bool, (2, 1, 3, 3)), GROUPS),
        ((4, 1), (2, 4), (torch.bool, (2, 1, 1, 4)), GROUPS),
    ]


def mixed_in_float64(q, k, v, scale, apart):
    """Attention of the last tokens by its definition."""
    queries, keys = q.shape[2], k.shape[2]
    q, k, v = (part.double() for part in (q, k, v))
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if apart:  # documents of 3 and of 5 tokens
        number = torch.arange(8) >= 3
        seen = seen & (number[keys - queries : keys, None] == number[:keys])
    logits = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("of", ["all", "documents", "documents by the kernel"])
@pytest.mark.parametrize("width,value_width", [(24, 16), (16, 24), (16, 16)])
@pytest.mark.parametrize("queries,heads", [(8, 4), (8, 2), (3, 2)])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_widths_and_scale_may_be_any(monkeypatch, scale, queries, heads, width, value_width, of):
    monkeypatch.setattr(document_kernel, "varlen_attn", attention_apart)
    generator = torch.Generator().manual_seed(0)
    shapes = (4, queries, width), (heads, 8, width), (heads, 8, value_width)
    parts = [torch.randn(2, *shape, generator=generator).requires_grad_() for shape in shapes]
    sight = {
        "all": None,
        "documents": documents(parts[0]),
        "documents by the kernel": Sight(None, STARTS, 8),
    }[of]
    found = CausalAttention(scale)(*parts, sight)
    expected = mixed_in_float64(*parts, scale, apart=sight is not None)
    assert found.shape == (2, 4, queries, value_width)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    gradients = (torch.autograd.grad((each * weights).sum(), parts) for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
