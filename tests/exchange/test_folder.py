"""Runs to folders of transformers and back, against transformers itself."""

import copy
import json
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_latent import DENSE
from tests.models.test_moe import GLM
from tests.support.commands import ROOT, run_command
from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.their_models import model_of, randomised
from tests.support.tiny import (
    listen_here,
    run_folder_of,
    tiny_tables,
    train,
    train_here,
    write_text,
)
from torchmars.config import (
    ActivationCheckpointConfig,
    ParallelismConfig,
    TrainingConfig,
    model_config,
)
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.data.manifest import read_manifest
from torchmars.data.order import Shares, places_of
from torchmars.data.tokenizer import load_tokenizer
from torchmars.data.windows import MixedWindows, Windows
from torchmars.evaluation.sampling import Draw, predict_with_cache, sample
from torchmars.exchange.export import export as export_models
from torchmars.exchange.families import to_config
from torchmars.exchange.saved_model import load_model, open_folder, open_model, open_source
from torchmars.exchange.tokenizer_files import tokenizer_files
from torchmars.exchange.weights import (
    load_weights,
    tensors_there,
    weights_of_folder,
    write_weights,
)
from torchmars.models import build_meta_model, build_model
from torchmars.parallel.layout import Layout
from torchmars.parallel.parallel_model import ParallelModel

