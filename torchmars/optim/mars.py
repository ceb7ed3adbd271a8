"""The MARS family: groups, state, and the order of a step, on whole tensors or on shards of them.

Sources: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large Models",
ICML 2025, arXiv 2411.10438; Liu et al., "MARS-M", arXiv 2510.21800.
"""

import importlib
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.optim.checks import (
    MAX_GRAD_NORM,
    check_group,
    check_parameters,
    check_rule,
    check_state_dtype,
    checked_params,
)
from torchmars.optim.compiling import (
    MIN_MODEL_TO_COMPILE,
    announce_compilation,
    can_compile,
    has_launches,
    is_capturing,
)
from torchmars.optim.groups import complete_group, warn_of_embeddings
from torchmars.optim.matrices.agreement import matrix_dtype_name
from torchmars.optim.matrices.exchange import Ends, travel
from torchmars.optim.meshes import MeshGroups
from torchmars.optim.passes import TorchPasses
from torchmars.optim.plans import Plans, kept_settings
from torchmars.optim.rules import RULES, group_settings
from torchmars.optim.settings import FIXED, FLATTEN, GAMMA_NEXT, SPLIT, Corrected, shown
from torchmars.optim.state import carried_state, check_loaded, new_state
from torchmars.optim.step import GroupTelemetry, count_skipped, report
from torchmars.optim.tensors import local_part, unchanged

if TYPE_CHECKING:
    from torchmars.optim.gpu.launches import Launcher, Launches

logger = logging.getLogger(__name__)


