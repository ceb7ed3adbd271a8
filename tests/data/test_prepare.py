"""The same shards however they are made: any processes and tasks, and after any kill."""

import errno
import json
import multiprocessing
import os
import random
import select
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import die_at
from tests.support.full import FULL, full_but
from torchmars.cluster import scheduler
from torchmars.commands import prepare as command
from torchmars.config import DataConfig
from torchmars.config.source import parse_source
from torchmars.core.errors import UserError
from torchmars.core.files import sha256
from torchmars.data import corpus
from torchmars.data.corpus import load_dataset
from torchmars.data.documents import Encoder
from torchmars.data.manifest import check_shards, has_manifest, read_manifest
from torchmars.data.prepare import prepare_shards, start_pool
from torchmars.data.progress_bar import progress_bar

LONGEST = 2000


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    for name, size in (("PIECE", 3000), ("BLOCK", 700), ("LONGEST", LONGEST)):
        monkeypatch.setattr(corpus, name, size)


def texts(count, seed=0):
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(["fox", "hill", "river", "é"]) for _ in range(rng.randrange(1, 60)))
        for _ in range(count)
    ]


@pytest.fixture
def config(tmp_path):
    """A corpus of two files of JSON lines, of which one is compressed, and two bad lines."""
    import gzip

    lines = [json.dumps({"text": text}) for text in texts(100)]
    lines[7] = lines[70] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:60]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[60:]).encode()))
    source = f"jsonl:{tmp_path}/*.jsonl*"
    shards = str(tmp_path / "one")
    return DataConfig(source, path=shards, validation_fraction=0.2, processes=1).resolve()


def made(config, name, tasks=1, **changes):
    """The name and SHA-256 of each file that is made, but what names the corpus."""
    config = replace(config, path=str(Path(config.path).parent / name), **changes)
    for task in range(tasks):
        prepare_shards(config, task, tasks)
    assert not list(Path(config.path).parent.glob("*.lock"))
    return files_of(config)


def files_of(config):
    folder = Path(config.path)
    check_shards(read_manifest(folder), folder)
    assert not [*folder.glob("part-*"), *folder.glob("plan*")]
    return {file.name: sha256(file) for file in folder.iterdir()}


def documents_of(config, name):
    folder = Path(config.path)
    shards = [folder / shard.file for shard in read_manifest(folder).splits[name].shards]
    tokens = np.concatenate([np.fromfile(file, "<u2") for file in shards])
    ends = np.flatnonzero(tokens == 256)
    assert ends[-1] == len(tokens) - 1
    return [bytes(part[part < 256].tolist()).decode() for part in np.split(tokens, ends + 1)[:-1]]


def test_shards_hold_every_document_once_in_its_split(config):
    names = made(config, "one")
    expected = [text for number, text in enumerate(texts(100)) if number not in (7, 70)]
    train, validation = (documents_of(config, name) for name in ("train", "validation"))
    assert sorted(train + validation) == sorted(expected)
    assert train == [text for text in expected if text in set(train)]  # in the corpus's order
    assert not set(train) & set(validation) and 5 < len(validation) < 40
    assert len([name for name in names if name.startswith("train-")]) > 2
    damaged = (Path(config.path) / "damaged.jsonl").read_text().splitlines()
    assert [Path(file).name for file in read_manifest(Path(config.path)).corpus] == [
        "a.jsonl",
        "b.jsonl.gz",
    ]
    assert [(Path(each["file"]).name, each["place"]) for each in map(json.loads, damaged)] == [
        ("a.jsonl", "line 8"),
        ("b.jsonl.gz", "line 11"),
    ]


@pytest.mark.parametrize("processes,tasks", [(2, 1), (3, 1), (1, 3), (1, 50)])
def test_any_number_of_processes_and_tasks_makes_the_same(config, processes, tasks):
    assert made(config, "one") == made(config, "other", tasks, processes=processes)


