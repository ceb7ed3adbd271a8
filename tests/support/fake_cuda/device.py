"""What torch.cuda says where a stub answers for one H100, and who waits for it."""

import types
from typing import Any

import torch

WAITS: list[str] = []
"""What has waited for the device, in order."""


class Stream:
    """A stream on which nothing runs."""

    device = torch.device("cuda", 0)
    device_index, device_type, stream_id, cuda_stream = 0, 1, 0, 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.append("Stream.synchronize")


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.append("Event.synchronize")


PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    gcnArchName="",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=2**16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
)


class Entered:
    """A device or a stream that is entered. Torch asks what is of this class."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def pretend() -> None:
    """Let torch.cuda answer for the GPU of this process, for good."""
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "_get_device_properties": PROPERTIES,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": Stream(),
        "default_stream": Stream(),
        "max_memory_allocated": 0,
        "_is_in_bad_fork": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(["_lazy_init", "set_device", "set_rng_state", "set_stream"]),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.device = torch.cuda.stream = Entered  # type: ignore[misc, assignment]
    torch.cuda.synchronize = lambda *args: WAITS.append("cuda.synchronize")
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[method-assign]
