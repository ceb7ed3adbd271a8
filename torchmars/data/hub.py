"""Data sets of Hugging Face, and what the answers of its hub may name."""

import contextlib
import functools
import os
import re
from typing import Any

from torchmars.config.source import DataSource
from torchmars.core.errors import UserError, needs_package

NAME = re.compile('(W/)?"?[0-9A-Za-z_-]+"?')  # also as an ETag, of which the package takes the name
# In what `datasets` raises of a data set that comes as a program: from release 4 on, and before.
NEEDS_SCRIPT = re.compile("scripts are no longer supported|trust_remote_code")


@functools.lru_cache(maxsize=1)  # the hub is asked once, not for each shard
def load_dataset(source: DataSource) -> Any:
    """Return a data set of Hugging Face, streamed.

    It comes from the hub, where NAME@REVISION names a revision of it, or from a local folder.
    Raises `UserError`.
    """
    with needs_package("datasets", "a source of Hugging Face"):
        import datasets
    distrust_hub()  # also a local data set may name files of a hub
    name, _, revision = source.dataset.partition("@")
    if os.path.exists(source.dataset):
        name, revision = source.dataset, ""
    options: dict[str, Any] = {"revision": revision or None, "streaming": True}
    try:
        data = datasets.load_dataset(name, source.config or None, split=source.split, **options)
    except UserError:
        raise
    except Exception as error:  # whatever its loader, its network or its files have raised
        remedy = "check its name, config and split, and the network"
        if NEEDS_SCRIPT.search(str(error)):
            remedy = (
                "it needs a loading script, which is not run: name a revision without one, such as "
                f"hf:{name}@refs/convert/parquet, or its files by parquet: or jsonl:"
            )
        raise UserError(
            f"data.source: cannot open the data set {source.dataset} ({in_a_line(error)}): {remedy}"
        ) from None
    columns = data.column_names  # not known of all data sets
    if columns and source.field not in columns:
        raise UserError(
            f"data.source: the data set {source.dataset} has no field {source.field!r}: name one "
            f"of {', '.join(columns)} (hf:DATASET:CONFIG:SPLIT:FIELD)"
        )
    return data


def in_a_line(error: BaseException) -> str:
    """Return the first line of another package's error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@functools.cache  # a second client would close the first one, which may be in use
def distrust_hub() -> None:
    """Check all answers that the package huggingface_hub, and others by it, get from here on.

    It makes paths of what a hub says. So a hub could name any file of this machine to be written,
    one that Python runs at its next start, for example.
    """
    from huggingface_hub import get_session, set_client_factory

    first: Any = get_session()  # of the package httpx, or of another one that newer versions take
    settings = {"event_hooks": first.event_hooks, "timeout": first.timeout}

    def checked_client() -> Any:
        client = type(first)(follow_redirects=True, **settings)
        send = client.send

        def checked_send(request: Any, **options: Any) -> Any:
            answer = send(request, **options)
            check_hub_answer(request, answer, is_whole=not options.get("stream"))
            return answer

        client.send = checked_send  # a hook sees an answer before its content is there
        return client

    set_client_factory(checked_client)


def check_hub_answer(request: Any, answer: Any, is_whole: bool) -> None:
    """Raise `UserError` for a commit or a file in the hub's cache that an answer misnames.

    `is_whole` says whether its content has been read: that of a file on its way may be large.
    """
    headers, names = answer.headers, {}
    if request.method == "HEAD":
        names["X-Repo-Commit"] = headers.get("X-Repo-Commit")
        if answer.status_code < 400:  # an error has an ETag of its own text, with any characters
            names["ETag"] = headers.get("X-Linked-Etag") or headers.get("ETag")
    elif is_whole and "/api/" in request.url.path:  # a file of rows may have such columns
        with contextlib.suppress(ValueError):  # it is no JSON
            content = answer.json()
            for number, each in enumerate(content if isinstance(content, list) else [content]):
                entry = each if isinstance(each, dict) else {}
                names[f"sha of {number}"] = entry.get("sha")
                names[f"oid of {number}"] = (entry.get("lfs") or {}).get("oid")
    for what, name in names.items():
        if name is not None and not NAME.fullmatch(str(name)):
            raise UserError(
                f"the hub {request.url.host} answers for {request.url.path} with the {what} "
                f"{str(name)!r:.80}, which no hub has: set HF_ENDPOINT to one that you trust"
            )
