"""Tells answers of an S3 store from pages of proxies that answer instead.

A proxy that wants a login answers each request with a page and status 200. Read as S3's own, that
is a folder without objects, and an object that was written.
"""

import re
from typing import Any

from aiobotocore.session import AioSession
from botocore.parsers import ResponseParserError
from fsspec.config import conf

# The first element of an answer's XML, by operation, and a header that each answer has.
ROOTS = {
    "ListBuckets": "ListAllMyBucketsResult",
    "ListObjects": "ListBucketResult",
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "DeleteObjects": "DeleteResult",
}
HEADERS = {"GetObject": ("etag",), "HeadObject": ("etag", "content-length")}
PUTS = "PutObject", "UploadPart"  # their answers have no body
COMMENT = rb"<!--(?:(?!-->).)*-->\s*"
ROOT = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*\?>\s*)?(?:%b)*<(?:\w+:)?(\w+)[\s>/]" % COMMENT, re.S
)


def session() -> Any:
    """Return a session of the S3 client that asks again if the answer does not come from a store.

    It has the profile that fsspec's own settings name.
    """
    made = AioSession(profile=conf.get("s3", {}).get("profile"))
    # Before botocore's own, which takes anything but XML for a fault of the store.
    made.get_component("event_emitter").register_first("before-parse.s3", check_answer)
    return made


def check_answer(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raise the error after which the client asks again, if no store sent the answer."""
    if wrong := problem(operation_model.name, response_dict):
        raise ResponseParserError(f"what answers is no store: {wrong}")


def problem(operation: str, answer: dict[str, Any]) -> str:
    """Return why an answer to an operation cannot be a store's; an empty text where it can."""
    headers = {name.lower(): value for name, value in answer["headers"].items()}
    kind = headers.get("content-type", "unknown")
    if answer["status_code"] >= 300:  # a listing of nothing is empty, and never missing
        missing = answer["status_code"] == 404 and ROOTS.get(operation) == "ListBucketResult"
        return f"a listing is not found ({kind})" if missing and not error_in(answer) else ""
    for header in HEADERS.get(operation, ()):
        if header not in headers:
            return f"{operation} has no {header} ({kind})"
    if operation in PUTS and answer["body"] and "etag" not in headers:
        return f"{operation} brings a page ({kind})"
    if (root := ROOTS.get(operation)) is None:
        return ""
    found = ROOT.match(answer["body"] or b"")
    if found is None or found[1].decode() != root or not closed(answer["body"], root):
        return f"a page or a part of one ({kind}) where a {root} is due"
    more = b"<IsTruncated>true" in answer["body"]
    if operation == "ListObjectsV2" and more and b"NextContinuationToken>" not in answer["body"]:
        return "a listing does not say where its next page is"
    return ""


def closed(body: bytes, root: str) -> bool:
    """Return whether XML comes to its end."""
    end = re.sub(rb"(?:%b)+$" % COMMENT, b"", body[-2000:], flags=re.S).rstrip()
    return re.search(rf"(</(\w+:)?{root}\s*>|/>)$".encode(), end) is not None


def error_in(answer: dict[str, Any]) -> bool:
    """Return whether an answer is one of S3's own errors."""
    found = ROOT.match(answer["body"] or b"")
    return found is not None and found[1] == b"Error"
