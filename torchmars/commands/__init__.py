"""The commands, one file each.

Modules that import torch are imported in `main`, after the options were read: so `--help` and
mistakes are said without the seconds that takes.
"""

from torchmars.core.console import say

# By what they are for, in the order of a user's first days. Launchers start `launch` themselves.
COMMANDS = {
    "start": {
        "train": "Check a config and train it on this machine's ranks.",
        "generate": "Sample text from a model.",
        "plot": "Draw runs, or a comparison: pictures, or a page.",
        "runs": "List the runs there are: how far each is, and whether it runs.",
        "evaluate": "Measure how good a model is: its accuracy on tasks, and its loss on texts.",
        "export": "Write the weights of a checkpoint for other programs.",
    },
    "data": {
        "prepare": "Do all of a run that needs no ranks, or only tokenise a corpus into shards.",
        "import": "Write a config that trains on from a model of Hugging Face's transformers.",
    },
    "compare": {
        "compare": "Compare optimizers fairly: each tuned, the best over several seeds.",
        "transfer": "Check that learning rates of a small model hold for larger ones.",
        "presets": "List published settings by name, with their cost and expected result.",
    },
    "machines": {
        "plan": "Print the memory, traffic and time of a run before it has a cluster.",
        "bench": "Measure how fast a config trains on this machine.",
        "rendezvous": "Hold the place where launchers of several machines meet, apart from them.",
    },
    "tools": {
        "config": "Print every setting of files and options, and where its value comes from.",
        "checkpoint": "Verify or prune the checkpoints of a run.",
    },
}
HIDDEN = ("launch",)


def commands() -> list[str]:
    """Return the names of all commands."""
    return [*HIDDEN, *(name for group in COMMANDS.values() for name in group)]


def print_commands() -> None:
    """Print the commands in groups, with a line on each."""
    say("usage: torchmars COMMAND ...\n\nPretraining of language models with MARS, its optimizers.")
    for title, group in COMMANDS.items():
        say(f"\n{title}:", *(f"  {name:<10}  {text}" for name, text in group.items()))
    say("\ntorchmars COMMAND --help says more of one; --version prints the version.")
