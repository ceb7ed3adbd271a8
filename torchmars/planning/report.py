"""A plan in lines, for the console."""

from collections import Counter

from torchmars.checkpoint.memory.slots import GENERATIONS
from torchmars.cluster.sizes import UsableSizes
from torchmars.core.console import labelled
from torchmars.core.words import counted, duration, table
from torchmars.data.order import shares_from_start
from torchmars.models.base import factors_of
from torchmars.parallel.layout import describe_layout
from torchmars.planning.plan import GPU_GIB, MEMORY, SPEEDS, Plan
from torchmars.records.gpus import GIB
from torchmars.training.summary import summary

OF_LENGTH = (
    "rates are for the batch and the steps that the base was tuned with: they go about with the",
    "root of the batch under Adam (arXiv 2205.10287), and with tokens^-0.32 (arXiv 2603.28743)",
)


def plan_in_words(plan: Plan, sizes: UsableSizes | None = None) -> list[str]:
    """Return all of a plan: the run, and its costs.

    `sizes` are those of an elastic run, of which this is the plan of the fewest ranks.
    """
    lines = []
    if sizes:
        fewest = f"{sizes.ranks[0]} ranks, the fewest: memory is the tightest there"
        lines = [*sizes.in_words(), *labelled("planned", fewest)]
    layout = describe_layout(plan.degrees, plan.costs.device)
    lines += summary(plan.config, layout, plan.degrees.data, plan.whole, plan.costs.optimizer)
    sections = {
        "transfer": transferred(plan),
        "memory": memory(plan),
        "pipeline": pipeline(plan),
        "disk": disk(plan, sizes),
        "traffic": traffic(plan),
        "owners": owners(plan),
        "tokens": tokens(plan),
    }
    for name, section in sections.items():
        lines += labelled(name, *section)
    if plan.seconds is not None:
        time = f"{duration(plan.seconds * plan.config.training.steps)}, {plan.seconds:.2f} s a step"
        without = "without the optimizer's reading and writing of memory"
        lines += labelled("time", f"about {time}: estimated for H100s, {SPEEDS}, {without}")
    return lines


def transferred(plan: Plan) -> list[str]:
    """Return what the tensors of each role get of a base's rates; nothing without a base."""
    factors = factors_of(plan.whole, plan.config.transfer)
    if factors is None:
        return []
    rows: Counter[tuple[str, ...]] = Counter()
    for group in plan.costs.optimizer.param_groups:
        rates = [f"{group[name]:.4g}" for name in ("lr", "weight_decay", "eps")]
        for name in group["param_names"]:
            std = plan.whole.init_std(name)
            begins = "ones" if std is None else f"{std * factors.std.get(name, 1.0):.4g}"
            rows[group["role"], begins, *rates] += 1
    roles = [(role, str(count), *rest) for (role, *rest), count in rows.items()]
    headings = "role", "tensors", "std at the start", "lr", "weight decay", "eps"
    return [*table([headings, *roles]), *OF_LENGTH]


def memory(plan: Plan) -> list[str]:
    """Return the memory of a rank, in a pipeline of the fullest, and whether it fits a GPU."""
    rank, size = plan.largest, plan.microbatches[0]
    whose = f"of the pipeline's rank {rank.rank}" if plan.degrees.pp > 1 else "of each rank"
    rows = [(whose, "GiB", "bytes")]
    for name in ("weights", "gradients", "optimizer_state", "gathered", "activations", "peak"):
        number = getattr(rank, name)
        rows.append((name.replace("_", " "), f"{number / GIB:.3f}", f"{number:,}"))
    even = "; all experts are taken to get as many tokens" if plan.whole.experts else ""
    lines = [*table(rows), f"the peak is in {rank.moment}, with activations as estimated{even}"]
    if plan.per_node and rank.peak > MEMORY:
        lower = f"training.microbatch_size = {size}" if size > 1 else "training.seq_len"
        lines.append(
            f"it does not fit a GPU of {GPU_GIB} GiB, which leaves about {MEMORY / GIB:.0f}: lower "
            f"{lower}, use more ranks, or look for another layout (--find)"
        )
    return lines


