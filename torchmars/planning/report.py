"""A plan in lines, for the console, and warnings of likely mistakes, each with its remedy."""

from collections import Counter
from collections.abc import Iterator

from torchmars.checkpoint.memory.slots import GENERATIONS
from torchmars.cluster.sizes import UsableSizes
from torchmars.core.console import labelled
from torchmars.core.words import counted, duration, table
from torchmars.models.base import factors_of
from torchmars.parallel.layout import describe_layout
from torchmars.planning.plan import GPU_GIB, MEMORY, SPEEDS, Plan
from torchmars.planning.traffic import axes_of
from torchmars.records.gpus import GIB
from torchmars.training.summary import summary

# Epochs after which data read again is worth less than new data: Muennighoff et al., arXiv
# 2305.16264.
EPOCHS = 4
OF_LENGTH = (
    "rates are for the batch and the steps that the base was tuned with: they go about with the",
    "root of the batch under Adam (arXiv 2205.10287), and with tokens^-0.32 (arXiv 2603.28743)",
)
SIZES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "receiving buffers": "received",
    "gathered weights and gradients, at the peak": "gathered",
    "activations, at the peak (estimated)": "activations",
    "peak": "peak",
}


def plan_in_words(plan: Plan, sizes: UsableSizes | None = None) -> list[str]:
    """Return all of a plan: the run, its costs, and warnings.

    `sizes` are those of an elastic run, of which this is the plan of the fewest ranks.
    """
    lines = []
    if sizes:
        fewest = f"{sizes.ranks[0]} ranks, the fewest: memory is the tightest there"
        lines = [*sizes.in_words(), *labelled("planned", fewest)]
    layout = describe_layout(plan.degrees, plan.memory.device)
    lines += summary(plan.config, layout, plan.degrees.data, plan.whole, plan.optimizer)
    sections = {
        "transfer": transferred(plan),
        "memory": memory(plan),
        "pipeline": pipeline(plan),
        "disk": disk(plan, sizes),
        "traffic": traffic(plan),
        "owners": owners(plan),
        "tokens": tokens(plan),
        "time": time(plan),
    }
    for name, section in sections.items():
        lines += labelled(name, *section) if section else []
    return lines + [line for text in warnings(plan) for line in labelled("warning", text)]


def transferred(plan: Plan) -> list[str]:
    """Return what the tensors of each role get of a base's rates; nothing without a base."""
    factors = factors_of(plan.whole, plan.config.transfer)
    if factors is None:
        return []
    rows: Counter[tuple[str, ...]] = Counter()
    for group in plan.optimizer.param_groups:
        rates = [f"{group[name]:.4g}" for name in ("lr", "weight_decay", "eps")]
        for name in group["param_names"]:
            std = plan.whole.init_std(name)
            begins = "ones" if std is None else f"{std * factors.std.get(name, 1.0):.4g}"
            rows[group["role"], begins, *rates] += 1
    roles = [(role, str(count), *rest) for (role, *rest), count in rows.items()]
    headings = "role", "tensors", "std at the start", "lr", "weight decay", "eps"
    return [*table([headings, *roles]), *OF_LENGTH]


def memory(plan: Plan) -> list[str]:
    """Return the memory of a rank: in a pipeline, of each of its ranks."""
    even = "; all experts are taken to get as many tokens" if plan.whole.experts else ""
    moment = f"the peak is in {plan.largest.moment}{even}"
    if len(plan.ranks) == 1:
        sizes = {name: getattr(plan.ranks[0], key) for name, key in SIZES.items()}
        rows = [(name, f"{size / GIB:.3f}", f"{size:,}") for name, size in sizes.items() if size]
        return [*table([("of each rank", "GiB", "bytes"), *rows]), moment]
    names = (name.split(",")[0].split(" weights")[0] for name in SIZES)
    headings = "rank of the pipeline", "stages", "blocks", "parameters", *names
    lines = [
        (
            str(number),
            " ".join(map(str, rank.stages)),
            " ".join(f"{each[0]}-{each[-1]}" for each in rank.stages.values()),
            f"{rank.parameters:,}",
            *(f"{getattr(rank, key) / GIB:.3f}" for key in SIZES.values()),
        )
        for number, rank in enumerate(plan.ranks)
    ]
    return [*table([(*headings[:-1], "peak (GiB)"), *lines]), moment]


