"""What the answers of a hub of Hugging Face may name."""

import contextlib
import functools
import re
from typing import Any

from torchmars.core.errors import UserError

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
