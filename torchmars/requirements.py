"""What the commands need of a Python, looked for before any of it is imported."""

# Python 3.8 must be able to read this file, and say that it is too old.
import sys
from pathlib import Path

OLDEST = (3, 11)
MODULES = (  # of the dependencies in pyproject.toml
    "torch",
    "numpy",
    "psutil",
    "pydantic",
    "rich",
    "torchdata",
    "tiktoken",
    "safetensors",
    "tomli",
    "tomli_w",
    "tqdm",
    "wandb",
)


def is_missing(module: str) -> bool:
    """Return whether there is no such module. A mere folder is none, such as W&B's `wandb`."""
    from importlib.util import find_spec

    spec = find_spec(module)
    return spec is None or spec.origin is None


def check() -> None:
    """End the process with one line and code 2 if this Python lacks what the commands need."""
    python, root = sys.executable, Path(__file__).resolve().parents[1]
    if sys.version_info < OLDEST:
        problem = f"{python} is Python {sys.version_info[0]}.{sys.version_info[1]}"
        remedy = "take Python 3.11 or newer"
    elif missing := [name for name in MODULES if is_missing(name)]:
        problem = f"{python} lacks {', '.join(missing)}"
        what = f"-e {root}" if (root / "pyproject.toml").exists() else "torchmars"
        remedy = f"{python} -m pip install {what}"
    else:
        return
    print(
        f"error: {problem}: {remedy}, or activate the environment that has torchmars",
        file=sys.stderr,
    )
    sys.exit(2)
