"""TOML file and overrides to a checked config, and one clear line for each mistake."""

import dataclasses
import functools
import re

import pytest

from tests.support.tiny import write_config
from torchmars.config import (
    Config,
    Degrees,
    identity_fields,
    reported_sections,
)
from torchmars.config.load import config_from_tables, load_config
from torchmars.core.errors import UserError, exit_on_user_error
from torchmars.core.typed import setting_meant


def load(tmp_path, toml, *args):
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_config([str(file), *args], "test")


def test_defaults_are_valid_and_resolved():
    config = load_config([], "test")
    assert (
        config.optimizer.lr == 6e-3
        and config.optimizer.lr_1d == 3e-3
        and config.optimizer.betas == (0.95, 0.99)
    )
    assert config.data.path == "data/stdlib-bytes"


def test_overrides_beat_the_file(tmp_path):
    config = load(
        tmp_path,
        "[training]\nsteps = 5\nseq_len = 64\n",
        "--training.steps",
        "7",
        "--optimizer.betas",
        "0.8",
        "0.9",
        "--training.microbatch_size=2",
        "--training.compile",
        "--data.source",
        "text",
        "--data.files",
        "a.txt",
        "b.txt",
        "--optimizer.weight-decay",
        "0",
        "--metrics.wandb",
        "True",
        "--run.name",
        "007",
    )
    assert (config.training.steps, config.training.seq_len, config.training.microbatch_size) == (
        7,
        64,
        2,
    )
    assert config.optimizer.betas == (0.8, 0.9) and config.optimizer.weight_decay == 0.0
    assert config.training.compile is True and config.metrics.wandb is True
    assert config.data.files == ["a.txt", "b.txt"] and config.run.name == "007"


def test_optimizer_defaults_follow_the_name():
    config = load_config(["--optimizer.name", "adamw"], "test")
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (
        6e-4,
        (0.9, 0.95),
        0.1,
    )
    assert config.optimizer.gamma is None and config.optimizer.lr_1d is None
    assert load_config(["--optimizer.lr", "0.01"], "test").optimizer.lr_1d == 0.005


def test_resolved_config_reads_back_the_same(tmp_path):
    for args in (
        [],
        ["--optimizer.name", "adamw"],
        ["--schedule.name", "wsd", "--training.max_grad_norm", "inf"],
        [
            "--data.source",
            "text",
            "--data.files",
            'odd "name".txt',
            "--validation.sample_prompt",
            'a\n"b"\t\\',
        ],
    ):
        config = load_config(args, "test")
        write_config(config, tmp_path / "resolved.toml")
        assert load_config([str(tmp_path / "resolved.toml")], "test") == config
        assert config_from_tables(dataclasses.asdict(config), "in a test") == config


def test_help_documents_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(["--help", "all"], "test")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    names = list(leaves(Config))
    settings = re.split(r"\n  --", text)
    assert [each.split()[0] for each in settings if "." in each.split()[0]] == names
    for each in settings[1:]:
        assert len(each.split()) > 4, f"{each} is not documented"
        assert each.count("Default:") <= 1 and "None" not in each
        default = functools.reduce(getattr, each.split()[0].split("."), Config())
        assert "Default:" in each or default in (None, "", [], {})
    assert "[[optimizer.groups]]" in text and "[[data.mixture]]" in text
    steps = " ".join(next(each for each in settings if each.startswith("training.steps")).split())
    assert "Optimizer steps of the whole run" in steps and steps.endswith("Default: 300.")


def leaves(owner, prefix=""):
    """Names of all fields but those that are TOML arrays of tables."""
    for knob in dataclasses.fields(owner):
        if dataclasses.is_dataclass(knob.default_factory):
            yield from leaves(knob.default_factory, f"{prefix}{knob.name}.")
        elif f"{prefix}{knob.name}" not in ("optimizer.groups", "data.mixture"):
            yield f"{prefix}{knob.name}"


GROUPS = """
[optimizer]
name = "mars-m"
[optimizer.embedding]
lr = 1e-3
[[optimizer.groups]]
pattern = "*.qkv.weight"
split = 3
[[optimizer.groups]]
pattern = "*.proj.weight"
rule = "muon"
lr = 2e-3
"""


