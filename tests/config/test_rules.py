"""The config names the rules and their settings without torch; `optim` is the authority."""

from typing import get_args

from torchmars.config.optimizer import MARS_RULES, RULE_SETTINGS, Rule
from torchmars.optim.rules import RULES


def test_the_config_knows_every_rule_and_every_setting():
    assert get_args(Rule) == tuple(RULES)
    assert set(MARS_RULES) == {name for name, rule in RULES.items() if rule.corrected}
    assert set(RULE_SETTINGS) == {key for rule in RULES.values() for key in rule.defaults}
