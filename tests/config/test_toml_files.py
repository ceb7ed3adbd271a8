"""Config files: which they extend, and what a run is called after."""

import pytest

from torchmars.config.load import load_config, read
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
    assert read(["mine.toml"])[1:] == [
        ("in base.toml", {"run": {"seed": 1}}),
        ("in middle.toml", {"training": {"steps": 3}}),
        ("in other.toml", {"run": {"seed": 2}}),
        ("in mine.toml", {"training": {"steps": 4}}),
    ]


@pytest.mark.parametrize(
    "text,message",
    [
        ('extends = "base.toml"', "extends must be a valid array, got 'base.toml'"),
        ("extends = [1]", r"extends must be a valid string, got 1 \(in mine.toml\)"),
        (f"extends = 0x{'f' * 5000}", r"extends cannot be read: .*\(in mine.toml\)"),
        ('extends = ["none.toml"]', "cannot read the config none.toml: No such file"),
        ('extends = ["mine.toml"]', r"mine.toml extends itself \(mine.toml -> mine.toml\)"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine=text)
    with pytest.raises(UserError, match=message):
        read(["mine.toml"])


def test_a_text_is_taken_for_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("Call me Ishmael.")
    own = "torchmars train quickstart.toml --data.source text:my.txt"
    with pytest.raises(UserError, match=f"my.txt is a text: {own} trains on it"):
        load_config(["my.txt"], "test")
    remedy = r"name a TOML file, or a preset \(torchmars presets\)"
    with pytest.raises(UserError, match=f"config no.toml: No such file or directory: {remedy}"):
        load_config(["no.toml"], "test")


def test_a_file_that_is_extended_often_is_read_once_and_counts_where_it_comes_last(
    tmp_path, monkeypatch
):
    """Each of these extends the next one twice: 2^90 ways lead to the last."""
    monkeypatch.chdir(tmp_path)
    numbers = range(90)
    for at in numbers:
        write(tmp_path, **{f"f{at}": f'extends = ["f{at + 1}.toml", "f{at + 1}.toml"]'})
    write(tmp_path, f90="", first='extends = ["f88.toml", "f0.toml", "f89.toml"]')
    names = [name for name, _ in read(["first.toml"])[1:]]
    later = ["in f90.toml", "in f89.toml"]
    assert names == [*[f"in f{at}.toml" for at in numbers[88::-1]], *later, "in first.toml"]


@pytest.mark.parametrize("first,name", [("my.toml", "my"), ("a_0.6b.toml", "a_0.6b"), ("b", "b")])
def test_a_run_without_a_name_is_called_as_its_first_config(tmp_path, first, name):
    for file in (first, "second.toml"):
        (tmp_path / file).write_text("[training]\nsteps = 7\n")
    files = [str(tmp_path / first), str(tmp_path / "second.toml")]
    assert load_config(files, "test").run.name == name
    assert load_config([*files, "--run.name", "own"], "test").run.name == "own"
    (tmp_path / "second.toml").write_text('[run]\nname = "second"\n')
    assert load_config(files, "test").run.name == "second"


def test_a_config_whose_name_is_no_name_of_a_run(tmp_path):
    (tmp_path / "a\n.toml").write_text("")
    with pytest.raises(UserError, match="run.name must be one name .*the name of "):
        load_config([str(tmp_path / "a\n.toml")], "test")
