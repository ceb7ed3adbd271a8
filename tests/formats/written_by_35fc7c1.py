"""What commit 35fc7c1 writes of a run with a plugin's model and rule, in exact mode.

`config.toml` and `manifest.json` of the folder 35fc7c1 are as that commit wrote them. Never change
them, nor this file, which writes the tensors that the manifest names: it uses nothing of torchmars.
"""

import hashlib
import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.formats.written_by_0_1_0 import json_file

WRITTEN = Path(__file__).parent / "35fc7c1"
STEP, WIDTH = 4, 32
ROWS = {
    "tok_embed.weight": 320,
    "pos_embed.weight": 32,
    "attn.qkv.weight": 3 * WIDTH,
    "attn.proj.weight": WIDTH,
    "mlp.up.weight": 4 * WIDTH,
    "mlp.proj.weight": WIDTH,
}
# What the commit made of these tensors in the steps that follow, on torch 2.13 and one rank.
LOSSES = {5: 5.7747393, 6: 5.7377710, 7: 5.7141290, 8: 5.7118645}


def tensors(kinds: dict[str, str]) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's state by name: `kinds` has a rule and buffers for each."""
    random = torch.Generator().manual_seed(0)
    state = {}
    for name, kind in kinds.items():
        rows = next((count for end, count in ROWS.items() if name.endswith(end)), None)
        columns = 4 * WIDTH if name.endswith("mlp.proj.weight") else WIDTH
        shape = (WIDTH,) if rows is None else (rows, columns)
        noise = 0.02 * torch.randn(shape, generator=random)
        state[f"model.{name}"] = noise if rows else 1 + noise
        for buffer in kind.split()[1:-1]:
            state[f"optimizer.{name}.{buffer}"] = 1e-4 * torch.rand(shape, generator=random)
        state[f"optimizer.{name}.step"] = torch.tensor(float(STEP))
    state["skipped_steps"] = torch.zeros(3, dtype=torch.int64)
    state["rng.cpu.0"] = torch.get_rng_state()
    return state


def write_run(folder: Path, fingerprint: str) -> None:
    """Write the folder of the run, which goes on from step `STEP`; `fingerprint` is its data's."""
    manifest = json.loads((WRITTEN / "manifest.json").read_text())
    checkpoint = folder / "checkpoints" / f"step-{STEP:08}"
    checkpoint.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group
        writer = dcp.FileSystemWriter(str(checkpoint))
        dcp.save(tensors(manifest["optimizer"]), storage_writer=writer, no_dist=True)
    for name, entry in manifest["files"].items():
        data = (checkpoint / name).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["sha256"]
    manifest["data_fingerprint"] = fingerprint
    (checkpoint / "manifest.json").write_text(json_file(manifest.pop("format"), manifest))
    (folder / "config.toml").write_text((WRITTEN / "config.toml").read_text())
    losses = [{"step": step, "train/loss": 6.0 - step / 10} for step in range(1, STEP + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    events = [
        {"event": "started", "step": 0, "ranks": 1, "machines": 1, "origin": None, "changes": []},
        {"event": "saved", "step": STEP, "checkpoint": checkpoint.name, "seconds": 0.1, "mib": 0.7},
        {"event": "stopped", "step": STEP, "signal": "SIGTERM"},
    ]
    lines = (json.dumps({"time": 1795600000.0 + step} | each) for step, each in enumerate(events))
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
