"""The first steps of every command, before it imports modules for seconds."""

# Python 3.8 must be able to read this file, and say that it is too old.
import os
import shlex
import signal
import sys
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder of a clone
OLDEST = (3, 11)
MODULES = (  # of the dependencies in pyproject.toml, but W&B: few runs need it
    "torch",
    "numpy",
    "psutil",
    "pydantic",
    "tiktoken",
    "safetensors",
    "tomli",
    "tomli_w",
    "torchdata",
    "tqdm",
)


def begin() -> None:
    """Check this Python, and keep imported modules from printing on the console."""
    # Ctrl-C ends the imports at once. It is an exception later: see `exit_on_user_error`.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    check_python()
    set_defaults(os.environ)


def set_defaults(variables: "MutableMapping[str, str]") -> None:
    """Set variables that torch and CUDA read at their start, unless the user has set them."""
    # Keeps torch's profiler from printing when it starts and stops.
    variables.setdefault("KINETO_LOG_LEVEL", "99")
    # Memory blocks then grow in place, which avoids fragmentation.
    if "PYTORCH_CUDA_ALLOC_CONF" not in variables:  # the older name, which the newer one overrules
        variables.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def install_command(extra: str, *packages: str) -> str:
    """Return the command that installs a clone with an extra ("": none), or else the packages.

    It asks no index for the project's own name, which belongs to nobody there.
    """
    if (ROOT / "pyproject.toml").exists():
        clone = f"{ROOT}[{extra}]" if extra else str(ROOT)
        packages = "-e", clone, "-c", str(ROOT / "constraints.txt")
    return " ".join(shlex.quote(word) for word in ("pip", "install", *packages))


def is_missing(module: str) -> bool:
    """Return whether there is no such module. A mere folder, such as W&B's `wandb`, is not one."""
    spec = find_spec(module)
    return spec is None or spec.origin is None


def check_python() -> None:
    """End the process with one line and code 2 if this Python lacks required packages."""
    python = sys.executable
    if sys.version_info < OLDEST:
        problem = f"{python} is Python {sys.version_info[0]}.{sys.version_info[1]}"
        remedy = "take Python 3.11 or newer"
    elif missing := [name for name in MODULES if is_missing(name)]:
        problem = f"{python} lacks {', '.join(missing)}"
        remedy = f"{python} -m {install_command('', *missing)}"
    else:
        return
    print(
        f"error: {problem}: {remedy}, or activate the environment that has torchmars",
        file=sys.stderr,
    )
    sys.exit(2)
