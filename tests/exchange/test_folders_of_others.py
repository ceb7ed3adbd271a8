"""Folders as others leave them: what transformers loads has the same logits here, or one line."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.exchange.test_folder import SHAPE
from tests.support.commands import run_command
from tests.support.full import full_but
from tests.support.mistakes import mistake
from tests.support.tokenizers import letters, tokenizer_file
from torchmars.api import load
from torchmars.core.errors import UserError
from torchmars.data.tokenizer import load_tokenizer
from torchmars.exchange.folder import open_folder, other_tokenizer
from torchmars.exchange.tokenizer_files import tokenizer_files
from torchmars.exchange.weights import load_weights, weights_of_folder
from torchmars.models import build_meta_model

transformers = pytest.importorskip("transformers")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
EXPERTS = SHAPE | {"num_experts_per_tok": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
LATENT = EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 24}
LATENT |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12}
FAMILIES = {
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64},
    "llama": SHAPE,
    "mistral": SHAPE | {"sliding_window": 5},
    "ministral": SHAPE | {"sliding_window": 5, "layer_types": [FULL, SLIDING], "head_dim": 16},
    "olmo3": SHAPE | {"sliding_window": 5, "layer_types": [FULL, SLIDING]},
    "smollm3": SHAPE | {"no_rope_layer_interval": 2, "pad_token_id": None},
    "qwen2": SHAPE,
    "qwen3": SHAPE | {"head_dim": 16},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "glm4_moe": EXPERTS
    | {"n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 16, "use_qk_norm": True},
}
TOKENS = torch.randint(260, (1, 24), generator=torch.Generator().manual_seed(1))


def randomised(model):
    """A model with weights so large that a difference is seen."""
    generator = torch.Generator().manual_seed(0)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and "inv_freq" not in name:
            norm = "norm" in name or ".ln_" in name
            torch.nn.init.normal_(value, float(norm and "weight" in name), 0.3, generator)
    return model.eval()


@cache
def model_of(kind, tied=False):
    tie = {} if kind == "gpt2" else {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(kind, vocab_size=260, **FAMILIES[kind], **tie)
    return randomised(transformers.AutoModelForCausalLM.from_config(config))


def theirs_of(folder):
    """The logits of transformers, or why it has none."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            return None, "random weights"
        with torch.no_grad():
            return model(TOKENS).logits, ""
    except Exception as error:  # whatever it is: no logits
        return None, f"{type(error).__name__}: {error}"


def ours_of(folder):
    """Our logits, or the line with which a folder is refused."""
    found = []
    line = mistake(lambda: found.append(open_folder(folder)))
    if line:
        return None, line
    model = found[0].model.to_empty(device="cpu")
    load_weights(found[0].weights, model.state_dict())
    with torch.no_grad():
        return model.head(model(TOKENS)), ""


def tensors(change):
    """Change the tensors of a folder by their names."""

    def way(folder, model):
        values = change(load_file(folder / "model.safetensors"))
        values = {name: value.clone().contiguous() for name, value in values.items()}
        save_file(values, folder / "model.safetensors", {"format": "pt"})

    return way


def config(**changes):
    def way(folder, model):
        file = folder / "config.json"
        text = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in text.items() if value is not ...}))

    return way


def files(**contents):
    """Put files beside those of a folder; None takes one away."""

    def way(folder, model):
        for name, content in contents.items():
            name = name.replace("__", ".")
            if content is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(content)

    return way


def sharded(folder, model):
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3


def both(*ways):
    def way(folder, model):
        for each in ways:
            each(folder, model)

    return way


def stale_shards(folder, model):
    """Shards of other weights, and their index, beside the file of a newer save."""
    with torch.no_grad():
        values = {name: value.clone() for name, value in model.state_dict().items()}
        for value in model.parameters():
            value.mul_(0.5)
        model.save_pretrained(folder / "old", max_shard_size="20KB")
        for name, value in model.state_dict().items():
            value.copy_(values[name])
    for file in (folder / "old").glob("model*"):
        file.rename(folder / file.name)
    shutil.rmtree(folder / "old")


