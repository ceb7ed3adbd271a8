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


@pytest.mark.parametrize("kernel", ["mars_adamw_", "mars_momentum_", "step_along_"])
def test_what_updates_is_at_most_one_kernel_a_tensor(code, kernel):
    """Torch may put several tensors in one kernel."""
    assert 1 <= code[kernel]["launches"] <= COUNT
    assert code[kernel]["copies"] == 0


def test_the_first_pass_is_one_kernel_a_tensor_and_one_for_all(code):
    assert code["inner_products"] == {"launches": COUNT + 1, "copies": 0}