def test_groups_of_the_optimizer(tmp_path):
    config = load(
        tmp_path, GROUPS, "--optimizer.vector.betas", "0.8", "0.9", "--optimizer.head.rule", "lion"
    )
    settings = config.optimizer.settings()
    assert settings["by_role"] == {
        "embedding": {"lr": 1e-3},
        "vector": {"betas": (0.8, 0.9)},
        "head": {"rule": "lion"},
    }
    assert settings["by_pattern"] == [
        ("*.qkv.weight", {"split": 3}),
        ("*.proj.weight", {"rule": "muon", "lr": 2e-3}),
    ]
    write_config(config, tmp_path / "resolved.toml")
    assert load_config([str(tmp_path / "resolved.toml")], "test") == config


@pytest.mark.parametrize(
    "args,message",
    [
        (["--data", "1"], "'--data': --data is a section: write --data.source .*--help data lists"),
        (["--trainin", "1"], "--training is a section: write --training.steps ..."),
        (
            ["--optimizer.head", "3"],
            "error: --optimizer.head is a section: write --optimizer.head.",
        ),
        (
            ["--data.mixture", "a"],
            r"data.mixture is an array of tables: write \[\[data.mixture\]\]",
        ),
        (["--training-steps", "3"], "'--training-steps': did you mean --training.steps?"),
        (["--training.stps", "3"], "unknown key training.stps .* did you mean training.steps?"),
        (["--lr", "3"], "cannot read the argument '--lr': did you mean --optimizer.lr?"),
        (["--no", "3"], "'--no': overrides look like --section.key value, see --help"),
        (["--resume"], "'--resume': the same command again goes on where the run stopped"),
        (["--training.qwxz", "3"], "unknown key training.qwxz .* may be one of steps, stop_after"),
        (["--trainig.steps", "3"], "unknown section trainig .* did you mean training?"),
        (["--training.steps", "many"], "training.steps must be a whole number, got 'many'"),
        (["--training.steps", "1.5"], "training.steps must be a whole number"),
        (["--training.steps", "0"], "training.steps must be at least 1, got 0"),
        (["--training.compile", "maybe"], "training.compile must be true or false"),
        (
            ["--training.dtype", "float8"],
            'training.dtype must be one of "auto", "float32", "bfloat16", got \'float8\'',
        ),
        (
            ["--optimizer.matrix_dtype", "float16"],
            'optimizer.matrix_dtype must be one of "auto", "bfloat16", "float32", got ',
        ),
        (["--optimizer.betas", "0.9"], "optimizer.betas must be 2 numbers"),
        (["--optimizer.betas", "0.9", "1.0"], r"optimizer.betas must be two numbers in \[0, 1\)"),
        (["--optimizer.lr", "0"], "optimizer.lr must be more than 0"),
        (["--optimizer.gamma", "-1"], "optimizer.gamma must be at least 0"),
        (
            ["--optimizer.name", "adamw", "--optimizer.gamma", "0.1"],
            'optimizer.gamma has no meaning for "adamw"',
        ),
        (["--optimizer.name", "sgd"], r"optimizer.name must be one of .*got 'sgd' \(on the"),
        (["--optimizer.name", "adamW"], "got 'adamW': did you mean adamw?"),
        (["--optimizer.head.rule", "Shampoo"], "did you mean mars-shampoo?"),
        (["--model.name", "l"], r"got 'l' \(on the command line"),
        (["--schedule.min_lr", "1"], "schedule.min_lr = 1.0 is above optimizer.lr"),
        (["--schedule.decay_steps", "5"], "schedule.decay_steps has no meaning"),
        (["--schedule.power", "0.5"], "schedule.power has no meaning"),
        (["--parallelism.dp_shard", "0"], "parallelism.dp_shard must be -1"),
        (
            ["--parallelism.reshard_after_forward", "sometimes"],
            'reshard_after_forward must be one of "auto", "always", "never", or a whole number',
        ),
        (
            ["--parallelism.reshard_after_forward", "2", "--parallelism.tp", "2"],
            "reshard_after_forward = 2 does not go with parallelism.tp: FSDP2",
        ),
        (["--run.name", "a/b"], "run.name must be one folder name"),
        (["--data.source", "text"], "data.files is empty"),
        (["--data.files", "a"], "data.files has no meaning"),
        (
            ["--data.validation_fraction", "0.9"],
            "data.validation_fraction must be more than 0 and at most 0.5",
        ),
        (["steps=3"], "config steps=3: did you mean --training.steps 3?"),
        (["-optimizer.lr", "1"], "config -optimizer.lr: did you mean --optimizer.lr?"),
        (["none=3"], "the config none=3: No such file or directory: name a TOML file"),
    ],
)
def test_mistakes_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as ended, exit_on_user_error():
        load_config(args, "test")
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and re.search(message, printed)


