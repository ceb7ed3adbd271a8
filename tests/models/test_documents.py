"""Documents that share a sequence are computed as if each were alone."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode  # private, torch 2.11 to 2.15

from tests.models.test_model import every_shape
from torchmars.models import document_kernel
from torchmars.models.attention import CausalAttention, Sight, has_kernel
from torchmars.models.documents import (
    WIDTHS,
    bounds,
    document_positions,
    document_starts,
)
from torchmars.models.initialize import init_weights

END, BEGIN = 63, 62
# Documents without their end-of-text, which is at once the beginning of the next.
LENGTHS = [[3, 1, 0, 7, 8], [23], [0, 0, 21], [11, 11]]


def packed(lengths, seed=0):
    """A window [T + 1] of documents of these lengths, and each alone: [END, d..., END]."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(END, (length,), generator=generator) for length in lengths]
    end = torch.tensor([END])
    window = torch.cat([end, *(part for text in texts for part in (text, end))])
    return window, [torch.cat([end, text, end]) for text in texts]


def losses(model, window, starts=None):
    """The loss of each target of a window, float32 [T]."""
    logits = model.head(model(window[None, :-1], starts=starts))
    return F.cross_entropy(logits[0], window[1:], reduction="none")


def test_documents_begin_at_an_end_of_text_and_at_a_sequence():
    tokens = torch.tensor([[5, 5, 9, 5, 9, 9], [9, 5, 5, 5, 5, 5], [5] * 6])
    starts = document_starts(tokens, 9)
    assert starts[:, :4].tolist() == [[0, 2, 4, 5], [0, 6, 6, 6], [0, 6, 6, 6]]
    assert starts.shape == (3, WIDTHS) and (starts[:, 4:] == 6).all()
    assert starts.dtype == torch.int32
    assert document_positions(starts, 6).tolist() == [
        [0, 1, 0, 1, 0, 0],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_batches_with_other_numbers_of_documents_have_few_widths():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(20, (2, 256), generator=generator) for _ in range(50)]
    widths = {document_starts(batch, 0).shape[1] for batch in batches}
    counts = {int((batch == 0).sum(1).max()) for batch in batches}
    assert widths == {16, 32} and len(counts) > 10


@every_shape
def test_losses_are_those_of_each_document_alone(family, args):
    model = family(args)
    init_weights(model, seed=0)
    windows, alone = zip(*map(packed, LENGTHS))
    for window, texts in zip(windows, alone):
        starts = document_starts(window[None, :-1], END)
        expected = torch.cat([losses(model, text) for text in texts])
        found = losses(model, window, starts)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        if len(texts) > 1:
            assert not torch.allclose(losses(model, window), expected, rtol=0, atol=1e-3)


