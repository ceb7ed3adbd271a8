"""TOML file and overrides to a checked config, and one clear line for each mistake."""

import dataclasses
import re

import pytest

from tests.support.tiny import write_config
from torchmars.config import Config, Degrees, identity_fields, reported_sections
from torchmars.config.load import config_from_tables, load_config
from torchmars.config.model import MODELS, model_section, transfer_section
from torchmars.config.sections import sections_of
from torchmars.core.check import nearest
from torchmars.core.cli import settings_in
from torchmars.core.errors import UserError, exit_on_user_error


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
    assert not hasattr(config.optimizer, "gamma") and not hasattr(config.optimizer, "lr_1d")
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


ROLES = ("router", "embedding", "head", "vector")  # as optimizer.matrix, whose help is theirs


@pytest.mark.parametrize("model,rule", [("gpt2", "mars-adamw"), ("deepseek", "muon")])
def test_help_documents_every_field(capsys, model, rule):
    with pytest.raises(SystemExit) as ended:
        load_config(["--help", "all", "--model.name", model, "--optimizer.name", rule], "test")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    names = settings_in(sections_of(model, rule))
    settings = re.split(r"\n  --", text)
    found = [each.split()[0] for each in settings if "." in each.split()[0]]
    assert sorted(found) == sorted(
        name for name in names if not name.startswith(tuple(f"optimizer.{r}." for r in ROLES))
    )
    for each in settings[1:]:
        assert len(each.split()) > 2, f"{each} is not documented"
        assert each.count("Default:") <= 1 and "None" not in each
    steps = " ".join(next(each for each in settings if each.startswith("training.steps")).split())
    assert "Optimizer steps of the whole run" in steps and steps.endswith("Default: 300.")


