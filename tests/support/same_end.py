"""Whether a run that something happened to ends as one that nothing happened to."""

from tests.support.tiny import run_folder_of, tiny_tables
from torchmars.checkpoint import manifest as manifests
from torchmars.checkpoint.folder import checkpoints


def check_same_end(straight, other, ranks, lines):
    """Compare the last checkpoints and the `lines` of metrics of two runs, by their tables.

    Speed and times may differ, and nothing else.
    """
    finals = [
        manifests.read(checkpoints(run_folder_of(tables) / "checkpoints")[-1])
        for tables in (straight, other)
    ]
    assert finals[0].step == finals[1].step
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    assert set(files) < set(finals[0].files)
    for name in files:  # weights, optimizer state and random numbers
        assert finals[0].files[name] == finals[1].files[name]
    found = [
        [
            line.split(', "train/tokens_per_second"')[0]
            for line in (run_folder_of(tables) / "metrics.jsonl").read_text().splitlines()
            if "stall_ms" not in line
        ]
        for tables in (straight, other)
    ]
    assert found[0] == found[1] and len(found[0]) == lines


def tables_of(folder, name, steps, overrides):
    """Return the tables of a run with dropout that saves and validates now and then."""
    tables = tiny_tables(
        folder,
        run={"name": name},
        model={"dropout": 0.1},
        training={"steps": steps},
        schedule={"name": "constant"},
        checkpoint={"interval": 4, "keep_last": 2},
        validation={"interval": 50, "windows": 4},
    )
    for section, table in overrides.items():
        tables[section] = tables.get(section, {}) | table
    return tables
