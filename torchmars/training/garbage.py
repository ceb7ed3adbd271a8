"""Python's collection of garbage, at moments when all ranks wait for each other anyway."""

import gc

MOST_STEPS = 100  # between two collections


class GarbageCollection:
    """While it is active, Python looks for garbage where `collect` is called only.

    By itself it would do so in the middle of a step, on each rank in another one, and all ranks
    wait for the one that does. A step leaves little: some objects of pipelines and of tensor
    parallelism, and no tensors.
    """

    def __init__(self) -> None:
        self.frozen = False

    def __enter__(self) -> "GarbageCollection":
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        gc.enable()

    def collect(self) -> None:
        """Free objects that nothing can reach any more.

        Objects that exist the first time live as long as the run, and are not examined again.
        """
        gc.collect()
        if not self.frozen:
            gc.freeze()
            self.frozen = True
