"""A new rule with a setting of its own: its file, and a line in the table of rules."""

import subprocess
import sys

RULE = """
from dataclasses import dataclass
from torchmars.optim.rules import ElementwiseRule
from torchmars.optim.settings import RuleSettings

@dataclass(frozen=True)
class SignsSettings(RuleSettings):
    lr: float = 0.5
    betas: tuple[float, float] = (0.0, 0.0)
    weight_decay: float = 0.0
    threshold: float = 0.25
    'Entries of the gradient below it are left out.'

class Signs(ElementwiseRule):
    name, config, own = "signs", SignsSettings, ("threshold",)

    def buffers(self, clip, exact, stacks):
        return ("exp_avg",)

    def momentum(self, old, c, f):
        return old

    def direction(self, old, new, c, f):
        return c.sign() * (c.abs() > f.own["threshold"])
"""
USE = """
import signs
from torchmars.optim import rules
rules.RULES["signs"] = signs.Signs()  # a line of rules.py

import torch
from torchmars.config.optimizer import optimizer_section
from torchmars.config.load import config_from_tables
from torchmars.core.errors import UserError
from torchmars.core.cli import documentation
from torchmars.optim import MARS, param_groups

def stepped(optimizer, parameter):
    parameter.grad = torch.tensor([[1.0, -0.1, -0.3]])
    optimizer.step()
    return parameter.detach().tolist()

def refused(error, call, *args, **settings):
    try:
        call(*args, **settings)
    except error as found:
        return str(found)

layer = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(layer.weight)
print(stepped(MARS([layer.weight], rule="signs"), layer.weight))
print(stepped(MARS([layer.weight], rule="signs", threshold=0.5), layer.weight))
print(stepped(MARS(param_groups(layer, "signs", threshold=0.0)), layer.weight))
print(refused(ValueError, MARS, [layer.weight], rule="signs", threshold=-1.0))
print(refused(TypeError, MARS, [layer.weight], rule="signs", treshold=1.0))
print(documentation(optimizer_section("signs"))["threshold"])
tables = {"optimizer": {"name": "signs", "threshold": 0.75}}
config = config_from_tables(tables, "test").optimizer
print(config.threshold, config.lr, {group["threshold"] for group in param_groups(
    layer, **config.settings())})
tables["optimizer"]["name"] = "adamw"
print(refused(UserError, config_from_tables, tables, "test"))
"""


def test_a_rule_with_a_setting_of_its_own_needs_no_other_file(tmp_path):
    (tmp_path / "signs.py").write_text(RULE)
    ended = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == [
        "[[-0.5, 0.0, 0.5]]",
        "[[-1.0, 0.0, 0.5]]",
        "[[-1.5, 0.5, 1.0]]",
        "threshold of group 0 must be at least 0, got -1.0",
        "MARS() got an unexpected keyword argument 'treshold'",
        "Entries of the gradient below it are left out.",
        "0.75 0.5 {0.75}",
        'optimizer.threshold has no meaning for optimizer.name = "adamw": remove it (test)',
    ]