class MARS(torch.optim.Optimizer):
    """Variance-reduced AdamW, Lion, Shampoo and Muon, and the same without the reduction.

    For each parameter x with gradient g, last gradient h (h = g at the first step) and
    kappa = gamma b1 / (1 - b1):

        c = g + kappa (g - h);   c <- c min(1, clip / ||c||);   m = b1 m + (1 - b1) c

    "mars-adamw" adds AdamW's second moment of c. "mars-lion" steps by sign(m). "mars-shampoo" and
    "mars-m" step by the orthogonalised matrix m, times max(1, rows / cols)^(1/2) or
    0.2 max(rows, cols)^(1/2). "adamw", "lion" and "muon" (Nesterov, the scale of mars-m; momentum
    is betas[0]) use g itself, without clip. Weight decay is decoupled, multiplied by lr.
    `reference.py` has each rule in a few lines (arXiv 2411.10438; "mars-m": arXiv 2510.21800).

    Parameters may be plain tensors, replicas (DDP) or DTensors of any mesh and placement. `||c||`
    is the norm of the whole tensor. A sharded matrix is orthogonalised whole, on the rank that owns
    it. In a stack of matrices [n, rows, cols] h is taken as 0 where g is exactly 0. Parameters may
    be replaced in `param_groups`, sharded or moved to another device or dtype later: their state
    follows at the next step.

    Creating the optimizer is collective, and creates the state. Plain tensors alone communicate
    nothing. A step never waits for a GPU.

    A step whose gradients are not all finite, or have a norm above 1.8e19 after the global clip, is
    skipped: it changes nothing (in exact mode the last gradient is still replaced). `telemetry`
    counts such steps. A last gradient that is not finite is not used: the tensor's next correction
    is 0, as in a first step.

    Args:
        params: parameters, named parameters or groups of them, as for any `torch.optim.Optimizer`.
            A group may set lr to clip and those of `settings`, and a name for itself, `role`.
        lr: learning rate; None: the default of the rule, as in `param_groups`.
        betas: decay of the momentum and of the second moment (for "lion": of the update and of the
            momentum); None: the default of the rule. They may follow a schedule.
        weight_decay: decoupled weight decay.
        rule: one of `rules.RULES`.
        gamma: strength of the variance reduction; 0 leaves the gradient as it is.
        clip: norm to which each tensor's corrected gradient is clipped. None switches it off: rules
            other than mars-adamw then keep one buffer, without the last gradient.
        max_grad_norm: clip the global norm of all gradients first; None switches it off.
            `grad_norm` is the norm before.
        exact: take h from `look_ahead` instead of the last step: this batch's gradient at the last
            weights.
        momentum_dtype: dtype of the first moment; None: the parameter's. torch.bfloat16 halves it.
        last_grad_dtype: the same of the last gradient.
        matrix_dtype: dtype in which matrices travel and are orthogonalised. "auto": bfloat16 where
            all ranks of the mesh multiply it by instruction, else float32.
        compile: fuse the work on each tensor by torch.compile; None: for large models, where a
            compiler is found. False: also without the kernels by Triton that GPUs have.
        norm_group: ranks with *different* parts of the model, such as stages of a pipeline, whose
            norm, clip and verdict are then one. `telemetry` becomes collective.
        settings: others that rules declare: `eps`, `gamma_next` (gamma of the next step, where it
            has a schedule), `flatten`, `split` and more, each with a sentence in `settings.py`.

    Raises `ValueError` for a value out of range and `TypeError` for an unknown argument, each with
    its name. Warns where a matrix rule is given an embedding or a head.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        *,
        weight_decay: float = 0.0,
        rule: str = "mars-adamw",
        gamma: float = Corrected.gamma,
        clip: float | None = Corrected.clip,
        max_grad_norm: float | None = None,
        exact: bool = False,
        momentum_dtype: torch.dtype | None = None,
        last_grad_dtype: torch.dtype | None = None,
        matrix_dtype: str | torch.dtype = "auto",
        compile: bool | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        MAX_GRAD_NORM.check(max_grad_norm)
        check_rule(rule)
        if unknown := settings.keys() - group_settings().keys():
            raise TypeError(f"MARS() got an unexpected keyword argument {min(unknown)!r}")
        check_state_dtype("momentum_dtype", momentum_dtype)
        check_state_dtype("last_grad_dtype", last_grad_dtype)
        self.max_grad_norm, self.exact = max_grad_norm, exact
        self._new_state = partial(
            new_state, exact=exact, momentum_dtype=momentum_dtype, last_grad_dtype=last_grad_dtype
        )
        self.plans = Plans(MeshGroups(), norm_group, matrix_dtype_name(matrix_dtype))
        self.ahead: dict[Tensor, Tensor] = {}
        """In exact mode room for the next step's h of each parameter that keeps one."""
        self._looked_ahead = False
        self._requested_compile = compile
        self.grad_norm = torch.zeros((), dtype=torch.float64)
        # Skipped steps: in all, in a row up to now, longest row since `start_interval`.
        self.skipped = torch.zeros(3, dtype=torch.int64)
        self._telemetry: list[GroupTelemetry] = []  # of the last step
        given = checked_params(params)
        settings |= dict(rule=rule, weight_decay=weight_decay, gamma=gamma, clip=clip)
        # Groups of all rules have these.
        shared = {each.name: each.default for each in (GAMMA_NEXT, FLATTEN, SPLIT)}
        settings = {"eps": Corrected.eps} | shared | settings
        settings |= {key: each for key, each in (("lr", lr), ("betas", betas)) if each is not None}
        self._given = list(settings)  # what else a group has follows from its rule
        by_rule = {key: RULES[rule].defaults[key] for key in ("lr", "betas")}
        super().__init__(given, by_rule | settings)
        self._settle()
        warn_of_embeddings(self.param_groups, given)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with state for each of its parameters.

        Collective for sharded parameters, as the constructor. Raises `ValueError` or `TypeError`
        for a group that it cannot take, and is then as it was before.
        """
        if isinstance(param_group, dict):  # otherwise torch raises a TypeError
            param_group = complete_group(
                param_group, self.defaults, self._given, len(self.param_groups)
            )
        self._follow()
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)  # no compiler
        group = self.param_groups[-1]
        try:
            check_parameters(group, len(self.param_groups) - 1)
            state = {parameter: self._new_state(parameter, group) for parameter in group["params"]}
            self.plans.add(group)
        except BaseException:
            self.param_groups.pop()
            raise
        self.state.update(state)
        self._make_room()

    def _make_room(self) -> None:
        for parameter, state in self.state.items():
            if self.exact and "last_grad" in state and parameter not in self.ahead:
                self.ahead[parameter] = torch.zeros_like(state["last_grad"])

    def _settle(self) -> None:
        """Choose passes by the device and the size of the parameters."""
        requested, device = self._requested_compile, self.plans.device
        if requested is None:
            elements = sum(local_part(each).numel() for each in self.plans.parameters)
            requested = elements >= MIN_MODEL_TO_COMPILE and can_compile(device)
        self.compile = requested
        self.launcher: Launcher | None = None
        if self._requested_compile is not False and has_launches(device):
            announce_compilation()
            # They need a cache that can be written to, CUDA's library and a linker, and say so only
            # when one is compiled. Here a rank can still do without: others may not.
            try:
                module = importlib.import_module("torchmars.optim.gpu.launches")
                launcher = module.Launcher(self.plans, self.exact)
                launcher.try_one()
                self.launcher = launcher
            except Exception as error:  # whatever an installation raises that lacks something
                logger.warning(
                    "the optimizer's kernels cannot be compiled by Triton here, and steps take "
                    f"longer: {type(error).__name__}: {shown(error)}; set TRITON_CACHE_DIR to a "
                    "folder that can be written, or compile=False (in a config training.compile)"
                )
        self.grad_norm, self.skipped = (
            torch.zeros_like(each, device=device) if each.is_meta else each.to(device)
            for each in (self.grad_norm, self.skipped)
        )

    def _follow(self) -> None:
        """Let state and plans follow parameters that were replaced, sharded or moved.

        Accelerate puts FSDP2's shards in the place of the parameters; `model.to` keeps the
        parameters and swaps what is in them. Collective where sharded parameters changed. All or
        nothing.
        """
        if unchanged(self.param_groups, self.plans.known):
            return
        if self._looked_ahead:
            raise RuntimeError("parameters were replaced or moved between look_ahead() and step()")
        for number, group in enumerate(self.param_groups):
            check_parameters(group, number)
        state = carried_state(self.param_groups, self.plans.known, self.state, self._new_state)
        former = self.plans
        plans = Plans(former.mesh_groups, former.sums.norm_group, former.matrix_dtype)
        for group in self.param_groups:
            plans.add(group)
        self.plans, self.state, self.ahead = plans, defaultdict(dict, state), {}
        self._telemetry = []  # of parameters that may be gone
        self._make_room()
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as any optimizer. Collective where sharded parameters were replaced."""
        self._follow()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, or the state of torch's AdamW.

        That goes into the rule "adamw", with its hyperparameters, and into "mars-adamw", which
        keeps its own and makes its first step without correction (`skip_next_correction`). Raises
        `ValueError`, naming what does not fit, and has changed nothing then.
        """
        self._follow()
        found: list[Any] = []

        def check(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            groups, *found[:] = check_loaded(saved, self.param_groups, self._new_state)
            numbers = [each for group in groups for each in group["params"]]
            return saved | {"param_groups": groups, "state": dict(zip(numbers, found[0].values()))}

        # After the hooks of others, which may change the state.
        checking = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            checking.remove()
        # Not by torch, which casts everything to the parameter's dtype.
        state, without_last_grad = found
        self.state = defaultdict(dict, state)
        self.skip_next_correction(without_last_grad)

    def __getstate__(self) -> dict[str, Any]:
        # All of it: a copy must be able to step. It may be read where there is no Triton.
        return self.__dict__ | {"launcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle()

    @torch.no_grad()
    def look_ahead(self) -> None:
        """Take the gradients of the *next* step's batch at today's weights, in exact mode.

        They get the same global clip as those of a step, and become the next step's h. Call it
        before each step, and before the backward pass of the step's own batch.
        """
        if not self.exact:
            raise RuntimeError("look_ahead needs MARS(..., exact=True)")
        passes = self._begun()
        products = passes.products(with_last=False)
        for parameter, h in self.ahead.items():
            if parameter.grad is None:
                local_part(h).zero_()
        passes.look_ahead(self.plans.sums.sum_(products), self.max_grad_norm, self.ahead)
        self._looked_ahead = True

    @torch.no_grad()
    def skip_next_correction(self, parameters: Iterable[Tensor]) -> None:
        """Leave the correction out of the next counted update of each of `parameters`.

        It is then as in a first step (h_1 = g_1). Use it for state that was loaded without a last
        gradient, such as AdamW's, or with one of other data.
        """
        parameters = list(parameters)
        if not set(parameters) <= self.state.keys():
            raise ValueError("parameters must be a list of parameters of this optimizer")
        for parameter in parameters:
            if "last_grad" in self.state[parameter]:  # NaN: there is none
                self.state[parameter]["last_grad"].fill_(math.nan)

    @torch.no_grad()
    def skip(self) -> None:
        """Leave a step out and count it as skipped, as `step` does for a broken gradient."""
        applied = torch.zeros((), dtype=torch.bool, device=self.grad_norm.device)
        self._finish(count_skipped(self.skipped, applied), [])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Return the result of `closure`.

        Gradients stay as they are.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.exact and not self._looked_ahead:
            raise RuntimeError("exact mode needs look_ahead() before each step()")

        passes = self._begun()
        products = passes.products()
        total = self.plans.sums.sum_(products)
        verdict, skipped, telemetry = passes.settle(
            total, products, self.max_grad_norm, self.skipped
        )
        if passes.conditional or verdict.applied:
            ends = Ends(passes.pack, passes.step_along, self.plans.places)
            passes.update(matrices=True)  # momenta
            way = travel(self.plans.matrices, ends)
            next(way)  # out to their owners
            passes.update(matrices=False)  # meanwhile
            next(way, None)  # directions, back, and the step along them
        self.grad_norm = verdict.norm
        self._finish(skipped, telemetry)
        return loss

    def _begun(self) -> "TorchPasses | Launches":
        """Return the passes over the tensors of a step: Triton's launches, or torch's.

        Refuse invalid tensors and settings before anything is written.
        """
        self._follow()
        if self.plans.device.type == "meta":
            raise ValueError(
                "the parameters are on the meta device: make the optimizer after to_empty(), which "
                "puts others in their place"
            )
        for number, (group, before) in enumerate(zip(self.param_groups, self.plans.checked)):
            now = kept_settings(group)
            if len(now) == len(before) and all(
                (each is before.get(name) or isinstance(each, tuple) and each == before[name])
                and not isinstance(each, Tensor)
                for name, each in now.items()
            ):
                continue
            check_group(group, number)
            for name in FIXED & before.keys():
                if now.get(name) != before[name]:
                    raise ValueError(
                        f"{name} of group {number} was {before[name]!r} and cannot change"
                    )
            self.plans.checked[number] = now
        groups = self.plans.gather(self.param_groups, self.state)
        if self.launcher is not None:
            given = groups, self.state, self.ahead, self.max_grad_norm
            if (launches := self.launcher.begin(*given)) is not None:
                return launches
        # What is captured was warmed up by launches: nothing may be compiled now.
        compile = self.compile and (self.launcher is None or not is_capturing(self.plans.device))
        return TorchPasses(groups, self.plans, self.exact, compile)

    def _finish(self, skipped: Tensor, telemetry: list[GroupTelemetry]) -> None:
        """Keep the results of a step, and in exact mode make the look-ahead the last gradient."""
        for parameter, ahead in self.ahead.items():
            state = self.state[parameter]
            self.ahead[parameter], state["last_grad"] = state["last_grad"], ahead
        self._looked_ahead = False
        self.skipped, self._telemetry = skipped, telemetry

    def telemetry(self) -> dict[str, float]:
        """Return the results of the last step's reductions, as numbers. Waits for the device once.

        Collective where there is a `norm_group`. "grad_norm" is before the clip, "skipped_steps" in
        all, "skipped_in_a_row" the longest row since `start_interval`. Each role has
        "ROLE/grad_norm". A role with last gradients also has "ROLE/clipped" (the fraction of its
        tensors whose corrected gradient was clipped), "ROLE/correction" (the size of the correction
        relative to the gradient) and "ROLE/cosine" (of the gradient and the last one).
        """
        return report(self.grad_norm, self.skipped, self._telemetry, self.plans.sums)

    def start_interval(self) -> None:
        """Start a new interval of `telemetry`: its longest row of skipped steps counts from here.

        A row that has begun counts whole.
        """
        total, row, _ = self.skipped.unbind()
        self.skipped = torch.stack([total, row, torch.zeros_like(row)])
