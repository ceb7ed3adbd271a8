"""What a model takes, and which share of it a rank has, counted by hand."""

import pytest

from torchmars.config import Degrees, ModelConfig
from torchmars.models import build_meta_model
from torchmars.planning.work import Share, Work


def work_of(size):
    return Work.of(build_meta_model(ModelConfig(name="llama", size=size), 151936, 4096))


def test_experts_of_qwen3():
    """48 blocks of 128 experts, three matrices of 768 x 2048 each, of which a token uses 8."""
    work = work_of("qwen3-30b-a3b")
    of_block = 128 * 3 * 768 * 2048
    assert (work.mixtures, work.block_experts, work.experts) == (48, of_block, 48 * of_block)
    assert (work.rows, work.inner) == (8 * 2048, 8 * 768)
    attention = 2048 * 128 * (2 * 32 + 2 * 4) + 2 * 128
    assert work.block == attention + 128 * 2048 + 2 * 2048  # and the router, and norms
    assert work.rest == 2 * 151936 * 2048 + 2048
    assert work.parameters == 48 * (work.block + of_block) + work.rest == 30_532_122_624


def test_dense_first_blocks_are_counted():
    work = work_of("glm-4.5-air")
    assert (work.mixtures, len(work.model.blocks)) == (45, 46)
    assert work.experts == 45 * work.block_experts
    assert work.parameters == sum(each.numel() for each in work.model.parameters())


@pytest.mark.parametrize(
    "degrees,copies",
    [
        (Degrees(dp_shard=8), 1),
        (Degrees(dp_shard=8, ep=4), 1),
        (Degrees(dp_shard=2, cp=2, tp=4, ep=8), 1),
        (Degrees(pp=2, dp_shard=2, tp=2), 2),  # tp's ranks repeat what is not dealt out
        (Degrees(pp=2, dp_shard=2, tp=4, ep=2), 1),
        (Degrees(dp_shard=1, tp=8, ep=8), 1),
    ],
)
def test_what_all_ranks_hold_is_the_model(degrees, copies):
    work, share = work_of("qwen3-30b-a3b"), Share(work_of("qwen3-30b-a3b"), degrees)
    ranks = degrees.pp * degrees.dp_shard * degrees.cp * degrees.tp
    others = work.parameters - work.experts
    assert share.held * ranks == pytest.approx(others + copies * work.experts)
    assert share.received == pytest.approx(share.computed - share.held)
    assert share.experts == work.experts / degrees.pp / degrees.ep
