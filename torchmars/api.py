"""torchmars from Python: train a config, and use, measure, read and plan runs in a notebook."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmars.cluster import connection
from torchmars.cluster.environment import keep_compiled_in
from torchmars.cluster.process import start_launcher
from torchmars.commands.plan import check_machines
from torchmars.config import ParallelismConfig, ResolvedConfig
from torchmars.config.fields import Count, Positive
from torchmars.config.load import config_text, read, validate
from torchmars.core.check import Interval, Place, make
from torchmars.core.device import gpu_type
from torchmars.core.errors import EXIT_STOPPED, UserError
from torchmars.core.places import place
from torchmars.data.tokenizer import Tokenizer
from torchmars.evaluation.sampling import Draw, continuations, encode, predict_with_cache
from torchmars.evaluation.scoring import Scorer, measure_text, windows_of_files
from torchmars.exchange.saved_model import load_model, load_sharded_model
from torchmars.models import Model, title
from torchmars.planning import plan as plans
from torchmars.planning.report import plan_in_words
from torchmars.records.run import Run, read_run
from torchmars.training.build import apply_determinism, build_trainer
from torchmars.training.preparation import prepare_run, read_tasks

Config = str | Path | Sequence[str | Path] | ResolvedConfig
TextFiles: Any = Annotated[str, Place(stores=True, pattern=True)]
Ranks = Annotated[int, Interval(1, 1_000)]
Planning = Annotated[int, Interval(1, 100_000)]  # as `torchmars plan` has it
PerNode = Annotated[int, Interval(0, 100_000)]
_alone = threading.Lock()  # held while this process trains, plans or measures


def run_training(config: Config, *, ranks: int = 1, **sections: dict[str, Any]) -> Run:
    """Train or resume the run of a config, as `torchmars train` does; return its curves.

    One rank trains in this process, which keeps the config's settings of a process:
    `training.deterministic`, and the folder of compiled kernels. Several ranks are processes of
    their own, which the launcher starts. They save and end with this process, were it killed.

    Args:
        config: a TOML file, the name of a shipped one or of a preset, or several of them, of which
            the later ones win.
        ranks: processes that train; as many GPUs are needed, where there are GPUs.
        sections: settings that win over the config's, by section:
            `training={"steps": 100}, optimizer={"name": "mars-m", "lr": 1e-2}`.

    Returns:
        The contents of the run's folder: `run.series["train/loss"]` has `steps` and `values`.

    Raises:
        UserError: for a mistake in the config or the data, in one line that names the remedy.
        KeyboardInterrupt: where a signal stopped the run. It was saved if it had begun: call again
            to go on. Outside of the main thread no signal does.
        RuntimeError: where ranks of the launcher failed. They have printed why.
    """
    make(Ranks, ranks, name="ranks")
    resolved = read_config(config, sections)
    code = train_here(resolved) if ranks == 1 else train_by_launcher(resolved, ranks)
    if code == EXIT_STOPPED:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"the run {resolved.run.path} ended with code {code}")
    return read_run(resolved.run.path)


@dataclass(frozen=True)
class Planned:
    """The memory, traffic and time of a run, by `make_plan`. Printed, it is the whole plan."""

    peak: int
    """Bytes of memory that the fullest rank has at its peak."""
    checkpoint: int
    """Bytes of a checkpoint."""
    microbatches: tuple[int, int]
    """Sequences of a microbatch, and microbatches of each rank in a step."""
    seconds: float | None
    """Of a step, estimated; None without GPUs."""
    text: str
    """The output of `torchmars plan`."""

    def __str__(self) -> str:
        return self.text


def make_plan(
    config: Config, world_size: int, gpus_per_node: int = 8, **sections: dict[str, Any]
) -> Planned:
    """Plan a config's run on many ranks: its memory, traffic and time, by formula.

    Args:
        config: as in `run_training`.
        world_size: ranks to plan for.
        gpus_per_node: GPUs of each machine; 0 for machines without.
        sections: as in `run_training`.

    Returns:
        Its memory, time and batches. `print` shows all that `torchmars plan` does.

    Raises:
        UserError: for a config that these ranks cannot train.
    """
    make(Planning, world_size, name="world_size")
    make(PerNode, gpus_per_node, name="gpus_per_node")
    check_machines(world_size, world_size, gpus_per_node or 1)
    plan = plans.plan_run(read_config(config, sections), world_size, gpus_per_node)
    text = "\n".join(plan_in_words(plan))
    return Planned(plan.largest.peak, plan.checkpoint, plan.microbatches, plan.seconds, text)


def load(folder: str | PurePath, device: str | torch.device | None = None) -> "LanguageModel":
    """Load the model of a run, of a checkpoint, or of a folder that transformers reads.

    Args:
        folder: a run gives its newest good checkpoint.
        device: where the model computes. Default: the GPU, where there is one.

    Returns:
        The model with its tokenizer, ready to generate.

    Raises:
        UserError: where there is no such model, and for a plugin's model whose module was not
            imported. What the folder names is never imported.
        DamagedCheckpoint: where files of the checkpoint are damaged; a `UserError` too.
    """
    path, device = place(make(Path, folder, name="folder"), "folder"), usable_device(device)
    model, tokenizer, config = load_model(path)
    return LanguageModel(path, model.to(device).eval(), tokenizer, config)


@dataclass(frozen=True, repr=False)
class LanguageModel:
    """A trained model and its tokenizer; `load` makes it."""

    folder: PurePath
    """Where it is from."""
    model: Model
    """A `torch.nn.Module`: from token ids [batch, length] to hidden states [batch, length, width],
    and `model.head` from these to logits."""
    tokenizer: Tokenizer
    config: ResolvedConfig
    """Of the run that trained it."""

    def __repr__(self) -> str:
        model = f"{title(self.config.model)}, {self.model.counts_in_words}"
        return f"LanguageModel({str(self.folder)!r}: {model})"

    def generate(
        self,
        prompt: str | Sequence[str] = "\n",
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str | list[str]:
        """Return the model's continuation of a prompt, or of each of several, without the prompt.

        Args:
            prompt: the text, or texts, to continue.
            max_tokens: tokens to sample at most; the end of a document comes before.
            temperature: divides the logits. 0 takes the likeliest token.
            top_k: sample from the k likeliest tokens only.
            top_p: sample from the likeliest tokens, as few as have this probability together
                (Holtzman et al. 2020, arXiv 1904.09751).
            seed: of the sampling.

        Returns:
            A text for a text, a list for several.

        Raises:
            UserError: for a value out of its range.
        """
        if isinstance(prompt, str):
            return self.generate([prompt], max_tokens, temperature, top_k, top_p, seed)[0]
        prompts = make(list[str], prompt, name="prompt")
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        draw = make(Draw, settings)
        make(Positive, max_tokens, name="max_tokens")
        if not prompts:
            return []
        longest = max(len(encode(self.tokenizer, each)) for each in prompts)
        # A model with a cache is of no other use: take a copy that has the same weights.
        weights = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        model = deepcopy(self.model, weights)
        predict = predict_with_cache(model, min(model.seq_len, longest + max_tokens))
        return continuations(predict, self.tokenizer, prompts, max_tokens, draw)

    @torch.no_grad()
    def logits(self, text: str | Tensor) -> Tensor:
        """Return the logits of the token after each token of a text.

        Args:
            text: a text, or token ids [length] or [batch, length].

        Returns:
            [length, vocab_rows] for a text, [batch, length, vocab_rows] for a batch. The rows
            beyond the tokenizer's vocabulary are padding, which training makes unlikely.

        Raises:
            UserError: for more tokens than the model sees, and for numbers that are not tokens.
        """
        if isinstance(text, Tensor):
            ids = check_tokens(text, self.model.vocab_rows)
        else:
            ids = torch.tensor(encode(self.tokenizer, make(str, text, name="text")))
        if ids.shape[-1] > self.model.seq_len:
            raise UserError(f"{ids.shape[-1]} tokens: the model sees {self.model.seq_len}")
        device = next(self.model.parameters()).device
        found = self.model.head(self.model(ids.to(device).reshape(-1, ids.shape[-1])))
        return found[0] if ids.ndim == 1 else found

    def evaluate(
        self,
        tasks: str | Sequence[str] = (),
        text: str | None = None,
        *,
        shots: int | None = None,
        limit: int | None = None,
        batch_size: int = 16,
    ) -> dict[str, dict[str, float]]:
        """Measure the model as `torchmars evaluate` does, which reads its weights once more.

        Args:
            tasks: one or several: names of lm_eval's, such as `"hellaswag"`, or files *.yaml that
                describe tasks of your own. Such a file may name Python code, which runs.
            text: text files, as a path, a folder or a glob, whose loss is measured.
            shots: solved examples before each question. Default: as the task says, mostly none.
            limit: only the first so many questions of each task, and windows of the text.
            batch_size: texts of the model's length that are scored at once, of shorter ones more.

        Returns:
            The measures of each task and of the text, by its name. Those of a task have lm_eval's
            names: `acc`, `acc_stderr`, `sample_len` and others.

        Raises:
            UserError: for a task or a text that cannot be read, and if there is none.
        """
        names = make(list[str], [tasks] if isinstance(tasks, str) else tasks, name="tasks")
        text = None if text is None else make(TextFiles, text, name="text")
        if not names and text is None:
            raise UserError("name what to measure: tasks or text")
        make(Count | None, shots, name="shots")  # type: ignore[arg-type]
        make(Positive | None, limit, name="limit")  # type: ignore[arg-type]
        make(Positive, batch_size, name="batch_size")
        with own_group():
            layout = connection.start(ParallelismConfig())
            asked = read_tasks(names, shots, limit)
            scorer = Scorer(*load_sharded_model(self.folder, layout, "float32"), batch_size)
            every = [] if text is None else windows_of_files(text, scorer)[:limit]
            found = {} if asked is None else asked.ask(scorer)
            if text is not None:
                found[text] = measure_text(scorer, every)
        return found


def read_config(config: Config, sections: dict[str, Any]) -> ResolvedConfig:
    """Return the resolved config of files or names, overridden by `sections`."""
    if isinstance(config, ResolvedConfig):
        if sections:
            raise UserError("a resolved config takes no other settings: set them where it is made")
        return config
    names = [config] if isinstance(config, str | os.PathLike) else config
    if not isinstance(names, list | tuple):
        raise UserError(
            "config must be a TOML file, the name of one or of a preset, or a list of these, got "
            f"{config!r:.80}: settings are sections, such as training={{'steps': 100}}"
        )
    files = [str(make(Path, name, name="config")) for name in names]
    return validate([*read(files), ("in Python", sections)])


def usable_device(device: Any) -> torch.device:
    """Return the device that is asked for, by default the GPU where there is one.

    Raises `UserError` for one that this machine has not, or on which nothing is computed.
    """
    wanted = device
    if device is None:
        wanted = gpu_type() or "cpu"
    try:
        allowed = isinstance(wanted, str | int | torch.device) and not isinstance(wanted, bool)
        found = torch.device(wanted if allowed else "meta")
        if found.type != "meta":
            torch.empty(1, device=found)
            return found
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):  # torch's, of many lines
        pass
    raise UserError(f'device must be one of this machine, such as "cpu", got {device!r:.80}')


def check_tokens(ids: Tensor, rows: int) -> Tensor:
    """Return token ids as 64-bit numbers. Raises `UserError` for any other tensor."""
    whole = ids.layout == torch.strided and not (
        ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    )
    if not whole or ids.ndim not in (1, 2) or not ids.numel() or ids.is_meta or ids.is_nested:
        raise UserError(
            "text must be a text, or whole numbers [length] or [batch, length], got a tensor "
            f"{list(ids.shape)} of {ids.dtype}"
        )
    least, most = (int(each) for each in ids.aminmax())
    if least < 0 or most >= rows:
        raise UserError(f"text must have token ids from 0 to {rows - 1}, got {least} to {most}")
    return ids.long()


@contextmanager
def own_group() -> Iterator[None]:
    """Leave, at the end, the process group that the body makes.

    Raises `UserError` if this process is in one.
    """
    if not _alone.acquire(blocking=False):
        raise UserError("another thread trains, plans or measures: this process does one at a time")
    try:
        if dist.is_initialized() or "RANK" in os.environ:
            raise UserError("this process is a rank of several: call torchmars outside of torchrun")
        try:
            yield
        finally:
            connection.stop()
    finally:
        _alone.release()


def train_here(config: ResolvedConfig) -> int:
    """Train on one rank, in this process. Returns the run's exit code."""
    with own_group():
        keep_compiled_in(config.run.compile_cache)
        prepare_run(config, 1, 1)
        apply_determinism(config.training)
        trainer = build_trainer(config, connection.start(config.parallelism))
        try:
            return trainer.run()
        finally:
            trainer.checkpointer.saver.release()


def train_by_launcher(config: ResolvedConfig, ranks: int) -> int:
    """Train on several ranks of this machine. Returns the launcher's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(config_text(config), encoding="utf-8")
        # The temporary folder goes with an interrupt that comes before the next line: then the
        # launcher finds no config.
        launcher = start_launcher([str(file)], os.environ | {"NGPU": str(ranks)})
        interrupted = False
        while True:
            try:
                if interrupted:
                    launcher.send_signal(signal.SIGINT)  # it saves the run
                code = launcher.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
    # The exit code of a launcher that was interrupted at its start says nothing.
    return EXIT_STOPPED if interrupted and code else code
