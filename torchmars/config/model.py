"""Which model is trained."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from torchmars.config.fields import Mark
from torchmars.core.bounds import KeyOf, Range

# Where the class of each family is, a `models.Model`: named, since its module imports torch.
MODELS = {"gpt2": "torchmars.models.gpt2.GPT2", "llama": "torchmars.models.llama.Llama"}


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: Annotated[str, KeyOf(MODELS), Mark.IDENTITY] = "gpt2"
    """Model family. llama: also Qwen2, Qwen3, Qwen3-MoE, Mixtral and GLM-4.5."""
    size: Annotated[str, Mark.IDENTITY] = "nano"
    """Named size. gpt2: nano (3M, for CPUs), small (124M), medium (355M), large (774M), xl (1.6B).
    llama: nano (3M, for CPUs), 160m, the sizes of Llama 3 (1b, 3b, 8b, 70b, 405b) and of Qwen3
    (qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b); mixtures of experts are moe-nano and glm-nano (for
    CPUs), qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b, mixtral-8x22b, glm-4.5-air and glm-4.5."""
    n_layer: Annotated[Annotated[int, Range(1, 1_000)] | None, Mark.IDENTITY] = None
    """Number of blocks, instead of the named size's."""
    n_head: Annotated[Annotated[int, Range(1, 10_000)] | None, Mark.IDENTITY] = None
    """Attention heads of each block, instead of the named size's."""
    n_kv_head: Annotated[Annotated[int, Range(1, 10_000)] | None, Mark.IDENTITY] = None
    """llama: heads of the keys and values, each shared by n_head / n_kv_head queries, instead of
    the named size's."""
    head_dim: Annotated[Annotated[int, Range(2, 10_000)] | None, Mark.IDENTITY] = None
    """llama: width of a head, instead of the named size's. That is n_embd / n_head; 128 for
    Qwen3."""
    n_embd: Annotated[Annotated[int, Range(1, 1_000_000)] | None, Mark.IDENTITY] = None
    """Width, instead of the named size's."""
    n_inner: Annotated[Annotated[int, Range(1, 10_000_000)] | None, Mark.IDENTITY] = None
    """llama: width within the MLP, instead of the named size's."""
    vocab_size: Annotated[Annotated[int, Range(1, 10_000_000)] | None, Mark.IDENTITY] = None
    """Rows of the token table. Default: the tokenizer's vocabulary, rounded up to a multiple of
    64."""
    rope_theta: Annotated[Annotated[float, Range(1, 1e12)] | None, Mark.IDENTITY] = None
    """llama: base of the wavelengths of rotary positions, instead of the named size's."""
    rope_scaling_factor: Annotated[Annotated[float, Range(1, 1_000)] | None, Mark.IDENTITY] = None
    """llama: stretch the rotary wavelengths of more than 8,192 tokens by this, as Llama 3.1 does,
    instead of the named size's. 1: leave them."""
    rotary_fraction: Annotated[Annotated[float, Range(0.01, 1)] | None, Mark.IDENTITY] = None
    """llama: the part of each head, from its first dim, that rotary positions turn, instead of the
    named size's. 0.5 in GLM-4.5."""
    norm_eps: Annotated[Annotated[float, Range(0, 1)] | None, Mark.IDENTITY] = None
    """llama: added to the mean square in RMSNorm, instead of the named size's."""
    qk_norm: Annotated[bool | None, Mark.IDENTITY] = None
    """llama: normalise each head's query and key, as Qwen3 does, instead of the named size's."""
    qkv_bias: Annotated[bool | None, Mark.IDENTITY] = None
    """llama: biases of queries, keys and values, as in Qwen2, instead of the named size's."""
    tied: Annotated[bool | None, Mark.IDENTITY] = None
    """llama: let the token table be the head too, instead of the named size's."""
    n_expert: Annotated[Annotated[int, Range(0, 10_000)] | None, Mark.IDENTITY] = None
    """llama: experts of each block, instead of the named size's. 0: one MLP for all tokens."""
    n_dense: Annotated[Annotated[int, Range(0, 1_000)] | None, Mark.IDENTITY] = None
    """llama: first blocks that have one MLP for all tokens instead of experts, instead of the named
    size's."""
    n_expert_used: Annotated[Annotated[int, Range(1, 1_000)] | None, Mark.IDENTITY] = None
    """llama: experts that each token uses, instead of the named size's."""
    n_expert_inner: Annotated[Annotated[int, Range(1, 10_000_000)] | None, Mark.IDENTITY] = None
    """llama: width within an expert, instead of the named size's. That is n_inner where the size
    has none."""
    n_expert_shared: Annotated[Annotated[int, Range(0, 1_000)] | None, Mark.IDENTITY] = None
    """llama: experts that all tokens use besides, instead of the named size's. They are one MLP of
    width n_expert_shared * n_expert_inner."""
    router: Annotated[Literal["softmax", "sigmoid"] | None, Mark.IDENTITY] = None
    """llama: how a router's logits become scores, instead of the named size's way. softmax: over
    all experts. sigmoid: of each alone, and experts are chosen by score and a bias, as in
    GLM-4.5."""
    norm_topk_prob: Annotated[bool | None, Mark.IDENTITY] = None
    """llama: divide the weights of a token's experts by their sum, as Mixtral does, instead of the
    named size's."""
    routed_scaling: Annotated[Annotated[float, Range(0.001, 1_000)] | None, Mark.IDENTITY] = None
    """llama: the factor of the outputs of a token's chosen experts, instead of the named size's."""
    bias: Annotated[bool, Mark.IDENTITY] = False
    """gpt2: biases in layers and norms, as OpenAI's weights have and the MARS runs had not."""
    activation: Annotated[Literal["gelu", "gelu_tanh"], Mark.IDENTITY] = "gelu"
    """gpt2: the function between the layers of an MLP. gelu_tanh: the approximation that OpenAI's
    weights were trained with."""
    scale_attn_by_inverse_layer_idx: Annotated[bool, Mark.IDENTITY] = False
    """gpt2: divide attention logits also by the block's number, counted from 1. The published MARS
    runs did."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """gpt2: probability of dropout on embeddings, attention and both outputs of a block in
    training."""
    extra: Annotated[dict[str, Any], Mark.IDENTITY] = field(default_factory=dict, hash=False)
    """[model.extra]: settings of a plugin's model, by names that it knows: --model.extra.NAME
    VALUE."""

    def changed(self) -> list[str]:
        """Return the fields that are set instead of the named size's."""
        others = (each for each in fields(self) if each.name not in ("name", "size", "extra"))
        return [each.name for each in others if getattr(self, each.name) != each.default]
