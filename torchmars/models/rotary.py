"""Rotary positions: pairs of dims that turn, each with a wavelength of its own.

Sources: Su et al. 2021 (arXiv 2104.09864); for the stretched wavelengths Chen et al. 2023 (linear,
arXiv 2306.15595), Peng et al. 2023 (YaRN, arXiv 2309.00071), Grattafiori et al. 2024 (Llama 3.1,
arXiv 2407.21783).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from torchmars.config.model_args import DecoderArgs

# Llama 3.1's scaling stretches wavelengths of more than the original length / LOW tokens, leaves
# those below the original length / HIGH, and goes from one to the other between.
LOW, HIGH = 1.0, 4.0


def rotation(positions: Tensor, width: int, args: DecoderArgs) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of `positions` [length] or [batch, length], float32.

    Both are [1 or batch, 1, length, width / 2], where `width` of each head is rotated. Pair i turns
    by theta^(-2i / width) for each position (Su et al., equation 15), or as `args` stretches that.
    YaRN multiplies both by its factor of attention.
    """
    turns = frequencies(width, args, positions.device)
    angles = (positions.unsqueeze(-1) * turns).unsqueeze(-3)
    angles = angles if angles.ndim == 4 else angles.unsqueeze(0)
    factor = attention_factor(args)
    if factor == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def frequencies(width: int, args: DecoderArgs, device: torch.device) -> Tensor:
    """Return by how much each pair of dims turns from a token to the next, [width / 2], radians."""
    theta, factor, original = args.rope_theta, args.rope_scaling_factor, args.original_len
    dims = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    found = 1.0 / theta ** (dims / width)
    if factor == 1:
        return found
    if args.rope_scaling == "linear":
        return found / factor
    if args.rope_scaling == "llama3":
        turns = original * found / (2 * math.pi)
        kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    else:
        first, last = (
            width * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))
            for beta in (args.rope_beta_fast, args.rope_beta_slow)
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        kept = 1 - ((dims / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    # `kept` is the part that stays: 1 for the short wavelengths, 0 for the long ones.
    return kept * found + (1 - kept) * found / factor


def attention_factor(args: DecoderArgs) -> float:
    """Return YaRN's factor of rotated queries and keys; 1 without YaRN."""
    if args.rope_scaling != "yarn":
        return 1.0
    return args.rope_attention_factor or 0.1 * math.log(args.rope_scaling_factor) + 1


def unscaled(args: DecoderArgs) -> DecoderArgs:
    """Return settings with no wavelength stretched."""
    return replace(args, rope_scaling_factor=1.0, rope_attention_factor=None)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Return `heads` [batch, heads, length, head width] with each pair of dims turned.

    Of the first w dims, for which `cos` and `sin` have w / 2 angles, i and i + w / 2 are a pair, as
    in transformers; or `neighbours` are, and come in the order of halves. The others stay. The turn
    is computed in float32, since an angle's cosine in bfloat16 is off by up to 0.4%.
    """
    width = 2 * cos.shape[-1]
    if neighbours:
        first, second = heads[..., 0:width:2], heads[..., 1:width:2]
    else:
        first, second = heads[..., :width].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = turned.to(heads.dtype)
    return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)
