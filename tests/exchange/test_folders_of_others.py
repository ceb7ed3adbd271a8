"""Folders as others leave them: what transformers loads has the same logits here, or one line."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests.support.full import full_but
from tests.support.mistakes import mistake
from tests.support.their_models import FULL, KINDS, SLIDING, model_of, randomised
from torchmars.core.errors import UserError
from torchmars.exchange.saved_model import open_folder
from torchmars.exchange.weights import load_weights, weights_of_folder
from torchmars.models import build_meta_model

transformers = pytest.importorskip("transformers")
fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
TOKENS = torch.randint(260, (1, 24), generator=torch.Generator().manual_seed(1))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def theirs_of(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]  # none is random
    with torch.no_grad():
        return model(TOKENS).logits


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


# Ways to change a folder that transformers wrote of a model.


def both(*ways):
    return lambda folder, model: [way(folder, model) for way in ways]


def tensors(change):
    """Change the tensors of a folder by their names."""

    def way(folder, model):
        values = change(load_file(folder / WEIGHTS))
        values = {name: value.clone().contiguous() for name, value in values.items()}
        save_file(values, folder / WEIGHTS, {"format": "pt"})

    return way


def renamed(change):
    return tensors(lambda values: {change(name): value for name, value in values.items()})


def each(change):
    return tensors(lambda values: {name: change(value) for name, value in values.items()})


def edited(folder, name, change):
    text = json.loads((folder / name).read_text())
    change(text)
    (folder / name).write_text(json.dumps(text))


def config(**changes):
    """Change keys of config.json; ... takes one away."""

    def change(text):
        text |= changes
        for key in [key for key, value in text.items() if value is ...]:
            del text[key]

    return lambda folder, model: edited(folder, "config.json", change)


def files(**contents):
    """Put files into a folder, with "__" for a dot."""
    return lambda folder, model: [
        (folder / name.replace("__", ".")).write_bytes(content)
        for name, content in contents.items()
    ]


def without(*names):
    return lambda folder, model: [(folder / name).unlink() for name in names]


def named(name):
    return lambda folder, model: (folder / WEIGHTS).rename(folder / name)


def sharded(folder, model):
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3


def index(change):
    return both(sharded, lambda folder, model: edited(folder, INDEX, change))


def stale_shards(folder, model):
    """Shards of other weights, and their index, beside the file of a newer save."""
    (folder / WEIGHTS).rename(folder / "kept")
    sharded_halves = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.save_pretrained(folder, max_shard_size="20KB", state_dict=sharded_halves)
    assert (folder / INDEX).exists()
    (folder / "kept").rename(folder / WEIGHTS)


def as_links(folder, model):
    """As the cache of the hub has them."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../blobs/{number}")


def base(name):
    return name.removeprefix("model.").removeprefix("transformer.")


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
    return {"lm_head.weight" if name == table else name: one for name, one in values.items()}


def bins(folder, model):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def shard_gone(folder, model):
    sharded(folder, model)
    next(folder.glob("model-00002*")).unlink()


def classifier(folder, model):
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=0)
    other = transformers.AutoModelForSequenceClassification.from_config(config)
    randomised(other).save_pretrained(folder)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
ADAPTER = b'{"peft_type": "LORA", "base_model_name_or_path": "x"}'


def old_buffers(values):
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    more += ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")
    return values | {name: torch.ones(4) for name in more}


def as_dtype(dtype):
    return each(lambda value: value.to(dtype) if value.dim() == 2 and len(value) < 260 else value)


def with_mark(folder, model):
    """As editors leave it, and a number that is none."""
    file = folder / "config.json"
    text = file.read_text().replace("{", '{"initializer_range": NaN,', 1)
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())


def cut_off(folder, model):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def in_two_ways(values):
    return values | {base(name): one for name, one in values.items() if re.search("norm|ln_", name)}


