"""The abilities that all ranks of a run share, and the settings that follow."""

from dataclasses import dataclass, replace
from typing import Any

from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import newest_config
from torchmars.config import ResolvedConfig
from torchmars.config.compile import resolve_compile
from torchmars.config.dtypes import resolve_dtypes
from torchmars.config.optimizer import as_begun
from torchmars.exchange.hub import find_folder, is_of_hub
from torchmars.optim.kernels import can_compile
from torchmars.optim.matrices.precision import multiplies_bfloat16
from torchmars.parallel.fsdp import weight_device
from torchmars.parallel.layout import Layout


@dataclass(frozen=True)
class Abilities:
    """The abilities that all ranks share."""

    native_bfloat16: bool
    """To multiply bfloat16 fast."""
    compile: bool


def resolve_on_ranks(config: ResolvedConfig, layout: Layout) -> tuple[ResolvedConfig, Abilities]:
    """Return `config` with all resolved that ranks must find out, and the abilities of all ranks.

    Raises `UserError`, on every rank, for a model of the hub that cannot be fetched.
    """
    device = layout.device
    weights = weight_device(config.parallelism, device)
    native_bfloat16 = layout.agree(lambda: multiplies_bfloat16(weights))
    saved, source = layout.on_first(lambda: saved_and_source(config))
    config = resolve_dtypes(config, device, native_bfloat16, saved)
    optimizer = as_begun(config.optimizer, config.training.router_z_loss, saved)
    config = replace(config, optimizer=optimizer)
    able = layout.agree(lambda: can_compile(device))
    config = resolve_compile(config, device, able, layout.group("tp").size, saved)
    config = replace(config, checkpoint=replace(config.checkpoint, init_from=source))
    return config, Abilities(native_bfloat16, able)


def saved_and_source(config: ResolvedConfig) -> tuple[dict[str, Any] | None, str | None]:
    """Return the config of the run's newest checkpoint, None without one, and checkpoint.init_from.

    The latter is as `resolve_source` has it. Raises `UserError`.
    """
    saved = newest_config(checkpoints(config.checkpoints))
    return saved, resolve_source(config.checkpoint.init_from, saved)


def resolve_source(source: str | None, saved: dict[str, Any] | None) -> str | None:
    """Return checkpoint.init_from, in which a model of the hub has its commit; fetch it.

    A run that has a checkpoint, with the config `saved`, keeps its commit. Raises `UserError`.
    """
    if source is None or not is_of_hub(source):
        return source
    if saved is None:
        return find_folder(source)[1]
    before = str(saved["checkpoint"].get("init_from"))
    return before if before.partition("@")[0] == source.partition("@")[0] else source
