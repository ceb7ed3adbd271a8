"""Checkpoints in an object store: moto's server of S3 on the loopback, also behind a proxy."""

import html
import os
import shutil

import pytest

from tests.support.full import FULL, full_but
from tests.support.ranks import run_ranks
from tests.support.store import BUCKET, SECRETS, Proxy, s3_server
from tests.support.tiny import listen_here, metrics, run_folder_of, tiny_tables, write_text
from torchmars.checkpoint.folder import checkpoints, leftovers, step_of
from torchmars.checkpoint.manifest import describe_file
from torchmars.checkpoint.resume import read_verified
from torchmars.core.errors import Unreachable, UserError
from torchmars.core.places import ObjectPath, place
from torchmars.storage import storage_of
from torchmars.storage.answers import problem
from torchmars.storage.owner import NAME, FileOwner, LostOwnership
from torchmars.storage.storage import MANIFEST
from torchmars.storage.stores import store_by_name, store_of

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(server, request):
    """A folder of the store, of this test's own."""
    return place(f"s3://{BUCKET}/{request.node.name.replace('[', '-').strip(']')}")


@pytest.fixture
def proxy(server, monkeypatch):
    with Proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        store_by_name.cache_clear()  # it is connected to the server
        yield proxy
    store_by_name.cache_clear()


def tables_of(tmp_path, folder, **checkpoint):
    write_text(tmp_path)
    own = {"interval": 2, "keep_best": False, "folder": str(folder)}
    return tiny_tables(tmp_path, training={"steps": 8}, checkpoint=own | checkpoint)


def train_all(environment, *runs):
    """Train runs one after the other on the ranks of this process group; what each has said."""
    os.environ.update(environment)
    return [listen_here(tables) for tables in runs]


def train_on(ranks, *runs):
    """Train runs one after the other; what the first rank has said of each."""
    return run_ranks(train_all, ranks, dict(os.environ), *runs)[0]


def stopped(tables, steps):
    return tables | {"training": tables["training"] | {"steps": steps}}


def written(store, file, content):
    store.files.pipe_file(str(file), content)


def test_a_run_goes_on_from_a_store_bit_for_bit(tmp_path, folder):
    """Ranks write files of their own, and the whole is there with its manifest."""
    tables = tables_of(tmp_path, folder)
    local = tables_of(tmp_path, tmp_path / "there")
    local["run"] = local["run"] | {"name": "local"}
    said = train_on(2, stopped(tables, 4), tables, local)
    assert f"from step 4: {folder}/step-00000004" in said[1]
    assert list(map(step_of, checkpoints(folder))) == [2, 4, 6, 8]
    ours, theirs = (
        read_verified(place(each) / "step-00000008", "full").files
        for each in (folder, tmp_path / "there")
    )
    assert ours.keys() == theirs.keys() and len(ours) == 3
    assert ours["__0_0.distcp"] == theirs["__0_0.distcp"]
    assert ours["__1_0.distcp"] == theirs["__1_0.distcp"]
    mine = run_folder_of(tables)
    assert not (mine / "checkpoints").exists()
    everything = b"".join(file.read_bytes() for file in mine.rglob("*") if file.is_file())
    for secret in SECRETS.values():
        assert secret.encode() not in everything and secret not in "".join(said)


def test_a_checkpoint_is_there_with_its_manifest_alone(folder):
    store, storage = store_of(folder), storage_of(folder)
    whole, cut, set_aside = (folder / f"step-0000000{step}" for step in (1, 2, 3))
    for checkpoint in (whole, cut, set_aside):
        written(store, checkpoint / "__0_0.distcp", b"tensors")
    for checkpoint in (whole, set_aside):
        storage.publish(checkpoint, checkpoint, "{}")
    storage.set_aside(set_aside)
    assert checkpoints(folder) == [whole]
    left = [cut.with_suffix(".partial"), set_aside.with_suffix(".damaged")]
    assert leftovers(folder) == left
    for path in (whole, *left):
        storage.delete(path)
    assert storage.list(folder) == {} and store.files.find(str(folder)) == []
    assert storage.list(folder / "never") == {}


def test_a_folder_without_a_bucket_is_not_empty():
    """Else a run whose bucket is gone would begin again."""
    gone = place("s3://gone/run")
    with pytest.raises(UserError, match="bucket does not exist: make it, or name another"):
        checkpoints(gone)


ECHOED = "wJalrXUtnFEMIofnobody"  # stands in a file of credentials alone


