"""What tests of clusters share: a run."""

import pytest

from tests.support.tiny import tiny_config, write_config, write_text


@pytest.fixture
def config(tmp_path):
    """The file of a run of 8 steps."""
    write_text(tmp_path)
    file = tmp_path / "tiny.toml"
    write_config(tiny_config(tmp_path, training={"steps": 8}), file)
    return file
