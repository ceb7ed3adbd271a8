"""Warnings of likely mistakes in a plan, each with its remedy."""

from collections.abc import Iterator

from torchmars.planning.assumptions import FLOPS, GPU, MEMORY, NETWORK
from torchmars.planning.plan import Plan
from torchmars.planning.scaling import beyond_family
from torchmars.records.gpus import GIB

BUBBLE = 0.15  # of a step, from which on a pipeline is worth another look
OPTIMIZER_SHARE = 0.1  # of a step, from which on an uneven plan is felt
# Epochs after which data read again is worth less than new data: Muennighoff et al., arXiv
# 2305.16264.
EPOCHS = 4
TOKENS_PER_PARAMETER = 20  # about compute-optimal: Hoffmann et al., arXiv 2203.15556
TILE = 64  # sizes that are no multiple of it use the matrix units of GPUs badly


def advice(plan: Plan) -> Iterator[str]:
    """Yield a line for each thing to warn of, with its remedy."""
    yield from of_memory(plan)
    yield from of_network(plan)
    yield from of_axes(plan)
    yield from of_owners(plan)
    yield from of_tokens(plan)
    yield from beyond_family(plan.config, plan.whole)
    rows, width = plan.whole.vocab_rows, plan.whole.width
    if plan.per_node and (rows % TILE or width % TILE):
        yield (
            f"vocabulary {rows} or width {width} is not a multiple of {TILE}: "
            "matrix units of GPUs are used badly (model.vocab_size, model.n_embd)"
        )


def of_memory(plan: Plan) -> Iterator[str]:
    """Yield warnings of memory that does not fit, or is larger than it need be."""
    simulation, gradient = plan.largest, plan.largest.gathered
    microbatch_size, accumulation_steps = plan.microbatches
    if plan.per_node and simulation.peak > MEMORY:
        remedy = "lower training.seq_len, or take a smaller model"
        if accumulation_steps > 1 and gradient > MEMORY / 2:
            remedy = "use more ranks, so that a step is one microbatch"
        elif microbatch_size > 1:
            remedy = f"lower training.microbatch_size = {microbatch_size}"
        yield (
            f"the peak of {simulation.peak / GIB:.1f} GiB does not fit a GPU of "
            f"{GPU.memory_gib} GiB, which leaves about {MEMORY / GIB:.0f}: {remedy}"
        )
    elif plan.per_node and (ep := plan.layout.group("ep").size) > 1:
        uneven = simulation.peak + plan.rule.rows_memory(plan.config)
        if uneven > MEMORY:
            yield (
                f"a rank whose experts get twice their share of tokens needs {uneven / GIB:.1f} "
                f"GiB, and a GPU of {GPU.memory_gib} GiB leaves about {MEMORY / GIB:.0f}: keep "
                "experts equally busy (training.balance_loss), or lower training.microbatch_size = "
                f"{microbatch_size} or parallelism.ep = {ep}"
            )
    if accumulation_steps > 1 and gradient > MEMORY / 4:
        yield (
            f"{accumulation_steps} microbatches a step keep gathered weights and gradients, "
            f"{gradient / GIB:.2f} GiB, until the last of them: "
            "raise training.microbatch_size, or use more ranks"
        )
    _, held = plan.rule.share(plan.config)
    shards = plan.layout.group("dp_shard").size * plan.layout.group("cp").size
    each = 8 if plan.config.training.ema_decay else 4
    excess = sum(rank.weights for rank in plan.ranks) / (each * held * len(plan.ranks))
    if excess > 1.1:
        yield (
            f"matrices do not divide over {shards} shards: rank 0 has {excess:.2f} times its "
            f"share; a number of shards that divides the width {plan.whole.width} evens it out"
        )


