"""The code that torch.compile writes for the optimizer on GPUs, without one."""

import pytest

from tests.support import fake_cuda

pytestmark = pytest.mark.full
COUNT = 4  # tensors in a call


@pytest.fixture(scope="module")
def code():
    if reason := fake_cuda.obstacle():
        pytest.skip(reason)
    return fake_cuda.run("code", [COUNT])[0]


@pytest.mark.parametrize(
    "kernel",
    [
        "mars_adamw_",
        "mars_adamw_ of stacks",
        "mars_momentum_",
        "mars_momentum_ of stacks",
        "step_along_",
    ],
)
def test_what_updates_is_at_most_one_kernel_a_tensor(code, kernel):
    """Torch may put several tensors in one kernel."""
    assert 1 <= code[kernel]["launches"] <= COUNT
    assert code[kernel]["copies"] == 0


@pytest.mark.parametrize("kernel", ["inner_products", "inner_products_of_stacks"])
def test_the_first_pass_is_one_kernel_a_tensor_and_one_for_all(code, kernel):
    assert code[kernel] == {"launches": COUNT + 1, "copies": 0}
