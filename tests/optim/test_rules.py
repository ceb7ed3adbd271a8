"""Every rule, mode and form against float64 math, and the identities between them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.optim.reference import direction, gradients, lion, mars, muon
from tests.support.full import full_but
from tests.support.steps import (
    BASE,
    MARS_RULES,
    MATRICES,
    OTHERS,
    meant,
    relative,
    run,
    starts,
    train,
)
from torchmars.optim import MARS
from torchmars.optim.rules import RULES, MatrixRule


def compare(parameters, reference, dtype, tolerance, **settings):
    """Compare with `reference`, and return on how many steps its clip was active."""
    clipped, sizes = 0, [parameter.shape for parameter in parameters]
    for seed, (parameter, start) in enumerate(zip(parameters, starts(sizes, dtype))):
        expected = reference(start, gradients(start.shape, 20, seed, dtype), **settings)
        if isinstance(expected, tuple):
            expected, active = expected
            clipped += active
        assert relative(parameter, expected) < tolerance
    return clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", MARS_RULES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip": None},
        {"gamma": 0.2, "betas": (0.9, 0.95)},
        {"clip": None, "gamma": 0.1},
        {"clip": 0.4},
        {"gamma": 0.0},
    ],
)
def test_mars_rules_in_approximate_form(rule, dtype, settings):
    matrix = isinstance(RULES[rule], MatrixRule)
    sizes = MATRICES if matrix else MATRICES + OTHERS
    parameters, optimizer = train(rule, dtype, sizes=sizes, **settings)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5 if matrix else 1e-6}[dtype]
    clipped = compare(parameters, mars, dtype, tolerance, rule=rule, **settings)
    assert (clipped > 0) == (settings.get("clip", 1.0) is not None)
    lean = settings.get("clip", 1.0) is None and rule != "mars-adamw"
    buffers = {name for name, value in optimizer.state[parameters[0]].items() if value.ndim}
    assert buffers == (
        {"momentum"}
        if lean
        else {"exp_avg", "last_grad"} | ({"exp_avg_sq"} if rule == "mars-adamw" else set())
    )


@pytest.mark.parametrize("rule", MARS_RULES)
@pytest.mark.parametrize("clip", [1.0, None])
def test_gamma_may_follow_a_schedule(rule, clip):
    gammas = [0.1 - 0.004 * step for step in range(21)]

    def schedule(optimizer, step):
        optimizer.param_groups[0] |= {"gamma": gammas[step], "gamma_next": gammas[step + 1]}

    parameters, _ = train(rule, torch.float64, before=schedule, clip=clip)
    compare(parameters, mars, torch.float64, 1e-11, rule=rule, clip=clip, gamma=gammas)


def one_cycle(rule, steps=20):
    """Return the betas of each step under torch's OneCycleLR, as it cycles them by default."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = MARS([{"params": [parameter], "rule": rule}], **BASE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, BASE["lr"], total_steps=steps + 1)
    betas = []
    for _ in range(steps):
        betas.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    return betas


@pytest.mark.parametrize(
    "rule,settings",
    [("lion", {}), ("muon", {}), *((rule, {"clip": None}) for rule in MARS_RULES[1:])],
)
@pytest.mark.parametrize("schedule", ["one cycle", "jumps"])
def test_betas_may_follow_a_schedule(rule, settings, schedule):
    jumps = [((0.9, 0.5, 0.97, 0.0)[t % 4], (0.99, 0.8, 0.0)[t % 3]) for t in range(20)]
    betas = one_cycle(rule) if schedule == "one cycle" else jumps

    def change(optimizer, step):
        optimizer.param_groups[0]["betas"] = betas[step]

    assert len(set(betas)) > 2
    parameters, _ = train(rule, torch.float64, before=change, betas=betas[0], **settings)
    if rule == "lion":
        compare(parameters, lion, torch.float64, 1e-11, betas=betas, **BASE)
    elif rule == "muon":
        compare(parameters, muon, torch.float64, 1e-7, momentum=[b1 for b1, _ in betas], **BASE)
    else:
        compare(parameters, mars, torch.float64, 1e-11, rule=rule, betas=betas, **settings)


