"""Layouts that cannot be are refused in one line, before there are ranks."""

import pytest

from torchmars.config import (
    ActivationCheckpointConfig,
    Config,
    ParallelismConfig,
    TrainingConfig,
    model_config,
)
from torchmars.config.model import model_section
from torchmars.config.training import Float8Config
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel.checks import check_layout

SIZE = {"n_layer": 4, "n_head": 4, "n_embd": 32}
FLOAT8 = Float8Config("tensorwise")
LLAMA = {"name": "llama", "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 96, "n_layer": 4}


def check(ranks, model=SIZE, training=None, activations=None, **parallelism):
    training = {"seq_len": 32, "global_batch_size": 16} | (training or {})
    config = Config(
        model=model_config(**model),
        training=TrainingConfig(**training),
        parallelism=ParallelismConfig(**parallelism),
        activation_checkpoint=ActivationCheckpointConfig(**(activations or {})),
    )
    whole = build_meta_model(config.model, 256, config.training.seq_len)
    config.parallelism.check()
    check_layout(config, config.parallelism.degrees(ranks), whole)


@pytest.mark.parametrize(
    "ranks,settings,message",
    [
        (3, {"tp": 3}, "parallelism.tp = 3 does not divide the 4 attention heads"),
        (4, {"tp": 4, "model": LLAMA}, "tp = 4 does not divide the 2 heads of keys and values"),
        (
            2,
            {"tp": 2, "model": SIZE | {"vocab_size": 257}},
            "tp = 2 does not divide the 257 rows of tok_embed",
        ),
        (
            2,
            {"tp": 2, "model": LLAMA | {"n_inner": 97}},
            "tp = 2 does not divide the 97 rows of blocks.0.mlp.gate",
        ),
        (2, {"tp": 2, "training": {"seq_len": 31}}, "seq_len = 31 must be a multiple of 2"),
        (2, {"cp": 2, "training": {"seq_len": 30}}, "seq_len = 30 must be a multiple of 4"),
        (
            8,
            {"cp": 2, "tp": 4, "cp_method": "ulysses"},
            "cp = 2 does not divide the 1 head of each rank: choose a divisor of 1, or ",
        ),
        (8, {"pp": 8}, "8 pipeline stages cannot share 4 blocks: lower parallelism.pp = 8$"),
        (4, {"pp": 4, "pp_schedule": "Interleaved1F1B"}, 'pp = 4, or choose .*"1F1B"'),
        (
            2,
            {"pp": 2, "training": {"microbatch_size": 16}},
            "make 1 microbatches .* fewer than the 2 stages",
        ),
        (
            2,
            {
                "pp": 2,
                "pp_schedule": "Interleaved1F1B",
                "training": {"global_batch_size": 5, "microbatch_size": 1},
            },
            "cannot deal out 5 microbatches in rounds",
        ),
        (
            2,
            {"tp": 2, "training": {"compile": True}, "activations": {"mode": "full"}},
            'activation_checkpoint.mode = "full" does not go with training.compile',
        ),
        (
            12,
            {
                "dp_replicate": 2,
                "reshard_after_forward": 4,
                "training": {"global_batch_size": 12},
            },
            "reshard_after_forward = 4 does not divide the 6 ranks",
        ),
        (
            2,
            {"tp": 2, "training": {"float8": FLOAT8}},
            "float8 does not go with parallelism.tp = 2",
        ),
        (4, {"tp": 3}, "parallelism.tp = 3 does not divide 4 ranks"),
    ],
)
def test_what_does_not_fit_is_named(ranks, settings, message):
    with pytest.raises(UserError, match=message):
        check(ranks, **settings)


@pytest.mark.parametrize(
    "ranks,settings",
    [
        (8, {"tp": 2, "cp": 2}),
        (4, {"tp": 2, "model": LLAMA}),
        (8, {"pp": 2, "tp": 2, "cp_method": "ulysses", "cp": 2}),
        (2, {"pp": 2, "training": {"compile": True}, "activations": {"mode": "selective"}}),
        (16, {"training": {"float8": FLOAT8}}),
        (8, {"cp": 2, "reshard_after_forward": 4}),  # weights are sharded over cp too
    ],
)
def test_what_fits_is_accepted(ranks, settings):
    check(ranks, **settings)


def test_qk_clip_is_refused_where_weights_do_not_decide_how_large_logits_are(own_family):
    def check(clip, **model):
        training = TrainingConfig(seq_len=8, qk_clip=clip)
        config = Config(model=model_section(model["name"])(**model), training=training)
        meta = build_meta_model(config.model, 64, 8)
        check_layout(config, ParallelismConfig().degrees(1), meta)

    for size in ("qwen3-0.6b", "moe-nano"):
        with pytest.raises(UserError, match="qk_clip = 100 .* beside model.qk_norm, which bounds"):
            check(100.0, name="llama", size=size)
        check(0.0, name="llama", size=size)
    with pytest.raises(UserError, match=r"declares the rows .* \(logit_rows\), which a Plain does"):
        check(100.0, name="plain", size="tiny")
    check(0.0, name="plain", size="tiny")
    check(100.0, name="gpt2", size="nano")
    check(100.0, name="llama", size="glm-nano")
