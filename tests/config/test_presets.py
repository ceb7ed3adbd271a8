"""The presets, against the published settings, which this file writes down once more.

Sources: Yuan et al., arXiv 2411.10438; Liu et al., arXiv 2510.21800; their repository. Grattafiori
et al., arXiv 2407.21783, table 3.
"""

import pytest

from torchmars.commands.presets import read_presets
from torchmars.config.load import load_config
from torchmars.core.errors import UserError
from torchmars.models import build_meta_model
from torchmars.parallel.checks import check_layout

OPENWEBTEXT, FINEWEB = "openwebtext", "fineweb-edu"
SOURCES = {OPENWEBTEXT: "openwebtext", FINEWEB: "fineweb-edu:sample-100BT"}
# layers, heads, width, min_lr, sequences of a microbatch on each of 8 GPUs
SHAPES = {
    "small": (12, 12, 768, 3e-5, 15),
    "medium": (24, 16, 1024, 6e-5, 15),
    "large": (36, 20, 1280, 1e-5, 5),
    "xl": (48, 25, 1600, 1e-5, 5),
}
# By size: AdamW's lr; that of MARS-AdamW and of its vectors; that of MARS-M and Moonlight on
# OpenWebText (None: not run) and on FineWeb-Edu.
RATES = {
    "small": (6e-4, 6e-3, 3e-3, 6e-3, 1e-2),
    "medium": (3e-4, 3e-3, 1.5e-3, 5e-3, 5e-3),
    "large": (2e-4, 2e-3, 1e-3, 5e-3, 5e-3),
    "xl": (2e-4, 2e-3, 1e-3, None, 3e-3),
}
MARS = {"betas": (0.95, 0.99), "weight_decay": 0.01, "gamma": 0.025}
VECTORS = {"betas_1d": (0.9, 0.95), "weight_decay_1d": 0.1, "optimize_1d": False}
MATRIX = {"weight_decay": 0.1, "betas_1d": (0.9, 0.95)}
# Best validation loss on OpenWebText after 50B tokens: small, medium, large.
LOSSES = {
    "adamw": ("2.885", "2.691", "2.561"),
    "mars-adamw": ("2.849", "2.636", "2.518"),
    "mars-adamw-exact": ("2.847", None, None),
}
# Mean accuracy on nine tasks after 50B tokens of FineWeb-Edu: small, XL.
ACCURACIES = {"adamw": ("45.72", "55.43"), "mars-adamw": ("45.93", "56.41")}
PRESETS = read_presets()


def published_gpt2():
    """The settings of [optimizer] of every published run of GPT-2, by the name of its preset."""
    found = {}
    for size, (adamw, mars, vectors, matrix, matrix_fineweb) in RATES.items():
        # Other sizes were run on the other data only.
        for data in [OPENWEBTEXT] * (size != "xl") + [FINEWEB] * (size in ("small", "xl")):
            found[f"gpt2-{size}-adamw-{data}"] = {
                "name": "adamw",
                "lr": adamw,
                "betas": (0.9, 0.95),
                "weight_decay": 0.1,
            }
            rates = {"lr": mars, "lr_1d": vectors}
            found[f"gpt2-{size}-mars-adamw-{data}"] = (
                {"name": "mars-adamw", "mode": "approx"} | MARS | VECTORS | rates
            )
        for data, rate in ((OPENWEBTEXT, matrix), (FINEWEB, matrix_fineweb)):
            if rate is not None:
                settings = MATRIX | {"lr": rate}
                found[f"gpt2-{size}-muon-{data}"] = {"name": "muon"} | settings
                found[f"gpt2-{size}-mars-m-{data}"] = (
                    {"name": "mars-m", "mode": "approx"} | MARS | settings
                )
    exact = found["gpt2-small-mars-adamw-openwebtext"] | {"mode": "exact"}
    return found | {"gpt2-small-mars-adamw-exact-openwebtext": exact}