@pytest.mark.parametrize(
    "status,code,kind",
    [
        (400, "InvalidBucketName", UserError),
        (400, "KeyTooLongError", UserError),
        (400, "AuthorizationHeaderMalformed", UserError),
        (404, "NoSuchBucket", UserError),
        (403, "SignatureDoesNotMatch", UserError),
        (400, "ExpiredToken", UserError),
        (400, "BadDigest", Unreachable),
        (500, "InternalError", Unreachable),
    ],
)
def test_what_stays_wrong_is_a_mistake_and_its_secrets_are_not_told(
    proxy, folder, tmp_path, monkeypatch, status, code, kind
):
    """A job must not be put into the queue again and again for the name of a bucket."""
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = me\naws_secret_access_key = {ECHOED}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(store_of(folder).files, "retries", 1)
    text = f"no: {ECHOED} <AWSAccessKeyId>{ECHOED}</AWSAccessKeyId>"
    body = f"<Error><Code>{code}</Code><Message>{html.escape(text)}</Message></Error>".encode()
    proxy.fault = lambda request, passed: (status, [("Content-Type", "application/xml")], body)
    with pytest.raises(UserError) as error:
        checkpoints(folder)
    assert type(error.value) is kind, error.value
    assert ECHOED not in str(error.value) and str(folder) in str(error.value)


def test_a_name_that_the_client_refuses_is_a_mistake():
    with pytest.raises(UserError, match="is no name that the store or its settings allow") as error:
        checkpoints(ObjectPath("s3://no bucket/run"))
    assert type(error.value) is UserError


