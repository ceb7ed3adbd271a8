"""A rule of thumb for layouts: a rough estimate of a rank's memory and of the time of a step.

It chooses which layouts `find.py` plans, and tells the hours of presets: what counts is a plan.
"""

from torchmars.cluster.sizes import UsableSizes
from torchmars.config import ResolvedConfig
from torchmars.core.device import gpu_memory
from torchmars.core.errors import UserError
from torchmars.core.words import counted
from torchmars.data.tokenizer import load_tokenizer
from torchmars.models import Model, build_run_model
from torchmars.optim import MARS
from torchmars.parallel.cuts import even_counts, head_in_blocks, stage_ranks
from torchmars.planning.assumptions import FLOPS, NETWORK, NVLINK
from torchmars.planning.pipeline import computed_again
from torchmars.records.gpus import GIB
from torchmars.training.optimizer import build_optimizer


class RuleOfThumb:
    """The costs of a model's layouts on many ranks. A block is the largest one, in bfloat16."""

    def __init__(self, model: Model, state: float, world_size: int, per_node: int) -> None:
        self.model, self.world_size, self.per_node = model, world_size, per_node
        self.stored = 8 + state  # bytes for each parameter: float32 weights, gradients, and state
        self.flops, self.head = model.flops_per_token(), head_in_blocks(model)
        blocks = [[*each.parameters()] for each in model.blocks.values()]
        block = max(blocks, key=lambda each: sum(weight.numel() for weight in each))
        routed = sum(each.numel() for each in block if each.ndim == 3)
        self.block = sum(each.numel() for each in block)
        self.parameters = model.parameter_count
        self.experts = sum(each.numel() for one in blocks for each in one if each.ndim == 3)
        unused = (self.parameters - model.active_count) / max(self.experts, 1)
        used = round(model.experts * (1 - unused))
        self.rows = used * model.width
        """Width of what comes to the experts of a token, all together."""
        self.inner = self.rows * routed // (3 * max(model.experts, 1) * model.width**2)
        """Width within them."""
        self.kept = {  # bytes for each token of a block: whole on each rank, and cut by tp
            "none": (4 * model.width, 3.3 * (self.block - routed) / model.width + 12 * model.width),
            "selective": (
                4 * model.width,
                1.3 * (self.block - routed) / model.width + 8 * model.width,
            ),
            "full": (0, 2 * model.width),
        }

    def batch(self, config: ResolvedConfig) -> tuple[int, int]:
        """Return the tokens of a microbatch on a rank, and the microbatches of a step."""
        degrees = config.parallelism.degrees(self.world_size)
        size, microbatches = config.training.microbatches(degrees.data, config.parallelism.stages)
        return size * config.training.seq_len // degrees.cp, microbatches

    def blocks(self, config: ResolvedConfig) -> list[int]:
        """Return the blocks of each stage."""
        return even_counts(len(self.model.blocks), config.parallelism.stages, self.head)

    def flight(self, config: ResolvedConfig) -> int:
        """Return of how many blocks a rank keeps passes: Narayanan et al. 2021, arXiv 2104.04473.

        The pipeline is 1F1B, interleaved where ranks have more than one stage.
        """
        ranks, stages = config.parallelism.pp, config.parallelism.stages // config.parallelism.pp
        most = ranks if stages == 1 else 2 * (ranks - 1) + (stages - 1) * ranks + 1
        return max(self.blocks(config)) * min(self.batch(config)[1] * stages, most)

    def rows_memory(self, config: ResolvedConfig) -> float:
        """Return the bytes that the rows of experts take on a rank."""
        degrees = config.parallelism.degrees(self.world_size)
        one = 8 * self.inner + 4 * self.rows
        kept = {
            "none": one,
            "selective": 4 * self.inner + (6 if degrees.ep > 1 else 2) * self.rows,
            "full": 0,
        }[config.activation_checkpoint.mode]
        # The gradients of experts' outputs, once more in float32: a router's weights are.
        working = 6 * self.rows + (one if computed_again(config.activation_checkpoint) else 0)
        tokens, _ = self.batch(config)
        return tokens * (self.flight(config) * kept + working) / degrees.tp

    def share(self, config: ResolvedConfig) -> tuple[float, float]:
        """Return the weights that a rank computes with, and those that it has."""
        pp, _, shards, cp, tp, ep = config.parallelism.degrees(self.world_size)
        others, shards = (self.parameters - self.experts) / pp / tp, shards * cp
        experts = self.experts / pp / ep
        own = others / shards + experts / (shards * tp / ep if ep > 1 else shards)
        return others + experts, own

    def kept_memory(self, config: ResolvedConfig) -> float:
        """Return the bytes of the weights, gradients and optimizer state that a rank keeps."""
        return self.stored * self.share(config)[1]

    def memory(self, config: ResolvedConfig) -> float:
        """Return the bytes of the rank that needs most."""
        mode, width = config.activation_checkpoint.mode, self.model.width
        pp, _, _, _, tp, ep = config.parallelism.degrees(self.world_size)
        tokens, microbatches = self.batch(config)
        computed, _ = self.share(config)
        unit = self.block / (ep if self.experts else tp)  # that is gathered at a time
        gathered = 6 * unit + (2 * computed if pp > 1 else 4 * unit)
        gathered += 4 * computed if config.parallelism.accumulate == "whole" else 0
        if pp > 1:  # what torch keeps for the hidden states of each microbatch
            gathered += 4 * config.parallelism.stages / pp * microbatches * tokens * width / tp
        whole, cut = self.kept[mode]
        again = self.kept["none"][1] / tp if computed_again(config.activation_checkpoint) else 0
        activations = tokens * (self.flight(config) * (whole + cut / tp) + again)
        head = 10 * self.model.vocab_rows / tp * width
        return self.kept_memory(config) + gathered + activations + head + self.rows_memory(config)

    def seconds(self, config: ResolvedConfig) -> float:
        """Return the time of a step: products, what layers wait for, and weights on their way."""
        parallelism, model, width = config.parallelism, self.model, self.model.width
        pp, replicas, shards, cp, tp, ep = parallelism.degrees(self.world_size)
        tokens, microbatches = self.batch(config)
        again = computed_again(config.activation_checkpoint)
        flops = self.flops * config.training.tokens_per_step
        compute = flops / self.world_size / FLOPS * (1 + again / 3)
        # For each token of a block, bytes through an axis, in both passes.
        keys = model.kept_width
        of_heads = 2 * model.heads[1] * model.head_width
        sharing = tp if keys == of_heads else 1  # ranks of tp have latents whole
        layers = 16 * (tp - 1) / tp * width / self.speed(tp)
        layers += 8 * (cp - 1) * keys / sharing / self.speed(tp * cp)
        layers += 8 * self.rows / tp * (ep - 1) / ep / self.speed(ep)
        layers *= (1 + again / 2) * tokens * microbatches * len(model.blocks) / pp
        computed, held = self.share(config)
        gathers = 2 * microbatches if pp == 1 else 1
        reductions = 1 if parallelism.accumulate == "whole" else microbatches
        weights = (computed - held) * (2 * gathers + 4 * reductions)
        weights /= self.speed(tp * cp * shards)
        weights += 8 * held / NETWORK if replicas > 1 else 0
        loads, blocks = [0.0] * pp, self.blocks(config)
        for rank, stage in zip(stage_ranks(parallelism), [*blocks[:-1], blocks[-1] + self.head]):
            loads[rank] += stage
        rounds = microbatches * parallelism.stages / pp
        waiting = max(loads) * pp / sum(loads) * (rounds + pp - 1) / rounds
        return config.optimizer.passes * ((compute + layers) * waiting + max(0, weights - compute))

    def speed(self, ranks: int) -> float:
        """Return the bytes per second between so many neighbours."""
        return NVLINK if self.per_node and ranks <= self.per_node else NETWORK