PUBLISHED = published_gpt2()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rules(name):
    optimizer = load_config([name], "test").optimizer
    assert {key: getattr(optimizer, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert optimizer.betas[0] == (0.9 if "-adamw-" in name and "mars" not in name else 0.95)
    assert optimizer.eps == 1e-8 and getattr(optimizer, "clip", 1.0) == 1.0 and not optimizer.groups


def test_which_there_are():
    partly = {f"llama-{size}-adamw-fineweb-edu" for size in ("8b", "70b", "405b")}
    assert {name: each.origin for name, each in PRESETS.items()} == {
        **dict.fromkeys(PUBLISHED, "published"),
        **dict.fromkeys(partly, "partly"),
    }
    assert len(PRESETS) == 28


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt2")])
def test_runs_of_gpt2(name):
    """What all runs of the two papers have in common, at their size."""
    _, size, *rule = name.split("-")
    data = OPENWEBTEXT if name.endswith(OPENWEBTEXT) else FINEWEB
    config = load_config([name], "test")
    training, schedule, model = config.training, config.schedule, config.model
    layers, heads, width, min_lr, microbatch = SHAPES[size]
    assert (training.global_batch_size, training.seq_len, training.steps) == (480, 1024, 100_000)
    assert training.max_grad_norm == 1.0 and training.dtype == "bfloat16"
    assert training.microbatches(8) == (microbatch, 60 // microbatch) and PRESETS[name].gpus == 8
    assert (schedule.name, schedule.warmup_steps) == ("cosine", 2000)
    assert schedule.min_lr == min_lr
    assert config.data.source == SOURCES[data] and config.data.tokenizer == "gpt2"
    assert model.scale_attn_by_inverse_layer_idx and model.dropout == 0
    assert config.validation.interval == 1000 and config.run.name == name
    built = build_meta_model(model, 50257, training.seq_len)
    assert (len(built.blocks), built.heads[0], built.width) == (layers, heads, width)
    assert built.vocab_rows == 50_304 and built.output is None  # tied


def test_published_results():
    expected = {
        f"gpt2-{size}-{rule}-openwebtext": f"validation loss {loss}"
        for rule, losses in LOSSES.items()
        for size, loss in zip(SHAPES, losses)
        if loss
    } | {
        f"gpt2-{size}-{rule}-fineweb-edu": f"{accuracy} on nine tasks, zero-shot"
        for rule, accuracies in ACCURACIES.items()
        for size, accuracy in zip(("small", "xl"), accuracies)
    }
    assert {
        name: each.result for name, each in PRESETS.items() if each.result != "none published"
    } == expected


def test_llama_3():
    """Table 3 of its report; and what the 405B run had."""
    for size, rate, steps, tokens in (
        ("8b", 3e-4, 3_576_279, 15e12),
        ("70b", 1.5e-4, 3_576_279, 15e12),
        ("405b", 8e-5, 929_832, 15.6e12),
    ):
        config = load_config([f"llama-{size}-adamw-fineweb-edu"], "test")
        training = config.training
        batch = training.global_batch_size * training.seq_len
        assert config.optimizer.lr == rate and config.optimizer.betas == (0.9, 0.95)
        assert config.optimizer.weight_decay == 0.1 and config.schedule.warmup_steps == 8000
        assert config.schedule.min_lr == pytest.approx(rate / 100)
        assert training.seq_len == 8192 and config.model.vocab_size == 128_256
        assert training.steps == steps and abs(steps * batch - tokens) < batch
    assert batch == 2**24
    layout = config.parallelism.degrees(PRESETS["llama-405b-adamw-fineweb-edu"].gpus)
    assert (layout.tp, layout.pp, layout.dp_shard * layout.cp) == (8, 16, 64)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_its_ranks_and_says_where_it_is_from(name):
    preset, config = PRESETS[name], load_config([name], "test")
    model = build_meta_model(config.model, 50257, config.training.seq_len)
    check_layout(config, config.parallelism.degrees(preset.gpus), model)
    assert preset.source
    rule = f"-{config.optimizer.name}-"
    assert rule in name.replace("-exact", "") and ("mars" in name) == ("mars" in rule)
    assert preset.layout.startswith("published") or preset.layout == "assumed"


def test_a_preset_is_merged_with_what_comes_after_it(tmp_path):
    (tmp_path / "my.toml").write_text('[optimizer]\nlr = 1e-3\n[run]\nname = "mine"\n')
    args = [str(tmp_path / "my.toml"), "--training.steps", "7"]
    config = load_config(["gpt2-medium-mars-m-openwebtext", *args], "test")
    assert (config.optimizer.name, config.optimizer.lr) == ("mars-m", 1e-3)
    assert (config.run.name, config.training.steps, config.model.size) == ("mine", 7, "medium")


def test_other_data_takes_the_place_of_the_presets(tmp_path):
    mixture = '[[data.mixture]]\nsource = "stdlib"\nweight = 1.0\n'
    (tmp_path / "mixture.toml").write_text(mixture)
    name, file = "gpt2-small-adamw-openwebtext", str(tmp_path / "mixture.toml")
    data = load_config([name, file], "test").data
    assert [part.source for part in data.mixture] == ["stdlib"] and data.source == "stdlib"
    data = load_config([name, file, "--data.source", "text", "--data.files", "a.txt"], "test").data
    assert (data.source, data.files, data.mixture) == ("text", ["a.txt"], [])
    assert data.path.startswith("data/text-gpt2-")
    (tmp_path / "both.toml").write_text('[data]\nsource = "text"\nfiles = ["a"]\n' + mixture)
    with pytest.raises(UserError, match="data.source, data.files and .* have no meaning beside"):
        load_config([name, str(tmp_path / "both.toml")], "test")


def test_a_file_comes_before_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-small-adamw-openwebtext").write_text("[training]\nsteps = 7\n")
    assert load_config(["gpt2-small-adamw-openwebtext"], "test").training.steps == 7
