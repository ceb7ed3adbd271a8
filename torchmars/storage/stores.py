"""Object stores, by fsspec: s3://BUCKET/FOLDER, and gs://, az:// and others alike.

Credentials come from where a store's own tools take them: its variables, files and roles.
"""

import contextlib
import errno
import io
import logging
import os
import re
from collections.abc import Iterator
from functools import cache
from glob import has_magic
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from torchmars.core.errors import Unreachable, UserError, missing_package
from torchmars.core.places import STORES, ObjectPath
from torchmars.core.secrets import without_secrets

BLOCK = 16 * 2**20  # bytes of a request where a file is read from start to end
ATTEMPTS = 3  # to read bytes that come altered
NO_BUCKET = re.compile("bucket does not exist|container does not exist", re.IGNORECASE)
# What stays as long as a name or a setting does: classes of errors of a store's client, codes of
# the store's own, the status of an answer, and words for what has none of these.
MISTAKES = {
    *("ParamValidationError", "ProfileNotFound", "ConfigNotFound", "ConfigParseError"),
    *("InvalidDNSNameError", "InvalidProxiesConfigError", "InvalidConfigError", "InvalidURL"),
    *("NoRegionError", "InvalidRegionError", "InvalidEndpointConfigurationError"),
    *("NoSuchBucket", "InvalidBucketName", "KeyTooLongError", "InvalidURI", "InvalidObjectName"),
    *("InvalidResourceName", "InvalidUri", "OutOfRangeInput", "ContainerNotFound", "301"),
    *("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
}
MISTAKE = re.compile(
    "(invalid|illegal) (bucket|container|object|blob|resource) name|invalid endpoint"
    "|name (is not valid|contains invalid)|key is too long",
    re.IGNORECASE,
)
REFUSALS = {"PermissionError", "AccessDenied", "AuthenticationFailed", "AuthorizationFailure"}
REFUSALS |= {"401", "403", "UnauthorizedSSOTokenError", "TokenRetrievalError"}
# Of credentials that may come at the next try, and of a clock that may be set by then.
PASSING = {"CredentialRetrievalError", "MetadataRetrievalError", "RequestTimeTooSkewed"}
REFUSAL = re.compile("forbidden|unauthorized|access denied", re.IGNORECASE)
# The time of an object's last write, by the names that stores use.
CHANGED = ("LastModified", "mtime", "updated", "last_modified")
AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
# Log lines of the stores' clients are not ours, and may have secrets.
CLIENTS = "adlfs aiobotocore asyncio azure botocore fsspec gcsfs google s3fs".split()
QUIET = logging.NullHandler()


class Altered(UserError):
    """The store's own checksum does not match the data that came."""


class Store:
    """An object store. Every process has its own connection: a fork cannot use another's."""

    def __init__(self, protocol: str) -> None:
        """`protocol` is one of STORES. Raises `UserError` if its package is missing."""
        self.protocol = protocol
        # By process. A forked child keeps the parent's connection alive: closing it there would
        # unregister the epoll that both share.
        self.connections: dict[int, Any] = {}
        self.files  # noqa: B018, connects

    @property
    def files(self) -> Any:
        """The file system of fsspec."""
        own = os.getpid()
        if own not in self.connections:
            self.connections[own] = self._connect()
        return self.connections[own]

    def open(self, file: PurePath) -> BinaryIO:
        """Open an object, of which any range can be read. Raises `OSError` and `Unreachable`."""
        with reading(file):
            size = self.files.info(str(file))["size"]
        return io.BufferedReader(_Object(self, file, size), BLOCK)

    def glob(self, pattern: str) -> list[PurePath]:
        """Return the objects that a pattern or a name has, or all in a folder of the name.

        Raises `Unreachable`.
        """
        path = ObjectPath(pattern)
        with reading(path):
            look = self.files.glob if has_magic(pattern) else self.files.find
            found = look(str(path), detail=True)
        # A wildcard matches folders too, and some stores have an object for one.
        return [
            ObjectPath(f"{self.protocol}://{name}")
            for name, about in found.items()
            if about["type"] == "file" and not name.endswith("/")
        ]

    def describe(self, file: PurePath) -> tuple[int, int]:
        """Return size and time of last change in ns. Raises `OSError` and `Unreachable`."""
        with reading(file):
            found = self.files.info(str(file))
        times = [found[key].timestamp() for key in CHANGED if hasattr(found.get(key), "timestamp")]
        return found["size"], int(max(times, default=0) * 1e9)

    def fetch(self, file: PurePath, begin: int, end: int) -> bytes:
        """Return bytes [begin, end) of an object. Raises `OSError` if it has fewer."""
        for attempt in range(ATTEMPTS):
            try:
                with reading(file):
                    content: bytes = self.files.cat_file(str(file), start=begin, end=end)
                break
            except Altered:  # its own client does not ask again
                if attempt == ATTEMPTS - 1:  # the store itself has it so
                    raise OSError(
                        errno.EIO, "its bytes are not those that were written", str(file)
                    ) from None
        if len(content) != end - begin:
            raise OSError(errno.EIO, f"it has no bytes {begin} to {end}", str(file))
        return content

    def _connect(self) -> Any:
        name = f"{self.protocol}://"
        extra, package = STORES[self.protocol]
        for client in CLIENTS:
            logging.getLogger(client).addHandler(QUIET)
        try:
            import fsspec

            own = {}
            if self.protocol == "s3":
                from torchmars.storage import answers  # it needs the client of S3

                own["session"] = answers.session()
            return fsspec.filesystem(
                self.protocol, skip_instance_cache=True, use_listings_cache=False, **own
            )
        except ImportError:
            raise missing_package(package, name, extra) from None
        except Exception as error:  # whatever its client makes of its variables and files
            raise UserError(
                f"{name} cannot be used ({reason(error)}): set what its own tools need"
            ) from None


def store_of(path: PurePath) -> Store:
    """Return the store of an object. Raises `UserError`, also for one of another account."""
    store = store_by_name(path.parts[0].removesuffix(":"))
    account = path.parts[1].partition("@")[2].partition(".")[0]
    if account:  # of abfs://CONTAINER@ACCOUNT.HOST: fsspec takes what the environment says
        client = getattr(store.files, "service_client", None)
        if account != getattr(client, "account_name", None):
            raise UserError(
                f"{path} names the account {account}, and {AZURE_ACCOUNT} another: set that"
            )
    return store


store_by_name = cache(Store)


def size_and_time(file: PurePath) -> tuple[int, int]:
    """Return the bytes of a file, and when it was last written to, in ns. Raises `OSError`."""
    if not isinstance(file, Path):
        return store_of(file).describe(file)
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


class _Object(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, store: Store, file: PurePath, size: int) -> None:
        self.store, self.file, self.size, self.place = store, file, size, 0
        self.name = str(file)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        )
        return self.place

    def readall(self) -> bytes:
        content = self.store.fetch(self.file, self.place, self.size)
        self.place = self.size
        return content

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.place + len(buffer))
        if end <= self.place:
            return 0
        content = self.store.fetch(self.file, self.place, end)
        buffer[: len(content)] = content
        self.place = end
        return len(content)


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Raise a `UserError`, mostly `Unreachable`, for all that a store raises.

    But an object that is missing stays a `FileNotFoundError`.
    """
    try:
        yield
    except (UserError, GeneratorExit):
        raise
    except FileNotFoundError as error:
        if NO_BUCKET.search(str(error)):
            raise UserError(f"{path}: {reason(error)}: make it, or name another one") from None
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from None
    except Exception as error:
        if "Checksum" in type(error).__name__:
            raise Altered(f"{path}: what comes is not what was written ({reason(error)})") from None
        kinds, text = set(error_kinds(error)), str(error).replace(str(path), "")
        if kinds & MISTAKES or MISTAKE.search(text):
            raise UserError(
                f"{path} is no name that the store or its settings allow ({reason(error)}): "
                "name another one, or mend the settings of the store's own tools"
            ) from None
        refused = kinds & REFUSALS or any("Credential" in kind for kind in kinds)
        if (refused or REFUSAL.search(text)) and not kinds & PASSING:
            raise UserError(
                f"{path}: the store refuses ({reason(error)}): set credentials for this "
                "folder, where the store's own tools read them (for s3: AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or ~/.aws)"
            ) from None
        raise Unreachable(
            f"{path} cannot be read ({reason(error)}): see that the store answers, and start again"
        ) from None


@contextlib.contextmanager
def writing(path: PurePath) -> Iterator[None]:
    """Raise an `OSError` with its reason for whatever a store raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, reason(error), str(path)) from None


def error_kinds(error: BaseException | None) -> Iterator[str]:
    """Yield the kinds of an error: names of classes, and codes and statuses of a store's answer.

    Each client has its own way to tell them. An error that stands behind it counts too.
    """
    while error is not None:
        yield from (kind.__name__ for kind in type(error).__mro__)
        answer = getattr(error, "response", None)
        told = answer.get("Error", {}) if isinstance(answer, dict) else {}
        names = ("code", "error_code", "status", "status_code")
        yield str(told.get("Code", ""))
        yield from (str(getattr(error, name, "")) for name in names)
        error = error.__cause__


def reason(error: Exception) -> str:
    """Return a store's error in one line. It never holds credentials."""
    return without_secrets(" ".join(str(error).split())) or type(error).__name__
