"""training.deterministic: what it sets and when, and that it changes nothing on CPUs."""

import json
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private, torch 2.11 to 2.15

from tests.support.ranks import run_ranks
from tests.support.tiny import (
    metrics,
    run_folder_of,
    tiny_config,
    tiny_tables,
    train_here,
    write_config,
    write_text,
)
from torchmars import train
from torchmars.checkpoint.folder import checkpoints
from torchmars.cluster import connection
from torchmars.config.load import config_from_tables
from torchmars.core.device import DETERMINISTIC
from torchmars.core.errors import UserError
from torchmars.training.build import apply_determinism

# By torch's documentation of use_deterministic_algorithms: what raises an error on CUDA then, and
# `cumsum` of floats.
REFUSED = {
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "fractional_max_pool2d_backward",
    "reflection_pad1d_backward",
    "nll_loss2d_forward",
    "_ctc_loss_backward",
    "_embedding_bag_backward",
    "put_",
    "put",
    "histc",
    "bincount",
    "median",
    "kthvalue",
    "grid_sampler_2d_backward",
    "scatter_reduce",
}


def settings():
    """What torch and the environment of this process say."""
    products = torch.backends.cuda.matmul
    return {
        "cuda": torch.cuda.is_initialized(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "inductor": torch._inductor.config.deterministic,
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
        "reduced": products.allow_bf16_reduced_precision_reduction
        or products.allow_fp16_reduced_precision_reduction,
        "tf32": products.allow_tf32,
        "variables": {name: os.environ.get(name) for name in DETERMINISTIC},
    }


def settings_at_the_start(file):
    """What a rank has set when it is about to meet the others."""
    found = {}

    def stop(parallelism):
        found.update(settings())
        raise UserError("that is all")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", str(file)])
        patch.setattr(connection, "start", stop)
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", "29400")
        patch.setattr(train, "end_at_once", sys.exit)
        with pytest.raises(SystemExit):
            train.main()
    return found


def test_a_rank_is_deterministic_before_cuda_and_nccl_start(tmp_path):
    file = tmp_path / "run.toml"
    write_config(tiny_config(tmp_path, training={"deterministic": True}), file)
    (found,) = run_ranks(settings_at_the_start, 1, file)
    assert found == {
        "cuda": False,
        "deterministic": True,
        "inductor": True,
        "fills": False,
        "reduced": False,
        "tf32": False,
        "variables": {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NCCL_ALGO": "allreduce:tree",
            "NCCL_PROTO": "Simple",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_COLLNET_ENABLE": "0",
        },
    }


class Operations(TorchDispatchMode):
    """The names of all operations, with the dtype of what `cumsum` adds up."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if name == "cumsum" and args[0].is_floating_point():
            name = "cumsum of floats"
        self.names.add(name)
        return op(*args, **(kwargs or {}))


def with_and_without(plain, deterministic):
    """Train both runs; return the operations of the second, and how the first is refused then."""
    train_here(plain)
    apply_determinism(config_from_tables(deterministic, "in a test").training)
    with Operations() as operations:
        train_here(deterministic)
    changed = plain | {"training": deterministic["training"]}
    with pytest.raises(UserError) as refused:
        train_here(changed)
    return operations.names, str(refused.value)


def test_it_changes_nothing_on_cpus_and_no_operation_is_without_an_order(tmp_path):
    write_text(tmp_path)

    def tables(**training):
        return tiny_tables(
            tmp_path,
            run={"name": "-".join(["run", *training])},
            data={"separate_documents": True},
            optimizer={"name": "mars-m"},
            training={"steps": 3, "microbatch_size": 4} | training,
            checkpoint={"interval": 3},
            validation={"interval": 3, "windows": 4, "sample_tokens": 2},
        )

    plain, deterministic = tables(), tables(deterministic=True)
    (operations, refusal), _ = run_ranks(with_and_without, 2, plain, deterministic)
    assert metrics(plain) == metrics(deterministic)
    assert metrics(plain, "validation/loss") == metrics(deterministic, "validation/loss")
    sums = []
    for each in (plain, deterministic):
        (folder,) = checkpoints(run_folder_of(each) / "checkpoints")
        manifest = json.loads((folder / "manifest.json").read_text())
        sums.append({name: sha for name, sha in manifest["files"].items() if "distcp" in name})
    assert sums[0] == sums[1] != {}
    assert "training.deterministic = False, the config says True" in refusal
    assert not operations & (REFUSED | {"cumsum of floats"})
