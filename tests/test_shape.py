"""What a reader may count on: one name for one thing, and functions that fit on a screen."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torchmars"
OF_EACH_MODEL_FAMILY = {"Attention", "MLP", "Block"}

LINES, PARAMETERS = 60, 8


def functions():
    """Each function of the package, with its file and the class that it is a method of."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        owners = {
            method: owner.name
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for method in owner.body
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield str(file.relative_to(PACKAGE)), owners.get(node, ""), node


def test_no_function_is_long():
    long = [
        f"{file}: {node.name} has {lines} lines"
        for file, _, node in functions()
        if (lines := node.end_lineno - node.lineno + 1) > LINES
    ]
    assert not long


def test_no_function_has_many_parameters():
    """But for public constructors, and the rules in a few lines, whose settings are parameters."""
    many = [
        f"{file}: {owner}.{node.name} has {count}"
        for file, owner, node in functions()
        if (count := len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]))
        > (
            PARAMETERS + bool(owner)  # self
        )
        and file != "optim/reference.py"
        and (node.name != "__init__" or owner.startswith("_"))
    ]
    assert not many


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} <= OF_EACH_MODEL_FAMILY


def test_no_file_name_stands_in_more_than_two_rooms():
    names = Counter(file.name for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    assert {name for name, count in names.items() if count > 2} == set()
