"""comparison.toml: settings that all trials in a folder share, so that they can be compared."""

import tomli

from torchmars.comparison.study import Study
from torchmars.config.load import Tables, config_text, flattened, read_toml
from torchmars.core.errors import UserError

SETTINGS_FILE = "comparison.toml"

# What may differ between two starts of a comparison: it does not change what is computed, or the
# trials have it of their own.
FREE_SECTIONS = ("optimizer", "checkpoint", "evaluation", "metrics", "profiler")
FREE = ("run.name", "run.folder", "data.processes", "data.verify")
SHOWN = 3  # differences in an error


def check_settings(study: Study) -> Tables:
    """Return the settings of a study, with the contenders that its folder has had before.

    Raises `UserError` if the trials in its folder were started with something else.
    """
    file, now = study.folder / SETTINGS_FILE, settings_of(study)
    before = read_toml(file) if file.exists() else now | {"contenders": {}}
    both = [name for name in before["contenders"] if name in now["contenders"]]

    def facts(settings: Tables) -> Tables:
        return flattened(settings["config"] | {name: settings["contenders"][name] for name in both})

    old, new = facts(before), facts(now)
    differing = [
        f"{key} = {new.get(key)} instead of {old.get(key)}"
        for key in sorted({**old, **new})
        if old.get(key) != new.get(key)
    ]
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise UserError(
            f"{study.folder} has a comparison with other settings: {', '.join(differing[:SHOWN])}"
            f"{more}: use those again, or name another --folder"
        )
    return now | {"contenders": before["contenders"] | now["contenders"]}


def settings_of(study: Study) -> Tables:
    """Return the settings that trials of a study must share, as TOML reads them back."""
    config = tomli.loads(config_text(study.base))
    initial = {key: value for key, value in config["checkpoint"].items() if "init" in key}
    kept = {name: table for name, table in config.items() if name not in FREE_SECTIONS}
    for place in FREE:
        section, key = place.split(".")
        kept[section].pop(key, None)
    contenders = {each.name: each.table for each in study.contenders}
    return {"config": kept | {"checkpoint": initial}, "contenders": contenders}
