"""Rotary positions in a config.json of transformers, read and written."""

import math
from collections.abc import Mapping
from typing import Any

from torchmars.config.decoder import LLAMA3_CONTEXT, DecoderArgs
from torchmars.core.errors import UserError
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


def factor_of_attention(table: Mapping[str, Any]) -> dict[str, float]:
    """Return `rope_attention_factor` of a table of yarn, where it is not as ours by default."""
    if table.get("attention_factor") is not None:
        return {"rope_attention_factor": number(table, "attention_factor")}
    if table.get("mscale") and table.get("mscale_all_dim"):
        grown = 0.1 * math.log(number(table, "factor"))
        one, other = (grown * number(table, name) + 1 for name in ("mscale", "mscale_all_dim"))
        return {"rope_attention_factor": one / other}
    return {}


def rope_config(args: DecoderArgs) -> dict[str, Any]:
    """Return `rope_theta` and, where positions are scaled, `rope_scaling` of config.json."""
    if args.rope_scaling_factor == 1:
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
