"""Methods of orthogonalisation, against float64 math."""

from typing import get_args

import pytest
import torch
from torch import nn

from tests.optim.reference import orthogonalized
from tests.optim.spectra import spectra
from torchmars.optim import MARS
from torchmars.optim.matrices.orthogonal import ORTHOGONALIZERS, Directions
from torchmars.optim.reference import orthogonal_direction
from torchmars.optim.rules import RULES
from torchmars.optim.settings import Method


def test_the_names_are_those_of_the_setting():
    assert tuple(ORTHOGONALIZERS) == get_args(Method)


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
def test_every_method_is_that_of_float64(method):
    for _, matrix in spectra(24, 40):
        batch = torch.stack([matrix, 3 * matrix.flip(1)])
        for given in (batch, batch.mT):
            result = ORTHOGONALIZERS[method](given.contiguous())
            for one, each in zip(result, given):
                torch.testing.assert_close(one, orthogonalized(each, method), rtol=0, atol=1e-8)
    assert not ORTHOGONALIZERS[method](torch.zeros(1, 3, 4)).any()


# For singular values from here on, over the Frobenius norm: between which two they end.
BANDS = [
    ("newton-schulz", 2e-3, 0.68, 1.21),
    ("polar-express", 1e-3, 0.85, 1.15),
    ("deepseek-v4", 3e-4, 0.999, 1.001),
    ("cubic5", 7e-3, 0.7, 1.3),
]


@pytest.mark.parametrize("method,least,low,high", BANDS)
def test_where_singular_values_end(method, least, low, high):
    """Each value beside one that fills the norm, as a matrix of rank 2."""
    values = torch.logspace(torch.tensor(least).log10().item(), 0, 500, dtype=torch.float64)[:-1]
    rest = (1 - values**2).sqrt()
    found = ORTHOGONALIZERS[method](torch.stack([values, rest], 1).diag_embed())
    ends = found.diagonal(dim1=1, dim2=2)[:, 0]
    assert low <= ends.min() and ends.max() <= high


def test_a_cubic_costs_two_products_a_step():
    quintic, cubic = (ORTHOGONALIZERS[each].flops(64, 64) for each in ("newton-schulz", "cubic5"))
    assert cubic / quintic == pytest.approx(2 / 3)


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("equilibrate", [False, True])
def test_the_momentum_of_a_softmax_router_has_no_direction_but_its_own(method, dtype, equilibrate):
    """Its columns have mean 0 but for rounding. The direction is as near to float64's as others."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(512, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randn(512, 96, generator=generator, dtype=torch.float64)
    (logits.softmax(-1) * torch.randn(512, 16, generator=generator)).sum().backward()
    exact = logits.grad.T @ x
    assert exact.mean(0).abs().max() < 1e-12 < exact.abs().mean()
    given = RULES["mars-m"].defaults | {"rule": "mars-m", "orthogonalize": method}
    settings = given | {"equilibrate": equilibrate, "zero_mean": True}
    moved = exact.to(dtype)[None]
    found = (
        Directions(*map(settings.get, Directions._fields)).orthogonalized(moved, dtype)[0].double()
    )
    lengths = exact.norm(dim=1, keepdim=True)
    null = torch.nn.functional.normalize(lengths if equilibrate else torch.ones(16, 1), dim=0)
    assert (null.mT.double() @ found).norm() < 0.01
    near = orthogonalized(exact / lengths if equilibrate else exact, method)
    assert (found - near).norm() < (0.3 if dtype == torch.bfloat16 else 1e-3)
    if dtype == torch.bfloat16 and not equilibrate:  # the fault
        usual = (
            Directions(*map(given.get, Directions._fields)).orthogonalized(moved, dtype)[0].double()
        )
        assert (null.mT.double() @ usual).norm() > (0.05 if method == "cubic5" else 0.1)


def test_the_exact_answer_of_the_reference_is_what_methods_come_near_to():
    [(_, matrix), *_] = spectra(48, 96)
    exact = orthogonal_direction(matrix, {"orthogonalize": "svd"})
    torch.testing.assert_close(exact @ exact.mT, torch.eye(48, dtype=exact.dtype))
    for method, most in (("newton-schulz", 0.3), ("polar-express", 0.1)):
        near = orthogonal_direction(matrix, {"orthogonalize": method})
        assert (near - exact).norm() < most * exact.norm()


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            {"orthogonalize": "qr"},
            "orthogonalize must be one of newton-schulz, polar-express, deepseek-v4, cub",
        ),
        ({"equilibrate": 1}, "equilibrate must be true or false"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError) as found:
        MARS([{"params": [parameter], "rule": "mars-m", **settings}])
    assert message in str(found.value).replace(" of group 0", "")


def test_what_follows_from_the_beginning_cannot_change():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([{"params": [parameter], "rule": "mars-m"}])
    parameter.grad = torch.ones(4, 4)
    for name, value in (("orthogonalize", "polar-express"), ("equilibrate", True)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} of group 0 was {before!r} and cannot change"):
            optimizer.step()
        optimizer.param_groups[0][name] = before
    optimizer.step()


def test_settings_that_cannot_change_are_not_loaded():
    """Else the next step would refuse them."""
    one, other = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    saved = MARS([{"params": [one], "rule": "mars-m", "equilibrate": True}])
    ours = MARS([{"params": [other], "rule": "mars-m"}])
    ours.load_state_dict(saved.state_dict())
    assert not ours.param_groups[0]["equilibrate"]
    other.grad = torch.ones(4, 4)
    ours.step()
