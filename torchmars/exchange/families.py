"""The families that are read from folders of Hugging Face's transformers, and written there.

A config.json is read through transformers' own class of its model_type, which knows what is left
out, and under which names earlier versions wrote what. It never is code of the folder's.
"""

import copy
import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from torchmars.core.errors import UserError, missing_package, needs_package
from torchmars.exchange.deepseek_family import DeepseekFamily
from torchmars.exchange.family import Counterpart, Family, ModelKind, number, require_all
from torchmars.exchange.gpt2_family import GPT2Family
from torchmars.exchange.llama_family import LlamaFamily
from torchmars.models.model import Model

# By the name of our model. A plugin enters its own.
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2Family(),
    "llama": LlamaFamily(),
    "deepseek": DeepseekFamily(),
}
# Kinds that transformers does not know, whose files are as those of another.
READ_AS = {"kimi_k2": "deepseek_v3"}
MOST_BLOCKS = 1_000
OLDEST = 5, 24  # version of transformers: 5.8 has rotary positions of OLMo 3 in another form
# What makes a model one that we have not, by its key, and what to do.
REFUSED = {
    "index_topk": "attention by an indexer, to some of the tokens before, is not here",
    "quantization_config": "its weights are quantised: fetch it in bfloat16, or dequantise it",
    "text_config": "it is more than a model of text: export that alone",
    "is_causal": "tokens see later ones there, and never here",
    "transformers_weights": "name that file model.safetensors, and leave the key out",
}


def family_of(model: Model) -> Family:
    """Return the family of a model, or of the class that its own derives from."""
    found = {family.model: family for family in FAMILIES.values()}
    return next(found[each] for each in type(model).__mro__ if each in found)


def counterparts(model: Model, fused: bool = False) -> dict[str, Counterpart]:
    """Return the tensor there of each parameter and buffer of `model`, as `Family` does."""
    return family_of(model).counterparts(model, fused)


def to_config(model: Model) -> dict[str, Any]:
    """Return the config.json of `model`, as `Family.config` does. Raises `UserError`."""
    family = next((each for each in FAMILIES.values() if each.model is type(model)), None)
    if family is None:
        raise UserError(
            f"transformers has no {type(model).__name__}: export it with --to safetensors"
        )
    return family.config(model)


def from_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [model] of a config.json, and its `seq_len` beside it.

    Raises `UserError` for a model that our families do not cover.
    """
    for key, reason in REFUSED.items():
        value = given.get(key)
        if value is not None and (key, value) != ("is_causal", True):
            raise UserError(f"its {key} is {value!r:.60}: {reason}")
    named = given.get("model_type")
    name = READ_AS.get(str(named), str(named))
    families = {kind: each for each in FAMILIES.values() for kind in each.kinds}
    if name not in families:
        known = ", ".join([*families, *READ_AS])
        raise UserError(f"its model_type is {named!r:.80}: models of {known} can be imported")
    family = families[name]
    config = as_its_class_has_it(name, family.kinds[name], given)
    require_all(config, family.kinds[name].allowed)
    return family.section(name, config)


def as_its_class_has_it(name: str, kind: ModelKind, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' class makes of the keys of a config.json that are read.

    Raises `UserError` for what it refuses. The number of blocks has bounds before, since a class
    makes lists of them.
    """
    with needs_package("transformers", "a folder of transformers", "hf"):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    if tuple(map(int, version("transformers").split(".")[:2])) < OLDEST:
        raise missing_package("transformers>=5.24", "a folder of transformers", "hf")
    cls = CONFIG_MAPPING[name]
    read = {*kind.keys.values(), *kind.allowed, *kind.reads}
    pairs = [pair for pair in cls.attribute_map.items() if read & {*pair}]  # two names of one key
    read |= {key for pair in pairs for key in pair}
    values = {key: given[key] for key in read & given.keys()}
    for one, other in pairs:
        if {one, other} <= values.keys() and values[one] != values[other]:
            raise UserError(
                f"its {one} is {values[one]!r:.80}, and its {other}, which is the same, "
                f"{values[other]!r:.80}: leave the right one"
            )
    blocks = kind.keys["n_layer"]
    for key in {blocks, *(one for one, other in pairs if other == blocks)} & values.keys():
        if number(values, key, 1) > MOST_BLOCKS:
            raise UserError(f"its {key} is {values[key]}: it must be at most {MOST_BLOCKS}")
    made, reason = made_by(cls, values)
    if reason:
        # Tables first: a class complains of a key that is right beside a wrong one.
        keys = sorted(values, key=lambda key: not isinstance(values[key], dict))
        without = ({name: values[name] for name in values if name != key} for key in keys)
        wrong = [key for key, rest in zip(keys, without) if not made_by(cls, rest)[1]][:1]
        said = f"{wrong[0]} is {values[wrong[0]]!r:.300}" if wrong else "config.json is as it is"
        raise UserError(f"its {said}, which {cls.__name__} of transformers refuses ({reason})")
    return {key: getattr(made, key) for key in read if hasattr(made, key)}


def made_by(cls: Any, values: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a config of a class of transformers, and why there is none; "" if there is one."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # transformers says what nobody here asked it
    try:
        made = cls(**copy.deepcopy(values))  # it changes tables
        if hasattr(made, "rope_parameters"):
            made.standardize_rope_params()  # once more, as a model does
        return made, ""
    except Exception as error:  # whatever a class raises
        return None, f"{type(error).__name__}: {error}".splitlines()[-1].strip()[:300]
    finally:
        logging.disable(before)