def test_tasks_in_any_order_and_finished_by_one(config, capsys):
    one = made(config, "one")
    some = replace(config, path=config.path + "-some")
    for task in (2, 0):
        assert prepare_shards(some, task, 3) is None
    assert prepare_shards(some) is not None
    assert files_of(some) == one
    assert prepare_shards(some, 1, 3) == read_manifest(Path(some.path))


def in_a_fork(work, kill_at):
    """Do `work` in a child that is killed before its `kill_at`-th durable call; its status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        die_at(kill_at)
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("fraction", full_but([0.2], [0.2, 1e-9]))
def test_a_kill_at_any_durable_call_loses_and_doubles_nothing(config, fraction):
    """Each start is killed one call later than the one before it, or after few calls again."""
    config = replace(config, validation_fraction=fraction)
    one = made(config, "one")
    for step in (1, 3, 7):
        killed = replace(config, path=f"{config.path}-{step}")
        kills, at = 0, step
        while status := in_a_fork(lambda c=killed: prepare_shards(c), at):
            assert status == -signal.SIGKILL
            kills, at = kills + 1, at + step
            assert kills < 300
        assert kills >= 3 and files_of(killed) == one


def test_processes_that_are_started_on_the_same_pieces_take_turns(config):
    one = made(config, "one")
    both = replace(config, path=config.path + "-both")
    parts = [(0, 1), (0, 3), (1, 3)]
    children = []
    for task, tasks in parts:
        children.append(os.fork())
        if not children[-1]:
            try:
                prepare_shards(both, task, tasks)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 3
    assert files_of(both) == one


def test_what_is_done_is_not_done_again(config, monkeypatch):
    """After a kill only the pieces under way are tokenised anew."""
    one = made(config, "one")
    encode, blocks = Encoder.encode, []
    monkeypatch.setattr(
        Encoder, "encode", lambda self, block: blocks.append(block) or encode(self, block)
    )
    made(config, "again")
    whole = len(blocks)
    killed = replace(config, path=config.path + "-killed")
    assert in_a_fork(lambda: prepare_shards(killed), 12) == -signal.SIGKILL
    blocks.clear()
    prepare_shards(killed)
    assert 0 < len(blocks) < whole and files_of(killed) == one


def test_a_start_with_another_plan_is_one_line(config, tmp_path):
    for task in range(2):
        prepare_shards(config, task, 3)
    for changes, message in (
        ({"validation_fraction": 0.1}, "was begun with data.validation_fraction = 0.2, now it is"),
        ({"tokenizer": "gpt2"}, 'was begun with data.tokenizer = "bytes", now it is "gpt2"'),
    ):
        with pytest.raises(UserError, match=message):
            prepare_shards(replace(config, **changes), 2, 3)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="begun with .*a.jsonl = .*, now it is .2 bytes.*remove"):
        prepare_shards(config, 2, 3)


def block_of(*texts):
    return [("a.txt", "line", *each) for each in enumerate(map(str.encode, texts), 1)]


ENCODER = Encoder(DataConfig(validation_fraction=0.1), parse_source("text"), 2**20)


def test_processes_end_with_the_body_and_one_that_is_killed_is_a_line():
    before, main = set(multiprocessing.active_children()), sys.modules["__main__"]
    with start_pool(ENCODER, 2) as submit:
        _, expected = ENCODER.encode(block_of("a", "b"))
        assert submit(block_of("a", "b")).result()[1] == expected
        assert not os.getenv("PYTHONSAFEPATH") and sys.modules["__main__"] is main
    with pytest.raises(UserError, match="a process that tokenises has died: start again"):
        with start_pool(ENCODER, 2) as submit:
            submit(block_of("a")).result()
            [worker] = set(multiprocessing.active_children()) - before
            os.kill(worker.pid, signal.SIGINT)  # Ctrl-C is for this process
            assert submit(block_of("a")).result()
            worker.kill()
            while True:
                submit(block_of("a")).result()
    assert set(multiprocessing.active_children()) == before


def test_processes_end_with_the_one_that_started_them():
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with start_pool(ENCODER, 2) as submit:
            submit(block_of("a")).result()
            [worker] = multiprocessing.active_children()
            os.write(writer, str(worker.pid).encode())
            signal.pause()
    worker = os.pidfd_open(int(os.read(reader, 100)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert select.select([worker], [], [], 60)[0]  # readable once it has ended


def test_long_documents_are_cut_at_line_ends(tmp_path):
    lines = [f"line {number} of a long book\n" for number in range(500)]
    (tmp_path / "book.txt").write_text("".join(lines))
    config = DataConfig(f"text:{tmp_path}/book.txt", path=str(tmp_path / "shards"), processes=1)
    config = replace(config, validation_fraction=0.3).resolve()
    prepare_shards(config)
    both = documents_of(config, "train") + documents_of(config, "validation")
    assert len(both) > 5 and all(len(each) <= LONGEST for each in both)
    assert sorted(each for text in both for each in text.splitlines(True)) == sorted(lines)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=FULL)])
@pytest.mark.parametrize("fraction", [1e-9, 0.5])
def test_a_split_that_gets_no_document_gets_the_end_of_the_stream(
    tmp_path, capsys, count, fraction
):
    """Also where all documents fall into validation, as some texts have it."""
    empty = set()
    for number in range(4):
        texts = [f"abcd{number}" * 100, f"fbcd{number}" * 100][:count]
        (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(texts))
        path = str(tmp_path / f"{number}")
        config = DataConfig(f"text:{tmp_path}/a.txt", path=path, validation_fraction=fraction)
        manifest = prepare_shards(config.resolve())
        check_shards(manifest, Path(path))
        train, validation = manifest.splits["train"], manifest.splits["validation"]
        assert train.tokens + validation.tokens == 501 * count + (count - 1)
        assert train.documents + validation.documents == count and train.shards
        if "to split by document" in capsys.readouterr().out:
            empty.add(number)
            assert validation.tokens == max(1, int((502 * count - 1) * fraction))
    assert len(empty) == 4 if count == 1 or fraction < 0.5 else 0 < len(empty) < 4


class Rows:
    """What `datasets.load_dataset(..., streaming=True)` returns, in memory."""

    column_names = None  # not known of all data sets

    def __init__(self, shards):
        self.shards = shards
        self.num_shards = len(shards)

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        return Rows([self.shards[index]])

    def __iter__(self):
        return ({"body": text} for shard in self.shards for text in shard)


def test_a_data_set_in_memory_goes_through_the_same_code(tmp_path, monkeypatch):
    import datasets

    asked = []
    shards = [texts(40, 0), [], texts(30, 1) + [None, 5], texts(20, 2)]

    def load(*args, **options):
        asked.append((args, options))
        return Rows(shards)

    load_dataset.cache_clear()
    monkeypatch.setattr(datasets, "load_dataset", load)
    config = DataConfig("hf:some/data:part:test:body", path=str(tmp_path / "one"), processes=1)
    config = replace(config, validation_fraction=0.2).resolve()
    one = made(config, "one")
    options = {"split": "test", "revision": None, "streaming": True}
    assert asked[0] == (("some/data", "part"), options)
    both = documents_of(config, "train") + documents_of(config, "validation")
    assert sorted(both) == sorted(text for shard in shards for text in shard if type(text) is str)
    damaged = [json.loads(line) for line in (tmp_path / "one" / "damaged.jsonl").open()]
    assert [each["place"] for each in damaged] == ["row 31", "row 32"]
    assert made(config, "tasks", tasks=3) == one
    killed = replace(config, path=config.path + "-killed")
    for at in (8, 20):
        assert in_a_fork(lambda: prepare_shards(killed), at) == -signal.SIGKILL
    prepare_shards(killed)
    assert files_of(killed) == one

    def fail(*_, **__):
        raise ConnectionError("no network\nand more")

    load_dataset.cache_clear()
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"the data set some/data \(ConnectionError: no network"):
        prepare_shards(replace(config, path=str(tmp_path / "new")), 0, 1)


REVISION = "refs/convert/parquet"  # that the hub itself makes


class Columns:
    """A data set whose columns are known."""

    num_shards, column_names = 1, ["id", "content"]


def test_a_data_set_without_the_field_and_one_that_is_a_program(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "books.py").write_text("import datasets\n")
    load_dataset.cache_clear()
    config = DataConfig("hf:some/books", path=str(tmp_path / "shards")).resolve()
    with pytest.raises(UserError, match="scripts are no longer .*books@refs/convert/parquet"):
        prepare_shards(replace(config, source=f"hf:{tmp_path}/books"))
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        return Columns()

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match="has no field 'text': name one of id, content"):
        prepare_shards(replace(config, source=f"{config.source}@{REVISION}:part"))
    options = {"split": "train", "streaming": True, "revision": REVISION}
    assert asked[-1] == (("some/books", "part"), options)
    load_dataset.cache_clear()


def test_a_local_folder_of_parquet_and_as_a_data_set(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        table = pyarrow.table({"id": range(50), "text": texts(50, number)})
        file = folder / f"train-{number:05d}-of-00002.parquet"
        pyarrow.parquet.write_table(table, file, row_group_size=17)
    config = DataConfig(f"parquet:{folder}/*.parquet", path=str(tmp_path / "files"), processes=1)
    config = replace(config, validation_fraction=0.2).resolve()
    files = made(config, "files")
    one = {name: documents_of(config, name) for name in ("train", "validation")}
    assert sorted(one["train"] + one["validation"]) == sorted(texts(50, 0) + texts(50, 1))
    assert made(config, "tasks", tasks=2) == files
    config = replace(config, source=f"hf:{folder}", path=str(tmp_path / "hub"))
    prepare_shards(config)
    assert {name: documents_of(config, name) for name in ("train", "validation")} == one
    for source, message in (
        (f"parquet:{folder}:body", "not one column 'body' of strings"),
        (f"parquet:{folder}:id", r"not one column 'id' of strings: name .* of id \(int64\), text"),
    ):
        with pytest.raises(UserError, match=message):
            path = str(tmp_path / source[-4:])
            prepare_shards(replace(config, source=source, path=path))


def prepare(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["prepare", *args])
    command.main()


def test_the_command_prepares_a_corpus_alone_and_as_an_array(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "PIECE", 500)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("\n<|endoftext|>\n".join(texts(5, number)))
    source = ["--source", "text:*.txt", "--validation_fraction=0.3"]
    prepare(monkeypatch, *source)
    path = DataConfig("text:*.txt").resolve().path
    assert f"{path}: train " in capsys.readouterr().out
    for task in (4, 6, 8):
        variables = {"ID": task, "MIN": 4, "STEP": 2, "COUNT": 3}
        for name, value in variables.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        prepare(monkeypatch, *source, "--path", "array")
        said = capsys.readouterr().out
        assert ("array: train" in said) == (task == 8)
    assert files_of(DataConfig(path="array").resolve()) == files_of(DataConfig(path=path).resolve())


@pytest.mark.parametrize(
    "args,message",
    [
        (["--task", "1"], "--task and --tasks need each other"),
        (["--task", "3", "--tasks", "3"], "task 3 is none of 3 tasks"),
        (["--source", "nothing"], "of no known kind"),
        (["--source", "text:*.text"], "names no text file"),
        (
            ["--source", "stdlib", "--processes", "0"],
            "data.processes must be greater than or equal to 1",
        ),
    ],
)
def test_mistakes_of_the_command(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        prepare(monkeypatch, *args)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def array_variables(number, numbers):
    """What SLURM 22.05 tells a task of an array."""
    step = numbers.step if isinstance(numbers, range) else 1
    values = {"ID": number, "MIN": min(numbers), "MAX": max(numbers), "STEP": step}
    values["COUNT"] = len(numbers)
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    "numbers,tasks",
    [
        (range(8), [(place, 8) for place in range(8)]),
        (range(4, 16, 2), [(place, 6) for place in range(6)]),
        ([7], [(0, 1)]),
        ([1, 4, 5], [(0, 1)] * 3),  # each does what is left: SLURM does not tell their places
    ],
)
def test_tasks_of_an_array(numbers, tasks):
    found = [scheduler.task_of_array(array_variables(number, numbers)) for number in numbers]
    assert found == tasks


def test_two_tasks_of_an_array_complete_what_the_others_have_left(config):
    one, array = made(config, "one"), replace(config, path=config.path + "-array")
    for numbers, mine in ((range(5), [0, 2, 3]), ([1, 4], [1, 4])):
        assert not has_manifest(Path(array.path))
        for number in mine:
            prepare_shards(array, *scheduler.task_of_array(array_variables(number, numbers)))
    assert files_of(array) == one


def test_too_much_damage_and_a_kill_leave_nothing_to_be_removed_by_hand(config, tmp_path):
    whole = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text("{\n" * 101 + whole)
    with pytest.raises(UserError, match="101 damaged records .the first: .*a.jsonl, line 1: it is"):
        prepare_shards(config)
    (tmp_path / "a.jsonl").write_text(whole)
    assert prepare_shards(config) is not None
    for name in ("one.lock", "one/plan.json", "one/part-00000.lock"):  # as a kill leaves them
        (tmp_path / name).touch()
    made(config, "one")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "one"]


def test_a_complete_folder_is_only_read(config, monkeypatch):
    made(config, "one")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("unlink", "mkdir", "rename", "rmdir"):  # as a read-only mount, also of what is not
        monkeypatch.setattr(os, name, refuse)
    assert prepare_shards(config) == read_manifest(Path(config.path))


def test_slurm_says_which_task_this_is():
    array = {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"}
    assert scheduler.task_of_array(array) == (2, 4)
    assert scheduler.task_of_array({}) is None
    assert scheduler.task_of_step({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}) == (5, 8)
    script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert scheduler.task_of_step(script) == (0, 1)


@pytest.mark.parametrize("name", ["one/notes.txt", "one/weights.bin"])
def test_a_folder_of_others_is_not_taken_for_one_cut_short(config, tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x")
    with pytest.raises(UserError, match="holds .*, but no manifest.json or plan.json: move it"):
        prepare_shards(config)
    assert file.read_text() == "x"


def test_nothing_is_deleted_beside_a_manifest_of_others(config, tmp_path):
    (tmp_path / "one").mkdir()
    for name in ("manifest.json", "part-00000.json", "plan.json"):
        (tmp_path / "one" / name).write_text("{}")
    with pytest.raises(UserError, match="is no manifest of this version"):
        prepare_shards(config)
    assert len([*(tmp_path / "one").iterdir()]) == 3
    made(config, "two")
    (tmp_path / "two" / "part-00000.parquet").touch()
    assert prepare_shards(replace(config, path=str(tmp_path / "two"))) is not None
    assert (tmp_path / "two" / "part-00000.parquet").exists()


def test_a_link_may_lead_to_a_folder_that_is_not_there_yet(config, tmp_path):
    one = made(config, "one")
    (tmp_path / "linked").symlink_to(tmp_path / "far" / "away")
    assert made(config, "linked") == one and (tmp_path / "far" / "away" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["one.lock", "one/part-00000.lock"])
def test_a_link_beside_or_in_a_folder_that_is_made_is_refused(config, tmp_path, name):
    (tmp_path / "thesis").write_text("by nobody else")
    assert prepare_shards(config, 3, 4) is None
    (tmp_path / name).symlink_to(tmp_path / "thesis")
    with pytest.raises(UserError, match=f"{Path(name).name} is "):
        prepare_shards(config)
    assert (tmp_path / "thesis").read_text() == "by nobody else"


@pytest.mark.parametrize("full", [True, False])
def test_a_bar_that_cannot_be_written_ends_no_work(monkeypatch, full):
    with open("/dev/full", "w") as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stream if full else None)
        with progress_bar("tokenising", 2, "B") as bar:
            bar.update(2)
