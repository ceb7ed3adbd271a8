"""What tests of saves share: a short run."""

import pytest

from tests.support.tiny import tiny_tables, write_text


@pytest.fixture
def tables(tmp_path):
    """A run of 12 steps that saves every second one and keeps all of them."""
    write_text(tmp_path)
    return tiny_tables(tmp_path, training={"steps": 12}, checkpoint={"interval": 2, "keep_last": 0})
