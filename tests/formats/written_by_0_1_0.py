"""What torchmars 0.1.0 writes: shards, a run's folder and its checkpoint, by code of its own.

Never change this file: it stands for the files that users have. It uses nothing of torchmars. A
later version adds a file like it where it writes something else.
"""

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

LAYERS, WIDTH, ROWS, LENGTH, STEP, BATCH = 2, 32, 320, 32, 4, 16


def json_file(format: str, entries: dict) -> str:
    """The text of a file that names its format first and its checksum last."""
    entries = {"format": format} | entries
    digest = hashlib.sha256(json.dumps(entries, indent=1).encode()).hexdigest()
    return json.dumps(entries | {"sha256": digest}, indent=1) + "\n"


def write_shards(folder: Path) -> str:
    """Write the shards of a text of bytes; the fingerprint of the training tokens."""
    folder.mkdir(parents=True)
    text = b"It was the best of times, it was the worst of times. " * 400
    splits = {}
    for name, part in {"train": text[:-1000], "validation": text[-1000:]}.items():
        tokens = np.array([*part, 256], dtype="<u2").tobytes()
        file = f"{name}-00000-000.bin"
        (folder / file).write_bytes(tokens)
        shard = {"file": file, "tokens": len(part) + 1, "offset": 0}
        shard["sha256"] = hashlib.sha256(tokens).hexdigest()
        counts = {"tokens": len(part) + 1, "documents": 1, "max_token": 256}
        splits[name] = counts | {"shards": [shard]}
    entries = {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "source": "text:text.txt",
        "files": [],
        "splits": splits,
        "dtype": "uint16",
        "validation_fraction": 0.05,
        "tokenizer_sha256": None,
        "validation_seed": 0,
        "text_bytes": {"train": len(text) - 1000, "validation": 1000},
        "end_of_text": 256,
    }
    (folder / "manifest.json").write_text(json_file("torchmars-shards-4", entries))
    shards = splits["train"]["shards"]
    return hashlib.sha256("".join(each["sha256"] for each in shards).encode()).hexdigest()


def shapes() -> dict[str, tuple[int, ...]]:
    """The weights of a small GPT-2 by name."""
    found = {"tok_embed.weight": (ROWS, WIDTH), "pos_embed.weight": (LENGTH, WIDTH)}
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        found |= {
            f"{block}.attn_norm.weight": (WIDTH,),
            f"{block}.attn.qkv.weight": (3 * WIDTH, WIDTH),
            f"{block}.attn.proj.weight": (WIDTH, WIDTH),
            f"{block}.mlp_norm.weight": (WIDTH,),
            f"{block}.mlp.up.weight": (4 * WIDTH, WIDTH),
            f"{block}.mlp.proj.weight": (WIDTH, 4 * WIDTH),
        }
    return found | {"norm.weight": (WIDTH,)}


def write_run(folder: Path, config: dict, fingerprint: str) -> None:
    """Write the folder of a run of `config`, with mars-m, that was stopped after step `STEP`."""
    random = torch.Generator().manual_seed(0)
    state, kinds = {}, {}
    for name, shape in shapes().items():
        matrix = len(shape) == 2 and "embed" not in name
        names = ("exp_avg", "last_grad") if matrix else ("exp_avg", "exp_avg_sq")
        kinds[name] = f"{'mars-m' if matrix else 'adamw'} {' '.join(names)} step"
        noise = torch.randn(shape, generator=random)
        state[f"model.{name}"] = 0.02 * noise if len(shape) == 2 else torch.ones(shape)
        for each in names:
            state[f"optimizer.{name}.{each}"] = 1e-4 * torch.rand(shape, generator=random)
        state[f"optimizer.{name}.step"] = torch.tensor(float(STEP))
    state["skipped_steps"] = torch.zeros(3, dtype=torch.int64)
    state["rng.cpu.0"] = torch.get_rng_state()
    checkpoint = folder / "checkpoints" / f"step-{STEP:08}"
    checkpoint.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(checkpoint)), no_dist=True)
    files = {
        file.name: {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(checkpoint.iterdir())
    }
    entries = {
        "step": STEP,
        "position": STEP * BATCH,
        "world_size": 1,
        "data_fingerprint": fingerprint,
        "vocab_size": 257,
        "optimizer": kinds,
        "config": config,
        "validation_loss": None,
        "recent_losses": [],
        "shares": {"weights": [1.0], "start": 0, "before": [0]},
        "tokenizer_sha256": None,
        "files": files,
    }
    (checkpoint / "manifest.json").write_text(json_file("torchmars-checkpoint-4", entries))
    losses = [{"step": step, "train/loss": 6.0 - step / 10} for step in range(1, STEP + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    events = [
        {"event": "started", "step": 0, "ranks": 1, "machines": 1, "origin": None, "changes": []},
        {"event": "saved", "step": STEP, "checkpoint": checkpoint.name, "seconds": 0.1, "mib": 1.0},
        {"event": "stopped", "step": STEP, "signal": "SIGTERM"},
    ]
    lines = (
        json.dumps({"time": 1795600000.0 + number} | each) for number, each in enumerate(events)
    )
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.toml").write_text(toml(config))


def toml(config: dict) -> str:
    """A config of plain values as a run keeps it."""
    lines = []
    for section, table in config.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"
