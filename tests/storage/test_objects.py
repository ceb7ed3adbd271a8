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
from torchmars.storage import store_ownership as leases
from torchmars.storage.answers import problem
from torchmars.storage.ownership import LostOwnership
from torchmars.storage.storage import MANIFEST
from torchmars.storage.store_ownership import StoreOwnership
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


def test_a_store_keeps_a_second_run_off(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(leases, "LAPSE_SECONDS", 3.0)
    store = store_of(folder)
    first = StoreOwnership(store, folder, tmp_path / "one")
    with pytest.raises(UserError, match="another run uses .*: stop it first, or set checkpoint.f"):
        StoreOwnership(store, folder, tmp_path / "two")
    again = StoreOwnership(store, folder, tmp_path / "one")  # its former process is over
    with pytest.raises(LostOwnership, match="was taken by process"):
        first.check()
    first.release()
    again.check()
    again.ended.set(), again.thread.join()  # as if it were killed
    other = StoreOwnership(store, folder, tmp_path / "two")
    with pytest.raises(LostOwnership):
        again.check()
    other.release()
    assert storage_of(folder).list(folder) == {}


def test_a_store_without_exclusive_creation_is_told(tmp_path, folder, proxy, capsys):
    """Such a store ignores If-None-Match."""

    def forget(request, passed):
        status, headers, content = passed()
        return (200, [], b"") if status == 412 else (status, headers, content)

    proxy.fault = forget
    StoreOwnership(store_of(folder), folder, tmp_path).release()
    assert "nothing keeps a second run from the same folder" in capsys.readouterr().out


UNKNOWN = [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest")]


@pytest.mark.parametrize(
    ("status", "code"), full_but(UNKNOWN[:2], [*UNKNOWN, (405, ""), (501, ""), (400, "")])
)
def test_a_store_that_refuses_exclusive_creation_can_be_used(
    tmp_path, folder, proxy, capsys, monkeypatch, status, code
):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.05)
    body = (
        f"<Error><Code>{code}</Code><Message>A header</Message></Error>".encode() if code else b""
    )

    def refuse(request, passed):
        return (status, [], body) if "If-None-Match" in request.headers else passed()

    proxy.fault = refuse
    lease = storage_of(folder).take(folder, tmp_path / "one")
    assert capsys.readouterr().out.count("nothing keeps a second run from the same folder") == 1
    with pytest.raises(UserError, match="another run uses"):
        StoreOwnership(store_of(folder), folder, tmp_path / "two")
    lease.check()
    lease.release()


@pytest.mark.parametrize("status", [409, 412])
def test_a_lease_that_another_run_is_just_making_is_seen(tmp_path, folder, proxy, status):
    """A store may answer so where two ask at once, also before the one object can be read."""
    asked = []

    def busy(request, passed):
        asked.append("If-None-Match" in request.headers)
        return (status, [], b"") if sum(asked) == 1 and asked[-1] else passed()

    proxy.fault = busy
    StoreOwnership(store_of(folder), folder, tmp_path).release()
    assert sum(asked) == 3


@FULL
def test_a_copy_of_a_run_takes_no_lease(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    store, one = store_of(folder), tmp_path / "one"
    first = StoreOwnership(store, folder, one)
    for copy in (shutil.copytree(one, tmp_path / "two"), tmp_path / "linked"):
        if not copy.exists():  # the copy in a folder that was copied once more
            shutil.copytree(tmp_path / "two", copy)
        for ask in (storage_of(folder).refuse_another, storage_of(folder).take):
            with pytest.raises(UserError, match="another run uses"):
                ask(folder, copy)
    first.check()
    first.ended.set(), first.thread.join()  # as if it were killed
    again = StoreOwnership(store, folder, one.rename(tmp_path / "moved"))  # at once
    again.release()


def test_a_copy_of_a_folder_takes_no_lease(tmp_path, folder, monkeypatch):
    """Neither there, nor where it is copied back over that of a run at work."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(leases, "LAPSE_SECONDS", 1.0)
    store, copy = store_of(folder), folder.with_name(folder.name + "-copy")
    first = StoreOwnership(store, folder, tmp_path / "one")
    store.files.copy(str(folder / leases.NAME), str(copy / leases.NAME))
    there = StoreOwnership(store, copy, tmp_path / "two")
    first.check(), there.check()
    store.files.copy(str(copy / leases.NAME), str(folder / leases.NAME))
    first.check()
    with pytest.raises(UserError, match="another run uses"):
        StoreOwnership(store, folder, tmp_path / "two")
    first.check(), first.release(), there.release()


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
    for ask in (checkpoints, leftovers, lambda there: storage_of(there).take(there, tmp_path)):
        with pytest.raises(Unreachable, match="see that the store answers, and start again"):
            ask(folder)


def test_a_page_that_comes_once_is_asked_for_again(folder, proxy):
    storage_of(folder).publish(folder, folder / "step-00000004", "{}")
    proxy.fault, spoiled = spoil_once("list-type", lambda *answer: (200, *PAGE))
    assert list(map(step_of, checkpoints(folder))) == [4] and spoiled


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_page_is_no_object(tmp_path, folder, proxy, monkeypatch, method):
    """Neither a manifest, which would be damaged, nor a lease, nor a file that has arrived."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    store, storage, checkpoint = store_of(folder), storage_of(folder), folder / "step-00000004"
    storage.publish(checkpoint, checkpoint, "{}")
    lease = StoreOwnership(store, folder, tmp_path)

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
        lease.check()


def test_a_size_that_is_not_told_is_no_size():
    answer = {"status_code": 200, "headers": {"ETag": "x"}, "body": b""}
    assert problem("HeadObject", answer) == "HeadObject has no content-length (unknown)"
    assert problem("HeadObject", answer | {"headers": {"ETag": "x", "Content-Length": "0"}}) == ""


@FULL
def test_a_store_whose_listing_lacks_what_it_has_is_none(tmp_path, folder, proxy, monkeypatch):
    """Each store's own form of an empty listing: what a stranger answers to all."""
    from torchmars.storage import objects

    monkeypatch.setattr(objects, "SETTLE_SECONDS", 0.0)
    empty = LISTING + b"<IsTruncated>false</IsTruncated></ListBucketResult>"
    proxy.fault = lambda request, passed: (
        (200, [], empty) if "list-type" in request.path else passed()
    )
    with pytest.raises(Unreachable, match="its listing lacks lease.json"):
        storage_of(folder).take(folder, tmp_path)


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


@pytest.mark.parametrize("content", full_but([b"{"], [b"", b"{", b"[1]"]))
def test_a_damaged_lease_lapses(tmp_path, folder, monkeypatch, content):
    monkeypatch.setattr(leases, "LAPSE_SECONDS", 1.0)
    store = store_of(folder)
    written(store, folder / leases.NAME, content)
    lease = StoreOwnership(store, folder, tmp_path)
    lease.check()
    written(store, folder / leases.NAME, content)
    with pytest.raises(Unreachable, match="it is no lease"):
        lease.check()


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


def test_two_names_of_an_azure_folder_are_one():
    names = ("az://box/run", "abfs://box@account.dfs.core.windows.net/run")
    assert {leases.in_store(place(name)) for name in names} == {"box/run"}
