"""The table of settings in docs/optimizers.md: what the rules declare."""

from tests.docs.pages import ROOT
from torchmars.core.cli import Option
from torchmars.optim.rules import RULES

FROM_LR = {"lr_1d": "lr / 2", "lr_rest": "lr"}


def cell(rule, name):
    """Return a rule's default of a setting; those that follow from lr are `FROM_LR`."""
    if name not in rule.defaults:
        return "-"
    return (
        Option(name, None, rule.defaults[name]).text("It").partition("Default: ")[2][:-1]
        or FROM_LR[name]
    )


def test_the_table_of_settings_is_what_the_rules_declare():
    every = [setting for rule in RULES.values() for setting in rule.settings]
    names = dict.fromkeys(setting.name for setting in every if setting.scope != "group")
    rows = [["setting", *RULES]]
    rows += [[f"`{name}`", *(cell(rule, name) for rule in RULES.values())] for name in names]
    heading, *others = [f"| {' | '.join(row)} |" for row in rows]
    table = ["", heading, "|" + "---|" * len(rows[0]), *others, ""]
    assert "\n".join(table) in (ROOT / "docs" / "optimizers.md").read_text()
