"""Checkpoints as older versions wrote them: read as before, to the last bit."""

import hashlib
import json
import shutil

import pytest

from tests.support.tiny import listen, metrics, run_folder_of, tiny_tables, train, write_text
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints
from torchmars.checkpoint.manifest import DamagedCheckpoint
from torchmars.checkpoint.resume import read_verified
from torchmars.data import manifest


def write_as_version_2(checkpoint):
    """Write the manifest of a checkpoint anew as version 2 did."""
    manifest = manifests.read(checkpoint)
    data = dict(manifest.config["data"])
    del data["separate_documents"], data["packing"]  # they came later
    config = manifest.config | {"data": data | {"corpus": data.pop("source")}}
    entries = {
        "step": manifest.step,
        "position": manifest.position,
        "world_size": manifest.world_size,
        "data": manifest.data_fingerprint,
        "vocab_size": manifest.vocab_size,
        "optimizer": manifest.optimizer,
        "config": config,
        "validation_loss": manifest.validation_loss,
        "recent_losses": manifest.recent_losses,
        "files": {
            name: {"size": file.size, "sha256": file.sha256}
            for name, file in manifest.files.items()
        },
        "format": "torchmars-checkpoint-2",
    }
    digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
    text = json.dumps(entries | {"sha256": digest}, indent=1) + "\n"
    (checkpoint / "manifest.json").write_text(text)


def write_data_as_version_2(folder):
    """Write the manifest of a folder of shards anew as version 2 did."""
    entries = json.loads((folder / "manifest.json").read_text())
    del entries["sha256"], entries["dtype"], entries["format"]
    entries["corpus"] = entries.pop("source")
    entries["format"] = "torchmars-shards-2"
    (folder / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Unbroken runs of two rules, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("former")
    write_text(folder)
    runs = {
        name: tiny_tables(
            folder,
            run={"name": name},
            training={"steps": 6},
            optimizer={"name": name},
            checkpoint={"interval": 3},
            validation={"interval": 3, "windows": 4},
        )
        for name in ("mars-adamw", "mars-m")
    }
    train(1, *runs.values())
    return runs


@pytest.mark.parametrize("name", ["mars-adamw", "mars-m"])
def test_a_run_of_version_2_goes_on_bit_for_bit(straight, tmp_path, name):
    tables = straight[name] | {"run": {"name": name, "folder": str(tmp_path)}}
    run = shutil.copytree(run_folder_of(straight[name]), run_folder_of(tables))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    data = shutil.copytree(straight[name]["data"]["path"], tmp_path / "data")
    tables["data"] = tables["data"] | {"path": str(data)}
    write_as_version_2(run / "checkpoints" / "step-00000003")
    write_data_as_version_2(data)
    assert read_verified(run / "checkpoints" / "step-00000003", "full").step == 3
    said = listen(1, tables)
    assert "continue  from step 3" in said and "warning" not in said and "changed" not in said
    for kind in ("train/loss", "train/grad_norm", "validation/loss"):
        assert metrics(tables, kind) == metrics(straight[name], kind)
    formats = [
        json.loads((path / "manifest.json").read_text())["format"]
        for path in checkpoints(run / "checkpoints")
    ]
    assert formats == ["torchmars-checkpoint-2", "torchmars-checkpoint-4"]
    assert manifest.read_manifest(data).dtype == "uint16"


def test_every_flipped_bit_of_a_manifest_of_version_2_is_found(straight, tmp_path):
    source = run_folder_of(straight["mars-adamw"]) / "checkpoints" / "step-00000003"
    folder = shutil.copytree(source, tmp_path / source.name)
    write_as_version_2(folder)
    file = folder / "manifest.json"
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 37):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match="manifest.json"):
            manifests.read(folder)
    file.write_bytes(whole)
    assert manifests.read(folder).step == 3
