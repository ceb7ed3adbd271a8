"""All is installed by one list of versions, and nothing by a name or an address that others own."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.pages import PAGES

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / "run_train.sh", ROOT / ".pre-commit-config.yaml", ROOT / "mkdocs.yml"]
SCRIPTS += [each for name in (".ci", ".github") for each in (ROOT / name).rglob("*")]
SCRIPTS += [each for each in ROOT.glob("examples/**/*") if each.suffix != ".pyc"]
SCRIPTS += [*ROOT.glob("*.toml"), *ROOT.glob("*.cff")]
CODE = [*ROOT.glob("torchmars/**/*.py"), *ROOT.glob("train_configs/**/*.toml")]
CONSTRAINTS = ROOT / "constraints.txt"
LIST = r" -c (\$root/|<\(grep -v \^\w+= )?constraints\.txt"


def texts(files):
    """The texts of files by their names, with continued lines in one."""
    found = {str(file.relative_to(ROOT)): file for file in files if file.is_file()}
    return {name: file.read_text().replace("\\\n", " ") for name, file in found.items()}


def test_each_package_has_a_version_that_the_project_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert list(pins) == sorted(pins) and len(lines) == len(pins)
    required = [Requirement(text) for texts in lists for text in texts]
    of_others = {"aiobotocore", "boto3", "botocore"}
    assert {canonicalize_name(each.name) for each in required} == set(pins) - of_others
    for each in required:
        assert each.specifier.contains(pins[canonicalize_name(each.name)]), str(each)


def test_each_install_has_the_list():
    found = []
    for name, text in texts([*PAGES, *SCRIPTS]).items():
        found += [(name, line) for line in re.findall(r"\bpip\S* install [^`\n]*", text)]
    assert len(found) > 20
    assert not [(name, line) for name, line in found if not re.search(LIST, line)]


def test_messages_have_it_from_one_place():
    assert not [name for name, text in texts(CODE).items() if "pip install" in text]


def test_nothing_is_asked_of_an_index_or_a_host_by_this_projects_name():
    for name, text in texts([*PAGES, *SCRIPTS, *CODE, ROOT / "CHANGELOG.md"]).items():
        assert "torchmars[" not in text and "://github.com/torchmars" not in text, name
        assert not re.search(r"install (-\S+ )*torchmars\b", text), name