transformers = pytest.importorskip("transformers")
LLAMA = {"name": "llama", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_inner": 48}
# A prompt and 50 tokens fit, and no token that is drawn is nearly as likely as another.
LENGTH, SPREAD = 64, 0.2
LATENT = {"name": "deepseek", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": 48}
LATENT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 12}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
MODELS = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "openai": {"bias": True, "activation": "gelu_tanh"},
    "llama": LLAMA | {"tied": False, "rope_scaling_factor": 8.0},
    "smollm3": LLAMA | {"rope_blocks": "rn", "window": 9, "window_blocks": "fs"},
    "olmo3": LLAMA
    | {"window": 9, "window_blocks": "sf", "post_norms": True, "qk_norm": True}
    | {"qk_norm_whole": True, "rope_theta": 77.0, "rope_blocks": "ur", "rope_original_len": 32}
    | {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
    "qwen2": LLAMA | {"qkv_bias": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 16},
}
# test_configs.py has the names and configs of all: these differ by what an export writes of them.
EXPORTED = ("gpt2", "openai", "olmo3", "qwen2", "qwen3")


def write_random_weights(tables):
    """Write weights for the run of `tables` to start from."""
    model = build_model(config_from_tables(tables, "in a test").model, 257, LENGTH)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: SPREAD * torch.randn(parameter.shape, generator=generator)
        + float("norm" in name and name.endswith("weight"))
        for name, parameter in model.named_parameters()
    }
    save_file(weights, tables["checkpoint"]["init_from"])


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Runs of some models, trained on two ranks, and what was exported of them."""
    folder = tmp_path_factory.mktemp("exports")
    write_text(folder)
    runs = {
        name: tiny_tables(
            folder,
            run={"name": name},
            training={"steps": 2, "seq_len": LENGTH},
            model=model,
            checkpoint={"interval": 1, "init_from": str(folder / f"{name}.safetensors")},
        )
        for name, model in ((name, MODELS[name]) for name in EXPORTED)
    }
    for tables in runs.values():
        write_random_weights(tables)
    train(2, *runs.values())
    for name, tables in runs.items():
        run, target = run_folder_of(tables), folder / name
        if name != "qwen2":
            export_models(open_model(run), target)
            continue
        code, out, err = run_command("export", [str(run), str(target)], ROOT)
        assert code == 0 and f"{name}: " in out, err
        assert "AutoTokenizer of transformers 5 reads the tokenizer of a qwen2 model" in out
    return {name: (run_folder_of(tables), folder / name) for name, tables in runs.items()}


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_loads_an_export_and_has_the_same_logits_and_tokens(exports, name):
    run, folder = exports[name]
    ours, tokenizer, _ = load_model(run)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            ours.head(ours(tokens)), theirs(tokens).logits, rtol=1e-5, atol=1e-5
        )
    there = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = there("The old fox", return_tensors="pt").input_ids
    assert prompt.tolist() == [tokenizer.encode("The old fox").tolist()]
    assert theirs.generation_config.eos_token_id == there.eos_token_id == tokenizer.end_of_text
    theirs.generation_config.eos_token_id = None  # 50 tokens in any case
    padding = range(257, ours.vocab_rows)  # rows of the table that no token has
    theirs.generation_config.suppress_tokens = list(padding)
    predict = predict_with_cache(ours, LENGTH)
    drawn = sample(predict, prompt.tolist(), 50, vocab_size=257, draw=Draw(temperature=0))
    expected = theirs.generate(prompt, max_new_tokens=50, do_sample=False)[0, prompt.shape[1] :]
    assert [token for (token,) in drawn] == expected.tolist()
    assert "seed = 0" in (folder / "torchmars.toml").read_text()


def trained_and_refused(tables, *others):
    """Train a run; return what others print on the same rank, the error of each in the end."""
    train_here(tables)
    return [listen_here(each) for each in others]


DEEPSEEKS = {
    "deepseek": LATENT | DENSE,
    "deepseek without latents of queries": LATENT | DENSE | {"q_lora_rank": 0},
}
# Half as wide and a fourth as deep, with heads of half the width: no multiplier is 1.
BASES = {
    "openai": {"n_head": 2, "n_embd": 16, "n_layer": 1},
    "qwen3": {"n_head": 4, "n_embd": 16, "n_inner": 24, "head_dim": 8, "n_layer": 1},
    "deepseek": {"n_embd": 16, "n_inner": 24, "n_layer": 1, "q_lora_rank": 12, "kv_lora_rank": 8}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    "deepseek without latents of queries": {"n_embd": 16, "n_layer": 1, "qk_nope_head_dim": 8},
}


@pytest.mark.parametrize("name", full_but(["qwen3"], BASES))
def test_a_model_with_a_base_is_exported_without_multipliers(name, tmp_path):
    write_text(tmp_path)

    def tables_of(run, transfer, **overrides):
        training = {"steps": 2, "seq_len": LENGTH, "ema_decay": 0.5}
        shape = (MODELS | DEEPSEEKS)[name] | {"n_layer": 4}
        sections = {"training": training, "model": shape, "transfer": transfer} | overrides
        return tiny_tables(tmp_path, run={"name": run}, **sections)

    run, base = tmp_path / "runs" / "large", BASES[name] | {"depth": "1/L"}
    others = [
        tables_of("other", BASES[name], checkpoint={"init_from": str(run)}),
        tables_of("large", BASES[name]),
    ]
    [[other, large]] = run_ranks(trained_and_refused, 1, tables_of("large", base), *others)
    ours, _, _ = load_model(run)
    applied = ours.args.multipliers
    assert all(value < 1 for value in applied)
    assert f"multiplies by {applied}, the config's by logits 0.5, residual 1, attention" in other
    assert "transfer.depth = 1/L, the config says none: set it back" in large
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = []
    for average in (False, True):
        saved, target = open_model(run, average=average), tmp_path / f"theirs-{average}"
        export_models(saved, target)
        ours.load_state_dict({key: saved.read(key) for key in ours.state_dict()})
        theirs = transformers.AutoModelForCausalLM.from_pretrained(target)
        with torch.no_grad():
            # In float64 what is left is the rounding of the folded weights, which are float32.
            expected, found = ours.double().head(ours(tokens)), theirs.double()(tokens).logits
        apart = (found - expected).abs().max() / expected.abs().max()
        assert apart < 4e-7
        logits.append(found)
    assert not torch.allclose(*logits, rtol=1e-2, atol=1e-4)
    with pytest.raises(UserError, match="multiplies by logits 1, residual 1, .* or remove"):
        open_source(f"hf:{target}", ours)


def state_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_a_step_is_that_of_its_checkpoint(exports, tmp_path):
    run, last = exports["qwen3"]
    code, _, err = run_command("export", [str(run), "first", "--step", "1"], tmp_path)
    assert code == 0, err
    first, last = map(state_of, (tmp_path / "first", last))
    assert not any(torch.equal(first[name], last[name]) for name in last)
    with pytest.raises(UserError, match="has no checkpoint of step 3: there are 1, 2"):
        open_model(run, 3)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_files_of_a_size_hold_all_weights_in_a_dtype(exports, name, tmp_path):
    run, folder = exports[name]
    export_models(open_model(run), tmp_path / "parts", "hf", "bfloat16", 20_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    total = 0
    for file in files:
        tensors = load_file(file)
        assert all(index["weight_map"][each] == file.name for each in tensors)
        sizes = [value.nbytes for value in tensors.values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
        total += sum(sizes)
    assert total == index["metadata"]["total_size"]
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "parts", dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for key, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, whole[key].bfloat16())


EXPERTS = {"n_expert": 4, "n_expert_used": 2, "n_expert_inner": 24}
MIXTURES = {
    "qwen3_moe": LLAMA | EXPERTS | {"qk_norm": True},
    "mixtral": LLAMA | EXPERTS,
    "glm4_moe": LLAMA | EXPERTS | GLM | {"n_layer": 3, "routed_scaling": 2.5},
    "deepseek_v3": LATENT | EXPERTS | {"n_layer": 3, "n_group": 2, "topk_group": 1},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_go_there_and_back(name, tmp_path):
    """In files of a size, with a tensor for each expert: transformers has the same logits of what
    is written, and we read the same bits of what it writes."""
    ours = build_model(model_config(tied=False, **MIXTURES[name]), 257, LENGTH)
    state = randomised(ours, SPREAD).state_dict()
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    write_weights(first, tensors_there(ours, torch.float32, state.__getitem__), 20_000)
    assert len(list(first.glob("*.safetensors"))) > 3
    config = to_config(ours)
    assert config["model_type"] == name
    (first / "config.json").write_text(json.dumps(config))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        first, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(257, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.head(ours(tokens)), expected, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(again)
    back = {key: torch.empty_like(value) for key, value in state.items()}
    load_weights(weights_of_folder(again, ours), back)
    assert all(torch.equal(value, state[key]) for key, value in back.items())


def whole_on(parallelism, folder, **model):
    """The weights that ranks of a layout read from a folder, gathered, and this rank's biases."""
    parallelism = ParallelismConfig(**parallelism)
    ranks = torch.distributed.get_world_size()
    layout = Layout.create(torch.device("cpu"), parallelism.degrees(ranks))
    whole = build_meta_model(model_config(**model), 257, LENGTH)
    training, kept = TrainingConfig(seq_len=LENGTH, dtype="float32"), ActivationCheckpointConfig()
    ours = ParallelModel(whole, parallelism, training, kept, layout, torch.device("cpu"))
    load_weights(weights_of_folder(folder, whole), ours.tensors)
    return {name: value.full_tensor() for name, value in ours.weights.items()} | ours.buffers


