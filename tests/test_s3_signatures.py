"""AWS Signature Version 4, against Amazon's own examples and botocore as the signer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.terms.errors import BadRequest
from mstore_serve.s3.documents import S3Error
from mstore_serve.s3.signatures import LONGEST, SKEW, Signed, check, signature, without_credentials
from mstore_serve.serving import S3Keys

# Of the examples in Amazon's API reference of S3.
AMAZON = S3Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
THEN = "20130524T000000Z"
EMPTY = hashlib.sha256(b"").hexdigest()
PRESIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256"
    "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    f"&X-Amz-Date={THEN}&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
)
KEYS = S3Keys("models", "a secret of more signs".replace(" ", "-"))
HOST = "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "payload", "wanted"),
    [
        (
            "GET",
            "/test.txt",
            "",
            {"range": "bytes=0-9", "x-amz-content-sha256": EMPTY, "x-amz-date": THEN},
            EMPTY,
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT",
            "/test%24file.text",
            "",
            {
                "date": "Fri, 24 May 2013 00:00:00 GMT",
                "x-amz-content-sha256": hashlib.sha256(b"Welcome to Amazon S3.").hexdigest(),
                "x-amz-date": THEN,
                "x-amz-storage-class": "REDUCED_REDUNDANCY",
            },
            hashlib.sha256(b"Welcome to Amazon S3.").hexdigest(),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET",
            "/",
            "lifecycle",
            {"x-amz-content-sha256": EMPTY, "x-amz-date": THEN},
            EMPTY,
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "GET",
            "/",
            "max-keys=2&prefix=J",
            {"x-amz-content-sha256": EMPTY, "x-amz-date": THEN},
            EMPTY,
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
        (
            "GET",
            "/test.txt",
            PRESIGNED,
            {},
            "UNSIGNED-PAYLOAD",
            "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
        ),
    ],
)
def test_amazons_examples(
    method: str, path: str, query: str, headers: dict[str, str], payload: str, wanted: str
) -> None:
    """Each example of Amazon's documentation has the signature that it shows."""
    headers = {"host": "examplebucket.s3.amazonaws.com", **headers}
    request = Signed(
        method, path.encode(), query.encode(), {name: [value] for name, value in headers.items()}
    )
    found = signature(request, AMAZON, THEN, "us-east-1", sorted(headers), payload)
    assert found == wanted


def signed(
    signer: type[SigV4Auth],
    keys: S3Keys = KEYS,
    *,
    method: str = "GET",
    path: str = "/mstore/refs/a/config.json",
    query: str = "",
    headers: Mapping[str, str] | None = None,
    region: str = "eu-west-7",
) -> Signed:
    """A request that botocore signed just now."""
    url = f"http://{HOST}{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method=method, url=url, headers=dict(headers or {}))
    signer(Credentials(keys.key, keys.secret), "s3", region).add_auth(request)
    parts = urlsplit(request.url)
    told = {name.lower(): [value] for name, value in request.headers.items()} | {"host": [HOST]}
    return Signed(method, parts.path.encode(), parts.query.encode(), told)


def now() -> float:
    return datetime.now(UTC).timestamp()


def refused(request: Signed, keys: S3Keys = KEYS, at: float | None = None) -> str:
    with pytest.raises(S3Error) as error:
        check(request, keys, now() if at is None else at)
    return error.value.report.code


SIGNERS = [S3SigV4Auth, S3SigV4QueryAuth]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=30)
@given(st.sampled_from(SIGNERS), TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=3))
def test_what_botocore_signs_is_accepted(
    signer: type[SigV4Auth], key: str, given: list[tuple[str, str]]
) -> None:
    """Whatever signs a key and a query has, in a header or in the address: what botocore signs is
    accepted, with another secret it is not, nor for another key."""
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in given)
    request = signed(signer, path=f"/mstore/{quote(key, safe='/~')}", query=query)
    check(request, KEYS, now())
    assert refused(request, S3Keys(KEYS.key, "x" * 20)) == "SignatureDoesNotMatch"
    assert refused(request, S3Keys("other", KEYS.secret)) == "InvalidAccessKeyId"
    moved = Signed(request.method, request.path + b"x", request.query, request.headers)
    assert refused(moved) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("signer", SIGNERS)
def test_what_a_signature_covers(signer: type[SigV4Auth]) -> None:
    """Method, host, query and each signed header are covered; how signs of the path are spelled is
    not."""
    request = signed(signer, query="prefix=a", headers={"X-Amz-Meta-One": "a  b"})
    check(request, KEYS, now())
    spelled = request.path.replace(b"config", b"%63onfig")
    check(Signed(request.method, spelled, request.query, request.headers), KEYS, now())
    for other in (
        Signed("HEAD", request.path, request.query, request.headers),
        Signed(request.method, request.path, request.query + b"&x=", request.headers),
        Signed(request.method, request.path, request.query, {**request.headers, "host": ["b"]}),
        Signed(
            request.method,
            request.path,
            request.query,
            {**request.headers, "x-amz-meta-one": ["c"]},
        ),
    ):
        assert refused(other) == "SignatureDoesNotMatch"


