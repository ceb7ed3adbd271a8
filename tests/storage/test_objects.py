"""Checkpoints in an object store: moto's server of S3 on the loopback, also behind a proxy."""

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
from torchmars.storage.local import FileOwner
from torchmars.storage.objects import OWNER, connect, store_of
from torchmars.storage.storage import MANIFEST, LostOwnership, NewFile

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
        connect.cache_clear()  # it is connected to the server
        yield proxy
    connect.cache_clear()


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


def written(file, content):
    store_of(file).pipe_file(str(file), content)


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
    storage = storage_of(folder)
    whole, cut, set_aside = (folder / f"step-0000000{step}" for step in (1, 2, 3))
    for checkpoint in (whole, cut, set_aside):
        written(checkpoint / "__0_0.distcp", b"tensors")
    for checkpoint in (whole, set_aside):
        storage.publish(checkpoint, checkpoint, "{}")
    storage.set_aside(set_aside)
    assert checkpoints(folder) == [whole]
    left = [cut.with_suffix(".partial"), set_aside.with_suffix(".damaged")]
    assert leftovers(folder) == left
    for path in (whole, *left):
        storage.delete(path)
    assert storage.list(folder) == {} and not store_of(folder).find(str(folder))
    assert storage.list(folder / "never") == {}


def test_a_folder_without_a_bucket_is_not_empty():
    """Else a run whose bucket is gone would begin again."""
    gone = place("s3://gone/run")
    with pytest.raises(UserError, match="bucket does not exist: make it, or name another"):
        checkpoints(gone)


@pytest.mark.parametrize(
    "status,code,kind",
    [
        (400, "InvalidBucketName", UserError),
        (400, "KeyTooLongError", UserError),
        (404, "NoSuchBucket", UserError),
        (403, "SignatureDoesNotMatch", UserError),
        (403, "ExpiredToken", UserError),
        (500, "InternalError", Unreachable),
        (503, "SlowDown", Unreachable),
    ],
)
def test_what_stays_wrong_is_a_mistake(proxy, folder, monkeypatch, status, code, kind):
    """A job must not be put into the queue again and again for the name of a bucket."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(store_of(folder), "retries", 1)
    text = "no: http://me:word@proxy/x?X-Amz-Signature=word"
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
    proxy.fault = lambda request, passed: (status, [("Content-Type", "application/xml")], body)
    with pytest.raises(UserError) as error:
        checkpoints(folder)
    assert type(error.value) is kind, error.value
    assert "word" not in str(error.value) and str(folder) in str(error.value)


def test_a_name_that_the_client_refuses_is_a_mistake():
    with pytest.raises(UserError, match="the store or its client refuses") as error:
        checkpoints(ObjectPath("s3://no bucket/run"))
    assert type(error.value) is UserError


def test_a_file_comes_back_as_it_was_written(folder):
    """What is larger than a request goes and comes in several."""
    storage = storage_of(folder)
    for size in (0, 1, 3 * 2**17, 40 * 2**20):
        content = os.urandom(size)
        with NewFile(storage.create(folder / "file")) as file:
            file.write(content[: size // 3])
            file.write(content[size // 3 :])
        assert describe_file(folder / "file") == file.describe()
        with storage.open(folder / "file") as stream:
            assert stream.read() == content
            stream.seek(size // 2)
            assert stream.read(7) == content[size // 2 :][:7]


def taken(folder, run):
    """The owner of a folder for the run of the folder `run`, whose lock this process takes."""
    return storage_of(folder).take(folder, run, FileOwner(run / "lock", "training").id)


def test_a_store_keeps_a_second_run_off(tmp_path, folder):
    first = taken(folder, tmp_path / "one")
    refused = (
        rf"another run uses .* \(process {os.getpid()} on .*\): stop it first or, if it is over, "
    )
    with pytest.raises(UserError, match=refused + f"delete {folder}/{OWNER}, or set checkpoint.f"):
        taken(folder, tmp_path / "two")
    first.check()
    again = taken(folder, tmp_path / "one")  # its former process is over
    with pytest.raises(LostOwnership, match="was taken by process"):
        first.check()
    first.release()
    again.check()
    store_of(folder).rm_file(str(folder / OWNER))
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
    written(folder / OWNER, content)
    with pytest.raises(Unreachable, match="it is none of this program's"):
        owner.check()
    with pytest.raises(UserError, match="another run uses .*an unknown process.* delete"):
        taken(folder, tmp_path / "one")


def test_a_save_touches_no_upload_of_others(folder):
    files, key = store_of(folder), folder.name

    def begun():
        found = files.call_s3("list_multipart_uploads", Bucket=BUCKET)
        return sorted(each["Key"] for each in found.get("Uploads", []))

    own, before = f"{key}/step-00000004/__0_0.distcp", begun()
    theirs = ["big.bin", f"{key}/mine.bin", f"{key}2/x", f"{key}/step-00000004/notes.bin", own]
    for name in theirs:
        files.call_s3("create_multipart_upload", Bucket=BUCKET, Key=name)
    storage, checkpoint = storage_of(folder), folder / "step-00000004"
    for _ in range(2):
        storage.stage(checkpoint)
        storage.create(checkpoint / "__0_0.distcp").close()
        storage.publish(checkpoint, checkpoint, "{}")
    storage.delete(checkpoint)
    assert begun() == sorted(before + theirs)


def test_what_others_have_in_a_folder_stays(folder):
    storage = storage_of(folder)
    checkpoint, other = folder / "step-00000004", folder.with_name(folder.name + "2")
    theirs = [
        other / "step-00000004" / "__0_0.distcp",
        checkpoint / "notes.txt",
        checkpoint / "export" / "__0_0.distcp",
        folder / "step-000000041" / "__0_0.distcp",
        folder / "step-00000004.txt",
    ]
    for file in theirs:
        written(file, b"x")
    for name in ("__0_0.distcp", ".metadata"):
        written(checkpoint / name, b"own")
    storage.publish(checkpoint, checkpoint, "{}")
    for again in (checkpoint, checkpoint.with_suffix(".partial")):
        with pytest.raises(OSError, match="it holds export, which no save wrote"):
            storage.delete(again)
    assert sorted(map(str, theirs)) == sorted(
        f"s3://{name}" for each in (folder, other) for name in store_of(each).find(str(each))
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


@FULL
@pytest.mark.parametrize("file", FILES)
def test_a_run_falls_back_from_what_is_altered_in_the_store(tmp_path, folder, proxy, file):
    """The store has no checksum of it that is right or wrong."""
    tables = tables_of(tmp_path, folder)
    train_on(1, stopped(tables, 4))

    def fault(request, passed):
        answer = passed()
        if request.method == "GET" and f"step-00000004/{file}" in request.path and answer[0] < 300:
            status, headers, content = altered(*answer)
            return status, [each for each in headers if "checksum" not in each[0].lower()], content
        return answer

    proxy.fault = fault
    (said,) = train_on(1, tables)
    assert "falling back to an older checkpoint" in said
    assert f"from step 2: {folder}/step-00000002" in said
    assert list(map(step_of, checkpoints(folder))) == [2, 4, 6, 8]
