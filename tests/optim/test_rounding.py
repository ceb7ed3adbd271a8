"""Stochastic rounding of the state: unbiased, and the same on every layout and after a resume."""

import copy
import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.optim.reference import gradients
from tests.support.ranks import run_ranks
from torchmars.optim import MARS
from torchmars.optim.rounding import (
    hashed,
    parameter_roundings,
    random_bits,
    stochastically_rounded,
    tensor_roundings,
)

BFLOAT16 = {
    "momentum_dtype": torch.bfloat16,
    "last_grad_dtype": torch.bfloat16,
    "stochastic_rounding": True,
}
LARGEST = torch.finfo(torch.bfloat16).max


def lowbias32(numbers):
    """Return the hash of numbers modulo 2^32, in numpy's unsigned integers."""
    x = np.asarray(numbers).astype(np.uint64)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) % 2**32
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) % 2**32
    return x ^ (x >> np.uint64(16))


def expected_bits(seed, name, step, numbers):
    """Return the bits of a momentum and of a last gradient, by the recipe."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    key = lowbias32((int.from_bytes(digest, "little") + step) % 2**32)
    bits = lowbias32(np.asarray(numbers).astype(np.uint64) % 2**32 ^ key)
    return bits % 2**16, bits >> np.uint64(16)


def expected_rounding(value, bits):
    """Return a Python float rounded to bfloat16 by 16 bits, from the definition in exact numbers.

    It is rounded away from zero in as many of the 2^16 cases as its distance says.
    """
    if not abs(value) < LARGEST:
        return torch.tensor(value).bfloat16().item()
    _, exponent = math.frexp(value)
    step = 2.0 ** (max(exponent, -125) - 8)  # of bfloat16: 8 digits, and subnormal numbers
    towards_zero = math.trunc(value / step)
    share = abs(value / step - towards_zero)
    away = int(bits) >= 2**16 * (1 - share)
    return (towards_zero + math.copysign(away, value)) * step


def test_hash_is_lowbias32():
    numbers = np.concatenate([np.arange(-5, 5), np.array([2**31 - 1, -(2**31), 123456789])])
    ours = hashed(torch.tensor(numbers, dtype=torch.int32)).numpy().view(np.uint32)
    assert (ours == lowbias32(numbers % 2**32)).all()


def test_rounding_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (4000,), generator=generator).int()
    special = [0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 2.0**-126, LARGEST, -LARGEST, 3.4e38, -3.4e38]
    special += [math.inf, -math.inf, math.nan, 1 + 2.0**-23, math.nextafter(LARGEST, 0)]
    nans = torch.tensor([-1, 2**31 - 1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    values = torch.cat([patterns.view(torch.float32), torch.tensor(special), nans])
    for bits in (0, 1, 0x8000, 0xFFFF, None):
        each = torch.randint(2**16, values.shape, generator=generator).int()
        each = each if bits is None else torch.full_like(each, bits)
        rounded = stochastically_rounded(values, each).bfloat16()
        wanted = [expected_rounding(*pair) for pair in zip(values.tolist(), each.tolist())]
        # Not equal_nan of numbers alone: the sign of zero counts, too.
        wanted = torch.tensor(wanted, dtype=torch.float64)
        assert torch.equal(rounded.isnan(), wanted.isnan())
        good = ~wanted.isnan()
        assert torch.equal(rounded[good].double(), wanted[good])
        assert torch.equal(rounded[good].signbit(), values[good].signbit())
    exact = patterns.view(torch.float32).bfloat16().float()
    exact = exact[exact.isfinite()]
    bits = torch.full(exact.shape, 0xFFFF, dtype=torch.int32)
    assert torch.equal(stochastically_rounded(exact, bits), exact)


@pytest.mark.parametrize("which", [0, 1])
def test_rounding_is_unbiased_over_elements_and_over_steps(which):
    parameter, count = torch.zeros(1 << 16), 1 << 16
    roundings = parameter_roundings([parameter], ["a"], seed=3)

    def bits(step):
        [rounding] = tensor_roundings(roundings, [parameter], [torch.tensor(float(step))])
        return random_bits(rounding, parameter)[which]

    of_elements = bits(7)
    of_steps = torch.cat([bits(step)[1000:1004] for step in range(count // 64)])
    # Elements of successive steps, and neighbours, have nothing to do with each other.
    for one, other in ((bits(7), bits(8)), (of_elements[1:], of_elements[:-1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(len(one))
    for sample in (of_elements, of_steps):
        for value in (1.0 + 1e-4, -(1 + 2.0**-8), 3.003e-39, 5e37):
            values = torch.full(sample.shape, value)
            rounded = stochastically_rounded(values, sample).double()
            low, high = rounded.min(), rounded.max()
            exact = values[0].double()
            assert low < exact < high and len(rounded.unique()) == 2
            share = (exact - low) / (high - low)
            sigma = (high - low) * (share * (1 - share) / len(sample)).sqrt()
            assert abs(rounded.mean() - exact) < 5 * sigma


SHAPES = [(10, 6), (7, 3), (2, 5), (9,), (4, 3, 5)]
STEPS = 3


def start(distribute=lambda whole: whole):
    wholes = [torch.linspace(-1, 1, math.prod(shape)).view(shape) for shape in SHAPES]
    return [(f"p{number}", nn.Parameter(distribute(each))) for number, each in enumerate(wholes)]


def train(rule, distribute=lambda whole: whole, steps=range(STEPS), optimizer=None, **settings):
    """Take steps with gradients so small that no clip depends on sums over ranks."""
    if optimizer is None:
        named = [pair for pair in start(distribute) if rule != "mars-m" or pair[1].ndim > 1]
        settings = {"flatten": True, "matrix_dtype": "float32"} | settings
        optimizer = MARS(named, rule=rule, lr=0.01, rounding_seed=5, **BFLOAT16 | settings)
    for step in steps:
        for ahead in (True, False) if optimizer.exact else (False,):
            for parameter in optimizer.plans.parameters:
                number = SHAPES.index(tuple(parameter.shape))
                whole = gradients(parameter.shape, 2 * STEPS + 1, number)[step + ahead] * 1e-3
                parameter.grad = distribute(whole.float())
            optimizer.look_ahead() if ahead else optimizer.step()
    return optimizer


def whole_state(optimizer):
    """Return the tensors that are rounded, whole."""
    kept = [
        state[name]
        for state in optimizer.state.values()
        for name in ("exp_avg", "momentum_buffer", "last_grad")
        if name in state
    ]
    assert {each.dtype for each in kept} == {torch.bfloat16}
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in kept]


CASES = [
    ("mars-adamw", {}),
    ("mars-adamw", {"exact": True}),
    ("mars-m", {}),
    ("lion", {}),
    ("adamw", {}),
]


def on_mesh(shape, all_placements):
    mesh = init_device_mesh("cpu", shape)

    def distributed(placements):
        def distribute(whole):
            fitting = [
                p if not p.is_shard() or p.dim < whole.ndim else Shard(0) for p in placements
            ]
            return distribute_tensor(whole, mesh, fitting, src_data_rank=None)

        return distribute

    return [
        whole_state(train(rule, distributed(placements), **settings))
        for placements in all_placements
        for rule, settings in CASES
    ]


@pytest.mark.parametrize(
    "shape,placements",
    [((2,), [[Shard(0)], [Shard(1)]]), ((2, 2), [[Replicate(), Shard(0)], [Shard(1), Shard(0)]])],
)
def test_state_is_the_same_on_every_layout(shape, placements):
    alone = [whole_state(train(rule, **settings)) for rule, settings in CASES]
    for results in run_ranks(on_mesh, math.prod(shape), shape, placements):
        for wanted, result in zip(alone * len(placements), results, strict=True):
            assert all(map(torch.equal, wanted, result))


def test_bits_follow_the_recipe():
    """The state after two steps equals that of the recipe, also where memory is not in order."""
    g = [each.float() for each in gradients((6, 4), 2, 0)]
    for transposed in (False, True):
        x = torch.zeros(4, 6).t() if transposed else torch.zeros(6, 4)
        x = nn.Parameter(x)
        optimizer = MARS([("w", x)], rule="lion", betas=(0.9, 0.75), **BFLOAT16, rounding_seed=5)
        m = np.zeros(24)
        for step in range(2):
            x.grad = g[step].clone(memory_format=torch.preserve_format)
            optimizer.step()
            m = (torch.tensor(m).float() * 0.75 + g[step].flatten() * 0.25).tolist()
            bits, _ = expected_bits(5, "w", step, range(24))
            m = [expected_rounding(*pair) for pair in zip(m, bits)]
        assert optimizer.state[x]["exp_avg"].flatten().tolist() == m


@pytest.mark.parametrize("rule", ["mars-adamw", "mars-m", "lion"])
def test_a_resume_is_exact_and_a_skipped_step_changes_nothing(rule):
    through = train(rule, steps=range(2 * STEPS))
    before = train(rule)
    after = train(rule, steps=range(0))
    with torch.no_grad():
        for one, other in zip(after.plans.parameters, before.plans.parameters):
            one.copy_(other)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for parameter in after.plans.parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    after.step()
    train(rule, steps=range(STEPS, 2 * STEPS), optimizer=after)
    assert all(map(torch.equal, whole_state(through), whole_state(after)))
    assert all(map(torch.equal, through.plans.parameters, after.plans.parameters))


def test_a_momentum_that_changes_slowly_is_kept_by_stochastic_rounding_only():
    """A momentum of 1 that falls by 1/1000 a step: round to nearest never lets it fall."""

    def mean_after(steps, **settings):
        x = nn.Parameter(torch.zeros(4096))
        optimizer = MARS([x], rule="lion", betas=(0.9, 0.999), **settings)
        optimizer.state[x]["exp_avg"].fill_(1.0)
        for _ in range(steps):
            x.grad = torch.zeros_like(x)
            optimizer.step()
        return optimizer.state[x]["exp_avg"].double().mean().item()

    wanted = 0.999**100
    assert mean_after(100, momentum_dtype=torch.bfloat16) == 1.0
    # A step's rounding has a deviation of 2^-9 at most: 5 of them over the steps and elements.
    assert abs(mean_after(100, **BFLOAT16) - wanted) < 5 * 2**-8 / 2 * (100 / 4096) ** 0.5


@pytest.mark.parametrize("rule", ["adamw", "mars-adamw", "lion", "mars-lion", "muon", "mars-m"])
def test_a_momentum_in_bfloat16_stays_near_one_in_float32(rule):
    def weights(**settings):
        x = nn.Parameter(torch.linspace(-1, 1, 60).view(10, 6))
        optimizer = MARS([x], rule=rule, lr=0.01, matrix_dtype="float32", **settings)
        for g in gradients((10, 6), 10, 0):
            x.grad = g.float()
            optimizer.step()
        return x, optimizer

    full, _ = weights()
    for settings in ({"momentum_dtype": torch.bfloat16}, BFLOAT16):
        x, optimizer = weights(**settings)
        assert "exp_avg_sq" not in optimizer.state[x] or (
            optimizer.state[x]["exp_avg_sq"].dtype == torch.float32
        )
        assert (x - full).norm() < (0.1 if "lion" in rule else 0.02) * full.norm()
