"""The S3 face: what a request asks for, who may ask, and how an error reads.

Path style only: `/mstore/KEY`.  Answers what programs need that read: ListBuckets, HeadBucket,
GetBucketLocation, GetBucketVersioning, ListObjects, ListObjectsV2, HeadObject, GetObject.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Final
from urllib.parse import unquote_to_bytes

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.types import Scope

from mstore_serve.addresses import path_of
from mstore_serve.conditions import http_date
from mstore_serve.face import Find, Pairs, Refusal
from mstore_serve.s3 import documents
from mstore_serve.s3.documents import BUCKET, XML, ListRequest, S3Error
from mstore_serve.s3.listing import folder_of, page
from mstore_serve.s3.signatures import Signed, check, pairs, without_credentials
from mstore_serve.serving import S3Keys
from mstore_serve.shown import Later, Showing, Shown, made

MOST_KEYS: Final = 1000
"""Keys and common prefixes of one page."""
_NUMBER_DIGITS: Final = 9
# What programs may ask for beside the bytes of an object and the keys of the bucket.
_PARTS_OF_S3: Final = frozenset(
    {
        *("accelerate", "acl", "analytics", "attributes", "cors", "encryption", "inventory"),
        *("legal-hold", "lifecycle", "logging", "metrics", "notification", "object-lock"),
        *("ownershipControls", "partNumber", "policy", "policyStatus", "publicAccessBlock"),
        *("replication", "requestPayment", "retention", "tagging", "torrent", "uploadId"),
        *("uploads", "versions", "website"),
    }
)


class S3Face:
    """Snapshots as objects of the bucket `mstore`.

    keys: what requests are signed with; None: they are not checked.
    """

    def __init__(self, showing: Showing, keys: S3Keys | None) -> None:
        self._showing = showing
        self._keys = keys

    def admit(self, scope: Scope, headers: Headers) -> None:
        if self._keys is None:
            return
        signed = Signed(
            scope["method"],
            path_of(scope["raw_path"]),
            scope["query_string"],
            {name: headers.getlist(name) for name in headers},
        )
        check(signed, self._keys, time.time())

    def asked(self, scope: Scope, headers: Headers) -> Find:
        try:
            bucket, _, key = _path(scope).partition("/")
        except UnicodeDecodeError:
            raise S3Error("InvalidURI", "the path is not UTF-8") from None
        query = dict(pairs(scope["query_string"]))
        if not bucket:
            return partial(_document, documents.buckets(0))
        if bucket != BUCKET:
            raise S3Error("NoSuchBucket", f"the only bucket is {BUCKET!r}")
        other = sorted(_PARTS_OF_S3 & query.keys())
        if other:
            raise S3Error("NotImplemented", f"this server has no {other[0]}")
        if query.get("versionId", "null") not in ("", "null"):
            raise S3Error("NoSuchVersion", "objects have no versions here")
        if key:
            return partial(self._object, key)
        if "location" in query:
            return partial(_document, documents.location())
        if "versioning" in query:
            return partial(_document, documents.versioning())
        if scope["method"] == "HEAD":
            return partial(_document, b"")
        asked = _list_request(query)
        return lambda: Later(partial(self._listed, asked))

    def refused(self, scope: Scope, refusal: Refusal) -> tuple[Pairs, bytes]:
        id = secrets.token_hex(8).upper()
        try:
            key = _path(scope).partition("/")[2]
        except UnicodeDecodeError:
            key = ""
        about = (("Content-Type", XML), ("x-amz-request-id", id))
        return about, documents.error(refusal, key, id)

    def query(self, scope: Scope) -> str:
        return without_credentials(scope["query_string"])

    def _object(self, key: str) -> Shown:
        self._showing.follow()
        found = folder_of(self._showing, key)
        if found is None:
            raise _no_key()
        folder, path = found
        snapshot = self._showing.snapshot(folder.place)
        file = self._showing.file(snapshot, folder.place, path)
        if file is None:
            raise _no_key()
        if file.validators.modified is not None:
            return file
        # Every object of S3 has one; as a condition it does not count, because a ref may move twice
        # in a second.
        modified = ("Last-Modified", http_date(folder.modified(snapshot)))
        return replace(file, headers=(*file.headers, modified))

    def _listed(self, asked: ListRequest) -> Shown:
        self._showing.follow()
        found, more = page(self._showing, asked.prefix, asked.delimiter, asked.after, asked.most)
        token = ""
        if more:
            last = found[-1]
            text = last if isinstance(last, str) else last.key
            token = base64.urlsafe_b64encode(text.encode()).decode()
        return _document(documents.listed(asked, found, more=more, token=token))


def _path(scope: Scope) -> str:
    """Return bucket and key of a request.  Raises UnicodeDecodeError."""
    return unquote_to_bytes(path_of(scope["raw_path"])).decode().removeprefix("/")


def _list_request(query: Mapping[str, str]) -> ListRequest:
    """Return what a listing is asked for.  Raises S3Error."""
    is_second_version = query.get("list-type") == "2"
    names = ("continuation-token", "start-after") if is_second_version else ("marker",)
    given = {name: query[name] for name in names if query.get(name)}
    for name in (*names, "prefix", "delimiter"):
        try:
            query.get(name, "").encode()
        except UnicodeEncodeError:
            raise S3Error("InvalidArgument", f"{name} is not UTF-8") from None
    most = query.get("max-keys", str(MOST_KEYS))
    if not (most.isascii() and most.isdigit() and len(most) <= _NUMBER_DIGITS):
        raise S3Error("InvalidArgument", "max-keys is a whole number")
    if query.get("encoding-type", "url") != "url":
        raise S3Error("InvalidArgument", "the encoding-type is url, or none")
    after = [value for name, value in given.items() if name != "continuation-token"]
    if "continuation-token" in given:
        try:
            after = [base64.b64decode(given["continuation-token"], b"-_", validate=True).decode()]
        except ValueError:
            raise S3Error(
                "InvalidArgument", "the continuation-token is not this server's"
            ) from None
    told = {"".join(map(str.capitalize, name.split("-"))): value for name, value in given.items()}
    return ListRequest(
        prefix=query.get("prefix", ""),
        delimiter=query.get("delimiter", ""),
        after="".join(after),
        most=min(MOST_KEYS, int(most)),
        is_encoded="encoding-type" in query,
        is_second_version=is_second_version,
        told=told,
    )


def _document(content: bytes) -> Shown:
    return made(content, XML)


def _no_key() -> S3Error:
    return S3Error("NoSuchKey", "the bucket has no such key")