def test_clocks() -> None:
    """A signature in a header holds for a quarter of an hour, before and after its time."""
    request = signed(S3SigV4Auth)
    for seconds in (-SKEW + 5, SKEW - 5):
        check(request, KEYS, now() + seconds)
    for seconds in (-SKEW - 5, SKEW + 5):
        assert refused(request, at=now() + seconds) == "RequestTimeTooSkewed"


def test_a_presigned_address_expires() -> None:
    """A presigned address holds as long as it says, at most a week, and not before its time."""
    request = signed(S3SigV4QueryAuth)
    check(request, KEYS, now() + 3600 - 5)
    assert refused(request, at=now() + 3600 + 5) == "AccessDenied"
    assert refused(request, at=now() - SKEW - 5) == "AccessDenied"
    for seconds in (b"0", str(LONGEST + 1).encode(), b"-1", b"x", b"\xd9\xa3"):
        query = request.query.replace(b"Expires=3600", b"Expires=" + seconds)
        other = Signed(request.method, request.path, query, request.headers)
        assert refused(other) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"authorization": None}, "AccessDenied"),
        ({"authorization": "AWS models:c2lnbmVk"}, "InvalidRequest"),
        ({"authorization": "AWS4-HMAC-SHA256"}, "AuthorizationHeaderMalformed"),
        ({"authorization": ("/s3/", "/ec2/")}, "AuthorizationHeaderMalformed"),
        ({"authorization": ("/s3/aws4_request", "")}, "AuthorizationHeaderMalformed"),
        ({"authorization": ("models/2", "models/1")}, "AuthorizationHeaderMalformed"),
        ({"authorization": ("=host;", "=")}, "AccessDenied"),
        ({"authorization": ("Signature=", "Signature=\xe4")}, "SignatureDoesNotMatch"),
        ({"x-amz-date": None}, "AccessDenied"),
        ({"x-amz-date": "20261341T000000Z"}, "AccessDenied"),
        ({"x-amz-content-sha256": "0" * 64}, "XAmzContentSHA256Mismatch"),
        (
            {"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"},
            "XAmzContentSHA256Mismatch",
        ),
    ],
)
def test_what_is_no_signature(change: dict[str, str | tuple[str, str] | None], code: str) -> None:
    """What is missing, malformed, of another service or of a body is refused with its own code."""
    request = signed(S3SigV4Auth)
    headers = dict(request.headers)
    for name, value in change.items():
        match value:
            case None:
                del headers[name]
            case str():
                headers[name] = [value]
            case before, after:
                assert before in headers[name][0]
                headers[name] = [headers[name][0].replace(before, after)]
    assert refused(Signed(request.method, request.path, request.query, headers)) == code


def test_a_presigned_address_of_version_2() -> None:
    """An address that was presigned as clients do by default is refused, with what is needed."""
    query = b"AWSAccessKeyId=models&Signature=bBygg64rpz7T2gQYOaLnkuGrVTI%3D&Expires=1795893715"
    request = Signed("GET", b"/mstore/a", query, {"host": [HOST]})
    assert refused(request) == "InvalidRequest"


def test_an_unsigned_body_is_accepted() -> None:
    """A client may leave its empty body unsigned."""
    request = signed(S3SigV4Auth)
    headers = {**request.headers, "x-amz-content-sha256": ["UNSIGNED-PAYLOAD"]}
    names = request.headers["authorization"][0].partition("SignedHeaders=")[2].partition(",")[0]
    written = request.headers["x-amz-date"][0]
    made = Signed(request.method, request.path, request.query, headers)
    again = signature(made, KEYS, written, "eu-west-7", names.split(";"), "UNSIGNED-PAYLOAD")
    begin = request.headers["authorization"][0].rpartition("Signature=")[0]
    headers["authorization"] = [f"{begin}Signature={again}"]
    check(made, KEYS, now())


def test_the_log_shows_no_credentials() -> None:
    """A query is logged without keys and signatures, however their names are spelled."""
    query = signed(S3SigV4QueryAuth, query="prefix=a%2Bb").query
    for one in (query, query.replace(b"X-Amz-Sig", b"X%2DAmz%2DSig"), b"AWSAccessKeyId=models"):
        told = without_credentials(one)
        assert "models" not in told
        assert query.rpartition(b"=")[2].decode() not in told
    assert without_credentials(query).startswith("prefix=a%2Bb&")
    assert "secret" not in repr(KEYS)


@pytest.mark.parametrize(
    ("key", "secret"), [("", "x" * 20), ("a/b", "x" * 20), ("ok1", "short"), ("ok1", "x" * 9 + " ")]
)
def test_keys_that_cannot_be(key: str, secret: str) -> None:
    """Keys that a header cannot carry, or that anybody guesses, are refused and not shown."""
    with pytest.raises(BadRequest) as error:
        S3Keys(key, secret).require()
    assert secret not in str(error.value)
