"""Rotary positions in a config.json of transformers, read and written."""

import math
from collections.abc import Mapping
from typing import Any

from torchmars.config.decoder import LLAMA3_CONTEXT, DecoderArgs
from torchmars.config.llama import LlamaArgs
from torchmars.core.errors import UserError
from torchmars.exchange.families import DEFAULTS
from torchmars.exchange.patterns import FULL, WINDOW
from torchmars.exchange.values import number, require_all, whole_number
from torchmars.models.rotary import HIGH, LOW

ORIGINAL = "original_max_position_embeddings"


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of the rotary positions of a config.json.

    transformers 5 writes all as `rope_parameters`, older versions as `rope_theta`,
    `partial_rotary_factor` and `rope_scaling`. Raises `UserError` for a scaling that we lack.
    """
    table = rope_table(config)
    found: dict[str, Any] = {"rope_theta": number(table, "rope_theta")}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return found | {"rope_scaling_factor": 1.0}
    if kind not in ("llama3", "linear", "yarn", "dynamic"):
        raise UserError(
            f"its rotary positions are scaled by {table}: only linear, llama3, yarn and dynamic "
            "scaling can be imported"
        )
    longest = whole_number(config, "max_position_embeddings")
    if kind == "yarn" and table.get(ORIGINAL) is None:
        raise UserError(f"its rotary positions are those of yarn, and lack {ORIGINAL}: add it")
    if kind == "yarn" and table.get("factor") is None:
        table["factor"] = longest / whole_number(table, ORIGINAL)
    found["rope_scaling_factor"] = number(table, "factor")
    if not found["rope_scaling_factor"] >= 1:
        raise UserError(
            f"its factor of rotary positions is {table['factor']}: it must be 1 or more"
        )
    if kind == "llama3":
        require_all(table, low_freq_factor=[LOW], high_freq_factor=[HIGH])
        original = whole_number(table, ORIGINAL)
        return found | ({} if original == LLAMA3_CONTEXT else {"rope_original_len": original})
    found["rope_scaling"] = kind
    if kind == "dynamic":
        found["rope_original_len"] = longest
    if kind != "yarn":
        return found
    found["rope_original_len"] = whole_number(table, ORIGINAL)
    require_all(table, truncate=[None, True])
    for ours, theirs in {"rope_beta_fast": "beta_fast", "rope_beta_slow": "beta_slow"}.items():
        if table.get(theirs):
            found[ours] = number(table, theirs)
    return found | factor_of_attention(table)


def rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a config.json says of rotary positions, in one table. Raises `UserError`."""
    tables = [config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    more = tables[0] if tables else {}
    if not isinstance(more, dict):
        raise UserError(f"its rotary positions are {more!r}, which is no table")
    if nested := [name for name, value in more.items() if isinstance(value, dict)]:
        raise UserError(f"its rotary positions are those of layers of types: {', '.join(nested)}")
    found = {name: config[name] for name in ("rope_theta", "partial_rotary_factor")} | more
    if config["model_type"] != "glm4_moe":
        require_all(found, partial_rotary_factor=[None, 1.0])
    if config.get(ORIGINAL) is not None:  # it goes before that of the table
        found[ORIGINAL] = config[ORIGINAL]
    return found


def rope_by_type(config: Mapping[str, Any], patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of the rotary positions of an OLMo 3, whose windows are `patterns`.

    Blocks with a window may lack the scaling of the others. Raises `UserError` for another
    difference between them.
    """
    given, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(older, dict):
        raise UserError(f"its rotary positions are {older!r}, which is no table")
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise UserError(f"its rope_parameters are {given!r}: a table for each layer type is needed")
    # As transformers 5.24 reads them: the theta of an older file is of blocks without a window, and
    # so is `rope_scaling`.
    tables = {FULL: {}, WINDOW: {}, **given}
    tables[FULL] = {"rope_theta": config["rope_theta"], **tables[FULL], **older}
    tables[WINDOW] = {"rope_theta": DEFAULTS["olmo3"]["rope_theta"], **tables[WINDOW]}
    full, narrow = (
        rope_of({**config, ORIGINAL: None, "rope_scaling": None, "rope_parameters": tables[each]})
        for each in (FULL, WINDOW)
    )
    if narrow == full or "window" not in patterns:
        return full
    if narrow != {"rope_theta": full["rope_theta"], "rope_scaling_factor": 1.0}:
        raise UserError(
            f"its rotary positions are {tables[FULL]} and {tables[WINDOW]}: blocks with a window "
            "may differ by their scaling alone"
        )
    letters = str.maketrans("sf", "ur")
    return full | {"rope_blocks": patterns.get("window_blocks", "s").translate(letters)}


def factor_of_attention(table: Mapping[str, Any]) -> dict[str, float]:
    """Return `rope_attention_factor` of a table of yarn, where it is not as ours by default."""
    if table.get("attention_factor") is not None:
        return {"rope_attention_factor": number(table, "attention_factor")}
    if table.get("mscale") and table.get("mscale_all_dim"):
        grown = 0.1 * math.log(number(table, "factor"))
        one, other = (grown * number(table, name) + 1 for name in ("mscale", "mscale_all_dim"))
        return {"rope_attention_factor": one / other}
    return {}


def nested_rope(args: LlamaArgs) -> dict[str, Any]:
    """Return `rope_parameters` of an OLMo 3, a table for each type of layer."""
    plain = {"rope_type": "default", "rope_theta": args.rope_theta}
    flat = rope_config(args)
    table = flat.pop("rope_scaling", plain) | {"rope_theta": flat.pop("rope_theta")}
    unscaled = "u" in map(args.rope_letter, range(args.n_layer))
    return flat | {"rope_parameters": {FULL: table, WINDOW: plain if unscaled else table}}


def rope_config(args: DecoderArgs) -> dict[str, Any]:
    """Return `rope_theta` and, where positions are scaled, `rope_scaling` of config.json."""
    if args.rope_scaling_factor == 1 and args.rope_attention_factor is None:
        return {"rope_theta": args.rope_theta}
    table: dict[str, Any] = {"rope_type": args.rope_scaling, "factor": args.rope_scaling_factor}
    if args.rope_scaling == "llama3":
        table |= {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    if args.rope_scaling == "yarn":
        table |= {"beta_fast": args.rope_beta_fast, "beta_slow": args.rope_beta_slow}
        if args.rope_attention_factor is not None:
            table["attention_factor"] = args.rope_attention_factor
    if args.rope_scaling in ("llama3", "yarn"):
        table[ORIGINAL] = args.original_len
    found = {"rope_theta": args.rope_theta, "rope_scaling": table}
    # The frequencies of a longer sequence would follow from this length.
    longest = {"max_position_embeddings": args.original_len}
    return found | (longest if args.rope_scaling == "dynamic" else {})
