"""One step's traffic of matrices, bucket by bucket: transfers overlap with work."""

from collections.abc import Sequence

from torchmars.optim.matrices.traffic import Matrices, MatrixTraffic, Places, Transfer


class Exchange:
    """Orthogonalises every matrix of a step, bucket by bucket.

    While bucket k is computed, bucket k + 1 travels in and k - 1 out. Other work fits between
    `start` and `finish`, while the first bucket travels.
    """

    def __init__(self, traffic: Sequence[MatrixTraffic], groups: Sequence[Matrices]) -> None:
        self.places: Places = {
            parameter: (group, number)
            for group in groups
            for number, parameter in enumerate(group.parameters)
        }
        every = [(each, bucket) for each in traffic for bucket in each.buckets]
        self.here = [(each, bucket) for each, bucket in every if not bucket.travels]
        self.jobs = [(each, bucket) for each, bucket in every if bucket.travels]
        self._first: Transfer | None = None

    def start(self) -> None:
        """Send the first bucket, and compute the matrices that do not travel."""
        if self.jobs:
            self._first = self._send(0)
        for traffic, bucket in self.here:
            traffic.compute_here(bucket, self.places)

    def finish(self) -> None:
        """Compute and send the other buckets, and write all results."""
        arriving, self._first = self._first, None  # its buffer is freed as soon as it is read
        returning: Transfer | None = None
        for number, (traffic, bucket) in enumerate(self.jobs):
            following = self._send(number + 1) if number + 1 < len(self.jobs) else None
            assert arriving is not None
            computed = traffic.compute(bucket, arriving.wait(), self.places)
            if returning is not None:
                self._write(number - 1, returning)
            arriving, returning = following, computed
        if returning is not None:
            self._write(len(self.jobs) - 1, returning)

    def _send(self, number: int) -> Transfer:
        traffic, bucket = self.jobs[number]
        return traffic.send(bucket, self.places)

    def _write(self, number: int, transfer: Transfer) -> None:
        traffic, bucket = self.jobs[number]
        traffic.write_results(bucket, transfer.wait(), self.places)
