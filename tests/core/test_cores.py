"""The cores of containers, which the folders of the system tell: written here."""

import os

import pytest

from torchmars.core.files import own_cores


@pytest.mark.parametrize(
    "files,cores",
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3),
    ],
)
def test_the_least_of_affinity_and_quotas_counts(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert own_cores(tmp_path) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert own_cores(tmp_path) == 1
