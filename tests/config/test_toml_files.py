"""Config files: which they extend, and what a run is called after."""

import pytest

from torchmars.config.load import load_config
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
        ('extends = "base.toml"', "extends must be a list of strings, got 'base.toml'"),
        ("extends = [1]", r"extends must be a string, got 1 \(in mine.toml\)"),
        (f"extends = 0x{'f' * 5000}", r"extends must be a number of at most 1,000 digits \(in"),
        ('extends = ["none.toml"]', "cannot read the config none.toml: No such file"),
        ('extends = ["mine.toml"]', r"mine.toml extends itself \(mine.toml -> mine.toml\)"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine=text)
    with pytest.raises(UserError, match=message):
        read_sources("mine.toml")


@pytest.mark.parametrize(
    "wrong,near",
    [
        ("quikstart.toml", "quickstart.toml"),
        ("quickstart", "quickstart.toml"),
        ("Quick-Start.toml", "quickstart.toml"),
        ("mine_2", "mine-2.toml"),
        ("sub/mine", "sub/mine.toml"),
        ("m", "m.toml"),
        ("optimizers/mars-m.toml", "optimizers/mars_m.toml"),
        ("optimizer/mars_m.toml", "optimizers/mars_m.toml"),
        ("mars-m.toml", "optimizers/mars_m.toml"),
        ("llama-8b", "llama_8b.toml"),
        ("qwen3-06b.toml", "qwen3_0.6b.toml"),
    ],
)
def test_the_nearest_config_is_named(tmp_path, monkeypatch, wrong, near):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path, **{"m": "", "mine-2": "", "sub/mine": ""})
    with pytest.raises(UserError, match=f"config {wrong}: .*: did you mean {near}\\?"):
        load_config([wrong], "test")


@pytest.mark.parametrize("given", ["", "no-such.toml", "quickstart.toml no-such.toml"])
def test_a_config_that_is_like_none(tmp_path, monkeypatch, given):
    """The variable is named where the config is from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONFIG_FILE", given)
    with pytest.raises(UserError) as error:
        load_config(["no-such.toml"], "test")
    remedy = "set CONFIG_FILE to a TOML file" if given else "name a TOML file"
    assert str(error.value).endswith(f": No such file or directory: {remedy}")


def test_a_file_that_is_extended_often_is_read_once_and_counts_where_it_comes_last(
    tmp_path, monkeypatch
):
    """Each of these extends the next one twice: 2^90 ways lead to the last."""
    monkeypatch.chdir(tmp_path)
    numbers = range(90)
    for at in numbers:
        write(tmp_path, **{f"f{at}": f'extends = ["f{at + 1}.toml", "f{at + 1}.toml"]'})
    write(tmp_path, f90="", first='extends = ["f88.toml", "f0.toml", "f89.toml"]')
    names = [name for name, _ in read_sources("first.toml")]
    later = ["in f90.toml", "in f89.toml"]
    assert names == [*[f"in f{at}.toml" for at in numbers[88::-1]], *later, "in first.toml"]


def test_files_that_extend_each_other_too_deeply(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **{f"f{at}": f'extends = ["f{at + 1}.toml"]' for at in range(1000)})
    with pytest.raises(UserError, match="f0.toml extends more than 100 files"):
        read_sources("f0.toml")


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
    with pytest.raises(UserError, match="run.name must be one folder name .*the name of "):
        load_config([str(tmp_path / "a\n.toml")], "test")
