"""The corruption campaign: damage to any byte of a checkpoint is found and named.

The run falls back to an older checkpoint. Checkpoints of other versions are not damaged.
"""

import json
import pickle
import random
import re
import shutil
from dataclasses import replace

import pytest

from tests.support.damage import flip
from tests.support.full import full_but
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    listen,
    listen_here,
    metrics,
    run_folder_of,
    tiny_tables,
    train,
    write_text,
)
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints, step_of
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.checkpoint.resume import newest_good, read_verified
from torchmars.core.formats import OtherVersion
from torchmars.storage.storage import MANIFEST


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A run on two ranks with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("corruption")
    write_text(folder)
    tables = tiny_tables(
        folder, run={"name": "whole"}, training={"steps": 6}, checkpoint={"interval": 2}
    )
    train(2, tables)
    return tables


def copy_of(tables, name, folder):
    """The same run under another name, elsewhere, to be damaged."""
    copied = tables | {"run": {"name": name, "folder": str(folder)}}
    shutil.copytree(run_folder_of(tables), run_folder_of(copied))
    return copied


def damages(folder, bits):
    """What can happen to the files of a checkpoint: (the file to be named, what to do)."""
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    for name in names:
        path, size = folder / name, (folder / name).stat().st_size
        yield name, lambda path=path: path.write_bytes(path.read_bytes()[:-1])
        yield name, lambda path=path: path.write_bytes(b"")
        yield name, path.unlink
        for bit in random.Random(name).sample(range(8 * size), bits):
            yield name, lambda path=path, bit=bit: flip(path, bit)
        for other in names:
            if other > name:
                yield f"({name}|{other})", lambda path=path, other=folder / other: swap(path, other)
    older = folder.with_name("step-00000004")
    for name in names:  # the same file of another checkpoint, in part of the same size
        # With the manifest of another step every file differs, and all steps have the same index.
        if name not in ("manifest.json", ".metadata"):
            yield name, lambda name=name: shutil.copy(older / name, folder / name)
    yield (
        "manifest.json is of step 4",
        lambda: shutil.copy(older / "manifest.json", folder / "manifest.json"),
    )
    yield "__2_0.distcp", lambda: shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")


def swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("bits", full_but([1], [1, 20]))
def test_every_damage_to_every_file_is_found_and_named_and_the_one_before_is_taken(
    tables, tmp_path, bits
):
    run = copy_of(tables, "damaged", tmp_path)
    folder = run_folder_of(run) / "checkpoints" / "step-00000006"
    whole = shutil.copytree(folder, tmp_path / "whole")
    found = checkpoints(folder.parent)
    cases = list(damages(folder, bits))
    assert len(cases) == 4 * (3 + bits) + 6 + 2 + 2
    for name, damage in cases:
        damage()
        said = []
        path, manifest = newest_good(found, lambda path: read_verified(path, "full"), said.append)
        assert (step_of(path), manifest.step) == (4, 4)
        assert len(said) == 1
        assert re.search(f"step-00000006/{name}", said[0])
        assert "falling back" in said[0]
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
    assert newest_good(found, lambda path: read_verified(path, "full"), said.append)[0] == folder


def test_sizes_alone_find_what_is_cut_or_missing(tables, tmp_path):
    folder = run_folder_of(copy_of(tables, "sizes", tmp_path)) / "checkpoints" / "step-00000006"
    flip(folder / "__0_0.distcp", 12345)
    assert read_verified(folder, "size").step == 6
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp was altered"):
        read_verified(folder, "full")
    (folder / "__0_0.distcp").write_bytes(b"short")
    assert read_verified(folder, "off").step == 6
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp has 5 bytes instead of"):
        read_verified(folder, "size")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp cannot be read: No such file"):
        read_verified(folder, "size")


def contents(folder):
    """The files of a run, but for those that name the last process that had it."""
    names = ("lock", "owner")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files if path.name not in names}


