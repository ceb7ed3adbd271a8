"""Which rank failed first, of what torch reports of the ranks of a machine."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchmars.cluster.document import Document
from torchmars.cluster.failures import RankLogs, failure_of, report_file
from torchmars.cluster.launcher import RankLauncher


def ended(folder, rank, code, error=None, at=0):
    """The failure of a rank: its exit code, and what @record wrote of an `error`."""
    file = folder / f"{rank}.json"
    if error:
        about = {"py_callstack": f"Traceback of {rank}\n{error}\n", "timestamp": str(at)}
        file.write_text(json.dumps({"message": {"message": error, "extraInfo": about}}))
    failure = ProcessFailure(rank, 100 + rank, exitcode=code, error_file=str(file))
    return failure_of(rank, failure, [f"the last line of {rank}"], folder)


def first_of(failures):
    """That which `RankLauncher` tells of."""
    told = []
    meeting = SimpleNamespace(look=lambda: Document("f" * 16), change_round=lambda how: CLOSED_RUN)
    own = {
        "meeting": meeting,
        "signalled": None,
        "max_restarts": 0,
        "logs": RankLogs(Path(), Path(), {0}),
    }
    launcher = SimpleNamespace(
        **own,
        ranks=9,
        reached=lambda: 0,
        record=lambda *failed: told.append(failed[1]),
        _say_end=lambda: 0,
    )
    RankLauncher._failed(launcher, failures)
    return told[0]


CLOSED_RUN = Document("f" * 16, closed="a rank failed")
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def test_the_cause_comes_before_what_it_does_to_others(tmp_path):
    cause = ended(tmp_path, 1, 1, "ValueError: boom", at=11)
    first = first_of([ended(tmp_path, 0, 1, CLOSED, at=10), cause, ended(tmp_path, 2, -15)])
    assert (first.rank, first.code, first.message) == (1, 1, "Traceback of 1\nValueError: boom")
    aborted = ended(tmp_path, 5, -6), ended(tmp_path, 6, 1, "RuntimeError: rank 7: OSError()", at=9)
    assert first_of([*aborted, ended(tmp_path, 7, 1, "OSError: full", at=11)]).rank == 7
    killed = first_of([ended(tmp_path, 3, 1, CLOSED, at=10), ended(tmp_path, 4, -9)])
    assert killed.rank == 4 and killed.message.startswith("the last line of 4\nSignal 9 (SIGKILL)")


def test_of_several_causes_the_first_counts_and_its_time_is_told(tmp_path):
    late = ended(tmp_path, 0, 1, "ValueError: late", at=12)
    first = first_of([late, ended(tmp_path, 1, 1, "ValueError: early", at=11)])
    said = first.in_words(RankLogs(tmp_path, tmp_path, {0}))
    assert re.fullmatch(
        r"rank 1 on \S+ failed first, at \d\d:\d\d:11: ValueError: early: all it printed is in "
        r".*rank-00001.log",
        said,
    )


def test_a_rank_that_its_watchdog_ends_has_the_code_70(tmp_path):
    report_file(tmp_path, 1).write_text("process 101 on n1\nTimeout (0:00:03)!\nThread 0x1\n")
    report_file(tmp_path, 2).write_text("process 7 on n1\nTimeout (0:00:03)!\n")  # of another start
    hung, other = ended(tmp_path, 1, 1), ended(tmp_path, 2, 1)
    assert (hung.code, hung.is_fallout, other.code) == (70, False, 1)


def test_the_last_line_of_a_rank_may_say_why_it_ended(tmp_path):
    assert ended(tmp_path, 3, 1).line == "the last line of 3; it ended with exit code 1"
