"""A plan in lines, for the console."""

from collections.abc import Iterator

from torchmars.checkpoint.memory.copies import GENERATIONS
from torchmars.cluster.sizes import UsableSizes
from torchmars.core.console import labelled
from torchmars.core.tables import table
from torchmars.core.words import counted, duration
from torchmars.planning.advice import advice
from torchmars.planning.assumptions import SPEEDS
from torchmars.planning.plan import Plan
from torchmars.planning.scaling import transferred
from torchmars.planning.simulation import Simulation
from torchmars.records.gpus import GIB
from torchmars.training.summary import summary


def plan_in_words(plan: Plan, sizes: UsableSizes | None = None) -> list[str]:
    """Return all of a plan: the run, its costs, and warnings.

    `sizes` are those of an elastic run, of which this is the plan of the fewest ranks.
    """
    sections = {
        "transfer": transferred(plan.config, plan.whole, plan.optimizer),
        "memory": memory(plan),
        "experts": dealt_experts(plan),
        "pipeline": pipeline(plan),
        "disk": disk(plan, sizes),
        "traffic": traffic(plan),
        "owners": owners(plan),
        "tokens": list(tokens(plan)),
        "time": time(plan),
    }
    lines = []
    if sizes:
        fewest = f"{sizes.ranks[0]} ranks, the fewest: memory is the tightest there"
        lines = [*sizes.in_words(), *labelled("planned", fewest)]
    lines += summary(plan.config, plan.layout, plan.whole, plan.optimizer)
    for name, section in sections.items():
        lines += labelled(name, *section) if section else []
    return lines + [line for text in advice(plan) for line in labelled("warning", text)]


def memory(plan: Plan) -> list[str]:
    """Return the memory of a rank: in a pipeline, of each of its ranks."""
    if len(plan.ranks) == 1:
        [rank] = plan.ranks
        sizes = {
            "weights": rank.weights,
            "gradients": rank.gradients,
            "optimizer state": rank.optimizer_state,
            "gathered weights and gradients, at the peak": rank.gathered,
            "activations, at the peak (estimated)": rank.activations,
            "peak": rank.peak,
        }
        one = [(name, f"{size / GIB:.3f}", f"{size:,}") for name, size in sizes.items()]
        return table([("of each rank", "GiB", "bytes"), *one])
    headings = "rank of the pipeline", "stages", "blocks", "parameters", "weights", "gradients"
    more = "optimizer state", "receiving buffers", "gathered", "activations", "peak (GiB)"
    kinds = "weights gradients optimizer_state received gathered activations peak".split()
    rows = [
        (str(number), *of_stages(rank), *(f"{getattr(rank, kind) / GIB:.3f}" for kind in kinds))
        for number, rank in enumerate(plan.ranks)
    ]
    return table([(*headings, *more), *rows])


def of_stages(rank: Simulation) -> tuple[str, str, str]:
    """Return which stages a rank of a pipeline has, and their blocks and parameters."""
    blocks = [list(part.model.blocks) for part in rank.model.parts.values()]
    numel = sum(weight.numel() for weight in rank.model.weights.values())
    return (
        " ".join(map(str, rank.model.parts)),
        " ".join(f"{each[0]}-{each[-1]}" for each in blocks),
        f"{numel:,}",
    )


def dealt_experts(plan: Plan) -> list[str]:
    """Return the distribution of experts, and its assumptions; nothing if ranks have all.

    A rank that has all experts has as many rows, whatever routers choose.
    """
    ep, number = plan.layout.group("ep").size, plan.whole.experts
    if ep == 1:
        return []
    more = plan.rule.rows_memory(plan.config) / GIB
    return [
        f"{number} of each block are dealt out over {counted(ep, 'rank')}, {number // ep} on each",
        "even routing is assumed: all experts get as many tokens. None is dropped, so memory has "
        f"no bound: twice its share of tokens takes a rank about {more:.3f} GiB "
        "more",
    ]


def pipeline(plan: Plan) -> list[str]:
    """Return how long the ranks of a pipeline wait; nothing without one."""
    if plan.bubble is None:
        return []
    parallelism = plan.config.parallelism
    return [
        f"{parallelism.pp_schedule}: {parallelism.stages} stages on {parallelism.pp} ranks, "
        f"{plan.microbatches[1]} microbatches: the bubble is {plan.bubble:.1%} of a step"
    ]


