"""./run_train.sh as a user runs it: what it prints, exit codes, Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import tiny_config, write_text
from torchmars.config_file import write_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path):
    write_text(tmp_path)
    file = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path, training={"steps": 4}, validation={"interval": 2, "sample_tokens": 5}), file)
    return file


def start(config, *args, **environment):
    """Start ./run_train.sh on two ranks, in a process group of its own as a terminal does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen([str(ROOT / "run_train.sh"), *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True, cwd=config.parent,
                            env=os.environ | {"PATH": path, "NGPU": "2", "CONFIG_FILE": str(config), "OMP_NUM_THREADS": "1"}
                            | environment)


def finish(*args, **environment):
    process = start(*args, **environment)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def processes(config):
    """The command lines of the processes that name this config (torchrun gives each rank a session of its own)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_text().replace("\0", " "))
    return [line for line in found if str(config) in line]


def test_a_run_says_what_it_does_then_that_it_is_complete(config, tmp_path):
    code, out, err = finish(config)
    assert code == 0, err
    for part in ("2 layers, 2 heads, width 32", "FSDP over 2 ranks (cpu, gloo), float32 compute", "16 x 32 tokens a step",
                 "mars-adamw, approx", "embedding  mars-adamw", "bytes tokens; 4 steps read 2,048", "step 4/4 | loss", "grad norm", "tok/s", "GiB",
                 "validation loss", "checkpoint ", "sample:"):
        assert part in out
    assert out.count("step 4/4 | loss") == 1  # one rank speaks
    assert "Warning" not in err and "Traceback" not in err
    resolved = tmp_path / "runs" / "tiny" / "config.toml"
    code, out, _ = finish(resolved)  # the resolved config describes the same run
    assert code == 0 and "complete  all 4 steps are done" in out and "step " not in out
    code, out, _ = finish(config, "--training.steps", "6")
    assert code == 0 and "continue  from step 4" in out and "step 6/6 | loss" in out


def altered(tmp_path):
    shard = tmp_path / "shards" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-4])


@pytest.mark.parametrize("args,damage,message", [
    (["--training.stps", "3"], None, "did you mean training.steps?"),
    (["--training.global_batch_size", "7"], None, "training.global_batch_size = 7 does not divide over 2"),
    (["--parallelism.dp_shard", "3"], None, "does not make 2 ranks"),
    ([], altered, "train-00000.bin has"),
    (["--optimizer.matrix.rule", "mars-m", "--optimizer.matrix.split", "5"], None, "split = 5 does not divide the 96 rows"),
    (["--optimizer.vector.rule", "muon"], None, "a matrix rule needs parameters of at least two dimensions"),
])
def test_mistakes_end_with_one_line_and_code_2(config, tmp_path, args, damage, message):
    if damage:
        subprocess.run([sys.executable, "-m", "torchmars.prepare", str(config)], check=True, capture_output=True, cwd=ROOT)
        damage(tmp_path)
    code, out, err = finish(config, *args)
    assert code == 2 and message in err and out == ""
    assert [line for line in err.splitlines() if line and not line.startswith("tokenising")] == err.splitlines()[-1:]


def test_without_the_script_a_mistake_still_ends_every_rank(config, tmp_path):
    """torchrun itself makes 1 of every exit code."""
    subprocess.run([sys.executable, "-m", "torchmars.prepare", str(config)], check=True, capture_output=True, cwd=ROOT)
    altered(tmp_path)
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                            "torchmars.train", str(config)], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 1 and ended.stderr.count("error: the shard") == 1
    alone = subprocess.run([sys.executable, "-m", "torchmars.train", str(config)], capture_output=True, text=True, cwd=ROOT)
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
def test_ctrl_c_ends_every_rank(config):
    process = start(config, "--training.steps", "1000000")
    for line in process.stdout:
        if line.startswith("step"):
            break
    assert len(processes(config)) >= 3  # torchrun and two ranks
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 20
    while processes(config) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes(config) == []


def test_help(config):
    code, out, _ = finish(config, "--help")
    assert code == 0 and "--optimizer.gamma" in out