def test_lion_is_mars_lion_with_another_gamma():
    """Lion(b1, b2) is mars-lion with beta b2, gamma 1 - b1 / b2, from h_1 = 0.

    There m_1 = (1 - b1) g_1, here m_1 = (1 - b2) g_1.
    """
    parameters, _ = train("lion", torch.float64, steps=20, betas=(0.9, 0.99))
    others = [nn.Parameter(start) for start in starts(MATRICES, torch.float64)]
    optimizer = MARS(
        others, rule="mars-lion", clip=None, betas=(0.99, 0.0), gamma=1 - 0.9 / 0.99, **BASE
    )
    for state in optimizer.state.values():
        state["step"].fill_(1)  # as if a step with a zero gradient had been made: h_1 = 0
    run(
        optimizer,
        others,
        [gradients(shape, 20, seed, torch.float64) for seed, shape in enumerate(MATRICES)],
    )
    for one, other in zip(parameters, others):
        assert relative(one, other) < 1e-9


def test_muon_equals_torch():
    """In bfloat16 a last bit may differ: torch divides by the norm in place, and without eps."""
    ours = [nn.Parameter(start) for start in starts(MATRICES)]
    theirs = [nn.Parameter(start) for start in starts(MATRICES)]
    sequences = [gradients(shape, 20, seed) for seed, shape in enumerate(MATRICES)]
    run(MARS(ours, rule="muon", **BASE), ours, sequences)
    run(
        torch.optim.Muon(theirs, momentum=0.95, adjust_lr_fn="match_rms_adamw", **BASE),
        theirs,
        sequences,
    )
    for one, other, start in zip(ours, theirs, starts(MATRICES)):
        assert relative(one - start, other - start) < 2e-2


@pytest.mark.parametrize("rule", ["mars-shampoo", "mars-m"])
def test_without_reduction_it_is_muon_with_plain_momentum(rule):
    parameters, _ = train(rule, torch.float64, gamma=0.0, clip=None)
    for seed, (parameter, start) in enumerate(zip(parameters, starts(MATRICES, torch.float64))):
        x, m = start.clone(), torch.zeros_like(start)
        for g in gradients(start.shape, 20, seed, torch.float64):
            m = 0.95 * m + 0.05 * g
            x = x - BASE["lr"] * (direction(rule, m) + BASE["weight_decay"] * x)
        assert relative(parameter, x) < 1e-7


def test_mars_m_without_clip_is_muon_with_nesterov_momentum():
    """With b1 = mu, gamma = 1 - mu and h_1 = 0, which the published code begins with."""

    def begin(optimizer, step):
        for state in optimizer.state.values() if step == 0 else ():
            state["step"].fill_(1)  # a first step has no correction
            state["last_grad"].zero_()

    mu = 0.95
    never = 1e9  # a clip that keeps the last gradient and clips nothing
    settings = {"betas": (mu, 0.99), "clip": never}
    ours, _ = train("mars-m", torch.float64, before=begin, gamma=1 - mu, **settings)
    theirs, _ = train("muon", torch.float64, betas=(mu, 0.99))
    others, _ = train("mars-m", torch.float64, before=begin, gamma=0.025, **settings)
    for one, muon_, other in zip(ours, theirs, others):
        assert relative(one, muon_) < 1e-7 < 1e-4 < relative(other, muon_)


def test_exact_on_one_batch_is_approximate():
    """On a deterministic objective both take the gradient at the last weights."""
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trained(exact):
        x = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
        optimizer = MARS([x], lr=0.05, gamma=0.3, exact=exact)
        for _ in range(15):
            for ahead in (True, False) if exact else (False,):
                optimizer.zero_grad()
                (x - target).pow(2).sum().backward()
                optimizer.look_ahead() if ahead else optimizer.step()
        return x

    assert relative(trained(True), trained(False)) < 1e-12


@pytest.mark.parametrize("rule", MARS_RULES)
def test_last_grad_in_bfloat16(rule):
    parameters, optimizer = train(rule, last_grad_dtype=torch.bfloat16)
    full, _ = train(rule)
    for parameter, other in zip(parameters, full):
        assert optimizer.state[parameter]["last_grad"].dtype == torch.bfloat16
        assert relative(parameter, other) < (0.1 if rule == "mars-lion" else 1e-2)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameters[0]]["last_grad"].dtype == torch.bfloat16


def test_global_clip_inside_equals_clip_grad_norm():
    inside, outside = ([nn.Parameter(start) for start in starts(MATRICES)] for _ in range(2))
    sequences = [gradients(shape, 20, seed) for seed, shape in enumerate(MATRICES)]
    first = MARS(
        [{"params": inside[:2]}, {"params": inside[2:], "rule": "adamw"}], max_grad_norm=0.7, **BASE
    )
    second = MARS([{"params": outside[:2]}, {"params": outside[2:], "rule": "adamw"}], **BASE)
    for step in range(20):
        for parameters in (inside, outside):
            for parameter, sequence in zip(parameters, sequences):
                parameter.grad = sequence[step].clone()
        norm = torch.nn.utils.clip_grad_norm_(outside, 0.7)
        first.step()
        second.step()
        assert first.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for one, other in zip(inside, outside):
        assert relative(one, other) < 1e-6


