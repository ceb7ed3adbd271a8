"""Runs to folders of transformers and back, against transformers itself."""

import pytest
import torch

from tests.support.commands import ROOT, run_command
from tests.support.tiny import run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint.inference import load_model

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


def start(config, folder, *options):
    code, out, err = run_command("import", [str(folder), str(config)], ROOT)
    assert code == 0, err
    return config


def weights_from(tables):
    """The whole weights that a run starts from."""
    config = config_from_tables(tables, "in a test")
    trainer = build_trainer(config, connection.start(config.parallelism))
    return {name: value.full_tensor() for name, value in trainer.model.weights.items()}
