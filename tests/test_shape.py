"""What a reader may count on: one name for one thing, and functions that fit on a screen."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "torchmars"
OF_EACH_MODEL_FAMILY = {"Attention", "MLP", "Block"}

LINES, PARAMETERS = 60, 8
IMPORTS_INSIDE, NAMES_OF_TWO_THINGS = 49, 12
# The lines of Python of each room, and of all. They only go down: a feature that needs more brings
# what it replaces.
IN_ALL = 31_800
OF_ROOMS = {
    "benchmark": 141,
    "checkpoint": 2_438,
    "cluster": 2_000,
    "commands": 1_498,
    "comparison": 1_750,
    "config": 2_494,
    "core": 1_300,
    "data": 2_499,
    "evaluation": 538,
    "exchange": 1_800,
    "models": 1_901,
    "optim": 5_191,
    "parallel": 2_935,
    "planning": 898,
    "records": 970,
    "reports": 591,
    "storage": 638,
    "top level": 636,
    "training": 1_582,
}
# Of Python's own modules subprocess takes time, which --help has not.
OURS = {"torchmars", *sys.stdlib_module_names} - {"subprocess"}


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


def test_no_room_grows():
    lines = Counter()
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        lines["top level" if room.endswith(".py") else room] += file.read_text().count("\n")
    assert lines.keys() == OF_ROOMS.keys()
    assert {room: count for room, count in lines.items() if count > OF_ROOMS[room]} == {}
    assert sum(lines.values()) <= IN_ALL


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


def modules():
    """The files of the package, each with its name as a module and its parsed text."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, file, ast.parse(file.read_text())


def named_in(tree, names):
    """The modules of `names` that a file imports anywhere, also for types, or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                full = f"{node.module}.{each.name}"
                yield full if full in names else node.module
        elif isinstance(node, ast.Constant) and "." in str(node.value):  # "torchmars": a title
            owner = str(node.value).rpartition(".")[0]  # of a class that is named with its module
            yield node.value if node.value in names else owner


def circles(named):
    """The sets of files that reach each other, by what each one names."""
    reached = {}
    for name in named:
        seen, left = set(), [name]
        while left:
            new = named[left.pop()] - seen
            seen |= new
            left += new
        reached[name] = seen
    return {
        frozenset({name} | {other for other in seen if name in reached[other]})
        for name, seen in reached.items()
        if name in seen
    }


def test_no_files_import_each_other_in_a_circle():
    """Inside functions, for types, by importlib and by a class's name in a string too."""
    trees = {name: tree for name, _, tree in modules()}
    named = {name: {*named_in(tree, trees)} & trees.keys() - {name} for name, tree in trees.items()}
    assert not circles(named)


# What a maker calls its own. Everything else asks core/device.py, or torch for the device's type.
NAMES_OF_A_MAKER = re.compile("cuda|nccl", re.IGNORECASE)
NAMED_BY = {
    "core/device.py": "the place for them",
    "begin.py": "a variable that is set before torch is imported",
    "cluster/watchdog.py": "torch's private calls for NCCL's records",
    "optim/compiling.py": "optim imports torch alone; whether Triton knows the GPU",
    "optim/passes.py": "what a compiled call takes on a GPU",
    "optim/matrices/agreement.py": "optim imports torch alone; what multiplies bfloat16",
    "optim/gpu/launches.py": "how they are launched",
}


def test_few_files_name_a_maker_of_gpus():
    """In code: names, attributes, imports and words. Texts of several words are for readers."""

    def words(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value if len(node.value.split()) == 1 else ""
            for name in ("id", "attr", "arg", "name", "module", "asname"):
                yield getattr(node, name, None) or ""

    named = {
        str(file.relative_to(PACKAGE))
        for _, file, tree in modules()
        if any(NAMES_OF_A_MAKER.search(word) for word in words(tree) if isinstance(word, str))
    }
    assert sorted(named ^ NAMED_BY.keys()) == [] and len(NAMED_BY) <= 12


def imports_of(tree, names):
    """What a file imports: at its top, and in statements inside functions. Not for types alone."""
    top, inside = set(), []

    def visit(node, function):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = {*named_in(node, names)}
            inside.append((node, named)) if function else top.update(named)
        for child in ast.iter_child_nodes(node):
            visit(child, function or isinstance(node, ast.FunctionDef))

    visit(tree, False)
    return top, inside


def test_imports_inside_functions_are_few_and_bring_a_package():
    """A package that the file has not imported at its top: it is optional, or takes long."""
    trees = {name: tree for name, _, tree in modules()}
    found = {name: imports_of(tree, trees) for name, tree in trees.items()}

    def brought(names):
        seen, left = set(), [*names]
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left += [name.rpartition(".")[0]] if "." in name else []
                left += found[name][0] if name in found else []
        return {name for name in seen if name.split(".")[0] not in OURS}

    inside = [(name, node, named) for name, (_, each) in found.items() for node, named in each]
    needless = [
        f"{name}: {ast.unparse(node)}"
        for name, node, named in inside
        if brought(named) <= brought([name])
    ]
    assert not needless
    assert len(inside) <= IMPORTS_INSIDE


def test_few_names_of_functions_stand_for_two_things():
    """Of those of a file, not of a class. Each command has a `main`."""
    files = Counter(
        node.name
        for _, _, tree in modules()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in ("_", "__getattr__", "main")
    )
    assert sum(count > 1 for count in files.values()) <= NAMES_OF_TWO_THINGS