@pytest.mark.parametrize(
    "toml,message",
    [
        ("[training]\nsteps = ", "is not valid TOML"),
        ("training = 3", "must be a table"),
        ("[training]\nsteps = true", "training.steps must be a whole number, got True"),
        ("[training]\nsteps = 3.0", "training.steps must be a whole number, got 3.0"),
        ("[run]\nname = 2020-01-01", "run.name must be a string, got datetime"),
        ("[optimizer]\nlr = true", "optimizer.lr must be a number, got True"),
        ("[optimizer]\nbetas = [0.9]", r"optimizer.betas must be 2 numbers, got \[0.9\]"),
        ("[metrics]\nwandb = 1", "metrics.wandb must be true or false, got 1"),
        (
            "[training]\nsteps = '3'",
            "training.steps must be a whole number, got '3': write it without quotes",
        ),
        ("[optimizer]\nlr = '1e-3'", "must be a number, got '1e-3': write it without quotes"),
        ("[optimizer]\nbetas = ['0.9', 1]", "got '0.9': write it without quotes"),
        ("[training]\ncompile = 'true'", "must be true or false, got 'true': write it without"),
        ("[training]\nsteps = '1e3'", r"must be a whole number, got '1e3' \(in"),
        ("lr = 1e-3", "unknown key lr in .*config.toml: did you mean lr, a setting of .optimizer."),
        ("qwxz = 3", "unknown key qwxz in .*config.toml: it may be one of run, model"),
        (
            "[trainning]\nsteps = 3",
            "unknown section trainning in .*config.toml: did you mean training?",
        ),
        ("[data]\nfiles = 'a'", "data.files must be a list of strings"),
        ("[run]\nname = 3", "run.name must be a string, got 3"),
        (
            "[optimizer.embeding]\nlr = 1",
            "unknown key optimizer.embeding in .*: did you mean optimizer.embedding?",
        ),
        ("[optimizer.head]\nlr = -1.0", "optimizer.head.lr must be at least 0"),
        ("[optimizer.vector]\ngamma = 0.1", 'optimizer.vector.gamma has no meaning for "adamw"'),
        ("[[optimizer.groups]]\nlr = 1.0", "optimizer.groups needs a pattern"),
        (
            "[[optimizer.groups]]\npattern = 'a'\nrule = 'sgd'",
            "optimizer.groups.rule must be one of",
        ),
        ("[optimizer]\nname = 'muon'\nmode = 'exact'", "optimizer.mode has no meaning"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, toml, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, toml)


# Keys, each with the setting that it was meant to be.
MEANT = """
schedule.lr optimizer.lr, schedule.steps training.steps, model.n_layers model.n_layer,
optimizer.Weight-Decay optimizer.weight_decay, training.weight_decay optimizer.weight_decay,
optimizer.embeding optimizer.embedding, seed run.seed, steps training.steps,
optimiser optimizer, schedular schedule, checkpoints checkpoint, optimizer_lr optimizer.lr
"""
# Of these each would be a guess.
GUESSES = "guards.spike gpus data.tokens optimizer.nesterov epochs training.block_size"


def test_the_setting_that_was_meant():
    pairs = [pair.split() for pair in MEANT.split(",")]
    for key, wanted in [*pairs, *((key, "") for key in GUESSES.split())]:
        *above, name = key.split(".")
        assert setting_meant(Config, above, name) == wanted, key


def test_batch_and_layout_that_do_not_divide_are_refused_with_the_numbers():
    config = load_config(["--training.global_batch_size", "12"], "test")
    assert config.training.microbatches(4) == (3, 1)
    training = dataclasses.replace(config.training, microbatch_size=2)
    assert training.microbatches(2) == (2, 3)
    with pytest.raises(
        UserError, match="microbatch_size = 2 does not divide the 3 sequences .* 12 over 4 ranks"
    ):
        training.microbatches(4)
    with pytest.raises(
        UserError, match=r"divide the 1 sequence of each .*over 12 ranks\): choose 1"
    ):
        training.microbatches(12)
    with pytest.raises(UserError, match="global_batch_size = 12 does not divide over 5"):
        training.microbatches(5)
    parallelism = dataclasses.replace(config.parallelism, dp_replicate=2)
    assert parallelism.degrees(8) == Degrees(dp_replicate=2, dp_shard=4)
    with pytest.raises(UserError, match="dp_replicate = 2.* does not divide 5 ranks"):
        parallelism.degrees(5)
    parallelism = dataclasses.replace(parallelism, dp_shard=3)
    with pytest.raises(UserError, match="dp_shard = 3 does not make 8 ranks"):
        parallelism.degrees(8)


def test_of_several_files_the_later_one_wins(tmp_path):
    size, rule = tmp_path / "size.toml", tmp_path / "rule.toml"
    size.write_text("[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nname = 'mars-m'\nlr = 1.0\n")
    rule.write_text("[optimizer]\nname = 'lion'\n[training]\nsteps = 6\n")
    config = load_config([str(size), str(rule), "--training.seq_len", "32"], "test")
    assert (config.training.steps, config.training.seq_len) == (6, 32)
    assert (config.optimizer.name, config.optimizer.lr) == ("lion", 1.0)


@pytest.mark.parametrize(
    "first,second,message",
    [
        ("[training]\nstps = 5", "", "unknown key training.stps in .*first.toml: did you mean"),
        ("", "[training]\nstps = 5", "unknown key training.stps in .*second.toml: did you mean"),
        ("", "[run]\nseed = -1", r"run.seed must be at least 0, got -1 \(in .*second.toml\)"),
        ("[training]\nsteps = 5", "training = 3", r"training must be a table.*second.toml\)"),
    ],
)
def test_the_file_of_a_mistake_is_named(tmp_path, first, second, message):
    files = tmp_path / "first.toml", tmp_path / "second.toml"
    for file, text in zip(files, (first, second)):
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config([str(file) for file in files], "test")


def test_what_makes_a_run_the_same_run_is_marked():
    shape = {
        *("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "n_inner", "n_expert"),
        *("n_dense", "n_expert_used", "n_expert_inner", "n_expert_shared"),
    }
    latent_shape = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
    shape |= {*latent_shape}
    latent = {*latent_shape, "n_group", "topk_group", "rope_interleave", "rope_logit_factor"}
    latent = {f"model.{name}" for name in latent}
    transfer = {f"transfer.{name}" for name in ("size", "depth", "decay", *shape)}
    assert {*identity_fields()} == transfer | latent | {
        "run.seed",
        "model.name",
        "model.size",
        "model.n_layer",
        "model.n_head",
        "model.n_kv_head",
        "model.head_dim",
        "model.n_embd",
        "model.n_inner",
        "model.vocab_size",
        "model.rope_theta",
        "model.rope_scaling_factor",
        "model.rope_scaling",
        "model.rope_original_len",
        "model.rope_beta_fast",
        "model.rope_beta_slow",
        "model.rope_attention_factor",
        "model.rope_blocks",
        "model.window",
        "model.window_blocks",
        "model.rotary_fraction",
        "model.norm_eps",
        "model.qk_norm",
        "model.qk_norm_whole",
        "model.post_norms",
        "model.qkv_bias",
        "model.tied",
        "model.n_expert",
        "model.n_dense",
        "model.n_expert_used",
        "model.n_expert_inner",
        "model.n_expert_shared",
        "model.router",
        "model.norm_topk_prob",
        "model.routed_scaling",
        "model.bias",
        "model.activation",
        "model.scale_attn_by_inverse_layer_idx",
        "data.tokenizer",
        "data.begin_token",
        "data.separate_documents",
        "data.packing",
        "training.seq_len",
        "training.deterministic",
        "optimizer.name",
        "optimizer.mode",
        "optimizer.momentum_dtype",
        "optimizer.last_grad_dtype",
    }
    assert reported_sections() == ["model", "training", "optimizer", "schedule", "guards"]