def rule_of_thumb(config: ResolvedConfig, world_size: int, per_node: int) -> RuleOfThumb:
    """Return the rule for a run's model and optimizer. Raises `UserError` for mistakes in them."""
    model = build_run_model(config, load_tokenizer(config.data.tokenizer).vocab_size)
    state = state_bytes(build_optimizer(config, model)) / model.parameter_count
    state += 4 if config.training.ema_decay else 0
    return RuleOfThumb(model, state, world_size, per_node)


def state_bytes(optimizer: MARS) -> int:
    """Return the bytes of the state of an optimizer of a whole model."""
    tensors = [tensor for each in optimizer.state.values() for tensor in each.values()]
    return sum(tensor.nbytes for tensor in (*tensors, *optimizer.ahead.values()))


def check_gpu_memory(config: ResolvedConfig, sizes: UsableSizes) -> None:
    """Raise `UserError` if GPUs are too small for what the fewest ranks of an elastic run keep.

    That is a rule of thumb, without activations: a plan tells more.
    """
    memory = gpu_memory()
    if memory is None or config.parallelism.cpu_offload:
        return
    fewest, ranks = sizes.usable[0], sizes.ranks[0]
    kept = rule_of_thumb(config, ranks, sizes.per_machine).kept_memory(config)
    if kept <= memory:
        return
    enough = [each for each in sizes.usable if kept * fewest / each <= memory]
    remedy = f"to {enough[0]} at least" if enough else "and MAX, or set parallelism.cpu_offload"
    raise UserError(
        f"NNODES = {sizes.asked}: {counted(fewest, 'machine')} with {counted(ranks, 'rank')} "
        f"would be too few: weights, gradients and optimizer state of a rank take "
        f"{kept / GIB:,.1f} GiB, and a GPU has {memory / GIB:,.1f} GiB: raise MIN {remedy}"
    )
