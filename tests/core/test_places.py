"""Names of places: each means a path or a store, or is refused without being repeated."""

from pathlib import Path

import pytest

from torchmars.core.errors import UserError
from torchmars.core.places import ObjectPath, local_place, place

KEY, SECRET = "AKIAOFNOBODY", "wJalrXUt/K7MDENG"
LOCAL = {
    name: name for name in ("runs/x", "a:b/c", "run-2024-01-01T10:00:00", "x@y", "~/x", "/x/s3:b")
}
LOCAL |= {"file:///tmp/x": "/tmp/x", "file:/tmp/x": "/tmp/x", "file://localhost/x": "/x"}
STORED = {name: name for name in ("s3://b/x", "gs://b", "gcs://b_u.c-k/é", "az://c/x", "abfs://c")}
STORED |= {"s3:/b/x": "s3://b/x", "s3://b//x/": "s3://b/x"}
STORED |= {"abfs://c@acc.dfs.core.windows.net/x": "abfs://c@acc.dfs.core.windows.net/x"}
# Stores' names that are spelled as nobody may, and other protocols of fsspec.
MISSPELLED = (
    *("S3://b/x", "s3:b/x", "s3:///x", "s3:", "s3://", "gs:/", " s3://b/x", "s3://b/x ", "s3 ://b"),
    *("s3//b/x", "s3;//b", "s3：//b", "ｓ３://b", "s3:\\b\\x", "C:\\x", '"s3://b"', "./s3://b/x"),
    *("s3a://b", "abfss://c@a.b/x", "abfs://c@acc/x", "az://c@acc.dfs.core.windows.net/x"),
    *("s3://b/x?versionId=1", "s3://b/x#f", "s3://b/../x", "s3://b/.", "s3://../x", "s3://b/x*"),
    *(
        "s3://b/x::y",
        "s3://b/x://y",
        "s3://bü",
        "s3://b%20c",
        "s3://-b",
        "s3://b/\n",
        "s3://b/\udcff",
    ),
    *("s3://" + "b" * 300, "s3://b/" + "k" * 2000, "arn:aws:s3:::b/x", "file://h/x", "file:x"),
    *("http://169.254.169.254/x", "HTTPS://h/x", "hdfs://n/x", "jupyter://h/x", "reference://x"),
    *("zip://x::s3://b/x.zip", "memory://x", "ftp://h/x", "github://o:r@main/x", "data:/x"),
)
SECRETS = tuple(
    name.replace("K", KEY).replace("S", SECRET)
    for name in (
        *("s3://K:S@b", "s3://K@b/x", "s3://K:S", "s3:K:S@b", "s3:/K:S@b", " s3://K:S@b/x"),
        *("s3://b@K:S/x", "gs://K:S@b/x", "az://K:S@acc/x", "abfs://K:S@a.b/x", "hdfs://K:S@n/x"),
        *("https://K:S@h/x", "file://K:S@h/x", "s3//K:S@b", "zip::s3://K:S@b/x", "K://b"),
    )
)


@pytest.mark.parametrize("name", MISSPELLED + SECRETS)
def test_what_is_no_name_is_refused_and_not_repeated(name):
    for read in (place, local_place):
        with pytest.raises(UserError, match="^--to must (be|name) ") as error:
            read(name, "--to")
        said = str(error.value)
        assert name.strip() not in said.replace("s3://BUCKET", "") or len(name) < 6
        assert KEY not in said and not any(part in said for part in SECRET.split("/"))


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
    with pytest.raises(UserError, match="without special characters"):
        place("s3://b/../*", pattern=True)