@FULL
@pytest.mark.parametrize("ep", [2, 4])
def test_each_rank_reads_its_own_experts(tmp_path, ep):
    model = build_model(model_config(**MIXTURES["glm4_moe"]), 257, LENGTH)
    state, generator = model.state_dict(), torch.Generator().manual_seed(0)
    for value in state.values():
        torch.nn.init.normal_(value, 0, 1, generator)
    write_weights(tmp_path, tensors_there(model, torch.float32, state.__getitem__))
    settings = {"ep": ep}, tmp_path
    for found in run_ranks(partial(whole_on, **MIXTURES["glm4_moe"]), 4, *settings):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_memory_holds_the_tensors_of_a_file_and_the_next(tmp_path):
    model, held = build_model(model_config(**MIXTURES["glm4_moe"]), 257, LENGTH), []
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    most = 20_000

    def read(name):
        alive = [array().nbytes for array in held if array() is not None]
        largest = 4 * max(shape.numel() for shape in shapes.values())
        assert sum(alive) <= most + 2 * largest, name
        values = np.ones(shapes[name], np.float32)
        held.append(weakref.ref(values))  # it lives as long as the tensor's memory is used
        return torch.from_numpy(values)

    write_weights(tmp_path, tensors_there(model, torch.float32, read), most)
    assert len(held) == len(shapes)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("layer,message", [(2, ""), (3, "layers.3.x, which no model")])
def test_a_layer_that_predicts_the_token_after_the_next_is_left_out(tmp_path, layer, message, name):
    """As these are published with one behind the last; no other may follow."""
    model = build_model(model_config(**MIXTURES[name] | {"n_layer": 2}), 257, LENGTH)
    assert to_config(model)["num_nextn_predict_layers"] == 0  # the class of DeepSeek-V3 has 1
    state = model.state_dict()
    write_weights(tmp_path, tensors_there(model, torch.float32, state.__getitem__))
    more = {f"model.layers.{layer}.x": torch.ones(1)}
    save_file(load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message) if message else nullcontext():
        assert weights_of_folder(tmp_path, model).keys() == state.keys()


STEP = {"name": "adamw", "lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.0}


def their_model(kind, folder):
    """A model of transformers, saved to `folder` in shards, with a tokenizer."""
    model = copy.deepcopy(model_of(kind))
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    for name, text in tokenizer_files(load_tokenizer("bytes"), 32).items():
        (folder / name).write_text(text)
    return model


def imported(folder, tmp_path, name, **overrides):
    """The tables of a run of one step that starts from a model of transformers."""
    tables = open_folder(folder).tables
    more = {
        "run": {"name": name},
        "model": tables["model"],
        "data": tables["data"],
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
    places = places_of(Shares(), [len(windows)], 0, np.arange(count))
    batch = MixedWindows([windows]).batch(places)
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    options = {key: value for key, value in STEP.items() if key != "name"}
    torch.optim.AdamW(model.parameters(), **options).step()


LAYOUTS = {"fsdp": {}, "tp": {"tp": 2}}


@pytest.mark.parametrize("kind", full_but(["qwen3"], ["gpt2", "mistral", "qwen3"]))
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
        export_models(open_model(run_folder_of(tables)), target)
        ours = state_of(target)
        for key, value in theirs.state_dict().items():
            change, error = value - before[key], ours[key] - value
            assert error.norm() <= 1e-4 * change.norm() + 1e-7, (name, key)
