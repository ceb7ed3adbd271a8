"""Methods of orthogonalisation and their forms, against float64 math."""

import pytest
import torch
from torch import nn

from tests.optim.reference import orthogonalized
from tests.support.spectra import error, spectra
from torchmars.optim import MARS
from torchmars.optim.matrices.directions import Directions, squared_deviations
from torchmars.optim.matrices.orthogonalize import ORTHOGONALIZERS, in_gram_form
from torchmars.optim.rules import RULES
from torchmars.optim.settings import ORTHOGONALIZE

ITERATIONS = ("newton-schulz", "polar-express")
SHAPES = [(64, 96), (64, 256), (160, 160), (192, 768)]


def test_the_names_are_those_of_the_setting():
    assert tuple(ORTHOGONALIZERS) == ORTHOGONALIZE.names


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
def test_every_method_is_that_of_float64(method):
    for name, matrix in spectra(24, 40):
        if method == "svd" and name == "low rank":
            continue  # its null space has no one polar factor; the one here is 0 there
        batch = torch.stack([matrix, 3 * matrix.flip(1)])
        for given in (batch, batch.mT):
            result = ORTHOGONALIZERS[method](given.contiguous())
            for one, each in zip(result, given):
                torch.testing.assert_close(one, orthogonalized(each, method), rtol=0, atol=1e-8)
    assert not ORTHOGONALIZERS[method](torch.zeros(1, 3, 4)).any()


def test_svd_leaves_a_null_space():
    [_, _, (_, matrix)] = spectra(32, 48)
    values = torch.linalg.svdvals(ORTHOGONALIZERS["svd"](matrix[None])[0])
    torch.testing.assert_close(values[:4], torch.ones(4, dtype=torch.float64))
    assert values[4:].max() < 1e-10


def polar(matrix, rank):
    """Return the polar factor of a matrix of this rank on its range, in float64."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left[:, :rank] @ right[:rank]


# Of the matrix that is rounded: float32 has 24 digits, bfloat16 8. Singular values lie together.
ROUNDED = [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]


@pytest.mark.parametrize("dtype,close", ROUNDED, ids=lambda value: str(value))
@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (8, 512), (256, 256)], ids=str)
def test_svd_makes_no_direction_of_rounding(shape, dtype, close):
    """Of matrices of rank 0, 1, 3: products, with outliers, or equal rows."""
    generator = torch.Generator().manual_seed(3)
    rows, cols = shape
    for rank in (0, 1, 3):
        left, right = (torch.randn(n, max(rank, 1), generator=generator) for n in shape)
        left = left * (rank > 0)
        equal = left[torch.arange(rows) % 4]
        outliers = left.where(torch.arange(rows)[:, None] % 8 > 0, 100 * left)
        for factor in (left, equal, outliers):
            wanted = polar(factor.double() @ right.T.double(), rank)
            kept = (factor @ right.T).to(dtype)
            found = ORTHOGONALIZERS["svd"](kept[None], torch.float64)[0]
            assert found.norm().item() == pytest.approx(rank**0.5, abs=1e-6)
            assert (found - wanted).norm() <= close * 10 ** (factor is outliers)


def test_svd_knows_in_what_the_matrices_of_a_stack_were_kept():
    """One of three is of rank 2. Equilibration and a wire in float32 hide that from the values."""
    generator = torch.Generator().manual_seed(4)
    stack = torch.randn(3, 24, 32, generator=generator)
    stack[1] = stack[1, :, :2] @ stack[1, :2]
    settings = {"rule": "muon", "orthogonalize": "svd", "lr": 1.0, "weight_decay": 0.0}
    for options, momentum_dtype, matrix_dtype in (
        ({}, None, "float32"),
        ({}, None, "mixed"),
        ({}, torch.bfloat16, "float32"),
        ({"equilibrate": True}, None, "mixed"),
    ):
        x = nn.Parameter(torch.zeros_like(stack))
        optimizer = MARS(
            [{"params": [x], **settings, **options}],
            momentum_dtype=momentum_dtype,
            matrix_dtype=matrix_dtype,
        )
        for _ in range(3):
            before = x.detach().clone()
            x.grad = stack.clone()
            optimizer.step()
            ranks = ((x.detach() - before) / (0.2 * 32**0.5)).square().sum((1, 2))
            torch.testing.assert_close(ranks, torch.tensor([24.0, 2.0, 24.0]), rtol=0.01, atol=0)


def test_rounding_of_another_order_moves_no_direction():
    """As sums of another layout do: the step is as near as the momenta are."""
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(n, 3, generator=generator) for n in (64, 48))
    one, other = left @ right.T, sum(torch.outer(*each) for each in zip(left.mT, right.mT))
    assert not torch.equal(one, other)
    directions = ORTHOGONALIZERS["svd"](torch.stack([one, other]))
    torch.testing.assert_close(directions[0], directions[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ORTHOGONALIZERS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("equilibrate", [False, True])
def test_the_momentum_of_a_softmax_router_has_no_direction_but_its_own(
    method, wire, product, equilibrate
):
    """Its columns have mean 0 but for rounding. The direction is as near to float64's as others."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(512, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randn(512, 96, generator=generator, dtype=torch.float64)
    (logits.softmax(-1) * torch.randn(512, 16, generator=generator)).sum().backward()
    exact = logits.grad.T @ x
    assert exact.mean(0).abs().max() < 1e-12 < exact.abs().mean()
    given = RULES["mars-m"].defaults | {"rule": "mars-m", "orthogonalize": method}
    settings = given | {"equilibrate": equilibrate, "zero_mean": True}
    moved = exact.to(wire)[None]
    found = Directions.of(settings).orthogonalized(moved, product, wire)[0].double()
    lengths = exact.norm(dim=1, keepdim=True)
    null = torch.nn.functional.normalize(lengths if equilibrate else torch.ones(16, 1), dim=0)
    assert (null.mT.double() @ found).norm() < 0.01
    near = orthogonalized(exact / lengths if equilibrate else exact, method)
    if method == "svd":
        near = near - null.double() @ (null.mT.double() @ near)
    assert (found - near).norm() < (0.3 if torch.bfloat16 in (wire, product) else 1e-3)
    if product == torch.bfloat16 and method != "svd" and not equilibrate:  # the fault
        usual = Directions.of(given).orthogonalized(moved, product, wire)[0].double()
        assert (null.mT.double() @ usual).norm() > 0.1


