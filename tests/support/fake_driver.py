"""Launches of Triton kernels on a machine without a GPU: all that the host does but the driver."""

import types
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)  # an H100


class FakeDriver:
    """A driver of one GPU that loads kernels and starts nothing. It takes tensors of the CPU.

    Triton chooses a kernel by the arguments of each launch, and compiles it when it is new, as it
    would on the GPU. `launches` has the names of the kernels that were launched.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, *_: (1, name, 0, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what launches a kernel, given its grid and arguments."""
        launched = self.launches.append

        def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            launched(function)

        return launch

    def get_current_device(self) -> int:
        """Return the number of the GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream to launch on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what kernels are compiled for."""
        return TARGET


def pretend() -> FakeDriver:
    """Let Triton launch by a fake driver in this process, for good."""
    driver = FakeDriver()
    triton.runtime.driver.set_active(driver)
    return driver
