"""`torchmars doctor`: what there is on a machine, and whether two ranks meet."""

import torch

from tests.support.full import FULL
from torchmars.cluster import health


def test_it_names_what_a_bug_report_needs(call, monkeypatch):
    monkeypatch.setattr(health, "meeting_problem", lambda: "")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    code, out, err = call("doctor")
    assert code == 0 and not err
    rows = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in out.splitlines()}
    assert rows["torch"] == torch.__version__ and rows["two ranks"] == "they meet"
    assert rows["NCCL_DEBUG"] == "INFO" and "GiB" in rows["room in /dev/shm"]
    assert "safetensors" in rows["packages"] and rows["[plot]"].startswith("matplotlib")


def test_ranks_that_cannot_meet_end_it_with_1(call, monkeypatch):
    monkeypatch.setattr(health, "meeting_problem", lambda: "no route to host")
    code, out, _ = call("doctor")
    assert code == 1 and out.splitlines()[-1].split("  ")[-1].strip() == "no route to host"


@FULL
def test_two_ranks_meet_or_say_why_not(monkeypatch):
    assert health.meeting_problem() == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert "none0" in health.meeting_problem()
