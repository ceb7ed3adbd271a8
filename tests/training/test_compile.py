"""What torch.compile made is kept in the run's folder, so that a restart does not compile again."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support.tiny import metrics, run_folder_of, tiny_tables, write_config, write_text
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.resume import newest_config
from torchmars.cluster.environment import keep_compiled_in
from torchmars.config.load import config_from_tables

# One rank, as torchrun starts it, which then says what the compiler's caches did.
RANK = """
import json, sys
from torchmars import train
try:
    train.main()
except SystemExit as ended:
    assert ended.code == 0
from torch._dynamo.utils import counters
print(json.dumps(counters["inductor"]))
"""


def start(file, *args, **environment):
    """Train the run of a config file in a process of its own; return its cache's counters."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if "INDUCTOR" not in name and "TRITON" not in name
    }
    ended = subprocess.run(
        [sys.executable, "-c", RANK, str(file), *args],
        env=variables | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_compiled(tmp_path):
    """It goes on bit for bit, and compiled as it began, though the config does not say so."""
    write_text(tmp_path)
    shape = {"model": {"n_layer": 1}, "schedule": {"name": "constant"}}

    def start_run(name, steps, **environment):
        tables = tiny_tables(tmp_path, run={"name": name}, training={"steps": steps}, **shape)
        file = tmp_path / f"{name}.toml"
        write_config(config_from_tables(tables, "in a test"), file)
        folder = run_folder_of(tables)
        begun = ["--training.compile", "true"] if not folder.exists() else []
        return tables, start(file, *begun, **environment)

    tables, first = start_run("stopped", 2)
    compiled = first["fxgraph_cache_miss"]
    assert compiled >= 2 and "fxgraph_cache_hit" not in first
    (cache,) = (run_folder_of(tables) / "compile_cache").iterdir()  # of this kind of CPU

    tables, second = start_run("stopped", 4)
    assert second["fxgraph_cache_hit"] == compiled and "fxgraph_cache_miss" not in second
    assert newest_config(checkpoints(run_folder_of(tables) / "checkpoints"))["training"]["compile"]

    # Where the user says so, another run finds the same kernels.
    straight, third = start_run("straight", 4, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert third["fxgraph_cache_hit"] == compiled and "fxgraph_cache_miss" not in third
    assert not (run_folder_of(straight) / "compile_cache").exists()
    assert list(metrics(tables)) == [1, 2, 3, 4] and metrics(tables) == metrics(straight)

    # torch would take this code on a CPU with narrower vectors too, and leave out half of each row.
    _, plain = start_run("straight", 6)
    _, other = start_run("stopped", 6, ATEN_CPU_CAPABILITY="default")
    assert other["fxgraph_cache_miss"] == compiled and "fxgraph_cache_hit" not in other
    assert metrics(tables) == pytest.approx(metrics(straight), rel=1e-5)


@pytest.mark.parametrize("given", ["", "elsewhere"])
def test_kernels_by_triton_are_kept_with_what_torch_compiles(tmp_path, monkeypatch, given):
    monkeypatch.setattr(os, "environ", {})
    if given:
        os.environ["TRITON_CACHE_DIR"] = given
    keep_compiled_in(tmp_path / "compile_cache")
    own = tmp_path / "compile_cache" / torch.backends.cpu.get_cpu_capability().lower()
    assert os.environ == {
        "TORCHINDUCTOR_CACHE_DIR": str(own),
        "TRITON_CACHE_DIR": given or str(own / "triton"),
    }
