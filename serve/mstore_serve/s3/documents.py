"""The XML documents of the S3 face, and its errors.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

import msgspec

from mstore_serve.documents import ErrorReport
from mstore_serve.face import Refusal

XML: Final = "application/xml"
BUCKET: Final = "mstore"
"""The bucket: a server has one store."""
ACCESS_DENIED: Final = "AccessDenied"

_SPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_STATUS: Final[Mapping[str, int]] = {
    "InvalidArgument": 400,
    "InvalidRequest": 400,
    "InvalidURI": 400,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "XAmzContentSHA256Mismatch": 400,
    ACCESS_DENIED: 403,
    "InvalidAccessKeyId": 403,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
}
_OF_STATUS: Final[Mapping[int, str]] = {
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    412: "PreconditionFailed",
    416: "InvalidRange",
    421: "InvalidRequest",
    500: "InternalError",
    503: "ServiceUnavailable",
}
"""What clients of S3 know the refusals of all faces by."""
# What XML cannot have at all, however it is written: only a request can bring such.
_IMPOSSIBLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
# Beside the signs of XML those that would not come back as they are.
_UNSAFE: Final = re.compile('[&<>"\t\n\r\x7f]')


class S3Error(Refusal):
    """A refusal that only this face has, by its code."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(_STATUS[code], ErrorReport(code, what, None))


class S3Object(msgspec.Struct, frozen=True):
    """A key as listings show it; modified: seconds since 1970."""

    key: str
    size: int
    etag: str
    modified: int


class ListRequest(msgspec.Struct, frozen=True):
    """What a listing is asked for; after: keys and prefixes up to this one are left out.

    told: the parameters that the answer repeats.
    """

    prefix: str
    delimiter: str
    after: str
    most: int
    is_encoded: bool
    is_second_version: bool
    told: Mapping[str, str]


def listed(asked: ListRequest, found: Sequence[S3Object | str], *, more: bool, token: str) -> bytes:
    """Return a page of a listing: objects, and common prefixes as texts, in order."""

    def name(text: str) -> str:
        return quote(text, safe="/") if asked.is_encoded else text

    fields: list[tuple[str, str]] = [("Name", BUCKET), ("Prefix", name(asked.prefix))]
    for field, value in asked.told.items():
        fields.append((field, value if field == "ContinuationToken" else name(value)))
    if asked.delimiter:
        fields.append(("Delimiter", name(asked.delimiter)))
    if asked.is_encoded:
        fields.append(("EncodingType", "url"))
    fields += [("MaxKeys", str(asked.most)), ("IsTruncated", "true" if more else "false")]
    if asked.is_second_version:
        fields.append(("KeyCount", str(len(found))))
    if more and asked.is_second_version:
        fields.append(("NextContinuationToken", token))
    elif more:
        last = found[-1]
        fields.append(("NextMarker", name(last if isinstance(last, str) else last.key)))
    parts = [_element(*field) for field in fields]
    for one in found:
        if isinstance(one, str):
            parts.append(f"<CommonPrefixes>{_element('Prefix', name(one))}</CommonPrefixes>")
            continue
        about = _element("Key", name(one.key)) + _element("LastModified", _time(one.modified))
        about += _element("ETag", one.etag) + _element("Size", str(one.size))
        parts.append(f"<Contents>{about}<StorageClass>STANDARD</StorageClass></Contents>")
    return _document("ListBucketResult", "".join(parts))


def buckets(made: int) -> bytes:
    """Return the list of buckets: one; made: seconds since 1970."""
    owner = f"<Owner>{_element('ID', BUCKET)}{_element('DisplayName', BUCKET)}</Owner>"
    bucket = _element("Name", BUCKET) + _element("CreationDate", _time(made))
    content = f"{owner}<Buckets><Bucket>{bucket}</Bucket></Buckets>"
    return _document("ListAllMyBucketsResult", content)


def location() -> bytes:
    """Return where the bucket is: nothing says us-east-1, and any region will do."""
    return _document("LocationConstraint", "")


def versioning() -> bytes:
    """Return that objects have no versions."""
    return _document("VersioningConfiguration", "")


def error(refusal: Refusal, key: str, request: str) -> bytes:
    """Return the document of an error; request: the id of the request."""
    report = refusal.report
    code = report.code if report.code in _STATUS else _OF_STATUS[refusal.status]
    told = [("Code", code), ("Message", report.what), ("BucketName", BUCKET), ("Key", key)]
    told.append(("RequestId", request))
    content = "".join(_element(*one) for one in told)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{content}</Error>\n'.encode()


def _document(name: str, content: str) -> bytes:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} xmlns="{_SPACE}">{content}</{name}>\n'
    return text.encode()


def _element(name: str, text: str) -> str:
    text = _IMPOSSIBLE.sub("\ufffd", text)
    return f"<{name}>{_UNSAFE.sub(lambda found: f'&#{ord(found[0])};', text)}</{name}>"


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