def of_network(plan: Plan) -> Iterator[str]:
    """Yield warnings of FSDP over a network.

    Each microbatch gathers all weights, 2 bytes each, and makes 2 FLOPs a token with each of those
    that a token uses.
    """
    per_node, world = plan.per_node, plan.layout.world.size
    shards, nodes = plan.layout.group("dp_shard").size, world // max(per_node, 1)
    if not per_node or shards <= per_node:
        return
    if shards % per_node:
        yield (
            f"dp_shard = {shards} is not a multiple of the {per_node} GPUs of a machine: "
            "shards straddle machines"
        )
    microbatch_size, _ = plan.microbatches
    length = microbatch_size * plan.config.training.seq_len
    needed = FLOPS / (NETWORK * per_node)  # the ranks of a machine receive for each other
    needed *= plan.whole.parameter_count / plan.whole.active_count
    if length >= needed:
        return
    simulation = plan.simulation
    state = simulation.weights + simulation.gradients + simulation.optimizer_state
    fits = state * shards / per_node + simulation.activations + simulation.gathered < MEMORY
    replicas = f"parallelism.dp_replicate = {nodes} gathers inside machines and fits; or "
    yield (
        f"{length:,} tokens of a microbatch on each gathering of the weights over {nodes} "
        f"machines: below about {needed:,.0f} a network of 400 Gb/s for each GPU is slower than an "
        f"H100: {replicas if fits else ''}raise training.microbatch_size = {microbatch_size}"
    )


def of_axes(plan: Plan) -> Iterator[str]:
    """Yield warnings of axes over a network, of repeated experts, and of pipelines that wait."""
    tp, per_node = plan.layout.group("tp").size, plan.per_node
    if per_node and per_node % tp:
        yield (
            f"parallelism.tp = {tp} reaches across machines of {per_node} GPUs: every layer waits "
            f"for the network: choose a divisor of {per_node}, and pp or dp_shard for the rest"
        )
    ep = plan.layout.group("ep").size
    if per_node and per_node % ep:
        yield (
            f"parallelism.ep = {ep} reaches across machines of {per_node} GPUs: tokens wait for "
            f"the network on their way to experts and back: choose a divisor of {per_node}"
        )
    if ep == 1 < tp and plan.whole.experts:
        yield (
            f"parallelism.tp = {tp} does not cut experts, so {tp} ranks repeat their weights and "
            f"optimizer state: set parallelism.ep = {tp}, or a multiple of it"
        )
    if tp == plan.whole.heads[1] < plan.whole.heads[0]:
        yield (
            f"parallelism.tp = {tp} is the number of heads of keys and values: a larger tp is "
            "refused, so grow with pp, cp or dp_shard from here"
        )
    parallelism, (_, microbatches) = plan.config.parallelism, plan.microbatches
    if plan.bubble is not None and plan.bubble > BUBBLE:
        interleaved = parallelism.stages > parallelism.pp
        other = "" if interleaved else ', or parallelism.pp_schedule = "Interleaved1F1B"'
        yield (
            f"the ranks of the pipeline wait {plan.bubble:.0%} of a step: more than "
            f"{microbatches} microbatches (raise training.global_batch_size, lower "
            f"training.microbatch_size = {plan.microbatches[0]} or parallelism.pp = "
            f"{parallelism.pp}){other}"
        )


def of_owners(plan: Plan) -> Iterator[str]:
    """Yield a warning where ranks wait for the owner of the largest matrices."""
    size = plan.config.training.global_batch_size
    if plan.owner_loads and plan.imbalance > 1.5 and plan.owner_share > OPTIMIZER_SHARE:
        yield (
            "ranks wait for the owner of the largest matrices: split what is fused "
            "(optimizer.groups, split = 3 for QKV), or raise training.global_batch_size = "
            f"{size}, so that the share of the optimizer falls"
        )


def of_tokens(plan: Plan) -> Iterator[str]:
    """Yield warnings of too little data, too few tokens and no warmup."""
    steps = plan.config.training.steps
    for folder, epochs in plan.epochs.items():
        if epochs > EPOCHS:
            data = f"the data in {folder}" if len(plan.epochs) > 1 else "the data"
            yield (
                f"{data} is read {epochs:.1f} times: beyond about {EPOCHS}, more data helps "
                "more than more epochs"
            )
    if plan.tokens_per_parameter < TOKENS_PER_PARAMETER / 2:
        yield (
            f"training.steps = {steps} reads {plan.tokens_per_parameter:.2g} tokens per parameter: "
            "a smaller model, or more steps, uses the same FLOPs better "
            f"(about {TOKENS_PER_PARAMETER} are compute-optimal)"
        )
    if plan.config.schedule.warmup_steps == 0 and steps >= 1000:
        yield "schedule.warmup_steps = 0: the published runs warm up over 2,000 steps"