def test_files_wait_in_a_bounded_place(folder, monkeypatch):
    """Files go up several at a time, and what is larger than a part goes in parts."""
    from torchmars.storage import uploads

    monkeypatch.setitem(uploads.OPTIONS, "chunksize", 5 * 2**20)
    files = storage_of(folder).new_files(folder, 2**20)
    assert files.size == 2**17
    contents = {f"{number}": os.urandom(2**17 * number) for number in (0, 1, 3, 96)}
    for name, content in contents.items():
        with files.create(name) as file:
            file.write(content)
    found = files.finish()
    assert found.keys() == contents.keys()
    for name, content in contents.items():
        assert describe_file(folder / name) == found[name]
        with storage_of(folder).open(folder / name) as stream:
            assert stream.read() == content
            stream.seek(len(content) // 2)
            assert stream.read(7) == content[len(content) // 2 :][:7]


def test_a_file_that_an_error_ends_is_dropped(folder):
    files = storage_of(folder).new_files(folder, 2**20)
    with pytest.raises(ValueError), files.create("broken") as file:
        file.write(b"half")
        raise ValueError
    assert files.finish() == {} and storage_of(folder).list(folder) == {}


def taken(folder, run):
    """The owner of a folder for the run of the folder `run`, whose lock this process takes."""
    return storage_of(folder).take(folder, FileOwner(run / "lock", "training"))


def test_a_store_keeps_a_second_run_off(tmp_path, folder):
    first = taken(folder, tmp_path / "one")
    refused = (
        rf"another run uses .* \(process {os.getpid()} on .*\): stop it first or, if it is over, "
    )
    with pytest.raises(UserError, match=refused + f"delete {folder}/{NAME}, or set checkpoint.f"):
        taken(folder, tmp_path / "two")
    first.check()
    again = taken(folder, tmp_path / "one")  # its former process is over
    with pytest.raises(LostOwnership, match="was taken by process"):
        first.check()
    first.release()
    again.check()
    store_of(folder).files.rm_file(str(folder / NAME))
    with pytest.raises(LostOwnership, match="was taken by somebody who deleted it"):
        again.check()
    other = taken(folder, tmp_path / "two")
    with pytest.raises(LostOwnership):
        again.check()
    other.release()
    assert storage_of(folder).list(folder) == {}


def test_of_two_runs_that_start_at_once_one_has_the_folder(tmp_path, folder, proxy):
    """The second one is faster between the first one's look and its request."""
    others = []

    def overtake(request, passed):
        if "If-None-Match" in request.headers and not others:
            others.append(None)
            others[0] = taken(folder, tmp_path / "two")
        return passed()

    proxy.fault = overtake
    with pytest.raises(UserError, match="another run uses"):
        taken(folder, tmp_path / "one")
    others[0].check()


@pytest.mark.parametrize("status", full_but([501], [400, 405, 501]))
def test_a_store_that_refuses_exclusive_creation_can_be_used(tmp_path, folder, proxy, status):
    def refuse(request, passed):
        return (status, [], b"") if "If-None-Match" in request.headers else passed()

    proxy.fault = refuse
    first = taken(folder, tmp_path / "one")
    with pytest.raises(UserError, match="another run uses"):
        taken(folder, tmp_path / "two")
    first.check()
    first.release()


def test_a_copy_of_a_run_is_another_run(tmp_path, folder):
    first = taken(folder, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(UserError, match="another run uses"):
        taken(folder, tmp_path / "two")
    first.check()
    taken(folder, (tmp_path / "one").rename(tmp_path / "moved")).release()  # as if it were killed


@pytest.mark.parametrize("content", full_but([b"{"], [b"", b"{", b"[1]"]))
def test_what_is_no_owner_is_no_permission(tmp_path, folder, content):
    owner = taken(folder, tmp_path / "one")
    written(store_of(folder), folder / NAME, content)
    with pytest.raises(Unreachable, match="it is none of this program's"):
        owner.check()
    with pytest.raises(UserError, match="another run uses .*an unknown process.* delete"):
        taken(folder, tmp_path / "one")


def test_a_save_gives_up_uploads_of_its_own_alone(folder):
    store, own = store_of(folder), "step-00000004/__0_0.distcp"
    key = folder.name
    theirs = [
        "big.bin",
        f"{key}/mine.bin",
        f"{key}2/{own}",
        f"{key}/deeper/{own}",
        f"{key}/step-00000004/notes.bin",
        f"{key}/step-00000004/export/__0_0.distcp",
        f"{key}/step-4/model.safetensors",
    ]

    def begun():
        found = store.files.call_s3("list_multipart_uploads", Bucket=BUCKET)
        return sorted(each["Key"] for each in found.get("Uploads", []))

    for name in (*theirs, f"{key}/{own}", f"{key}/step-00000006/.metadata", own):
        store.files.call_s3("create_multipart_upload", Bucket=BUCKET, Key=name)
    storage_of(folder).stage(folder / "step-00000008")
    assert begun() == sorted([*theirs, own])
    whole = place(f"s3://{BUCKET}")
    storage_of(whole).stage(whole / "step-00000008")
    assert begun() == sorted(theirs)


def test_what_others_have_in_a_folder_stays(folder):
    store, storage = store_of(folder), storage_of(folder)
    checkpoint, other = folder / "step-00000004", folder.with_name(folder.name + "2")
    theirs = [
        other / "step-00000004" / "__0_0.distcp",
        checkpoint / "notes.txt",
        checkpoint / "export" / "__0_0.distcp",
        folder / "step-000000041" / "__0_0.distcp",
        folder / "step-00000004.txt",
    ]
    for file in theirs:
        written(store, file, b"x")
    for name in ("__0_0.distcp", ".metadata"):
        written(store, checkpoint / name, b"own")
    storage.publish(checkpoint, checkpoint, "{}")
    for again in (checkpoint, checkpoint.with_suffix(".partial")):
        with pytest.raises(OSError, match="it holds export, which no save wrote"):
            storage.delete(again)
    assert sorted(map(str, theirs)) == sorted(
        map(str, store.glob(str(folder)) + store.glob(str(other)))
    )


FILES = [MANIFEST, ".metadata", "__0_0.distcp"]


def spoil_once(part, how):
    """Spoil the first answer to a GET of a path that ends in `part`."""
    spoiled = []

    def fault(request, passed):
        answer = passed()
        if request.method == "GET" and part in request.path and not spoiled and answer[0] < 300:
            spoiled.append(request)
            return how(*answer)
        return answer

    return fault, spoiled


def altered(status, headers, content):
    middle = len(content) // 2
    return status, headers, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@FULL
@pytest.mark.parametrize("file", FILES)
def test_a_byte_that_the_network_alters_is_read_again(tmp_path, folder, proxy, file):
    tables = tables_of(tmp_path, folder)
    train_on(1, stopped(tables, 4))
    proxy.fault, spoiled = spoil_once(f"step-00000004/{file}", altered)
    (said,) = train_on(1, tables)
    assert spoiled and f"from step 4: {folder}/step-00000004" in said


@FULL
def test_answers_that_fail_are_asked_for_again(tmp_path, folder, proxy):
    """Some requests fail, and of some the answer ends in its middle."""

    def fault(request, passed):
        if request.number % 25 == 8:
            return 500, [], b"<Error><Code>InternalError</Code></Error>"
        if request.number % 25 == 20:
            status, headers, content = passed()
            return status, headers, content[: len(content) // 2] if len(content) > 100 else content
        return passed()

    proxy.fault = fault
    tables = tables_of(tmp_path, folder)
    train_on(1, stopped(tables, 4), tables)
    assert list(map(step_of, checkpoints(folder))) == [2, 4, 6, 8]
    assert list(metrics(tables)) == list(range(1, 9))


@FULL
def test_a_save_that_a_store_refuses_is_told_and_the_run_goes_on(tmp_path, folder, proxy):
    def refuse(request, passed):
        if request.method == "PUT" and "step-00000004/__0" in request.path:
            return (
                403,
                [],
                b"<Error><Code>ExpiredToken</Code><Message>It has expired</Message></Error>",
            )
        return passed()

    proxy.fault = refuse
    (said,) = train_on(1, tables_of(tmp_path, folder))
    warning = f"warning: the checkpoint {folder}/step-00000004 could not be written: "
    assert warning in said and "expired" in said
    assert list(map(step_of, checkpoints(folder))) == [2, 6, 8] and leftovers(folder) == []


def test_a_store_that_does_not_answer_is_not_an_empty_one(folder, proxy, monkeypatch):
    proxy.fault = lambda request, passed: (503, [], b"")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Unreachable, match="cannot be read .* see that the store answers"):
        checkpoints(folder)


LISTING = b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount>'
PAGE = [("Content-Type", "text/html")], b"<html><head/><body>Please log in</body></html>"
NO_LISTINGS = {
    "a login page": (200, *PAGE),
    "one that is no XML": (200, [], b"<!DOCTYPE html><p>Please<br>log in"),
    "JSON": (200, [], b'{"login": "https://proxy"}'),
    "nothing": (200, [], b""),
    "a part of one": (200, [], LISTING),
    "an error": (200, [], b"<Error><Code>InternalError</Code></Error>"),
    "another answer": (200, [], b"<ListAllMyBucketsResult></ListAllMyBucketsResult>"),
    "a part of many": (
        200,
        [],
        LISTING + b"<IsTruncated>true</IsTruncated></ListBucketResult>",
    ),
    "a page that is not found": (404, *PAGE),
    "nothing that is not found": (404, [], b""),
}


@pytest.mark.parametrize("answer", NO_LISTINGS)
def test_what_is_no_listing_is_not_an_empty_folder(tmp_path, folder, proxy, monkeypatch, answer):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    written(store_of(folder), folder / "step-00000004" / MANIFEST, b"{}")

    def spoil(request, passed):
        return NO_LISTINGS[answer] if "list-type" in request.path else passed()

    proxy.fault = spoil
    for ask in (checkpoints, leftovers):
        with pytest.raises(Unreachable, match="see that the store answers, and start again"):
            ask(folder)


def test_a_page_that_comes_once_is_asked_for_again(folder, proxy):
    storage_of(folder).publish(folder, folder / "step-00000004", "{}")
    proxy.fault, spoiled = spoil_once("list-type", lambda *answer: (200, *PAGE))
    assert list(map(step_of, checkpoints(folder))) == [4] and spoiled


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_page_is_no_object(tmp_path, folder, proxy, monkeypatch, method):
    """Neither a manifest, which would be damaged, nor an owner, nor a file that has arrived."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    storage, checkpoint = storage_of(folder), folder / "step-00000004"
    storage.publish(checkpoint, checkpoint, "{}")
    owner = taken(folder, tmp_path)

    def spoil(request, passed):
        asked = (method, "HEAD") if method == "GET" else (method,)
        return (200, *PAGE) if request.method in asked and "list-" not in request.path else passed()

    proxy.fault = spoil
    if method == "PUT":
        with pytest.raises(OSError, match="what answers is no store"):
            storage.publish(checkpoint, checkpoint, "{}")
        return
    for ask in (checkpoints, lambda there: read_verified(checkpoint, "size")):
        with pytest.raises(Unreachable, match="what answers is no store"):
            ask(folder)
    with pytest.raises(Unreachable, match="what answers is no store"):
        owner.check()


def test_a_size_that_is_not_told_is_no_size():
    answer = {"status_code": 200, "headers": {"ETag": "x"}, "body": b""}
    assert problem("HeadObject", answer) == "HeadObject has no content-length (unknown)"
    assert problem("HeadObject", answer | {"headers": {"ETag": "x", "Content-Length": "0"}}) == ""


@FULL
@pytest.mark.parametrize("file", FILES)
def test_a_run_falls_back_from_what_is_altered_in_the_store(tmp_path, folder, proxy, file):
    """Its client refuses such an object each time, by the checksum that the store has of it."""
    tables = tables_of(tmp_path, folder)
    train_on(1, stopped(tables, 4))

    def fault(request, passed):
        answer = passed()
        bad = request.method == "GET" and f"step-00000004/{file}" in request.path
        return altered(*answer) if bad and answer[0] < 300 else answer

    proxy.fault = fault
    (said,) = train_on(1, tables)
    assert "falling back to an older checkpoint" in said
    assert f"from step 2: {folder}/step-00000002" in said
    assert list(map(step_of, checkpoints(folder))) == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + LISTING + b"</ListBucketResult>",
        LISTING.replace(b"?>", b"?><!-- a -->\n<!-- b -->") + b"</ListBucketResult>",
        LISTING + b"</ListBucketResult>\n<!-- served by one -->\n",
    ],
)
def test_a_listing_may_have_what_xml_allows(body):
    answer = {"status_code": 200, "headers": {}, "body": body}
    assert problem("ListObjectsV2", answer) == ""
    assert "a page" in problem("ListObjectsV2", answer | {"body": None})
