"""Names of places: each means a path or a store, or is refused."""

from pathlib import Path

import pytest

from torchmars.core.errors import UserError
from torchmars.core.places import ObjectPath, local_place, place

LOCAL = {
    name: name for name in ("runs/x", "a:b/c", "run-2024-01-01T10:00:00", "x@y", "~/x", "/x/s3:b")
}
STORED = {name: name for name in ("s3://b/x", "gs://b", "gs://b_u.c-k/é", "az://c/x")}
STORED |= {"s3:/b/x": "s3://b/x", "s3://b//x/": "s3://b/x"}
# Stores' names that are spelled as nobody may, and other protocols of fsspec.
MISSPELLED = [
    *(
        "S3://b/x",
        "s3:b/x",
        "s3:///x",
        "s3:",
        "s3://",
        "gs:/",
        " s3://b/x",
        "s3 ://b",
        "./s3://b/x",
    ),
    *(
        "s3a://b",
        "gcs://b",
        "abfs://c@a.core.net/x",
        "az://c@a.core.net/x",
        "s3://b/x*",
        "s3://b/x#f",
    ),
    *(
        "s3://b/x?versionId=1",
        "s3://bü",
        "s3://b%20c",
        "s3://-b",
        "file://h/x",
        "file:x",
        "ftp://h/x",
    ),
    *("http://169.254.169.254/x", "HTTPS://h/x", "hdfs://n/x", "zip://x::s3://b/x.zip", "data:/x"),
    *("s3://me:word@b", "s3://me@b/x", "s3://me:word", "s3:me:word@b", "https://me:word@h/x"),
]


@pytest.mark.parametrize("name", MISSPELLED)
def test_what_is_no_name_is_refused(name):
    for read in (place, local_place):
        with pytest.raises(UserError, match="^--to must be ") as error:
            read(name, "--to")
        assert "word" not in str(error.value)


def test_what_names_mean():
    for name, meant in LOCAL.items():
        assert place(name) == local_place(name) == Path(meant)
    for name, meant in STORED.items():
        found = place(name)
        assert type(found) is ObjectPath and str(found) == meant
        with pytest.raises(UserError, match="must be a path of this machine's disks"):
            local_place(name)


def test_a_pattern_may_hold_what_no_folder_may():
    for name in ("s3://b/*.txt", "s3://b/[ab]?.txt", "s3://b/c#.txt"):
        assert str(place(name, pattern=True)) == name
        with pytest.raises(UserError, match="without special characters"):
            place(name)
