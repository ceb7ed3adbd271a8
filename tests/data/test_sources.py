"""What a run says of data that are not what they were: settings, shards."""

import os
import re
from dataclasses import replace

import pytest

from tests.support.commands import begun
from tests.support.full import FULL
from tests.support.tiny import listen, tiny_config, tiny_tables, write_config, write_text
from torchmars.core.errors import UserError
from torchmars.training.preparation import prepare_data


def test_another_validation_fraction_is_refused(tmp_path):
    write_text(tmp_path)
    config = tiny_config(tmp_path)
    prepare_data(config)
    config = replace(config, data=replace(config.data, validation_fraction=0.1))
    message = "prepared with data.validation_fraction = 0.05, now it is 0.1: set it back"
    with pytest.raises(UserError, match=message):
        prepare_data(config)


def test_validation_data_that_cannot_be_read_end_the_run_on_all_ranks(tmp_path):
    write_text(tmp_path)
    tables = tiny_tables(
        tmp_path, data={"verify": "off"}, validation={"interval": 2}, training={"steps": 2}
    )
    prepare_data(tiny_config(tmp_path, **{"data": tables["data"]}))
    os.truncate(tmp_path / "shards" / "validation-00000.bin", 10)
    said = listen(1, tables)
    assert said.count("error") == 1 and "validation-00000.bin cannot be read at byte" in said


@FULL
def test_ranks_end_when_one_of_them_cannot_read(tmp_path):
    """With file and place in a line, and with the exit code of a mistake."""
    write_text(tmp_path)
    write_config(tiny_config(tmp_path), tmp_path / "run.toml")
    run = begun(tmp_path / "run.toml")
    os.truncate(tmp_path / "shards" / "train-00000.bin", 10)
    _, said = run.communicate()
    assert run.returncode == 2
    lines = [line for line in said.splitlines() if "error" in line]
    assert 1 <= len(lines) <= 2 and "Traceback" not in said  # both ranks may read there at once
    for line in lines:
        assert re.search("^error: .*train-00000.bin cannot be read at byte .*cut short", line)
