"""Config files that extend others."""

import pytest

from torchmars.config.toml_files import read_sources
from torchmars.core.errors import UserError


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)


def test_what_is_extended_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        base="[run]\nseed = 1\n",
        other="[run]\nseed = 2\n",
        middle='extends = ["base.toml"]\n[training]\nsteps = 3\n',
        mine='extends = ["middle.toml", "other.toml"]\n[training]\nsteps = 4\n',
    )
    assert read_sources("mine.toml") == [
        ("in base.toml", {"run": {"seed": 1}}),
        ("in middle.toml", {"training": {"steps": 3}}),
        ("in other.toml", {"run": {"seed": 2}}),
        ("in mine.toml", {"training": {"steps": 4}}),
    ]


@pytest.mark.parametrize(
    "text,message",
    [
        ('extends = "base.toml"', "extends must be a list of config files, got 'base.toml'"),
        ("extends = [1]", r"extends must be a list of config files, got \[1\] \(in mine.toml\)"),
        ('extends = ["none.toml"]', "cannot read the config none.toml: No such file"),
        ('extends = ["mine.toml"]', r"mine.toml extends itself \(mine.toml -> mine.toml\)"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine=text)
    with pytest.raises(UserError, match=message):
        read_sources("mine.toml")