def leaves(model="gpt2", rule="mars-adamw"):
    """Names of all fields but those that are TOML arrays of tables."""
    return [*settings_in(sections_of(model, rule))]


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
        (["--training-steps", "3"], "--training-steps 3: did you mean --training.steps?"),
        (["--training.stps", "3"], "key training.stps .* did you mean training.steps?"),
        (["--training.step", "3"], "key training.step .* did you mean training.steps?"),
        (["--lr", "3"], "unrecognized arguments: --lr 3: did you mean --optimizer.lr?"),
        (["--no", "3"], "unrecognized arguments: --no 3: see --help"),
        (["--training.qwxz", "3"], "key training.qwxz .* may be one of training.steps, train"),
        (["--training.steps", "many"], "training.steps must be a valid integer, got 'many'"),
        (["--training.steps", "1.5"], "training.steps must be a valid integer"),
        (["--training.steps", "3", "4"], "unrecognized arguments: 4: see --help"),
        (["--training.steps"], "--training.steps: expected one argument: see --help"),
        (["--training.steps", "0"], "training.steps must be greater than or equal to 1, got 0"),
        (["--training.compile", "maybe"], "training.compile must be a valid boolean"),
        (["--training.compile", "1"], "training.compile must be a valid boolean"),
        (["--training.dtype", "float8"], "must be 'auto', 'float32' or 'bfloat16', got 'float8'"),
        (["--optimizer.betas", "0.9"], "optimizer.betas needs 2 values, got"),
        (["--optimizer.betas", "0.9", "1.0"], r"optimizer.betas must be two numbers in \[0, 1\)"),
        (["--optimizer.lr", "0"], "optimizer.lr must be more than 0"),
        (["--optimizer.gamma", "-1"], "optimizer.gamma must be at least 0"),
        (["--optimizer.gamma", "nan"], "optimizer.gamma must be at least 0"),
        (["--training.z_loss", "nan"], "training.z_loss must be less than or equal to 1"),
        (
            ["--optimizer.name", "adamw", "--optimizer.gamma", "0.1"],
            'optimizer.gamma has no meaning for optimizer.name = "adamw"',
        ),
        (["--model.n_kv_head", "2"], 'model.n_kv_head has no meaning for model.name = "gpt2"'),
        (["--optimizer.name", "sgd"], r"optimizer.name must be one of .*got 'sgd' \(on the"),
        (["--optimizer.name", "adamW"], "got 'adamW': did you mean adamw?"),
        (["--model.name", "mamba"], r"got 'mamba' \(on the command line"),
        (["--schedule.min_lr", "1"], "schedule.min_lr = 1.0 is above optimizer.lr"),
        (["--schedule.decay_steps", "5"], "schedule.decay_steps has no meaning"),
        (["--schedule.power", "0.5"], "schedule.power has no meaning"),
        (["--parallelism.dp_shard", "0"], "parallelism.dp_shard must be -1"),
        (
            ["--parallelism.reshard_after_forward", "sometimes"],
            "reshard_after_forward must be a valid integer or must be 'auto', 'always' or 'never'",
        ),
        (
            ["--parallelism.reshard_after_forward", "2", "--parallelism.tp", "2"],
            "reshard_after_forward = 2 does not go with parallelism.tp: FSDP2",
        ),
        (["--run.name", "a/b"], "run.name must be one name"),
        (["--data.source", "text"], "data.files is empty"),
        (["--data.files", "a"], "data.files has no meaning"),
        (
            ["--data.validation_fraction", "0.9"],
            "data.validation_fraction must be less than or equal to 0.5",
        ),
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
    "words,value",
    [
        ("1e3", 1000),
        ("1000.0", 1000),
        ("--training.microbatch_size none", None),
        ("--training.compile", True),
        ("--training.compile true --training.compile FALSE", False),
        ("--training.max-grad-norm inf", float("inf")),
        ("--optimizer.betas 0.8,0.95", (0.8, 0.95)),
        ("--evaluation.tasks -a b", ["-a", "b"]),
        ("--evaluation.tasks", []),
        ("--validation.sample_prompt=--x", "--x"),
        ("--validation.sample_prompt -x", "-x"),
    ],
)
def test_words_become_values(words, value):
    words = words.split(" ") if words.startswith("--") else ["--training.steps", words]
    config = load_config(words, "test")
    section, name = words[0].partition("=")[0][2:].replace("-", "_").split(".")
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize(
    "toml,message",
    [
        ("[training]\nsteps = ", "is not valid TOML"),
        ("training = 3", "must be an object"),
        ("[training]\nsteps = true", "training.steps must be a valid integer, got True"),
        ("[training]\nsteps = 3.0", "training.steps must be a valid integer, got 3.0"),
        ("[run]\nname = 2020-01-01", "run.name must be a valid string, got datetime"),
        ("[optimizer]\nlr = true", "optimizer.lr must be a valid number, got True"),
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas needs 2 values, got"),
        ("[optimizer]\nweight_decay = 'x'\nbetas = []", "optimizer.betas needs 2 values, got"),
        ("[metrics]\nwandb = 1", "metrics.wandb must be a valid boolean, got 1"),
        ("[training]\nsteps = '3'", "training.steps must be a valid integer, got '3'"),
        ("lr = 1e-3", "unknown section lr .*config.toml.: did you mean optimizer.lr?"),
        ("qwxz = 3", "unknown section qwxz .*config.toml.: it may be one of run, model"),
        ("[trainning]\nsteps = 3", "section trainning .*config.toml.: did you mean training?"),
        ("[data]\nfiles = 'a'", "data.files must be a valid array"),
        ("[optimizer.embeding]\nlr = 1", "optimizer.embeding .*did you mean optimizer.embedding"),
        ("[optimizer.head]\nlr = -1.0", "optimizer.head.lr must be greater than or equal to 0"),
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
seed run.seed, steps training.steps, optimizer_lr optimizer.lr, run.plugin run.plugins
"""
# Of these each would be a guess.
GUESSES = "gpus optimizer.nesterov epochs training.block_size"


def test_the_setting_that_was_meant():
    pairs = [pair.split() for pair in MEANT.split(",")]
    for key, wanted in [*pairs, *((key, "") for key in GUESSES.split())]:
        assert nearest(key, leaves()) == wanted, key


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
        UserError, match=r"divide the 1 sequence of each .*over 12 ranks\): choose a divisor of 1"
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
        ("[training]\nstps = 5", "", "key training.stps .in .*first.toml.: did you mean"),
        ("", "[training]\nstps = 5", "key training.stps .in .*second.toml.: did you mean"),
        (
            "",
            "[run]\nseed = -1",
            r"run.seed must be greater than or equal to 0, got -1 \(in .*second.toml\)",
        ),
        ("[training]\nsteps = 5", "training = 3", r"training must be an object.*second.toml\)"),
    ],
)
def test_the_file_of_a_mistake_is_named(tmp_path, first, second, message):
    files = tmp_path / "first.toml", tmp_path / "second.toml"
    for file, text in zip(files, (first, second)):
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config([str(file) for file in files], "test")


def test_what_makes_a_run_the_same_run_is_marked():
    """Of all families together; each has its own alone."""
    shape = {
        *("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "n_inner", "n_expert"),
        *("n_dense", "n_expert_used", "n_expert_inner", "n_expert_shared"),
    }
    latent_shape = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
    shape |= {*latent_shape}
    latent = {*latent_shape, "n_group", "topk_group", "rope_interleave", "rope_logit_factor"}
    latent = {f"model.{name}" for name in latent}
    transfer = {f"transfer.{name}" for name in ("size", "depth", "decay", *shape)}
    found: set[str] = set()
    for name in MODELS:
        sections = {"model": model_section(name)(), "transfer": transfer_section(name)()}
        own = {*identity_fields(dataclasses.replace(Config(), **sections))}
        assert "model.rope_theta" in own or name == "gpt2"
        found |= own
    assert found == transfer | latent | {
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