def pipeline(plan: Plan) -> list[str]:
    """Return how long the ranks of a pipeline wait, and their stages; nothing without one."""
    parallelism, rows = plan.parallelism, []
    if parallelism.pp == 1:
        return []
    for rank in plan.ranks:
        stages = " ".join(map(str, rank.stages))
        blocks = " ".join(f"{each[0]}-{each[-1]}" for each in rank.stages.values())
        rows.append((str(rank.rank), stages, blocks, f"{rank.peak / GIB:.3f}"))
    return [
        f"{parallelism.pp_schedule}: {parallelism.stages} stages on {parallelism.pp} ranks, "
        f"{plan.microbatches[1]} microbatches: the bubble is {plan.bubble:.1%} of a step",
        *table([("rank", "stages", "blocks", "peak (GiB)"), *rows]),
    ]


def disk(plan: Plan, sizes: UsableSizes | None = None) -> list[str]:
    """Return the size of checkpoints, on disk and in memory while they are written.

    `sizes` are those of an elastic run.
    """
    settings, world = plan.config.checkpoint, plan.world_size
    size, kept = plan.checkpoint, settings.keep_last
    total = f"{kept * size / GIB:,.1f} GiB for the {kept} that are kept" if kept else "all are kept"
    lines = [f"{size / GIB:,.2f} GiB ({size:,} bytes) a checkpoint, {total}"]
    here = sizes.per_machine if sizes else min(plan.per_node or world, world)
    of_machine = here * max(rank.weights + rank.optimizer_state for rank in plan.ranks)
    copy = of_machine / GIB
    if settings.async_save:
        lines.append(f"{copy:,.2f} GiB of each machine's memory for the copy being written")
    if settings.memory_interval:
        copies = GENERATIONS * (1 if here == world else 2)
        lines.append(f"{copies * copy:,.2f} GiB of each machine's /dev/shm for {copies} copies")
        if sizes and sizes.ranks[1:]:
            more = sizes.ranks[1]  # their parts are smaller, and each machine has a partner
            both = round((copies + 2 * GENERATIONS * world / more) * of_machine)
            lines.append(
                f"{both / GIB:,.2f} GiB ({both:,} bytes) there while {more} ranks become {world}, "
                "until the first new copy is complete"
            )
    return lines


def traffic(plan: Plan) -> list[str]:
    """Return the traffic of a rank in a step, by kind; in a pipeline, of the busiest rank."""
    rows = [("sent by each rank in a step", "along", "among", "MiB")]
    sent = plan.sent
    for each in sent:
        among = counted(len(each.group), "rank")
        if plan.per_node:
            among += f" on {counted(plan.machines(each.group), 'machine')}"
        size = f"{each.size / 2**20:,.2f}"
        rows.append((each.operation, each.along, among, size))
    total = sum(each.size for each in sent)
    return table([*rows, ("in all", "", "", f"{total / 2**20:,.2f}")])


def owners(plan: Plan) -> list[str]:
    """Return how evenly matrices are dealt out."""
    loads = [*plan.owned[0].values()]
    if not loads:
        return ["none: no rule of this run orthogonalises matrices"]
    share = max(loads) / plan.flops * plan.world_size
    return [
        "largest over mean orthogonalisation work of a rank: "
        f"{max(loads) * len(loads) / sum(loads):.2f}; "
        f"{loads.count(0)} of {counted(len(loads), 'rank')} own no matrix",
        f"the largest is {share:.1%} of a rank's forward and backward FLOPs",
    ]


def tokens(plan: Plan) -> list[str]:
    """Return the tokens and FLOPs of the run, and how often it reads each corpus."""
    training, read = plan.config.training, f"{plan.config.data.path} is not prepared yet"
    if data := plan.costs.data:
        samples = shares_from_start(data.weights).counts(
            training.steps * training.global_batch_size
        )
        read = ", ".join(
            f"{count * training.seq_len / part.manifest.splits['train'].tokens:.2f} epochs of "
            f"{part.folder}"
            for part, count in zip(data.parts, samples)
        )
    parameter = "active parameter" if plan.whole.experts else "parameter"
    of_each = training.tokens / plan.whole.active_count
    return [
        f"{training.tokens_per_step:,} a step, {training.tokens:,} to the end: "
        f"{of_each:.1f} for each {parameter}; {read}",
        f"{plan.flops * training.steps:.2e} FLOPs",
    ]
