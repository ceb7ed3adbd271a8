"""Runs to folders of transformers and back, against transformers itself."""

from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, run_command
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint.inference import load_model
from torchmars.config.load import config_from_tables
from torchmars.config.toml_files import read_toml
from torchmars.data.manifest import read_manifest
from torchmars.data.order import window_of_sample
from torchmars.data.windows import Windows

transformers = pytest.importorskip("transformers")
LLAMA = {"name": "llama", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
MODELS = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "openai": {"bias": True, "activation": "gelu_tanh"},
    "llama": LLAMA | {"tied": False, "rope_scaling_factor": 8.0},
    "qwen2": LLAMA | {"qkv_bias": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 16},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Runs of one model of each kind, trained on two ranks, and what was exported of them."""
    folder = tmp_path_factory.mktemp("exports")
    write_text(folder)
    runs = {
        name: tiny_tables(folder, run={"name": name}, training={"steps": 2}, model=model)
        for name, model in MODELS.items()
    }
    train(2, *runs.values())
    for name, tables in runs.items():
        places = [str(run_folder_of(tables)), str(folder / name)]
        code, out, err = run_command("export", places, ROOT)
        assert code == 0 and f"{name}: " in out, err
    return {name: (run_folder_of(tables), folder / name) for name, tables in runs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_export_and_has_the_same_logits(exports, name):
    run, folder = exports[name]
    ours, _, config = load_model(run)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(257, (2, config.training.seq_len))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.head(ours(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-5
        )
    card = (folder / "README.md").read_text()
    assert f"# {name}" in card and "1,024" in card and "seed = 0" in card


STEP = {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.0}
CONFIGS = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
}
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def their_model(kind, folder):
    """A model of transformers with random weights, biases among them, saved to `folder`."""
    shape = CONFIGS[kind] | (SHAPE if kind != "gpt2" else {})
    config = transformers.AutoConfig.for_model(kind, vocab_size=260, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    return model


def imported(folder, tmp_path, name, **overrides):
    """The tables of a run of one step that starts from a model of transformers."""
    code, _, err = run_command("import", [str(folder), str(tmp_path / f"{name}.toml")], ROOT)
    assert code == 0, err
    tables = read_toml(tmp_path / f"{name}.toml")
    more = {
        "run": {"name": name},
        "model": tables["model"],
        "checkpoint": tables["checkpoint"] | {"interval": 0},
        "training": {"steps": 1},
        "optimizer": STEP,
        "schedule": {"name": "constant", "warmup_steps": 0},
    }
    return tiny_tables(tmp_path, **more | overrides)


def step_of_theirs(model, tables):
    """Make the run's step on `model` in plain torch."""
    config = config_from_tables(tables, "in a test")
    data = read_manifest(Path(config.data.path))
    windows = Windows(Path(config.data.path), data.splits["train"], data.dtype, 32)
    count = config.training.global_batch_size
    batch = torch.stack([windows[window_of_sample(n, len(windows), 0)] for n in range(count)])
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    options = {key: value for key, value in STEP.items() if key != "name"}
    torch.optim.AdamW(model.parameters(), **options).step()


LAYOUTS = {"fsdp": {}, "tp": {"tp": 2}}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_of_an_import_is_that_of_plain_torch(kind, tmp_path):
    write_text(tmp_path)
    theirs = their_model(kind, tmp_path / "theirs")
    runs = {
        name: imported(tmp_path / "theirs", tmp_path, name, parallelism=layout)
        for name, layout in LAYOUTS.items()
    }
    train(2, *runs.values())
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    step_of_theirs(theirs, runs["fsdp"])
    for name, tables in runs.items():
        target = tmp_path / f"export-{name}"
        code, _, err = run_command("export", [str(run_folder_of(tables)), str(target)], ROOT)
        assert code == 0, err
        ours = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
        for key, value in theirs.state_dict().items():
            change, error = value - before[key], ours[key] - value
            assert error.norm() <= 1e-4 * change.norm() + 1e-7, (name, key)
