"""The config has the settings that the rules declare."""

import pytest

from torchmars.config import GroupConfig
from torchmars.config.load import config_from_tables, load_config
from torchmars.config.optimizer import optimizer_section
from torchmars.core.cli import documentation
from torchmars.core.errors import UserError
from torchmars.optim.rules import RULES


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_config_has_every_setting_of_a_rule_with_its_default(rule):
    config = config_from_tables({"optimizer": {"name": rule.name}}, "test").optimizer
    texts, of_groups = documentation(optimizer_section(rule.name)), documentation(GroupConfig)
    for setting in rule.settings:
        if setting.scope != "group":
            wanted = setting.default
            if setting.name == "lr_1d" and wanted is None:
                wanted = config.lr / 2
            assert getattr(config, setting.name) == wanted
            assert texts[setting.name].endswith(".")
        assert (setting.scope == "both") == (setting.name in of_groups and setting.name != "split")


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if "gamma" in rule.defaults])
def test_a_setting_of_other_rules_is_refused(rule):
    """Each rule whose gradient is corrected has gamma; AdamW has not."""
    config_from_tables({"optimizer": {"name": rule, "gamma": 0.1}}, "test")
    with pytest.raises(UserError, match="optimizer.gamma has no meaning for .*adamw"):
        config_from_tables({"optimizer": {"name": "adamw", "gamma": 0.1}}, "test")


def test_another_rule_drops_the_settings_that_it_lacks(tmp_path):
    """Those of a file before it, of [optimizer]: the same place as the name."""
    file = tmp_path / "mine.toml"
    file.write_text('[optimizer]\nname = "mars-m"\nlr = 0.1\ngamma = 0.1\nequilibrate = true\n')
    optimizer = load_config([str(file), "--optimizer.name", "adamw"], "test").optimizer
    assert (optimizer.name, optimizer.lr) == ("adamw", 0.1)
    assert not hasattr(optimizer, "gamma") and not hasattr(optimizer, "equilibrate")
    optimizer = load_config([str(file), "--optimizer.name", "muon"], "test").optimizer
    assert optimizer.equilibrate and not hasattr(optimizer, "gamma")
    assert load_config([str(file)], "test").optimizer.gamma == 0.1
    with pytest.raises(UserError, match="optimizer.gamma has no meaning for .*adamw"):
        words = ["--optimizer.name", "adamw", "--optimizer.gamma", "0.1"]
        load_config([str(file), *words], "test")
