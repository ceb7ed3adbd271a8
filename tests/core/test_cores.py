"""The cores of containers and jobs, which the folders of the system tell: written here."""

import os

import pytest

from torchmars.core.files import own_cores

V2, V1 = "0::/job/step\n", "5:cpuset:/\n4:cpu,cpuacct:/docker/7a\n0::/\n"
TIME = "cpu,cpuacct/cpu.cfs"


def write(system, groups, **files):
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)


@pytest.mark.parametrize(
    "groups,files,cores",
    [
        (V2, {"job/step/cpu.max": "max 100000\n"}, 64),
        (V2, {"job/step/cpu.max": "350000 100000\n"}, 3),
        (V2, {"job/step/cpu.max": "50000 100000\n"}, 1),
        (V2, {"job/step/cpu.max": "900000 100000\n", "job/cpu.max": "400000 200000\n"}, 2),
        (V2, {"cpu.max": "200000 100000\n"}, 2),  # as a container sees its own group
        (V1, {f"{TIME}_quota_us": "-1", f"{TIME}_period_us": "100000"}, 64),
        (V1, {f"{TIME}_quota_us": "150000", f"{TIME}_period_us": "50000"}, 3),
    ],
)
def test_the_least_of_affinity_and_quotas_counts(tmp_path, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    write(tmp_path, groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert own_cores(tmp_path) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert own_cores(tmp_path) == 1


def test_without_groups_it_is_the_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert own_cores(tmp_path) == 3
    write(tmp_path, "nothing")
    assert own_cores(tmp_path) == 3
