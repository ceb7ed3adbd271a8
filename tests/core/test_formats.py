"""Files with a format and a checksum: damage is found, other versions are named."""

import json
from dataclasses import dataclass, replace

import pytest

from torchmars.core.formats import Format, OtherVersion


@dataclass
class Run:
    steps: int
    config: dict[str, dict[str, int]]


FORMAT = Format("torchmars-test", 4, "use that version")


def test_every_flipped_bit_is_found(tmp_path):
    file = tmp_path / "manifest.json"
    whole = FORMAT.text({"steps": 7, "config": {}}).encode()
    file.write_bytes(whole)
    assert FORMAT.read(file, Run) == Run(7, {})
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError):
            FORMAT.read(file, Run)


def test_a_checksum_must_be_there(tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"format": "torchmars-test-4", "steps": 7, "config": {}}))
    with pytest.raises(ValueError, match="checksum is missing"):
        FORMAT.read(file, Run)


def test_entries_that_a_later_writer_added_are_ignored(tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text(FORMAT.text({"steps": 7, "config": {}, "more": 1}))
    assert FORMAT.read(file, Run) == Run(7, {})


@pytest.mark.parametrize("config", [None, [], {"optim": 3}])
def test_tables_that_are_none_are_damage(tmp_path, config):
    file = tmp_path / "manifest.json"
    file.write_text(FORMAT.text({"steps": 7} | ({} if config is None else {"config": config})))
    with pytest.raises(ValueError, match="config"):
        FORMAT.read(file, Run)


@pytest.mark.parametrize("version", [1, 3, 5, 12])
def test_other_versions_are_named(tmp_path, version):
    file = tmp_path / "manifest.json"
    message = (
        f"manifest.json is of format torchmars-test-{version}, which .* read: use that version"
    )
    for text in (
        replace(FORMAT, version=version).text({}),
        f'{{"format": "torchmars-test-{version}"}}',
    ):
        file.write_text(text)
        with pytest.raises(OtherVersion, match=message):
            FORMAT.read(file, Run)