def pipeline(plan: Plan) -> list[str]:
    """Return how long the ranks of a pipeline wait; nothing without one."""
    parallelism = plan.config.parallelism
    return [
        f"{parallelism.pp_schedule}: {parallelism.stages} stages on {parallelism.pp} ranks, "
        f"{plan.microbatches[1]} microbatches: the bubble is {plan.bubble:.1%} of a step"
    ] * (parallelism.pp > 1)


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
    for phase, operation, group, size, _ in plan.sent:
        among = counted(len(group), "rank")
        if plan.per_node:
            among += f" on {counted(plan.machines(group), 'machine')}"
        along = axes_of(group, plan.degrees)
        rows.append((f"{phase}, {operation}", along, among, f"{size / 2**20:,.2f}"))
    total = sum(each.size for each in plan.sent)
    return table([*rows, ("in all", "", "", f"{total / 2**20:,.2f}")])


def owners(plan: Plan) -> list[str]:
    """Return how evenly matrices are dealt out."""
    loads = plan.owned[0]
    if not loads:
        return ["none: no rule of this run orthogonalises matrices"]
    ranks = {rank for each in loads.values() for rank in each}
    busy = {rank for each in loads.values() for rank, load in each.items() if load}
    mean = sum(sum(each.values()) / len(each) for each in loads.values())
    share = plan.largest_load / plan.flops * plan.world_size
    return [
        f"largest over mean orthogonalisation work of a rank: {plan.largest_load / mean:.2f}; "
        f"{len(ranks - busy)} of {counted(len(ranks), 'rank')} own no matrix",
        f"the largest is {share:.1%} of a rank's forward and backward FLOPs",
    ]


def tokens(plan: Plan) -> list[str]:
    """Return the tokens and FLOPs of the run."""
    training, missing = plan.config.training, f"{plan.config.data.path} is not prepared yet"
    epochs = [f"{epochs:.2f} epochs of {path}" for path, epochs in plan.epochs.items()]
    parameter = "active parameter" if plan.whole.experts else "parameter"
    of_each = training.tokens / plan.whole.active_count
    return [
        f"{training.tokens_per_step:,} a step, {training.tokens:,} to the end: "
        f"{of_each:.1f} for each {parameter}; {', '.join(epochs) or missing}",
        f"{plan.flops * training.steps:.2e} FLOPs",
    ]


def time(plan: Plan) -> list[str]:
    """Return how long the run takes on GPUs; nothing for CPUs."""
    if plan.seconds is None:
        return []
    whole = duration(plan.seconds * plan.config.training.steps)
    return [
        f"about {whole}, {plan.seconds:.2f} s a step: estimated for H100s, {SPEEDS}, without the "
        "optimizer's reading and writing of memory"
    ]


def warnings(plan: Plan) -> Iterator[str]:
    """Yield a line for each likely mistake, with its remedy."""
    peak, per_node = plan.largest.peak, plan.per_node
    if per_node and peak > MEMORY:
        size = plan.microbatches[0]
        lower = f"training.microbatch_size = {size}" if size > 1 else "training.seq_len"
        yield (
            f"the peak of {peak / GIB:.1f} GiB does not fit a GPU of {GPU_GIB} GiB, which "
            f"leaves about {MEMORY / GIB:.0f}: lower {lower}, use more ranks, or look for another "
            "layout (--find)"
        )
    for axis in ("tp", "ep"):
        if per_node and per_node % (size := getattr(plan.degrees, axis)):
            yield (
                f"parallelism.{axis} = {size} reaches across machines of {per_node} GPUs: every "
                f"layer waits for the network: choose a divisor of {per_node}"
            )
    for folder, epochs in plan.epochs.items():
        if epochs > EPOCHS:
            yield (
                f"{folder} is read {epochs:.1f} times: beyond about {EPOCHS}, more data helps more "
                "than more epochs"
            )