def as_links(folder, model):
    """As the cache of the hub has them."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../blobs/{number}")


def renamed(change):
    return tensors(lambda values: {change(name): value for name, value in values.items()})


def base(name):
    return name.removeprefix("model.").removeprefix("transformer.")


def fused(folder, model):
    model.save_pretrained(folder, save_original_format=False)


def mixed(values):
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return {name: value.to(kinds[n % 4]) for n, (name, value) in enumerate(values.items())}


def table_in(values):
    return next(name for name in values if name.endswith(("embed_tokens.weight", "wte.weight")))


def own_head(values):
    shape, generator = values[table_in(values)].shape, torch.Generator().manual_seed(2)
    return values | {"lm_head.weight": torch.randn(shape, generator=generator)}


def same_head(values):
    return values | {"lm_head.weight": values[table_in(values)]}


def head_alone(values):
    table = table_in(values)
    return {"lm_head.weight" if name == table else name: each for name, each in values.items()}


def bins(folder, model):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def named(name):
    return lambda folder, model: (folder / "model.safetensors").rename(folder / name)


def no_index(folder, model):
    sharded(folder, model)
    (folder / "model.safetensors.index.json").unlink()


def shard_gone(folder, model):
    sharded(folder, model)
    next(folder.glob("model-00002*")).unlink()


def index(change):
    def way(folder, model):
        sharded(folder, model)
        file = folder / "model.safetensors.index.json"
        text = json.loads(file.read_text())
        change(text)
        file.write_text(json.dumps(text))

    return way


def classifier(folder, model):
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=0)
    other = transformers.AutoModelForSequenceClassification.from_config(config)
    randomised(other).save_pretrained(folder)


def base_model(folder, model):
    model.base_model.save_pretrained(folder)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
ADAPTER = b'{"peft_type": "LORA", "base_model_name_or_path": "x"}'


def old_buffers(values):
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    more += ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")
    return values | {name: torch.ones(4) for name in more}


def padded(values):
    """More rows of the tables than config.json says."""
    return {
        name: torch.cat([value, value[:4]]) if len(value) == 260 else value
        for name, value in values.items()
    }


def as_dtype(dtype, names=("_proj", "c_", "w1")):
    def change(values):
        return {
            name: value.to(dtype) if any(each in name for each in names) else value
            for name, value in values.items()
        }

    return tensors(change)


def with_mark(folder, model):
    """As editors leave it, and a number that is none."""
    file = folder / "config.json"
    text = file.read_text().replace("{", '{"initializer_range": NaN,', 1)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())


def cut_off(folder, model):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def in_two_ways(values):
    return values | {base(n): each for n, each in values.items() if re.search("norm|ln_", n)}


# How a folder came to be, and the line that it is refused with, if it is: for each family.
WAYS = {
    "as it was saved": (lambda folder, model: None, ""),
    "shards": (sharded, ""),
    "shards beside a newer file": (stale_shards, ""),
    "links of a cache": (as_links, ""),
    "experts in stacks": (fused, ""),
    "a mark and a NaN": (with_mark, ""),
    "without prefix": (renamed(base), ""),
    "head with prefix": (renamed(lambda name: name.replace("lm_head", "model.lm_head")), ""),
    "dtypes mixed": (tensors(mixed), ""),
    "bfloat16": (tensors(lambda values: {n: each.bfloat16() for n, each in values.items()}), ""),
    "old buffers": (tensors(old_buffers), ""),
    "old buffers without prefix": (both(tensors(old_buffers), renamed(base)), ""),
    "index with a wrong size": (index(lambda text: text["metadata"].update(total_size=5)), ""),
    "index without metadata": (index(lambda text: text.pop("metadata")), ""),
    "others beside": (files(consolidated__safetensors=b"x", pytorch_model__bin=b"x"), ""),
    "no architectures": (config(architectures=...), ""),
    "null quantization_config": (config(quantization_config=None), ""),
    "code beside": (config(auto_map={"AutoModelForCausalLM": "modeling.X"}), ""),
    "dtype and torch_dtype": (config(dtype=..., torch_dtype="float16"), ""),
    "compiled": (renamed(lambda name: f"_orig_mod.{name}"), "save the model that is in _orig_mod"),
    "ddp": (renamed(lambda name: f"module.{name}"), "save the model that is in module"),
    "named twice": (tensors(in_two_ways), "are one weight: take one out"),
    "float8": (as_dtype(torch.float8_e4m3fn), "as F8_E4M3, where F32"),
    "int8": (as_dtype(torch.int8), "as I8, where F32"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "weights are quantised"),
    "padded": (tensors(padded), r"in shape \[264, 32\], the config's model in \[260, 32\]"),
    "pickles": (bins, "but pytorch_model.bin, .* save it with safe_serialization"),
    "a variant": (named("model.fp16.safetensors"), "but model.fp16.safetensors, .* this variant="),
    "Mistral's own": (named("consolidated.safetensors"), "no model.safetensors, but consolidated"),
    "no index": (no_index, "no model.safetensors.index.json that says"),
    "a shard is missing": (shard_gone, "has no model-00002-of-.*, which its .*index.json names"),
    "a file elsewhere": (
        both(named("other.safetensors"), config(transformers_weights="other.safetensors")),
        "but other.safetensors, which transformers does not read",
    ),
    "pointer of Git LFS": (files(model__safetensors=LFS), "pointer of Git LFS.* git lfs pull"),
    "config is a pointer": (files(config__json=LFS), "pointer of Git LFS.* git lfs pull"),
    "empty": (files(model__safetensors=b""), "it is empty: fetch it again"),
    "cut off": (cut_off, "cannot read .*model.safetensors"),
    "an adapter's config beside the merged model": (files(adapter_config__json=ADAPTER), ""),
    "adapter alone": (
        files(adapter_config__json=ADAPTER, config__json=None, model__safetensors=None),
        "an adapter of PEFT: .*merge_and_unload",
    ),
    "part of a model": (
        config(text_config={"model_type": "llama"}),
        "text_config is .* more than a model of text",
    ),
    "no part of a model": (config(text_config=None), ""),
    "tokens that see later ones": (config(is_causal=False), "its is_causal is False"),
}
# The same, of a head that is tied to the token table.
TIED = {
    "tied": (lambda folder, model: None, ""),
    "another head": (tensors(own_head), ""),
    "another head without prefix": (both(tensors(own_head), renamed(base)), ""),
    "the same head": (tensors(same_head), ""),
    "the same head, not tied": (both(tensors(same_head), config(tie_word_embeddings=False)), ""),
    "the head alone": (tensors(head_alone), ""),
    "the head alone, in shards": (both(tensors(head_alone), as_links), ""),
    "saved without head": (base_model, ""),
    "classifier": (classifier, "has score.weight, which no model of its config.json has"),
    "neither": (
        tensors(lambda values: {n: each for n, each in values.items() if each.shape[0] != 260}),
        "has no (model.embed_tokens|transformer.wte).weight, which its config.json asks for",
    ),
}
OWN_TABLE = "lm_head.weight has other values than its transformer.wte.weight: a GPT-2 here has"
EXCEPTIONS = {
    ("another head", "gpt2"): OWN_TABLE,
    ("another head without prefix", "gpt2"): OWN_TABLE,
    # transformers gives that theta to blocks without a window alone.
    ("theta alone", "olmo3"): "blocks with a window may differ by their scaling alone",
    ("scaling beside the table", "olmo3"): "may differ by their scaling alone",
    ("by layers", "olmo3"): "",
    ("the same head, not tied", "gpt2"): "its tie_word_embeddings is False: only models with True",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
LLAMAS = [kind for kind in FAMILIES if kind != "gpt2"]
# Those that transformers can scale by more than the width of a head: its Mixtral knows none.
SCALED = [kind for kind in LLAMAS if kind != "mixtral"]
QWENS = ["qwen2", "qwen3", "qwen3_moe"]


def scaled(**changes):
    table = LLAMA3 | {"original_max_position_embeddings": 8192} | changes
    return config(rope_scaling={key: each for key, each in table.items() if each is not ...})


# What config.json says, of which families.
CONFIGS = {
    "theta beside the table": (config(rope_theta=77.0), LLAMAS, ""),
    "theta alone": (config(rope_theta=77.0, rope_parameters=...), LLAMAS, ""),
    "scaling beside the table": (scaled(rope_theta=500.0), LLAMAS, ""),
    "factor without a type": (config(rope_scaling={"factor": 2.0}), LLAMAS, ""),
    "llama3 of another length": (scaled(original_max_position_embeddings=32), LLAMAS, ""),
    "llama3 of no length": (scaled(original_max_position_embeddings=...), LLAMAS, ""),
    "llama3, length beside": (
        both(scaled(), config(original_max_position_embeddings=32)),
        LLAMAS,
        "",
    ),
    "linear": (config(rope_scaling={"type": "linear", "factor": 2.0}), LLAMAS, ""),
    "yarn": (config(rope_scaling=YARN), SCALED, ""),
    "yarn of no length": (
        config(rope_scaling=YARN | {ORIGINAL: None}),
        LLAMAS,
        "original_.*: None",
    ),
    "yarn of no factor": (config(rope_scaling=YARN | {"factor": None}), SCALED, ""),
    "yarn, both scales": (
        config(rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 2.0}),
        SCALED,
        "",
    ),
    "yarn, attention": (config(rope_scaling=YARN | {"attention_factor": 0.7}), SCALED, ""),
    "yarn, factor of attention alone": (
        config(rope_scaling=YARN | {"factor": 1.0, "attention_factor": 0.7}),
        SCALED,
        "",
    ),
    "yarn of factor 0": (
        config(rope_scaling=YARN | {"factor": 0.0}),
        LLAMAS,
        "scaling_factor must",
    ),
    "yarn, not truncated": (config(rope_scaling=YARN | {"truncate": False}), LLAMAS, "truncate"),
    "dynamic": (config(rope_scaling=YARN | {"rope_type": "dynamic"}), SCALED, ""),
    "longrope": (config(rope_scaling={"rope_type": "longrope"}), LLAMAS, "longrope.* refuses"),
    "by layers": (config(rope_parameters={"full_attention": LLAMA3}), LLAMAS, "layers of types"),
    "swish": (config(hidden_act="swish"), LLAMAS, ""),
    "gelu": (config(hidden_act="gelu"), LLAMAS, "hidden_act is 'gelu'"),
    "windows": (
        config(use_sliding_window=True, sliding_window=4, max_window_layers=1, layer_types=...),
        [*QWENS, "smollm3"],
        "",
    ),
    "a window, switched off": (config(sliding_window=4), QWENS, ""),
    "a window": (config(sliding_window=4), ["mistral", "ministral", "mixtral"], ""),
    "a window of 0": (config(sliding_window=0), ["mistral"], "sliding_window is 0"),
    "no window": (config(sliding_window=None), ["mistral"], ""),
    "blocks that slide": (config(layer_types=[FULL, SLIDING]), ["mistral"], "model_type = minis"),
    "other blocks": (config(layer_types=[FULL, "chunked_attention"]), LLAMAS[2:4], "chunked_att"),
    "a block too few": (
        config(layer_types=[FULL]),
        ["ministral"],
        "must be equal to the number of",
    ),
    "blocks that turn": (config(no_rope_layers=[0, 1], layer_types=...), ["smollm3"], ""),
    "no blocks that turn": (config(no_rope_layers=[2, 1]), ["smollm3"], "must have 0 and 1"),
    "windows by layers": (
        config(layer_types=["full_attention", "sliding_attention"]),
        QWENS,
        "layer_types (has|is) 'sliding_attention'",
    ),
    "other weights of experts": (config(norm_topk_prob=True), ["qwen3_moe", "glm4_moe"], ""),
    "experts under another name": (
        config(num_experts=..., num_local_experts=4),
        ["qwen3_moe"],
        "",
    ),
    "two numbers of experts": (
        config(num_experts=4, num_local_experts=2),
        ["qwen3_moe", "mixtral"],
        "which is the same",
    ),
    "other names": (
        config(
            n_embd=...,
            n_head=...,
            n_layer=...,
            n_positions=...,
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=64,
        ),
        ["gpt2"],
        "",
    ),
    "two numbers of heads": (config(num_attention_heads=2), ["gpt2"], "which is the same, 4"),
    "scaled by layer": (config(scale_attn_by_inverse_layer_idx=True), ["gpt2"], ""),
    "exact GELU": (config(activation_function="gelu"), ["gpt2"], ""),
    "another eps": (config(layer_norm_epsilon=0.01), ["gpt2"], "layer_norm_epsilon is 0.01"),
    "biases": (
        config(attention_bias=True),
        ["llama", "qwen3", "deepseek_v3", "glm4_moe_lite"],
        "attention_bias is True",
    ),
    "an indexer": (config(index_topk=2048), ["deepseek_v3"], "its index_topk is 2048"),
    "small groups": (config(n_group=4), ["deepseek_v3"], "n_group = 4 needs two experts or more"),
    "few in groups": (
        config(num_experts_per_tok=3),
        ["deepseek_v3"],
        "topk_group = 1 of 2 groups leaves 2 experts, fewer than model.n_expert_used = 3",
    ),
    "other scores": (config(scoring_func="softmax"), ["deepseek_v3"], "scoring_func is 'softmax'"),
    "halves": (config(rope_interleave=False), ["deepseek_v3", "glm4_moe_lite"], ""),
    "width of what is rotated": (config(head_dim=8), ["deepseek_v3", "glm4_moe_lite"], ""),
    "another width": (config(head_dim=4), ["glm4_moe_lite"], "head_dim is 4, .* the same, 8"),
    "dense as in older files": (
        config(mlp_layer_types=..., first_k_dense_replace=1),
        ["glm4_moe_lite"],
        "",
    ),
    "dense last": (
        config(mlp_layer_types=["sparse", "dense"]),
        ["glm4_moe_lite"],
        "mlp_layer_types are .* first blocks are dense",
    ),
    "all dense": (config(mlp_only_layers=[0]), ["qwen3_moe"], r"mlp_only_layers is \[0\]"),
}
# Kinds that differ by their tensors: how files are laid out is the same for all others.
APART = [
    kind for kind in FAMILIES if kind not in {"mistral", "ministral", "smollm3", "glm4_moe_lite"}
]
CASES = [
    *((way, kind) for way in WAYS for kind in APART),
    *((way, kind) for way in TIED for kind in APART if (way, kind) != ("classifier", "glm4_moe")),
    *((way, kind) for way, (_, kinds, _) in CONFIGS.items() for kind in kinds),
]
QUICK = [
    ("shards beside a newer file", "llama"),
    ("links of a cache", "llama"),
    ("another head", "llama"),
    ("the head alone", "gpt2"),
]


@pytest.mark.parametrize("way,kind", full_but(QUICK, CASES))
def test_a_folder_has_the_logits_of_transformers_or_a_line_that_says_why(tmp_path, way, kind):
    change, *_, message = (WAYS | TIED | CONFIGS)[way]
    message = EXCEPTIONS.get((way, kind), message)
    folder, model = tmp_path / "model", model_of(kind, way in TIED)
    model.save_pretrained(folder)
    change(folder, model)
    ours, line = ours_of(folder)
    if message:
        assert ours is None and re.search(message, line), line
        assert f"{folder} cannot be opened: " in line
        return
    theirs, why = theirs_of(folder)
    if theirs is None:  # then it is none of weights
        assert re.match("OSError: .*config|KeyError: 'metadata'", why), why
        theirs = model(TOKENS).logits.detach()
    assert not line
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parts_of_the_ranks_of_others_name_what_makes_them_one_file(tmp_path):
    """And that does: what accelerate merges has the logits."""
    model, parts = model_of("llama"), tmp_path / "parts"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=parts, no_dist=True)
    model.config.save_pretrained(parts)
    assert "accelerate merge-weights FOLDER OUT" in ours_of(parts)[1]
    fsdp_utils.merge_fsdp_weights(str(parts), str(tmp_path / "whole"))
    model.config.save_pretrained(tmp_path / "whole")
    ours, line = ours_of(tmp_path / "whole")
    assert not line
    torch.testing.assert_close(ours, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name,remedy",
    [
        ("global_step7", "python zero_to_fp32.py FOLDER OUT --safe_serialization"),
        ("consolidated.00.pth", "fetch their folder for transformers, which has a config.json"),
        ("params.json", "fetch their folder for transformers, which has a config.json"),
        ("notes.txt", "has no model.safetensors: fetch it"),
    ],
)
def test_folders_without_weights_name_the_remedy(tmp_path, name, remedy):
    (tmp_path / "model" / name).mkdir(parents=True)
    assert remedy in ours_of(tmp_path / "model")[1]


@pytest.mark.parametrize("number", [259, 260])
def test_an_id_without_a_row_is_told_with_both_numbers(tmp_path, number):
    """As that of a token of padding that was added to a tokenizer."""
    model_of("llama").save_pretrained(tmp_path)
    tokenizer = letters(lambda letter: ord(letter) - 32)
    tokenizer.add_special_tokens([f"<{each}>" for each in range(96, number)] + ["<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    line = mistake(open_folder, tmp_path)
    told = "largest id of its tokenizer is 260, and the model has 260 rows" in line
    assert told == (number == 260) and bool(line) == told


def test_a_tokenizer_that_is_not_the_models_is_told(tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    model_of("llama").save_pretrained(folder)
    source = f"hf:{folder}"
    assert "model has no tokenizer.json: name the one" in other_tokenizer(source, "bytes")
    assert not other_tokenizer(source, "gpt2") and not other_tokenizer("runs/tiny", "bytes")
    code, out, err = run_command("import", [str(folder), "new.toml"], tmp_path)
    said = f"{folder} has no tokenizer.json: set data.tokenizer to the one"
    assert code == 0 and f"warning: {said}" in err and "plan" in out
    assert (tmp_path / "new.toml").read_text().startswith(f"# {said}")
    for name, text in tokenizer_files(load_tokenizer("bytes"), 64).items():
        (folder / name).write_text(text)
    assert not other_tokenizer(source, "bytes")  # other files, the same tokens
    file = tokenizer_file(other)
    assert f"other tokens than {folder}/tokenizer.json" in other_tokenizer(source, str(file))
    shutil.copy(file, folder / "tokenizer.json")
    assert not other_tokenizer(source, str(file))


def test_dynamic_positions_end_where_they_would_change(tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})(tmp_path, None)
    for name, text in tokenizer_files(load_tokenizer("bytes"), 64).items():
        (tmp_path / name).write_text(text)
    model = load(tmp_path)
    assert model.generate("The", max_tokens=61)
    with pytest.raises(UserError, match="are 65 tokens, and the rotary positions .* go to 64"):
        model.generate("The", max_tokens=62)


def test_the_settings_of_a_tokenizer_in_a_cache_are_found(tmp_path):
    """They lie beside the link, not beside the file that it leads to."""
    folder = tmp_path / "model"
    model_of("llama").save_pretrained(folder)
    tokenizer_file(folder, special="<stop>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    as_links(folder, None)
    name = open_folder(folder).tables["data"]["tokenizer"]
    assert load_tokenizer(name).end_of_text == 127


def test_another_head_is_told_and_the_run_is_not_tied(tmp_path, capsys):
    folder = tmp_path / "model"
    model_of("llama", tied=True).save_pretrained(folder)
    tensors(own_head)(folder, None)
    capsys.readouterr()
    found = open_folder(folder)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "lm_head.weight has other values: it is loaded as" in said
    assert found.tables["model"]["tied"] is False and "output.weight" in found.weights
    with pytest.raises(UserError, match="than its model.embed_tokens.weight: set model.tied = fal"):
        weights_of_folder(folder, build_meta_model(replace(found.config.model, tied=True), 1, 64))
    tensors(same_head)(folder, None)
    assert open_folder(folder).tables["model"]["tied"] is True
    assert not capsys.readouterr().err