@pytest.mark.parametrize("rule", [*MARS_RULES, "adamw", "lion", "muon"])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_non_finite_gradient_changes_nothing(rule, clip, bad):
    clean, _ = train(rule, clip=clip, max_grad_norm=1.0)
    parameters = [nn.Parameter(start) for start in starts(MATRICES)]
    settings = meant(rule, {"clip": clip}) | BASE | {"max_grad_norm": 1.0}
    optimizer = MARS(parameters, rule=rule, matrix_dtype=torch.float32, **settings)
    sequences = [gradients(shape, 20, seed) for seed, shape in enumerate(MATRICES)]
    for step in range(20):
        for broken in (True, False) if step in (0, 7, 8) else (False,):
            for parameter, sequence in zip(parameters, sequences):
                parameter.grad = sequence[step].clone()
            if broken:
                parameters[1].grad[0, 0] = bad
            optimizer.step()
            assert optimizer.telemetry()["skipped_in_a_row"] == broken
            optimizer.start_interval()
    assert optimizer.telemetry()["skipped_steps"] == 3
    for parameter, other in zip(parameters, clean):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize(
    "settings,wanted",
    [
        ({"rule": "adamw"}, 8),
        ({"rule": "mars-adamw"}, 12),
        ({"rule": "mars-adamw", "exact": True}, 16),
        ({"rule": "mars-adamw", "last_grad_dtype": torch.bfloat16}, 10),
        ({"rule": "mars-adamw", "momentum_dtype": torch.bfloat16}, 10),
        ({"rule": "adamw", "momentum_dtype": torch.bfloat16}, 6),
        ({"rule": "lion"}, 4),
        ({"rule": "muon"}, 4),
        ({"rule": "muon", "momentum_dtype": torch.bfloat16}, 2),
    ]
    + [
        ({"rule": rule, "clip": clip}, wanted)
        for rule in ("mars-lion", "mars-shampoo", "mars-m")
        for clip, wanted in ((1.0, 8), (None, 4))
    ],
)
def test_bytes_of_state_per_parameter(settings, wanted):
    parameter = nn.Parameter(torch.zeros(100, 100))
    optimizer = MARS([parameter], **settings)
    kept = [*optimizer.state[parameter].values(), *optimizer.ahead.values()]
    assert (
        sum(value.numel() * value.element_size() for value in kept if value.ndim)
        == wanted * parameter.numel()
    )


NARROW = {"last_grad_dtype": torch.bfloat16}  # which a pass of its own writes
COMPILED = [
    ("mars-adamw", {}),
    ("mars-adamw", NARROW),
    ("mars-adamw", NARROW | {"momentum_dtype": torch.bfloat16}),
    ("mars-lion", {}),
    ("lion", {}),
]


@pytest.mark.parametrize("rule,dtypes", full_but(COMPILED[:1], COMPILED))
def test_compiled_kernels_equal_plain_ones(rule, dtypes):
    """Tensors large enough to be compiled, alone and together, equal a step without it."""
    shapes = [(300, 300)] * 5 + [(70_000,), (3,)]
    results = []
    for compile in (True, False):
        parameters = [nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]
        optimizer = MARS(parameters, rule=rule, compile=compile, max_grad_norm=1.0, **dtypes)
        run(optimizer, parameters, [gradients(shape, 4, seed) for seed, shape in enumerate(shapes)])
        results.append(parameters)
    for one, other in zip(*results):
        assert relative(one, other) < (1e-6 if rule == "mars-adamw" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["mars-adamw", "mars-lion", "mars-m"])
def test_compiled_kernels_give_the_losses_of_plain_ones(rule):
    """Over 20 steps of a small network, by 1e-6 of the loss."""

    def losses(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        settings = {"lr": 1e-3, "max_grad_norm": 1.0, "matrix_dtype": "float32"}
        matrices = [each for each in model.parameters() if each.ndim == 2]
        others = [each for each in model.parameters() if each.ndim == 1]
        groups = [{"params": matrices, "rule": rule}, {"params": others, "rule": "mars-adamw"}]
        optimizer = MARS(groups, compile=compile, **settings)
        inputs, targets = torch.randn(2, 64, 256).unbind()
        for _ in range(20):
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    compiled = list(losses(True))
    assert compiled[-1] < 0.9 * compiled[0]
    assert compiled == pytest.approx(list(losses(False)), rel=1e-6)
