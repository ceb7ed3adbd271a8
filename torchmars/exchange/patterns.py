"""What differs from block to block in transformers: windows of attention, and rotary positions."""

from collections.abc import Mapping
from typing import Any

from torchmars.config.llama import LlamaArgs
from torchmars.core.errors import UserError
from torchmars.exchange.values import whole_number

MOST_BLOCKS = 1_000
WINDOW, FULL = "sliding_attention", "full_attention"
# Kinds that have `layer_types`; those whose window all blocks have, and no list; and those that
# have a window only with `use_sliding_window`.
BY_BLOCK = ("qwen2", "qwen3", "ministral", "smollm3", "olmo3")
EVERYWHERE = ("mistral", "mixtral", "qwen3_moe")
BY_SWITCH = ("qwen2", "qwen3", "qwen3_moe", "smollm3")


def patterns_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `window`, `window_blocks` and `rope_blocks` of a config.json, where they are not ours.

    Raises `UserError` for lists that its class would not follow.
    """
    kind, blocks = config["model_type"], whole_number(config, "num_hidden_layers")
    found: dict[str, Any] = {}
    if blocks > MOST_BLOCKS:
        return found  # n_layer has bounds, and is refused
    rotates = rotating(config, blocks)
    if not all(rotates):
        found["rope_blocks"] = shortest("".join("r" if each else "n" for each in rotates))
    types = by_block(config, "layer_types", blocks)
    if types is not None and kind == "mistral":
        raise UserError(
            "its layer_types are not followed by its class, which gives all blocks the window: "
            "leave them out, or say model_type = ministral"
        )
    for each in types or ():
        if each not in (FULL, WINDOW) or (each == WINDOW and kind not in BY_BLOCK):
            known = FULL + (f" and {WINDOW}" if kind in BY_BLOCK else "")
            raise UserError(f"its layer_types has {each!r}: only models with {known} are known")
    off = kind in BY_SWITCH and not config["use_sliding_window"]
    if kind not in BY_BLOCK + EVERYWHERE or off or config["sliding_window"] is None:
        if WINDOW in (types or ()):
            raise UserError(f"its layer_types has {WINDOW!r}, and its window is off or null")
        return found
    if types is None:
        types = [WINDOW if each else FULL for each in sliding(config, rotates)]
    if WINDOW not in types:
        return found
    letters = shortest("".join("s" if each == WINDOW else "f" for each in types))
    found["window"] = whole_number(config, "sliding_window")
    return found | ({} if letters == "s" else {"window_blocks": letters})


def rotating(config: Mapping[str, Any], blocks: int) -> list[bool]:
    """Return which blocks have rotary positions."""
    if config["model_type"] != "smollm3":
        return [True] * blocks
    given = by_block(config, "no_rope_layers", blocks)
    if given is None:
        every = whole_number(config, "no_rope_layer_interval")
        return [(number + 1) % every != 0 for number in range(blocks)]
    if set(map(str, given)) - {"0", "1"}:
        raise UserError(f"its no_rope_layers is {given!r}: it must have 0 and 1 only")
    return [bool(each) for each in given]


def sliding(config: Mapping[str, Any], rotates: list[bool]) -> list[bool]:
    """Return which blocks have the window where no list says so."""
    kind = config["model_type"]
    if kind == "smollm3":
        return [not each for each in rotates]
    if kind == "olmo3":
        return [(number + 1) % 4 != 0 for number in range(len(rotates))]
    if kind in ("qwen2", "qwen3"):
        first = whole_number(config, "max_window_layers", least=0)
        return [number >= first for number in range(len(rotates))]
    return [True] * len(rotates)


def by_block(config: Mapping[str, Any], name: str, blocks: int) -> list[Any] | None:
    """Return a list with an entry for each block; None if there is none. Raises `UserError`."""
    found = config.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != blocks:
        raise UserError(
            f"its {name} is {found!r}: it must have an entry for each of {blocks} blocks"
        )
    return found


def shortest(letters: str) -> str:
    """Return the shortest pattern that gives `letters` when it is repeated."""
    for length in range(1, len(letters)):
        if (letters[:length] * len(letters))[: len(letters)] == letters:
            return letters[:length]
    return letters


def pattern_config(kind: str, args: LlamaArgs) -> dict[str, Any]:
    """Return what config.json of a `kind` has of windows and of blocks that do not rotate.

    Every key is there, also where nothing is on: a Mistral without one has a window of 4,096.
    """
    windows = [args.window_of(number) for number in range(args.n_layer)]
    window = next((each for each in windows if each is not None), None)
    found: dict[str, Any] = {}
    if kind in BY_BLOCK + EVERYWHERE:
        found["sliding_window"] = window
    if kind in BY_BLOCK:
        found["layer_types"] = [WINDOW if each else FULL for each in windows]
    if kind in BY_SWITCH:
        found["use_sliding_window"] = window is not None
    if kind in ("qwen2", "qwen3"):
        found["max_window_layers"] = next(
            (n for n, each in enumerate(windows) if each), len(windows)
        )
    if kind == "smollm3":
        found["no_rope_layers"] = [
            int(args.rope_letter(number) != "n") for number in range(args.n_layer)
        ]
        found["pad_token_id"] = None  # in its class 128004, which a small vocabulary lacks
    return found


def check_patterns(kind: str, args: LlamaArgs) -> None:
    """Raise `UserError` for patterns that the class of a `kind` cannot have."""
    windows = [args.window_of(number) for number in range(args.n_layer)]
    letters = [args.rope_letter(number) for number in range(args.n_layer)]
    if args.rope_scaling_factor == 1:  # unscaled ones are as all others then
        letters = [letter.replace("u", "r") for letter in letters]
    pairs = {(window is not None, letter) for window, letter in zip(windows, letters, strict=True)}
    has = {
        "model.rope_blocks": {*letters} != {"r"},
        "model.window": {*windows} != {None},
        "model.window_blocks": len({*windows}) > 1,
    }
    ropes = {"smollm3": {*letters} <= {"r", "n"}, "olmo3": pairs <= {(True, "u"), (False, "r")}}
    covered = {
        "model.rope_blocks": ropes.get(kind, False),
        "model.window": kind in BY_BLOCK + EVERYWHERE,
        "model.window_blocks": kind in BY_BLOCK,
    }
    for name, there in has.items():
        if there and not covered[name]:
            raise UserError(
                f"{kind} of transformers has no {name} like this: such weights can only be written "
                "with --to safetensors"
            )
