"""QK-clip: each head's weights are scaled by hand, on every layout, and its logits then have the
limit."""

import dataclasses

import pytest
import torch

from tests.parallel.test_attention_logits import (
    LATENT,
    LLAMA,
    OF_BASE,
    PLAIN,
    enlarge,
    plain_logits,
)
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
from torchmars.training.build import build_trainer

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
    for block, largest in enumerate(plain_logits(name, apart)):
        gammas = [min(1.0, limit / each.item()) for each in largest]
        layer = f"blocks.{block}.attn"
        if "deepseek" in name:
            scale_latent(weights, layer, model.args, gammas)
            continue
        (heads, groups), width = HEADS[name], WIDTH[name]
        for kind in ("weight", "bias"):
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


def scale_latent(weights, layer, args, gammas):
    """Scale the parts of queries and keys that are a head's own, and those of queries that are not.

    The key of these is every head's, and stays.
    """
    q, own = weights[f"{layer}.{'q_b' if args.q_lora_rank else 'q'}.weight"], args.qk_nope_head_dim
    kv, of_q, of_kv = weights[f"{layer}.kv_b.weight"], args.head_width, own + args.v_head_dim
    for head, gamma in enumerate(gammas):
        q[head * of_q : head * of_q + own] *= gamma**0.5
        q[head * of_q + own : (head + 1) * of_q] *= gamma
        kv[head * of_kv : head * of_kv + own] *= gamma**0.5


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


CASES = [("TP 2", GPT2), ("CP 2 Ulysses", LLAMA, True), ("FSDP 2", LATENT)]
OTHERS = [("TP 2", LLAMA, True), ("CP 2", GPT2, True, "full"), ("PP 2", GPT2), ("FSDP 2", LLAMA)]
OTHERS += [("TP 2", "deepseek", True), ("CP 2 Ulysses", LATENT), ("PP 2", "deepseek")]
MORE = [("TP 2 x CP 2", GPT2), ("FSDP 2 x TP 2", LLAMA, True), ("PP 2 x FSDP 2", LLAMA)]
MORE += [("TP 2 x CP 2", "deepseek")]


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


def tables(folder, name, steps=6, **sections):
    sections["training"] = {"steps": steps, "qk_clip": 0.02} | sections.get("training", {})
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
    sections["model"] = {"name": "llama", "tied": True} | shape | sections.get("model", {})
    rule = {"name": "mars-m", "matrix_dtype": "float32"} | sections.pop("optimizer", {})
    return tiny_tables(folder, run={"name": name}, optimizer=rule, **sections)


@FULL
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
