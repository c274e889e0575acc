"""Who signed a request: AWS Signature Version 4, in its headers or in a presigned address.  Pure.

The source of all rules is "Authenticating Requests (AWS Signature Version 4)" of Amazon's API
reference of S3.  Any region will do; a body is not read, so none can be signed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec

from mstore_serve.s3.documents import ACCESS_DENIED, S3Error
from mstore_serve.serving import S3Keys

SKEW: Final = 15 * 60
"""Seconds by which the clock of a client may differ."""
LONGEST: Final = 7 * 24 * 3600
"""Seconds for which a presigned address may hold."""

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_NOTHING: Final = hashlib.sha256(b"").hexdigest()
_PARAMETERS: Final = ("Credential", "Date", "Expires", "SignedHeaders", "Signature")
# Also those of version 2, which clients send to servers that take it.
_CREDENTIALS: Final = frozenset(
    {"x-amz-credential", "x-amz-signature", "x-amz-security-token", "awsaccesskeyid", "signature"}
)
_TIME: Final = "%Y%m%dT%H%M%SZ"
_TIME_FORM: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")


class Signed(msgspec.Struct, frozen=True):
    """A request as it came: path and query percent-encoded, headers by lower-case name."""

    method: str
    path: bytes
    query: bytes
    headers: Mapping[str, Sequence[str]]

    def header(self, name: str) -> str | None:
        found = self.headers.get(name)
        return None if found is None else ",".join(found)


class _Claim(msgspec.Struct, frozen=True):
    """What a request says of its signature; time: in seconds since 1970, and as it was written."""

    credential: str
    headers: Sequence[str]
    signature: str
    payload: str
    written: str
    time: float


def pairs(query: bytes) -> list[tuple[str, str]]:
    """Return names and values of a query, decoded; bytes that are no UTF-8 come back as such."""
    text = query.decode("latin-1")
    return parse_qsl(text, keep_blank_values=True, errors="surrogateescape")


def without_credentials(query: bytes) -> str:
    """Return a query as a log may have it: whoever reads it cannot use a presigned address."""
    told = [(name, "-" if name.lower() in _CREDENTIALS else value) for name, value in pairs(query)]
    return "&".join(f"{_encoded(name)}={_encoded(value)}" for name, value in told)


def check(request: Signed, keys: S3Keys, now: float) -> None:
    """Raise S3Error unless these keys signed the request; now: seconds since 1970."""
    query = dict(pairs(request.query))
    claim = _presigned(query, now) if "X-Amz-Algorithm" in query else _in_headers(request, now)
    key, *scope = claim.credential.rsplit("/", 4)
    if len(scope) != 4 or scope[0] != claim.written[:8] or scope[2:] != ["s3", "aws4_request"]:
        what = "the credential is not KEY/DATE/REGION/s3/aws4_request, of the request's date"
        raise S3Error("AuthorizationHeaderMalformed", what)
    if "host" not in claim.headers:
        raise S3Error(ACCESS_DENIED, "the signature does not cover the host")
    if not hmac.compare_digest(_bytes(key), _bytes(keys.key)):
        raise S3Error("InvalidAccessKeyId", "this server does not know the access key")
    made = signature(request, keys, claim.written, scope[1], claim.headers, claim.payload)
    if not hmac.compare_digest(_bytes(made), _bytes(claim.signature)):
        raise S3Error(
            "SignatureDoesNotMatch",
            "the signature is not that of this request: check the secret key, and whether a proxy "
            "changes host or path",
        )


def signature(
    request: Signed, keys: S3Keys, written: str, region: str, headers: Sequence[str], payload: str
) -> str:
    """Return the signature of a request, in hex.

    written: its time, as in `X-Amz-Date`. headers: the names of those that it covers. payload: the
    SHA-256 of its body in hex, or what stands for it.
    """
    lines = [
        request.method.encode(),
        quote(unquote_to_bytes(request.path), safe="/~").encode(),
        _canonical_query(request.query).encode(),
        *(_bytes(name) + b":" + _canonical(request.header(name)) for name in headers),
        b"",
        _bytes(";".join(headers)),
        payload.encode(),
    ]
    scope = f"{written[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(b"\n".join(lines)).hexdigest()
    key = f"AWS4{keys.secret}".encode()
    for part in (written[:8], region, "s3", "aws4_request"):
        key = _signed(key, part)
    return _signed(key, f"{_ALGORITHM}\n{written}\n{scope}\n{digest}").hex()


def _in_headers(request: Signed, now: float) -> _Claim:
    header = request.header("authorization")
    if header is None and b"AWSAccessKeyId=" in request.query:
        header = "AWS"
    if header is None:
        raise S3Error(ACCESS_DENIED, "this server wants signed requests")
    kind, _, rest = header.partition(" ")
    if kind != _ALGORITHM:
        raise S3Error("InvalidRequest", f"this server takes signatures of {_ALGORITHM} only")
    told = dict(one.strip().partition("=")[::2] for one in rest.split(","))
    if not told.keys() >= {"Credential", "SignedHeaders", "Signature"}:
        what = "the header Authorization lacks Credential, SignedHeaders or Signature"
        raise S3Error("AuthorizationHeaderMalformed", what)
    written = request.header("x-amz-date") or ""
    time = _seconds(written)
    if abs(now - time) > SKEW:
        what = f"the clocks of client and server differ by more than {SKEW // 60} minutes"
        raise S3Error("RequestTimeTooSkewed", what)
    payload = request.header("x-amz-content-sha256") or _NOTHING
    if payload not in (_UNSIGNED, _NOTHING):
        raise S3Error("XAmzContentSHA256Mismatch", "the signed body is not empty")
    names = told["SignedHeaders"].split(";")
    return _Claim(told["Credential"], names, told["Signature"], payload, written, time)


def _presigned(query: Mapping[str, str], now: float) -> _Claim:
    missing = [name for name in _PARAMETERS if f"X-Amz-{name}" not in query]
    if missing or query["X-Amz-Algorithm"] != _ALGORITHM:
        what = f"a presigned address has X-Amz-Algorithm={_ALGORITHM} and X-Amz-" + (
            ", X-Amz-".join(_PARAMETERS)
        )
        raise S3Error("AuthorizationQueryParametersError", what)
    credential, written, expires, names, signed = (query[f"X-Amz-{one}"] for one in _PARAMETERS)
    time = _seconds(written)
    if not re.fullmatch(r"[0-9]{1,6}", expires) or not 1 <= int(expires) <= LONGEST:
        what = f"X-Amz-Expires is a number of seconds from 1 to {LONGEST}"
        raise S3Error("AuthorizationQueryParametersError", what)
    if now > time + int(expires):
        raise S3Error(ACCESS_DENIED, "the presigned address has expired")
    if time > now + SKEW:
        raise S3Error(ACCESS_DENIED, "the presigned address is not valid yet")
    return _Claim(credential, names.split(";"), signed, _UNSIGNED, written, time)


def _seconds(written: str) -> float:
    try:
        if _TIME_FORM.fullmatch(written):
            return datetime.strptime(written, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        pass
    raise S3Error(ACCESS_DENIED, "a signed request has its time in X-Amz-Date")


def _canonical_query(query: bytes) -> str:
    told = sorted(
        (_encoded(name), _encoded(value))
        for name, value in pairs(query)
        if name != "X-Amz-Signature"
    )
    return "&".join(f"{name}={value}" for name, value in told)


def _canonical(value: str | None) -> bytes:
    return re.sub(r" +", " ", (value or "").strip()).encode("latin-1")


def _encoded(text: str) -> str:
    return quote(text, safe="~", errors="surrogateescape")


def _signed(key: bytes, text: str) -> bytes:
    return hmac.new(key, _bytes(text), hashlib.sha256).digest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