def disk(plan: Plan, sizes: UsableSizes | None = None) -> list[str]:
    """Return the size of checkpoints, on disk and in memory while they are written.

    `sizes` are those of an elastic run.
    """
    settings = plan.config.checkpoint
    size, kept = plan.checkpoint, settings.keep_last
    total = f"{kept * size / GIB:,.1f} GiB for the {kept} that are kept" if kept else "all are kept"
    lines = [f"{size / GIB:,.2f} GiB ({size:,} bytes) a checkpoint, {total}"]
    largest = max(rank.weights + rank.optimizer_state for rank in plan.ranks)
    world = plan.layout.world.size
    here = sizes.per_machine if sizes else min(plan.per_node or world, world)
    copy = largest * here / GIB
    if settings.async_save:
        lines.append(f"{copy:,.2f} GiB of each machine's memory for the copy being written")
    if settings.memory_interval:
        copies = GENERATIONS * (1 if here == world else 2)
        lines.append(f"{copies * copy:,.2f} GiB of each machine's /dev/shm for {copies} copies")
        if sizes and sizes.ranks[1:]:
            more = sizes.ranks[1]  # their parts are smaller, and each machine has a partner
            both = round((copies + 2 * GENERATIONS * world / more) * largest * here)
            lines.append(
                f"{both / GIB:,.2f} GiB ({both:,} bytes) there while {more} ranks become {world}, "
                "until the first new copy is complete"
            )
    return lines


def traffic(plan: Plan) -> list[str]:
    """Return the traffic of a rank in a step, by kind; in a pipeline, of the busiest rank."""
    rank = max(plan.ranks, key=lambda each: sum(each.traffic.sent.values()))
    times, sent = rank.traffic.times, rank.traffic.sent
    rows: list[tuple[str, ...]] = [
        ("sent by each rank in a step", "along", "among", "times", "MiB")
    ]
    for kind, size in sent.items():
        among = counted(len(kind.ranks), "rank")
        if plan.per_node:
            machines = len({number // plan.per_node for number in kind.ranks})
            among += f" on {counted(machines, 'machine')}"
        name, along = f"{kind.phase}, {kind.operation}", plan.axes_of(kind.ranks)
        rows.append((name, along, among, f"{times[kind]}", f"{size / 2**20:,.2f}"))
    total = f"{sum(times.values())}", f"{sum(sent.values()) / 2**20:,.2f}"
    return table([*rows, ("in all", "", "", *total)])


def owners(plan: Plan) -> list[str]:
    """Return how evenly matrices are dealt out."""
    loads = plan.owner_loads
    if not loads:
        return ["none: no rule of this run orthogonalises matrices"]
    ranks = {rank for each in loads.values() for rank in each}
    busy = {rank for each in loads.values() for rank, load in each.items() if load}
    return [
        f"largest over mean orthogonalisation work of a rank: {plan.imbalance:.2f}; "
        f"{len(ranks - busy)} of {counted(len(ranks), 'rank')} own no matrix",
        f"the largest is {plan.owner_share:.1%} of a rank's forward and backward FLOPs",
    ]


def tokens(plan: Plan) -> Iterator[str]:
    """Return the tokens and FLOPs of the run."""
    training, missing = plan.config.training, f"{plan.config.data.path} is not prepared yet"
    epochs = [f"{epochs:.2f} epochs of {path}" for path, epochs in plan.epochs.items()]
    read = ", ".join(epochs) or missing
    parameter = "active parameter" if plan.whole.experts else "parameter"
    yield (
        f"{training.tokens_per_step:,} a step, {training.tokens:,} to the end: "
        f"{plan.tokens_per_parameter:.1f} for each {parameter}; {read}"
    )
    yield f"{plan.flops_per_token * training.tokens:.2e} FLOPs"


def time(plan: Plan) -> list[str]:
    """Return how long the run takes on GPUs; nothing for CPUs."""
    seconds = plan.seconds
    if seconds is None:
        return []
    whole = duration(seconds * plan.config.training.steps)
    return [
        f"about {whole}, {seconds:.2f} s a step: estimated for H100s, {SPEEDS}, without the "
        "optimizer's reading and writing of memory"
    ]
