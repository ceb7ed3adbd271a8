"""QK-clip: each head's weights are scaled by hand, on every layout, and its logits then have the
limit."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.parallel.test_attention_logits import LLAMA, OF_BASE, PLAIN, enlarge, plain_logits
from tests.support import gradients
from tests.support.full import FULL
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny import metrics, tiny_tables, train, write_text
from torchmars.cluster import connection
from torchmars.config import ActivationCheckpointConfig, ParallelismConfig
from torchmars.config.load import config_from_tables
from torchmars.models.initialize import init_weights
from torchmars.optim.tensors import local_part
from torchmars.parallel.qk_clip import QKClip
from torchmars.training.trainer import build_trainer

GPT2 = "gpt2 of a base"
HEADS = {GPT2: (OF_BASE.n_head, OF_BASE.n_head), LLAMA: (PLAIN.n_head, PLAIN.n_kv_head)}
WIDTH = {GPT2: OF_BASE.n_embd // OF_BASE.n_head, LLAMA: PLAIN.head_width}


def limit_of(name, apart):
    """Between the largest logits of the first block's heads: some of them are clipped."""
    return plain_logits(name, apart)[0].quantile(0.4).item()


def clipped_by_hand(name, apart):
    """The weights of the plain model, of which each head has been scaled on its own."""
    model, limit = gradients.MODELS[name](), limit_of(name, apart)
    init_weights(model, seed=0)
    enlarge(model.named_parameters())
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    (heads, groups), width = HEADS[name], WIDTH[name]
    for block, largest in enumerate(plain_logits(name, apart)):
        gammas = [min(1.0, limit / each.item()) for each in largest]
        for kind in ("weight", "bias"):
            layer = f"blocks.{block}.attn"
            if name == GPT2:
                q, k, _ = weights[f"{layer}.qkv.{kind}"].chunk(3)
            else:
                q, k = weights[f"{layer}.q.{kind}"], weights[f"{layer}.k.{kind}"]
            for group in range(groups):
                own = range(group * heads // groups, (group + 1) * heads // groups)
                kappa = min(gammas[head] for head in own) ** 0.5
                k[group * width : (group + 1) * width] *= kappa
                for head in own:
                    q[head * width : (head + 1) * width] *= gammas[head] / kappa
    return weights


def found_on(layout, name, apart=False, mode="none"):
    """Weights after a clip, whether others left bits alone, and the largest logits then."""
    ranks, parallelism = LAYOUTS[layout][0], ParallelismConfig(**LAYOUTS[layout][1])
    training = dataclasses.replace(gradients.training_on(ranks), qk_clip=limit_of(name, apart))
    of_model = name, parallelism, training, ActivationCheckpointConfig(mode), apart
    _, model, batch = gradients.model_on(*of_model)
    enlarge(model.weights.items())
    model.backward(batch)
    before = {name: local_part(each).clone() for name, each in model.weights.items()}
    model.clip_logits(torch.tensor(False))
    limit, model.qk_clip.limit = model.qk_clip.limit, 1e6
    model.clip_logits(torch.tensor(True))
    same = all(torch.equal(local_part(model.weights[name]), before[name]) for name in before)
    model.qk_clip.limit = limit
    model.clip_logits(torch.tensor(True))
    weights = {name: gradients.gathered(each) for name, each in model.weights.items()}
    model.backward(batch)
    logits = model.attention_logits
    return weights, same, dict(zip(logits.blocks, logits.result().clone(), strict=True))


def all_found(cases):
    return [found_on(*case) for case in cases]


CASES = [("TP 2", GPT2), ("CP 2 Ulysses", LLAMA, True), ("FSDP 2", LLAMA)]
OTHERS = [("TP 2", LLAMA, True), ("CP 2", GPT2, True, "full"), ("PP 2", GPT2, False)]
MORE = [("TP 2 x CP 2", GPT2), ("FSDP 2 x TP 2", LLAMA, True), ("PP 2 x FSDP 2", LLAMA)]


@pytest.mark.parametrize(
    "ranks,cases",
    [(2, CASES), pytest.param(2, OTHERS, marks=FULL), pytest.param(4, MORE, marks=FULL)],
    ids=["some", "others", "more"],
)
def test_each_head_is_scaled_as_by_hand_and_has_the_limit_then(ranks, cases):
    for case, results in zip(cases, zip(*run_ranks(all_found, ranks, cases)), strict=True):
        name, apart = case[1], len(case) > 2 and case[2]
        expected, limit = clipped_by_hand(name, apart), limit_of(name, apart)
        seen = set()
        for weights, same, largest in results:
            assert same, case
            for weight, value in weights.items():
                torch.testing.assert_close(value.double(), expected[weight], rtol=1e-6, atol=1e-9)
            seen |= {*weights}
            if "0" in largest:  # what comes before other blocks has changed
                wanted = plain_logits(name, apart)[0].clamp(max=limit)
                torch.testing.assert_close(largest["0"].double(), wanted, rtol=1e-6, atol=0)
                clipped = wanted == limit
                assert clipped.any() and not clipped.all(), case
        assert seen == expected.keys()


class Latent(nn.Module):
    """The weights of attention by latents: a part of each head's queries has one key for all."""

    def __init__(self, heads=3, own=4, shared=2, value=5, latent=6, width=7):
        super().__init__()
        self.q_b = nn.Linear(width, heads * (own + shared))
        self.kv_b = nn.Linear(latent, heads * (own + value))
        self.head_rows = {"q_b": (own, shared) * heads, "kv_b": (own, value) * heads}
        self.logit_rows = {"q_b": ["query", "lone query"] * heads, "kv_b": ["key", ""] * heads}
        self.sizes = heads, own

    def largest(self, x, latents, shared):
        """The largest logit of each head, of all queries and keys."""
        heads, own = self.sizes
        q = self.q_b(x).unflatten(-1, (heads, -1)).transpose(0, 1)
        k = self.kv_b(latents).unflatten(-1, (heads, -1)).transpose(0, 1)[..., :own]
        k = torch.cat([k, shared.expand(heads, -1, -1)], dim=-1)
        return (q @ k.mT).amax((1, 2)).detach()


def test_queries_whose_key_is_every_heads_take_all_of_the_factor():
    """So each head falls by its own, and the key that they share stays."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"attn": Latent()}).double()
    given = [torch.randn(9, width, dtype=torch.float64) for width in (7, 6, 2)]
    before = block.attn.largest(*given)
    limit = before.median().item()
    logits = SimpleNamespace(blocks={"4": []}, heads=3, result=lambda: before[None])
    parts = {1: SimpleNamespace(model=SimpleNamespace(blocks={"4": block}))}
    weights = {f"blocks.4.{name}": each for name, each in block.named_parameters()}
    values = block.attn.kv_b(given[1]).unflatten(-1, (3, -1))[..., 4:].detach()
    QKClip(limit, logits, parts, weights).scale(torch.tensor(True))
    assert logits.always and before.amin() < limit < before.amax()
    torch.testing.assert_close(block.attn.largest(*given), before.clamp(max=limit))
    assert torch.equal(block.attn.kv_b(given[1]).unflatten(-1, (3, -1))[..., 4:], values)


def tables(folder, name, steps=6, **sections):
    sections["training"] = {"steps": steps, "qk_clip": 0.02} | sections.get("training", {})
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
    sections["model"] = {"name": "llama", "tied": True} | shape | sections.get("model", {})
    rule = {"name": "mars-m", "matrix_dtype": "float32"} | sections.pop("optimizer", {})
    return tiny_tables(folder, run={"name": name}, optimizer=rule, **sections)


def test_a_run_resumes_to_the_last_bit_and_agrees_on_layouts(tmp_path):
    write_text(tmp_path)
    watched = {"metrics": {"attention": True}, "schedule": {"name": "constant"}}
    straight, never = tables(tmp_path, "straight", **watched), tables(tmp_path, "never", **watched)
    never["training"]["qk_clip"] = 0.0
    train(1, straight, never, tables(tmp_path, "resumed", steps=3, **watched))
    train(1, tables(tmp_path, "resumed", **watched))
    train(2, tables(tmp_path, "tp", parallelism={"tp": 2}, **watched))
    found = {name: metrics(tables(tmp_path, name)) for name in ("straight", "resumed", "never")}
    assert found["straight"] == found["resumed"] and found["straight"] != found["never"]
    assert metrics(tables(tmp_path, "tp")) == pytest.approx(found["straight"], rel=1e-5)


def one_step(given):
    """The weights before and after a step, and their average."""
    config = config_from_tables(given, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    weights, average = trainer.model.weights, trainer.average.values
    before = {name: each.detach().clone() for name, each in weights.items()}
    trainer.train_step()
    trainer.flags.result()
    after = {name: each.detach().clone() for name, each in weights.items()}
    return before, after, {name: each.clone() for name, each in average.items()}


@pytest.mark.parametrize("mode", ["approx", "exact"])
def test_the_average_is_of_clipped_weights(tmp_path, mode):
    """Which a step makes of those that a step without the clip makes."""
    write_text(tmp_path)
    of = {"training": {"ema_decay": 0.5}, "optimizer": {"mode": mode}}
    clipped, free = tables(tmp_path, "clipped", **of), tables(tmp_path, "free", **of)
    free["training"]["qk_clip"] = 0.0
    [(before, after, average)] = run_ranks(one_step, 1, clipped)
    [(_, plain, _)] = run_ranks(one_step, 1, free)
    differ = {name.split(".")[-2] for name in after if not torch.equal(after[name], plain[name])}
    assert differ == {"q", "k"}
    for name, value in average.items():
        torch.testing.assert_close(value, (before[name] + after[name]) / 2, rtol=1e-6, atol=1e-8)