# How a folder came to be. First what is loaded, whatever the names and shapes of tensors are.
OF_TENSORS = {
    "as it was saved": lambda folder, model: None,
    "shards": sharded,
    "experts in stacks": lambda folder, model: model.save_pretrained(
        folder, save_original_format=False
    ),
    "without prefix": renamed(base),
    "head with prefix": renamed(lambda name: name.replace("lm_head", "model.lm_head")),
    "dtypes mixed": tensors(mixed),
    "bfloat16": each(torch.Tensor.bfloat16),
    "old buffers": tensors(old_buffers),
    "old buffers without prefix": both(tensors(old_buffers), renamed(base)),
}
OF_FILES = {
    "shards beside a newer file": stale_shards,
    "links of a cache": as_links,
    "a mark and a NaN": with_mark,
    "index with a wrong size": index(lambda text: text["metadata"].update(total_size=5)),
    "index without metadata": index(lambda text: text.pop("metadata")),
    "others beside": files(consolidated__safetensors=b"x", pytorch_model__bin=b"x"),
    "an adapter's config beside the merged model": files(adapter_config__json=ADAPTER),
    "no architectures": config(architectures=...),
    "null quantization_config": config(quantization_config=None),
    "code beside": config(auto_map={"AutoModelForCausalLM": "modeling.X"}),
    "dtype and torch_dtype": config(dtype=..., torch_dtype="float16"),
    "no part of a model": config(text_config=None),
}
# Then what is not, and the line that says why.
REFUSED = {
    "compiled": (renamed(lambda name: f"_orig_mod.{name}"), "save the model that is in _orig_mod"),
    "ddp": (renamed(lambda name: f"module.{name}"), "save the model that is in module"),
    "named twice": (tensors(in_two_ways), "are one weight: take one out"),
    "float8": (as_dtype(torch.float8_e4m3fn), "as F8_E4M3, where F32"),
    "int8": (as_dtype(torch.int8), "as I8, where F32"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "weights are quantised"),
    "padded": (
        each(lambda value: torch.cat([value, value[:4]]) if len(value) == 260 else value),
        r"in shape \[264, 32\], the config's model in \[260, 32\]",
    ),
    "pickles": (bins, "but pytorch_model.bin, .* save it by save_pretrained"),
    "a variant": (named("model.fp16.safetensors"), "but model.fp16.safetensors, .* its variant="),
    "Mistral's own": (named("consolidated.safetensors"), "no model.safetensors, but consolidated"),
    "no index": (both(sharded, without(INDEX)), "and no model.safetensors.index.json: fetch it"),
    "a shard is missing": (shard_gone, "has no model-00002-of-.*, which its .*index.json names"),
    "a file elsewhere": (
        both(named("other.safetensors"), config(transformers_weights="other.safetensors")),
        "but other.safetensors, .* load the model by transformers",
    ),
    "pointer of Git LFS": (files(model__safetensors=LFS), "pointer of Git LFS.* git lfs pull"),
    "config is a pointer": (files(config__json=LFS), "pointer of Git LFS.* git lfs pull"),
    "empty": (files(model__safetensors=b""), "cannot read .*model.safetensors: "),
    "cut off": (cut_off, "cannot read .*model.safetensors: "),
    "adapter alone": (
        both(files(adapter_config__json=ADAPTER), without("config.json", WEIGHTS)),
        "an adapter of PEFT: .*merge_and_unload",
    ),
    "part of a model": (config(text_config={"model_type": "llama"}), "more than a model of text"),
    "tokens that see later ones": (config(is_causal=False), "its is_causal is False"),
}
# The same, of a head that is tied to the token table.
TIED = {
    "tied": lambda folder, model: None,
    "another head": tensors(own_head),
    "another head without prefix": both(tensors(own_head), renamed(base)),
    "the same head": tensors(same_head),
    "the same head, not tied": both(tensors(same_head), config(tie_word_embeddings=False)),
    "the head alone": tensors(head_alone),
    "the head alone, in shards": both(tensors(head_alone), as_links),
    "saved without head": lambda folder, model: model.base_model.save_pretrained(folder),
}
TIED_REFUSED = {
    "classifier": (classifier, "has score.weight, which no model of its config.json has"),
    "neither": (
        tensors(lambda values: {n: one for n, one in values.items() if one.shape[0] != 260}),
        "has no (model.embed_tokens|transformer.wte).weight, which its config.json asks for",
    ),
}
OWN_TABLE = "lm_head.weight has other values than its transformer.wte.weight: a GPT-2 here has"
EXCEPTIONS = {
    ("another head", "gpt2"): OWN_TABLE,
    ("another head without prefix", "gpt2"): OWN_TABLE,
    ("the same head, not tied", "gpt2"): "its tie_word_embeddings is False: only models with True",
    # transformers gives that theta to blocks without a window alone.
    ("theta alone", "olmo3"): "blocks with a window may differ by their scaling alone",
    ("scaling beside the table", "olmo3"): "may differ by their scaling alone",
    ("by layers", "olmo3"): "",
}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = LLAMA3 | {ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
# What transformers has an error of its own for.
OURS_ALONE = {"index without metadata", "a mark and a NaN"}
LLAMAS = [kind for kind in KINDS if kind != "gpt2"]
# Those that transformers can scale by more than the width of a head: its Mixtral knows none.
SCALED = [kind for kind in LLAMAS if kind != "mixtral"]
QWENS = ["qwen2", "qwen3", "qwen3_moe"]
LATENTS = ["deepseek_v3", "glm4_moe_lite"]
OTHER_NAMES = {"n_embd": ..., "n_head": ..., "n_layer": ..., "n_positions": ...}
OTHER_NAMES |= {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def scaled(table):
    return {"rope_scaling": table}


# What config.json says, of which kinds, and the line that it is refused with, if it is.
CONFIGS = {
    "theta beside the table": ({"rope_theta": 77.0}, LLAMAS),
    "theta alone": ({"rope_theta": 77.0, "rope_parameters": ...}, LLAMAS),
    "scaling beside the table": (scaled(LONG | {"rope_theta": 500.0}), LLAMAS),
    "factor without a type": (scaled({"factor": 2.0}), LLAMAS),
    "llama3 of another length": (scaled(LLAMA3 | {ORIGINAL: 32}), LLAMAS),
    "llama3 of no length": (scaled(LLAMA3), LLAMAS),
    "llama3, length beside": (scaled(LONG) | {ORIGINAL: 32}, LLAMAS),
    "linear": (scaled({"type": "linear", "factor": 2.0}), LLAMAS),
    "yarn": (scaled(YARN), SCALED),
    "yarn of no length": (scaled(YARN | {ORIGINAL: None}), LLAMAS, "original_.*: None"),
    "yarn of no factor": (scaled(YARN | {"factor": None}), SCALED),
    "linear, with scales of yarn": (
        scaled({"rope_type": "linear", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        LLAMAS,
    ),
    "yarn, both scales": (
        scaled(YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 2.0}),
        SCALED,
    ),
    "yarn, attention": (scaled(YARN | {"attention_factor": 0.7}), SCALED),
    "yarn, factor of attention alone": (
        scaled(YARN | {"factor": 1.0, "attention_factor": 0.7}),
        SCALED,
    ),
    "yarn of factor 0": (scaled(YARN | {"factor": 0.0}), LLAMAS, "scaling_factor must"),
    "yarn, not truncated": (scaled(YARN | {"truncate": False}), LLAMAS, "truncate"),
    "dynamic": (scaled(YARN | {"rope_type": "dynamic"}), LLAMAS, "dynamic.* is not here"),
    "longrope": (scaled({"rope_type": "longrope"}), LLAMAS, "longrope.* refuses"),
    "by layers": ({"rope_parameters": {FULL: LLAMA3}}, LLAMAS, "layers of types"),
    "swish": ({"hidden_act": "swish"}, LLAMAS),
    "gelu": ({"hidden_act": "gelu"}, LLAMAS, "hidden_act is 'gelu'"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        | {"layer_types": ...},
        [*QWENS, "smollm3"],
    ),
    "a window, switched off": ({"sliding_window": 4}, QWENS),
    "a window": ({"sliding_window": 4}, ["mistral", "ministral", "mixtral"]),
    "a window of 0": ({"sliding_window": 0}, ["mistral"], "sliding_window is 0"),
    "no window": ({"sliding_window": None}, ["mistral"]),
    "blocks that slide": ({"layer_types": [FULL, SLIDING]}, ["mistral"], "layer_types is .*null"),
    "other blocks": ({"layer_types": [FULL, "chunked_attention"]}, LLAMAS[2:4], "chunked_att"),
    "a block too few": ({"layer_types": [FULL]}, ["ministral"], "must be equal to the number of"),
    "blocks that turn": ({"no_rope_layers": [0, 1], "layer_types": ...}, ["smollm3"]),
    "no blocks that turn": ({"no_rope_layers": [2, 1]}, ["smollm3"], "must have 0 and 1"),
    "windows by layers": (
        {"layer_types": [FULL, SLIDING]},
        QWENS,
        "layer_types (has|is) 'sliding_attention'",
    ),
    "other weights of experts": ({"norm_topk_prob": True}, ["qwen3_moe", "glm4_moe"]),
    "experts under another name": ({"num_experts": ..., "num_local_experts": 4}, ["qwen3_moe"]),
    "two numbers of experts": (
        {"num_experts": 4, "num_local_experts": 2},
        ["qwen3_moe", "mixtral"],
        "which is the same",
    ),
    "other names": (OTHER_NAMES | {"max_position_embeddings": 32}, ["gpt2"]),
    "two numbers of heads": ({"num_attention_heads": 2}, ["gpt2"], "which is the same, 4"),
    "scaled by layer": ({"scale_attn_by_inverse_layer_idx": True}, ["gpt2"]),
    "exact GELU": ({"activation_function": "gelu"}, ["gpt2"]),
    "another eps": ({"layer_norm_epsilon": 0.01}, ["gpt2"], "layer_norm_epsilon is 0.01"),
    "biases": ({"attention_bias": True}, ["llama", "qwen3", *LATENTS], "attention_bias is True"),
    "an indexer": ({"index_topk": 2048}, ["deepseek_v3"], "its index_topk is 2048"),
    "small groups": ({"n_group": 4}, ["deepseek_v3"], "n_group = 4 needs two experts or more"),
    "few in groups": (
        {"num_experts_per_tok": 3},
        ["deepseek_v3"],
        "topk_group = 1 of 2 groups leaves 2 experts, fewer than model.n_expert_used = 3",
    ),
    "other scores": ({"scoring_func": "softmax"}, ["deepseek_v3"], "scoring_func is 'softmax'"),
    "halves": ({"rope_interleave": False}, LATENTS),
    "width of what is rotated": ({"head_dim": 8}, LATENTS),
    "another width": ({"head_dim": 4}, ["glm4_moe_lite"], "head_dim is 4, .* the same, 8"),
    "dense as in older files": (
        {"mlp_layer_types": ..., "first_k_dense_replace": 1},
        ["glm4_moe_lite"],
    ),
    "dense last": (
        {"mlp_layer_types": ["sparse", "dense"]},
        ["glm4_moe_lite"],
        "mlp_layer_types are .* first blocks are dense",
    ),
    "all dense": ({"mlp_only_layers": [0]}, ["qwen3_moe"], r"mlp_only_layers is \[0\]"),
}
# Kinds that differ by their tensors. Files without a look into them are alike for all kinds.
APART = [kind for kind in KINDS if kind not in {"mistral", "ministral", "smollm3", "glm4_moe_lite"}]
PLAIN = ["gpt2", "llama"]
WAYS = {
    **{name: (way, APART) for name, way in (OF_TENSORS | TIED).items()},
    **{name: (way, PLAIN) for name, way in OF_FILES.items()},
    **{name: (way, PLAIN, line) for name, (way, line) in (REFUSED | TIED_REFUSED).items()},
    **{name: (config(**changes), *more) for name, (changes, *more) in CONFIGS.items()},
}
CASES = [(way, kind) for way, (_, kinds, *_) in WAYS.items() for kind in kinds]
QUICK = [
    ("as it was saved", "olmo3"),
    ("shards beside a newer file", "llama"),
    ("links of a cache", "llama"),
    ("experts in stacks", "glm4_moe"),
    ("another head", "llama"),
    ("the head alone", "gpt2"),
]


@pytest.mark.parametrize("way,kind", full_but(QUICK, CASES))
def test_a_folder_has_the_logits_of_transformers_or_a_line_that_says_why(tmp_path, way, kind):
    change, _, *line = WAYS[way]
    message = EXCEPTIONS.get((way, kind), "".join(line))
    folder, model = tmp_path / "model", model_of(kind, way in TIED | TIED_REFUSED)
    model.save_pretrained(folder)
    change(folder, model)
    ours, line = ours_of(folder)
    if message:
        assert ours is None and re.search(message, line), line
        assert f"{folder} cannot be opened: " in line
        return
    assert not line
    theirs = model(TOKENS).logits.detach() if way in OURS_ALONE else theirs_of(folder)
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
