"""Whatever needs a GPU runs on the CPU too, in small: it is not broken when a GPU is at hand."""

import types

import pytest

from tests.gpu import test_documents, test_optimizer, test_training
from tests.gpu.test_optimizer import one_rank  # noqa: F401, a fixture
from tests.gpu.test_training import trainer  # noqa: F401, likewise

FOR_GPUS_ALONE = {
    "test_a_run_compiles_and_a_restart_finds_what_it_compiled": "tests/training/test_compile.py",
}
# `pytest` tests what they do elsewhere.
SLOW = {"test_a_rank_that_hangs_leaves_the_flight_recorder"}
SLOW |= {"test_a_run_in_bfloat16_goes_on_where_it_was_stopped"}
SLOW |= {"test_a_signal_saves_and_a_dead_rank_is_started_again"}


def first_case(test):
    """Return a test without the mark of its module, and with the first of its parameters alone."""
    smoke = types.FunctionType(test.__code__, test.__globals__, test.__name__)
    for mark in getattr(test, "pytestmark", []):
        names, cases = mark.args
        smoke = pytest.mark.parametrize(names, cases[:1])(smoke)
    return smoke


for module in (test_documents, test_optimizer, test_training):
    for name, value in list(vars(module).items()):
        if name.startswith("test_") and name not in FOR_GPUS_ALONE:
            smoke = first_case(value)
            globals()[name] = pytest.mark.full(smoke) if name in SLOW else smoke
