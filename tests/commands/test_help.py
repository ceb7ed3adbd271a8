"""`--help`: each command's, without the seconds that torch takes to import."""

import re
import subprocess
import sys

import pytest

from torchmars import __version__
from torchmars.__main__ import main
from torchmars.commands import commands

# All but torchrun's own options, which `launch` shows.
ARGUMENTS = [
    *([name, "--help"] for name in commands() if name != "launch"),
    ["train", "--help", "all"],
    ["--help"],
    ["--version"],
    [],
]
SCRIPT = """
import sys
from torchmars.__main__ import main
for args in ARGUMENTS:
    sys.argv = ["torchmars", *args]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, args
    finally:
        sys.stdout.flush()
    assert "torch" not in sys.modules, args
    print("\\0")
"""


def texts():
    """What each of the `ARGUMENTS` prints."""
    script = SCRIPT.replace("ARGUMENTS", repr(ARGUMENTS))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    return ended.stdout.split("\0\n")[:-1]


def test_help_is_plain_text_that_needs_no_torch():
    for args, text in zip(ARGUMENTS, texts(), strict=True):
        assert max(map(len, text.splitlines())) <= 100, args
        if args == ["--version"]:
            assert text == f"torchmars {__version__}\n"
            continue
        assert text.startswith("usage: torchmars"), args
        assert "default: None" not in text and "{None}" not in text
        assert "Default: None" not in text and "Default: ." not in text
        # Commands spell their options with hyphens, settings are spelled as in TOML files.
        options = re.findall(r"^  (--[\w-]+)(?=[ \n])", text, re.MULTILINE)
        assert not [each for each in options if "_" in each], args
        for paragraph in re.split(r"\n(?=  --)", text)[1:]:
            assert paragraph.count("Default: ") <= 1, paragraph


def test_help_of_train_imports_little():
    script = SCRIPT.replace("ARGUMENTS", '[["train", "--help"]]').replace(
        'assert "torch" not in', 'assert not {"torch", "numpy", "pydantic.main", "subprocess"} &'
    )
    script = script.replace("& sys.modules", "& {*sys.modules}")
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


def test_help_of_a_command_with_settings_fits_on_a_screen(call):
    code, out, err = call("train", "--help")
    assert code == 0 and not err and len(out.splitlines()) <= 50
    assert "  [training.float8]       Which matrix products are computed in float8, by" in out
    assert out.count("[optimizer.matrix] ") == 1 and "[optimizer.router]" not in out


def test_help_has_a_section_and_those_within_it(call):
    code, out, err = call("plan", "--help", "training")
    assert code == 0 and not err and out.startswith("[training]:\n")
    assert "  --training.float8.recipe {" in out and "--optimizer.lr" not in out
    code, out, err = call("train", "--help", "trainig")
    assert code == 2 and "no such section: did you mean training? They are run, model, " in err
    code, out, err = call("train", "--help", "optimizer", "--optimizer.name", "muon")
    assert code == 0 and "--optimizer.lr_rest FLOAT" in out and "optimizer.gamma" not in out[:9000]
    assert out.count("Default: 0.006") == 1 and out.count("[optimizer.matrix]") == 1
    code, out, err = call("train", "--help", "qwxz")
    assert code == 2 and "there is no such section: they are run, model, " in err


@pytest.mark.parametrize("setting", ["optimizer.lr", "training.float8.recipe", "run.plugins"])
def test_help_has_one_setting(call, setting):
    section = setting.rpartition(".")[0]
    code, out, err = call("train", "--help", setting)
    assert code == 0 and not err and out.startswith(f"[{section}]:\n")
    assert re.findall(r"^  --(\S+)", out, re.MULTILINE) == [setting]
    whole = " ".join(call("train", "--help", section)[1].split())
    text = " ".join(out[out.index("\n  --") :].split())
    assert text in whole and len(text) > 40
    code, out, err = call("train", "--help", f"{setting}x")
    assert code == 2 and f"did you mean {setting}? They are run" in err


@pytest.mark.parametrize("array,key", [("optimizer.groups", "pattern"), ("data.mixture", "weight")])
def test_help_has_an_array_of_tables(call, array, key):
    code, out, err = call("train", "--help", array)
    assert code == 0 and not err and out.startswith(f"[{array}]:\n  [[{array}]], in TOML only")
    assert f"  --{array}.{key} " in out


def test_help_before_a_word(monkeypatch, capsys):
    """`torchmars --help WORD` is of a command, or of the settings, as `train --help WORD` is."""

    def said(*args):
        monkeypatch.setattr(sys, "argv", ["torchmars", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    for word in ("optimizer", "data.source", "qwxz", "all"):
        assert said("--help", word) == said("train", "--help", word)
    assert said("-h", "plan") == said("plan", "--help")
