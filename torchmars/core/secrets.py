"""Credentials of stores, which nobody may read: how they are removed from output."""

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

GONE = "..."
# How the names of keys begin at Amazon and Google.
KEY = r"(?:A3T|AKIA|ASIA|AGPA|AIDA|AROA|AIPA|ANPA|ANVA|GOOG)[A-Z0-9]{8,}"
SHORTEST = 6  # letters of a secret: shorter ones are in every text
# USER@, USER:PASSWORD@ and USER:PASSWORD, to the end of the word. Azure's names may be
# abfs://CONTAINER@ACCOUNT.HOST, and addresses have ports.
CREDENTIALS = (
    # Nor is the text after a bucket or a host.
    rf"(?!/*(?!{KEY})[A-Za-z0-9][A-Za-z0-9._-]*/)"
    r"(?!(?<=abfs://)[\w.-]+@[\w-]+\.[\w.-]+(?:[/\s'\"]|$))"
    r"(?:\S*@\S*|[^\s/:]*:(?![0-9]{1,5}(?:\W|$))\S+)"
)
BEGINS = "|".join(rf"(?<={begin})" for begin in ("://", r"\bs3:", r"\bgs:", r"\bgcs:", r"\baz:"))
IN_NAMES = re.compile(f"(?:{BEGINS}){CREDENTIALS}", re.IGNORECASE)
KEY_ID = re.compile(rf"\b{KEY}\b")
# The same in texts that are hardly names, and in the query of an address.
PRINTED = [
    IN_NAMES,
    KEY_ID,
    re.compile(f"(?<=//){CREDENTIALS}"),
    re.compile(r"(?<=\?)(?<!\s\?)\S+=\S+"),
]
# How the names end of variables, and of entries of files, that hold a secret.
HOLDS = r"(?:key|key_?id|token|secret|password|passwd|signature|sig|connection_string)"
VARIABLE = re.compile(rf".*{HOLDS}", re.IGNORECASE)
ENTRY = re.compile(
    rf"(?:^|[\s\"';&?])[\"']?[\w.-]*{HOLDS}[\"']?\s*[=:]\s*(?:\"([^\"]*)\"|'([^']*)'|(?=(\S+)))",
    re.IGNORECASE,
)
OWNERS = ("AWS_", "AZURE_", "GOOGLE_", "FSSPEC_")  # of variables whose values hold several entries
# Files of the stores' own tools, and the variables that name others in their place.
FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
    "AZURE_FEDERATED_TOKEN_FILE": "",
    "BOTO_CONFIG": "~/.boto",
}
LARGEST = 2**20  # bytes that are read of such a file
# Texts that look like a secret, from any source: a role's credentials are in no file.
LOOKS_SECRET = [
    re.compile(r"\beyJ[\w-]{4,}(?:\.[\w-]*)*"),  # a JSON web token
    re.compile(r"\bya29\.[\w-]+"),  # a token of Google's
    re.compile(r"\b[0-9a-fA-F]{32,}\b"),
    # 20 letters or more, with small and capital ones and digits among them
    re.compile(
        r"(?<![\w+/=~-])(?=[\w+/=~-]*[a-z])(?=[\w+/=~-]*[A-Z])(?=[\w+/=~-]*[0-9])[\w+/=~-]{20,}"
    ),
    re.compile(
        r"(?i)(?<![a-z])(?:x-amz-[a-z-]+|x-goog-[a-z-]+|aws_?access_?key_?id|signature(?:provided)?"
        r"|sig|credential|authorization|string_?to_?sign(?:bytes)?|canonical_?request"
        r"|security_?token|session_?token|account_?key|secret_?(?:access_?)?key|password)"
        r"[\"']?\s*[=:>]+\s*[^\s<]*"
    ),
]


def has_credentials(value: Any) -> bool:
    """Return whether a text, or one in tables and lists, has credentials in a store's name."""
    if isinstance(value, str):
        return IN_NAMES.search(value) is not None
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, (dict, list, tuple)) and any(map(has_credentials, inner))


def without_credentials(text: str) -> str:
    """Return a text without anything that looks like credentials in names and addresses."""
    for pattern in PRINTED:
        text = pattern.sub(GONE, text)
    return text


def without_secrets(text: str) -> str:
    """Return a store's message without anything that is a secret, or looks like one."""
    text = without_credentials(text)
    forms = {form for each in secrets() for form in (each, quote(each, safe=""), html.escape(each))}
    for secret in sorted(forms, key=len, reverse=True):
        text = text.replace(secret, GONE)
    for pattern in LOOKS_SECRET:
        text = pattern.sub(GONE, text)
    return text


def secrets() -> set[str]:
    """Return the secrets in the environment, and in the files where stores' tools look."""
    found: set[str] = set()
    for name, value in os.environ.items():
        if VARIABLE.fullmatch(name):
            found.add(value)
        if name.startswith(OWNERS):
            found.update(entries(value))
    for name, usual in FILES.items():
        text = start_of_text(os.environ.get(name) or usual)
        found.update(entries(text))
        if name.endswith("TOKEN_FILE"):
            found.add(text)
    lines = {line for each in found for line in re.split(r"\s*(?:\n|\\n)\s*", each)}
    return {each for each in map(str.strip, lines) if len(each) >= SHORTEST}


def entries(text: str) -> Iterator[str]:
    """Yield the values in a text, in whatever format, whose names say that they are secrets."""
    for found in ENTRY.finditer(text):
        value = found[1] or found[2] or found[3] or ""
        yield value
        yield re.split("[;&,]", value)[0]  # others may follow it in one text


def start_of_text(file: str) -> str:
    """Return the start of a file's text; "" if it cannot be read."""
    path = Path(os.path.expanduser(file)) if file else None
    try:
        if path is None or not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(LARGEST)
    except OSError:
        return ""
