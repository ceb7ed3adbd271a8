"""Whether the hub of Hugging Face can be reached, before its package tries for minutes."""

import contextlib
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import datasets
from huggingface_hub import constants

ANSWER_SECONDS = 10.0


@contextlib.contextmanager
def hub_or_cache() -> Iterator[str]:
    """Let the package datasets, in the body, use only its cache if there is no hub.

    It would ask again and again. The body gets why the hub cannot be reached, "" if it can.
    """
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
