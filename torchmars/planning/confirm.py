"""Exact plans of layouts that were found: how far the formulas of find.py are from them."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from torchmars.config import ResolvedConfig
from torchmars.config.plugins import load_plugins
from torchmars.core.tables import table
from torchmars.metrics.throughput import GIB
from torchmars.planning.find import Candidate
from torchmars.planning.plan import make_plan


def confirmed_table(
    found: list[Candidate], config: ResolvedConfig, world_size: int, per_node: int
) -> list[str]:
    """Plan each layout of `found` exactly; return the figures beside the estimates, in lines."""
    rows: list[tuple[str, ...]] = [("GiB", "planned", "off", "waiting", "planned", "options")]
    spawn = multiprocessing.get_context("spawn")  # a plan leaves its process group behind
    plugins = (config.run.plugins,)
    with ProcessPoolExecutor(1, spawn, load_plugins, plugins, max_tasks_per_child=1) as pool:
        for each in found:
            peak, bubble = pool.submit(planned, each.config, world_size, per_node).result()
            sizes = [f"{size / GIB:.1f}" for size in (each.memory, peak)]
            bubbles = [f"{part:.0%}" for part in (each.bubble, bubble)]
            off = f"{each.memory / peak - 1:+.0%}"
            rows.append((*sizes, off, *bubbles, each.options(config)))
    return table(rows, right=range(5))


def planned(config: ResolvedConfig, world_size: int, per_node: int) -> tuple[int, float]:
    """Return the largest peak of a rank in bytes, and the bubble, by an exact plan."""
    plan = make_plan(config, world_size, per_node)
    return plan.largest.peak, plan.bubble or 0.0