def test_ranks_fall_back_to_the_newest_good_one_and_set_the_damaged_aside(tables, tmp_path):
    run = copy_of(tables, "fallback", tmp_path)
    folder = run_folder_of(run) / "checkpoints"
    flip(folder / "step-00000006" / "__1_0.distcp", 100_000)
    (folder / "step-00000004" / ".metadata").unlink()
    out = listen(2, run)
    assert out.count("warning: ") == 2
    assert "step-00000006/__1_0.distcp was altered" in out
    assert "step-00000004/.metadata cannot be read" in out
    assert "continue  from step 2" in out
    assert metrics(run) == metrics(tables)
    assert [step_of(path) for path in checkpoints(folder)] == [2, 4, 6]
    assert {path.name for path in folder.glob("*.damaged")} == {
        "step-00000004.damaged",
        "step-00000006.damaged",
    }
    for path in checkpoints(folder):
        read_verified(path, "full")


def test_with_no_good_one_left_the_run_ends_and_nothing_changes(tables, tmp_path):
    run = copy_of(tables, "lost", tmp_path)
    for path in checkpoints(run_folder_of(run) / "checkpoints"):
        flip(path / "__0_0.distcp", 77_777)
    before = contents(run_folder_of(run))
    for said in run_ranks(listen_here, 2, run):
        assert re.search(
            "error: no checkpoint in .* is good; "
            "the newest: .*step-00000006/__0_0.distcp was altered",
            said,
        )
    assert contents(run_folder_of(run)) == before


def test_what_verification_was_told_to_overlook_still_falls_back_where_loading_fails(
    tables, tmp_path
):
    run = copy_of(tables, "overlooked", tmp_path)
    run["checkpoint"] = run["checkpoint"] | {"verify": "off"}
    data = run_folder_of(run) / "checkpoints" / "step-00000006" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-100_000])
    assert "step-00000006/__1_0.distcp has no tensor where one should be" in listen(2, run)
    assert metrics(run) == metrics(tables)


@pytest.mark.parametrize("verify", ["full", "off"])
def test_an_index_of_half_a_tensor_is_not_gone_on_from(tables, tmp_path, verify):
    """Whether checksums, which are right, are compared or not."""
    run = copy_of(tables, "half", tmp_path)
    run["checkpoint"] = run["checkpoint"] | {"verify": verify}
    folder = run_folder_of(run) / "checkpoints" / "step-00000006"
    index = pickle.loads((folder / ".metadata").read_bytes())
    del index.state_dict_metadata["model.norm.weight"].chunks[0]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    manifest = manifests.read(folder)
    manifest.files[".metadata"] = manifests.describe_file(folder / ".metadata")
    (folder / MANIFEST).write_text(manifest.text())
    out = listen(2, run)
    assert (
        "step-00000006/.metadata is damaged (model.norm.weight is in chunks that leave a gap" in out
    )
    assert "continue  from step 4" in out
    assert metrics(run) == metrics(tables)


def rewrite(folder, version=manifests.FORMAT.version, **changes):
    """Write a checkpoint's manifest anew, as `version` of torchmars might, with a good checksum."""
    file = folder / "manifest.json"
    entries = json.loads(file.read_text()) | changes
    del entries["format"], entries["sha256"]
    file.write_text(replace(manifests.FORMAT, version=version).text(entries))


@pytest.mark.parametrize("version,checksum", [(3, True), (9, False)])
def test_a_manifest_of_another_version_is_named(tables, tmp_path, version, checksum):
    """And is not taken for damaged."""
    run = copy_of(tables, "version", tmp_path)
    folder = run_folder_of(run) / "checkpoints" / "step-00000006"
    rewrite(folder, version, steps={"made": 6})
    if not checksum:  # another version may have another kind
        file = folder / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sha256": "?"}))
    before = contents(run_folder_of(run))
    of = f"torchmars-checkpoint-{version}"
    message = f"manifest.json is of format {of}, which this version cannot read: "
    with pytest.raises(OtherVersion, match=message):
        manifests.read(folder)
    for said in run_ranks(listen_here, 2, run):
        assert re.search(
            f"error: .*{message}continue with the version of torchmars that wrote", said
        )
        assert "warning" not in said and "falling back" not in said
    assert contents(run_folder_of(run)) == before


def test_a_checkpoint_of_another_version_stays_where_others_are_deleted(tables, tmp_path):
    run = copy_of(tables, "kept", tmp_path)
    folder = run_folder_of(run) / "checkpoints"
    rewrite(folder / "step-00000002", 9)
    run["training"] = run["training"] | {"steps": 8}
    run["checkpoint"] = run["checkpoint"] | {"keep_last": 1, "keep_best": False}
    assert "continue  from step 6" in listen(2, run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000008"]
