"""The measurement of the host's time says so where the code has no longer what it forces."""

import pytest

from tests.measurements import host_step
from torchmars.optim.matrices import traffic
from torchmars.parallel import fsdp


@pytest.mark.parametrize("owner,name", [(traffic, "BATCH_OF_CPU_THREAD"), (fsdp, "ONE_UNIT_BYTES")])
def test_what_is_forced_must_be_there(monkeypatch, owner, name):
    before = getattr(owner, name)
    with host_step.as_on_gpu():
        assert getattr(owner, name) != before
    assert getattr(owner, name) == before
    monkeypatch.delattr(owner, name)
    message = f"error: .*{name}.* let `forced` in .*host_step.py"
    with pytest.raises(SystemExit, match=message), host_step.as_on_gpu():
        pass
