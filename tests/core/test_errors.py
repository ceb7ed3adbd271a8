"""What a rank leaves of its error for the launcher, which may end it in the middle of that."""

import json

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from torchmars.core.errors import ERROR_FILE, LostRank, report_failure, say_error


def test_an_error_is_left_whole(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))
    report_failure(LostRank("rank 1 lost rank 0"))
    ended = ProcessFailure(0, 4711, 1, str(file))
    assert ended.message["message"] == "LostRank: rank 1 lost rank 0"


def test_it_is_left_as_torch_leaves_errors(tmp_path, monkeypatch):
    def left(leave):
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
        leave(error)
        found = json.loads((tmp_path / "error.json").read_text())
        assert int(found["message"]["extraInfo"].pop("timestamp")) > 0
        return found

    try:
        raise ValueError("half of a pair: \ud800")
    except ValueError as caught:
        error = caught
        assert left(report_failure) == left(ErrorHandler().record_exception)


def test_a_rank_that_is_ended_while_it_leaves_its_error_leaves_none(tmp_path, monkeypatch):
    """torchrun fails on the half of a file."""
    file = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(file))

    def end(data, stream):
        stream.write("{")
        stream.flush()
        raise SystemExit  # as by a signal

    monkeypatch.setattr(json, "dump", end)
    with pytest.raises(SystemExit):
        report_failure(LostRank("rank 1 lost rank 0"))
    assert not file.exists()
    assert "SIGTERM" in ProcessFailure(0, 4711, -15, str(file)).message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://me:wo/rd@proxy:80/ is down", "http://...@proxy:80/ is down"),
        ("see s3:me:word@b", "see s3:...@b"),
        (
            "no answer from 'http://127.0.0.1:9/b?sig=word&a=1'",
            "no answer from 'http://127.0.0.1:9/b?...'",
        ),
        ("http://user: hello", "http://user: hello"),
        ("s3://bucket/run@2024, hf:gpt2@main", "s3://bucket/run@2024, hf:gpt2@main"),
        ("https://hf.co:443/a/b@main is a revision", "https://hf.co:443/a/b@main is a revision"),
    ],
)
def test_an_error_has_no_password_and_no_query_of_an_address(capsys, text, told):
    say_error(text)
    assert capsys.readouterr().err == f"error: {told}\n"