def test_svd_is_exact_in_float32_and_for_each_matrix_alone():
    """Also of small singular values. A batch, which layouts cut otherwise, changes no bit."""
    for name, matrix in spectra(64, 256):
        if name == "random":
            assert error(matrix, "svd", torch.float32, "direct") < 1e-3
        if name == "decaying":  # what is above the rounding of 256 numbers: 4.5 digits of 6
            kept, bound = matrix.float(), 256 * 2**-23
            rank = int((torch.linalg.svdvals(matrix) > bound).sum())
            found = ORTHOGONALIZERS["svd"](kept[None], torch.float64)[0]
            assert (found - polar(kept, rank)).norm() < 1e-3 and 40 < rank < 64
    batch = torch.randn(3, 37, 77)
    alone = [ORTHOGONALIZERS["svd"](each[None])[0] for each in batch]
    assert torch.equal(ORTHOGONALIZERS["svd"](batch), torch.stack(alone))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ITERATIONS)
def test_the_gram_form_is_as_near_to_float64_as_the_direct_one(method, shape):
    """In float32 to 1e-4. In bfloat16 long ones are nearer: it multiplies in float16."""
    for _, matrix in spectra(*shape):
        direct, gram = (error(matrix, method, torch.float32, form) for form in ("direct", "gram"))
        assert gram < direct + 1e-4
        direct, gram = (error(matrix, method, torch.bfloat16, form) for form in ("direct", "gram"))
        assert gram < direct or shape[0] == shape[1]
        assert error(matrix, method, torch.float64, "gram") < 1e-10


def test_auto_follows_from_shape_and_dtype():
    wide = torch.float32
    assert in_gram_form(64, 96, wide, "auto") and in_gram_form(96, 64, wide, "auto")
    assert not in_gram_form(64, 95, wide, "auto") and in_gram_form(64, 64, wide, "gram")
    assert not in_gram_form(64, 256, torch.bfloat16, "auto")
    assert not in_gram_form(64, 256, wide, "direct")
    method = ORTHOGONALIZERS["newton-schulz"]
    for rows, cols in ((64, 96), (64, 256), (256, 64)):
        short, ratio = 64, max(rows, cols) / 64
        assert method.flops(rows, cols) == (20 * ratio + 10) * short**3
        assert method.flops(rows, cols, gram=True) == (8 * ratio + 28) * short**3
    assert method.flops(64, 96, gram=True) == method.flops(64, 96)  # where it begins to pay
    settings = RULES["mars-m"].defaults | {"rule": "mars-m", "orthogonalize_form": "auto"}
    flops = [Directions.of(settings).flops(64, 256, each) for each in (wide, torch.bfloat16)]
    assert flops == [method.flops(64, 256, gram=True), method.flops(64, 256)]


def test_random_signs_estimate_how_orthogonal_matrices_are():
    [(_, matrix), *_] = spectra(48, 96)
    near = ORTHOGONALIZERS["newton-schulz"](torch.stack([matrix, matrix.flip(0)]))
    exact = ORTHOGONALIZERS["svd"](matrix[None])
    for x in near:
        wanted = ((x @ x.mT - torch.eye(48, dtype=x.dtype)).norm() ** 2 / 48).item()
        assert squared_deviations(x[None]).item() == pytest.approx(wanted, rel=0.5)
        assert squared_deviations(x.mT[None]).item() == squared_deviations(x[None]).item()
    assert squared_deviations(exact).item() < 1e-20


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"orthogonalize": "qr"}, "orthogonalize must be one of newton-schulz, polar-express, svd"),
        ({"orthogonalize_form": "auto", "orthogonalize": "svd"}, "has no meaning for svd"),
        ({"renormalize": True, "orthogonalize": "svd"}, "renormalize has no meaning for svd"),
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
    for name, value in (("orthogonalize", "svd"), ("equilibrate", True)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"{name} of group 0 was {before!r} and cannot change"):
            optimizer.step()
        optimizer.param_groups[0][name] = before
    optimizer.step()


def test_settings_that_cannot_change_are_not_loaded():
    """Else a saved one could have no meaning beside ours, which the next step would refuse."""
    one, other = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    saved = MARS([{"params": [one], "rule": "mars-m", "renormalize": True}])
    ours = MARS([{"params": [other], "rule": "mars-m", "orthogonalize": "svd"}])
    ours.load_state_dict(saved.state_dict())
    assert not ours.param_groups[0]["renormalize"]
    other.grad = torch.ones(4, 4)
    ours.step()


def test_a_skipped_step_says_nothing_of_orthogonality():
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([parameter], rule="mars-m")
    optimizer.measures = True
    for gradient, there in ((1.0, True), (torch.nan, False), (1.0, True)):
        parameter.grad = torch.full((4, 4), gradient)
        optimizer.step()
        assert ("mars-m/orthogonality" in optimizer.telemetry()) is there
