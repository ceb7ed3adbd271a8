"""Layouts that are refused before there are ranks."""

import pytest

from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.parallel.checks import check_layout


@pytest.mark.parametrize(
    "tables,ranks,message",
    [
        (
            {
                "parallelism": {"pp": 2, "pp_schedule": "ZBVZeroBubble"},
                "training": {"compile": True},
            },
            2,
            "training.compile does not go with parallelism.pp_schedule",
        ),
        (
            {
                "parallelism": {"pp": 2, "pp_schedule": "DualPipeV"},
                "activation_checkpoint": {"mode": "full"},
            },
            2,
            'activation_checkpoint.mode = "full" does not go with parallelism.pp_schedule',
        ),
        (
            {
                "parallelism": {"tp": 2},
                "training": {"compile": True},
                "activation_checkpoint": {"mode": "full"},
            },
            2,
            'activation_checkpoint.mode = "full" does not go with training.compile',
        ),
        (
            {"parallelism": {"dp_replicate": 2, "reshard_after_forward": 4}},
            12,
            "reshard_after_forward = 4 does not divide the 6 ranks",
        ),
    ],
)
def test_what_does_not_go_together(tables, ranks, message):
    config = config_from_tables(tables, "in a test")
    with pytest.raises(UserError, match=message):
        check_layout(config, config.parallelism.degrees(ranks))


@pytest.mark.parametrize(
    "parallelism,ranks",
    [
        ({"pp_schedule": "ZBVZeroBubble"}, 2),  # no pipeline
        ({"pp": 2}, 2),
        ({"cp": 2, "reshard_after_forward": 4}, 8),  # weights are sharded over cp too
    ],
)
def test_what_goes_together(parallelism, ranks):
    tables = {
        "parallelism": parallelism,
        "training": {"compile": True},
        "activation_checkpoint": {"mode": "selective"},
    }
    config = config_from_tables(tables, "in a test")
    check_layout(config, config.parallelism.degrees(ranks))
