"""Files with a format and a checksum: damage is found, other versions and old names are known."""

import json
from dataclasses import dataclass, replace

import pytest

from torchmars.core.formats import Format, OtherVersion


@dataclass
class Run:
    steps: int
    config: dict[str, dict[str, int]]
    device: str


FORMAT = Format(
    "torchmars-test",
    written=4,
    oldest=2,
    checksum_since=3,
    remedy="use that version",
    renamed={2: {"count": "made"}, 3: {"made": "steps", "config.optim.lr": "config.schedule.lr"}},
    added={3: {"device": "cpu"}},
)
EXPECTED = Run(7, {"optim": {}, "schedule": {"lr": 1}}, "cpu")


def test_every_flipped_bit_is_found(tmp_path):
    file = tmp_path / "manifest.json"
    whole = FORMAT.text({"steps": 7, "config": {}, "device": "cpu"}).encode()
    file.write_bytes(whole)
    assert FORMAT.read(file, Run) == Run(7, {}, "cpu")
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError):
            FORMAT.read(file, Run)


@pytest.mark.parametrize(
    "version,entries",
    [
        (3, {"made": 7, "config": {"optim": {"lr": 1}}}),
        (2, {"count": 7, "config": {"optim": {"lr": 1}}}),
    ],
)
def test_names_of_older_versions_are_read_as_those_of_today(tmp_path, version, entries):
    file = tmp_path / "manifest.json"
    file.write_text(replace(FORMAT, written=version).text(entries))
    assert FORMAT.read(file, Run) == EXPECTED
    file.write_text(json.dumps({"format": f"torchmars-test-{version}"} | entries))
    if version < FORMAT.checksum_since:
        assert FORMAT.read(file, Run) == EXPECTED
    else:
        with pytest.raises(ValueError, match="checksum is missing"):
            FORMAT.read(file, Run)


@pytest.mark.parametrize("config", [None, [], {"optim": 3}, {"schedule": 3, "optim": {"lr": 1}}])
def test_tables_that_are_none_are_not_taken_for_renamed_ones(tmp_path, config):
    file = tmp_path / "manifest.json"
    entries = {"made": 7} | ({} if config is None else {"config": config})
    file.write_text(replace(FORMAT, written=3).text(entries))
    with pytest.raises(ValueError, match="config"):
        FORMAT.read(file, Run)


@pytest.mark.parametrize("version", [1, 5, 12])
def test_other_versions_are_named(tmp_path, version):
    file = tmp_path / "manifest.json"
    message = (
        f"manifest.json is of format torchmars-test-{version}, which .* read: use that version"
    )
    for text in (
        replace(FORMAT, written=version).text({}),
        f'{{"format": "torchmars-test-{version}"}}',
    ):
        file.write_text(text)
        with pytest.raises(OtherVersion, match=message):
            FORMAT.read(file, Run)


@pytest.mark.parametrize(
    "name", ["torchmars-other-4", "torchmars-test-", "torchmars-test-x", 4, None]
)
def test_other_kinds_of_files_are_no_versions(tmp_path, name):
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"format": name}))
    with pytest.raises(ValueError, match="its format is "):
        FORMAT.read(file, Run)
