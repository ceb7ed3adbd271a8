"""The hub of Hugging Face: what its answers may name, and whether there is one."""

import contextlib
import functools
import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from torchmars.core.errors import UserError

ANSWER_SECONDS = 10.0
COMMIT = re.compile("[0-9a-f]{40}")
NAME = re.compile('(W/)?"?[0-9A-Za-z_-]+"?')  # also as an ETag, of which the package takes the name


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
    names: list[tuple[str, Any, re.Pattern[str]]] = []
    if request.method == "HEAD":
        headers = answer.headers
        names.append(("X-Repo-Commit", headers.get("X-Repo-Commit"), NAME))
        if answer.status_code < 400:  # an error has an ETag of its own text, with any characters
            names.append(("ETag", headers.get("X-Linked-Etag") or headers.get("ETag"), NAME))
    elif is_whole:
        with contextlib.suppress(ValueError):  # it is no JSON
            content = answer.json()
            for each in content if isinstance(content, list) else [content]:
                entry = each if isinstance(each, dict) else {}
                if "/api/" in request.url.path:  # not a file of rows that may have such a column
                    names.append(("sha", entry.get("sha"), COMMIT))
                lfs = entry.get("lfs")
                names.append(("oid", lfs.get("oid") if isinstance(lfs, dict) else None, NAME))
    for what, name, form in names:
        if name is not None and not form.fullmatch(str(name)):
            raise UserError(
                f"the hub {request.url.host} answers for {request.url.path} with the {what} "
                f"{str(name)!r:.80}, which no hub has: set HF_ENDPOINT to one that you trust"
            )


@contextlib.contextmanager
def hub_or_cache() -> Iterator[str]:
    """Let the package datasets, in the body, use only its cache if there is no hub.

    It would ask again and again. The body gets why the hub cannot be reached, "" if it can.
    """
    import datasets
    from huggingface_hub import constants

    switches = [(datasets.config, "HF_HUB_OFFLINE"), (constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in switches]
    problem = "" if any(before) else hub_problem(constants.ENDPOINT)
    try:
        for module, name in switches:
            setattr(module, name, bool(problem) or any(before))
        yield problem
    finally:
        for (module, name), value in zip(switches, before):
            setattr(module, name, value)


def hub_problem(address: str) -> str:
    """Return why nothing answers at an address of the web; "" if something does."""
    try:
        request = urllib.request.Request(address, method="HEAD")
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except (urllib.error.HTTPError, http.client.HTTPException):  # an answer
        return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        # Its own client may have other certificates.
        return "" if isinstance(reason, ssl.SSLError) else f"{address} cannot be reached ({reason})"
    return ""
