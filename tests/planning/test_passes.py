"""Passes of few blocks, from which those of more follow: the same as passes of all, to the byte."""

import pytest
import torch.distributed as dist

from tests.support.full import FULL
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tables
from torchmars.config.load import config_from_tables
from torchmars.parallel import fsdp
from torchmars.planning.plan import plan_rank
from torchmars.planning.simulation import FewBlocks

RANKS, PER_NODE = 16, 4
MIXTURE = {"name": "llama", "size": "moe-nano"}
CASES = [
    pytest.param(MIXTURE | {"n_layer": 6}, {"ep": 2}, "full", 1, id="ep2-full", marks=FULL),
    *(
        pytest.param(
            model,
            parallelism,
            mode,
            4,
            id=name,
            marks=FULL if name == "hsdp" else pytest.mark.slow,
        )
        for name, model, parallelism, mode in (
            ("ep4", MIXTURE | {"n_layer": 9}, {"ep": 4}, "none"),
            ("tp2-ep4", MIXTURE | {"n_layer": 8}, {"tp": 2, "ep": 4}, "selective"),
            ("whole", MIXTURE | {"n_layer": 8}, {"ep": 2, "accumulate": "whole"}, "full"),
            ("hsdp", {"n_layer": 9}, {"dp_replicate": 2}, "selective"),
            ("cp2", {"n_layer": 8}, {"cp": 2, "reshard_after_forward": "always"}, "none"),
            ("pp2", {"n_layer": 15}, {"pp": 2}, "none"),
            (
                "pp2-interleaved",
                MIXTURE | {"n_layer": 27},
                {"pp": 2, "pp_schedule": "Interleaved1F1B", "ep": 2},
                "full",
            ),
        )
    ),
]


def figures(tables, few, unit_bytes=0):
    """What a plan says of the passes of each rank of a pipeline, and whether few blocks told it.

    Blocks are gathered together up to `unit_bytes`.
    """
    dist.destroy_process_group()
    told = []

    def tell(self, model, tell=FewBlocks.tell):
        told.append(few and tell(self, model))
        return told[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FewBlocks, "tell", tell)
        patch.setitem(fsdp.UNIT_BYTES, "cuda", unit_bytes)
        plan = plan_rank(config_from_tables(tables, "in a test"), RANKS, PER_NODE)
    sizes = [
        (rank.gradients, rank.activations, rank.gathered, rank.traffic.times, rank.traffic.sent)
        for rank in plan.ranks
    ]
    return sizes, told


@pytest.mark.parametrize("model,parallelism,mode,microbatches", CASES)
def test_few_blocks_tell_the_rest(tmp_path, model, parallelism, mode, microbatches):
    tables = tiny_tables(
        tmp_path,
        model=model,
        parallelism=parallelism,
        training={"global_batch_size": RANKS * microbatches, "microbatch_size": 1},
        activation_checkpoint={"mode": mode},
        optimizer={"name": "mars-m"},
    )
    found, told = run_ranks(figures, 1, tables, True)[0]
    assert told and all(told)
    assert found == run_ranks(figures, 1, tables, False)[0][0]


def test_few_blocks_do_not_tell_of_blocks_that_are_gathered_together(tmp_path):
    tables = tiny_tables(tmp_path, model={"n_layer": 8})
    [(_, told)] = run_ranks(figures, 1, tables, True, fsdp.UNIT_BYTES["cuda"])
    assert not any(told)