@every_shape
def test_the_rest_of_a_document_is_one_of_its_own(family, args):
    model = family(args)
    init_weights(model, seed=0)
    rest, (text,) = torch.randint(END, (6,)), packed([9])[1]
    window = torch.cat([rest, text])
    found = losses(model, window, document_starts(window[None, :-1], END))
    expected = torch.cat([losses(model, torch.cat([rest, text[:1]])), losses(model, text)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_an_end_and_a_begin_token_are_one_border():
    """Ends at a window's first and last place are of the document before."""
    tokens = torch.tensor(
        [[9, 1, 5, 9, 1, 5, 9], [1, 5, 1, 9, 9, 1, 9], [5, 9, 1, 9, 1, 9, 1], [5, 5, 9, 5, 1, 1, 9]]
    )
    starts = document_starts(tokens, 9, 1)
    assert starts[:, :4].tolist() == [[0, 1, 4, 7], [0, 5, 7, 7], [0, 2, 4, 6], [0, 7, 7, 7]]
    assert document_positions(starts, 7)[0].tolist() == [0, 0, 1, 2, 0, 1, 2]


@every_shape
def test_documents_with_a_begin_token_are_as_if_alone_from_that_token_on(family, args):
    """The token may also be one of their text. The last target of each is the next one's first."""
    model = family(args)
    init_weights(model, seed=0)
    begin = torch.tensor([BEGIN])
    texts = [torch.cat([begin, text[1:]]) for text in packed([7, 0, 4, 8])[1]]
    texts[3][3] = BEGIN
    window = torch.cat([*texts, begin])
    starts = document_starts(window[None, :-1], END, BEGIN)
    assert starts[0, :5].tolist() == [0, 9, 11, 17, 27]
    expected = torch.cat([losses(model, torch.cat([text, begin])) for text in texts])
    found = losses(model, window, starts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(
        losses(model, window, document_starts(window[None, :-1], END)), expected, rtol=0, atol=1e-3
    )


def attention_apart(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, scale, **groups):
    """What `varlen_attn` is, by plain attention of one document after the other."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k)
    assert cu_seq_q[-1] == len(q) and cu_seq_k[-1] == len(k) == len(v)
    assert groups.get("enable_gqa") or k.shape[1] == q.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    repeats = q.shape[1] // k.shape[1]
    mixed = torch.full_like(q, torch.nan)
    bounds = zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:])
    for first_q, last_q, first_k, last_k in (map(int, each) for each in bounds):
        queries, keys = last_q - first_q, last_k - first_k
        assert 0 <= queries <= max_q and 0 <= keys <= max_k
        if queries:
            own_k, own_v = (part[first_k:last_k].repeat_interleave(repeats, 1) for part in (k, v))
            logits = torch.einsum("qhw,khw->hqk", q[first_q:last_q], own_k) * scale
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            mixed[first_q:last_q] = torch.einsum("hqk,khw->qhw", weights, own_v)
    return mixed


@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("first,last", [(0, 24), (0, 6), (6, 12), (12, 24), (23, 24)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_gets_what_the_mask_says(monkeypatch, first, last, kv_heads, takes_groups):
    monkeypatch.setattr(document_kernel, "varlen_attn", attention_apart)
    monkeypatch.setattr(document_kernel, "TAKES_GROUPS", takes_groups)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack([packed(lengths)[0][:24] for lengths in LENGTHS])
    starts = document_starts(tokens, END)
    q = torch.randn(4, 4, last - first, 8, generator=generator)
    k, v = (torch.randn(4, kv_heads, last, 8, generator=generator) for _ in range(2))
    masked = Sight.of_documents(starts, 24, q, dropout=0.0)
    assert masked.mask is not None and masked.mask.shape == (4, 1, 24, 24)
    by_kernel, attend = Sight(None, starts, 24, bounds(starts, 0, 24)), CausalAttention()
    found, expected = (attend(q, k, v, sight) for sight in (by_kernel, masked))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_takes_what_it_gets(kv_heads):
    """Types and shapes of the real `varlen_attn` and of its backward pass, without values."""
    with FakeTensorMode():
        shapes = [(2, 4, 6, 16), *[(2, kv_heads, 12, 16)] * 2]
        q, k, v = (torch.empty(each, dtype=torch.bfloat16, requires_grad=True) for each in shapes)
        starts = torch.zeros(2, 3, dtype=torch.int32)
        mixed = CausalAttention()(q, k, v, Sight(None, starts, 12))
        mixed.sum().backward()
    assert mixed.shape == q.shape and mixed.dtype == q.dtype
    assert [each.grad.shape for each in (q, k, v)] == shapes


def test_a_mask_is_made_where_no_kernel_serves():
    assert has_kernel("cuda", torch.bfloat16, 0.0) and has_kernel("cuda", torch.float16, 0.0)
    assert not has_kernel("cuda", torch.float32, 0.0)
    assert not has_kernel("cuda", torch.bfloat16, 0.1)
    assert not has_kernel("cpu", torch.bfloat16, 0.0)
