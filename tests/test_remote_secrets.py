"""No error about a remote shows a credential, a signature or the query of a request.

obstore's errors quote the server's answer, and servers quote requests: Azure and S3 tell which text
was signed, a proxy may echo headers. So each kind of failure is made to happen, at each provider,
with a server that echoes all that it was sent.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import servers
from gcs_stub import QuietServer
from small_models import small_model

from mstore import Store
from mstore.remotes import bucket
from mstore.remotes.bucket import Bucket
from mstore.remotes.objects import Absent, Objects, Overtaken, RootStamp
from mstore.remotes.web import Web
from mstore.terms.errors import Corrupt, Incompatible, MstoreError, Unavailable

ACCOUNT = "models0account"


@dataclass
class Heard:
    """What the server was sent that no error may show, and how it answers."""

    mode: str = "403"
    elsewhere: str = "http://127.0.0.1:1"
    secrets: set[str] = field(default_factory=set)
    requests: int = 0


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    heard: ClassVar[Heard]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        heard = self.heard
        heard.requests += 1
        told = [self.headers.get(name, "") for name in ("authorization", "x-amz-security-token")]
        query = self.path.partition("?")[2]
        # The signature alone, too.
        told += [told[0].rpartition("=")[2], told[0].rpartition(":")[2], query]
        heard.secrets.update(one for one in told if len(one) > 8)
        echo = f"{self.command} {self.path}\n{self.headers}"
        if heard.mode == "garbage":
            self.wfile.write(f"{echo}\r\n\r\n".encode())
            self.close_connection = True
            return
        if heard.mode == "closed":
            self.close_connection = True
            return
        status, _, form = heard.mode.partition(" ")
        body = echo.encode()
        if form == "xml":
            text = echo.replace("&", "&amp;").replace("<", "&lt;")
            code = "<Code>SignatureDoesNotMatch</Code>"
            body = f"<Error>{code}<Message>{text}</Message></Error>".encode()
        self.send_response(int(status))
        if form == "elsewhere":
            path = self.path.partition("?")[0]
            self.send_header("Location", heard.elsewhere + path)
        self.send_header("Content-Length", str(len(body) + (100 if form == "cut" else 0)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = form == "cut"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815


@contextmanager
def echoing() -> Iterator[tuple[Heard, str]]:
    """A server that answers as it is told, with all that it was sent; and its address."""
    heard = Heard()
    server = QuietServer(("127.0.0.1", 0), type("Echo", (_Echo,), {"heard": heard}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield heard, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _key() -> str:
    return base64.b64encode(secrets.token_bytes(64)).decode()


def _signature() -> str:
    return f"sv=2021-08-06&sr=c&sp=rwdl&sig={secrets.token_urlsafe(32)}"


PROVIDERS: Mapping[str, Callable[[str], tuple[str, dict[str, str]]]] = {
    "s3": lambda server: (
        "s3://models/family",
        servers.s3_environment(server) | {"AWS_SESSION_TOKEN": secrets.token_urlsafe(40)},
    ),
    "gs": lambda server: (
        "gs://models/family",
        {"GOOGLE_BASE_URL": server, "GOOGLE_BEARER_TOKEN": f"ya29.{secrets.token_urlsafe(40)}"},
    ),
    "az": lambda server: (
        "az://models/family",
        {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _key(),
            "AZURE_STORAGE_ENDPOINT": f"{server}/{ACCOUNT}",
        },
    ),
    "az-sas": lambda server: (
        "az://models/family",
        {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_SAS_TOKEN": _signature(),
            "AZURE_STORAGE_ENDPOINT": f"{server}/{ACCOUNT}",
        },
    ),
}
PUBLIC = ("AWS_ENDPOINT_URL", "AWS_REGION", "GOOGLE_BASE_URL")
PUBLIC += ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT")


PIECE = 1 << 10
"""Bytes of a part here."""


def _parts() -> Iterator[bytes]:
    yield from [bytes(PIECE + 1)] * 2


CALLS: Mapping[str, Callable[[Objects], object]] = {
    "read_root": lambda objects: objects.read_root(),
    "create": lambda objects: objects.swap_root(b"1", None),
    "replace": lambda objects: objects.swap_root(b"1", RootStamp('"1"', "1")),
    "probe": lambda objects: objects.probe("one"),
    "read": lambda objects: objects.read_each("lists/1", [(0, 10)]),
    "read many": lambda objects: objects.read_each("lists/1", [(0, 10), (1 << 20, 10)]),
    "size": lambda objects: objects.size("lists/1"),
    "time": lambda objects: objects.time_ns("lists/1"),
    "put": lambda objects: objects.put_bytes("lists/1", b"1"),
    "put parts": lambda objects: objects.put("packs/1", 2 * PIECE + 2, _parts()),
    "list": lambda objects: list(objects.names("lists/")),
    "remove": lambda objects: objects.remove("lists/1"),
}


def _quick(patch: pytest.MonkeyPatch) -> None:
    """Let obstore try once more, at once, and cut small parts."""
    soon = timedelta(milliseconds=1)
    tries = {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=60),
        "backoff": {"init_backoff": soon, "max_backoff": soon, "base": 2},
    }
    patch.setattr(bucket, "_TRIES", tries)
    patch.setattr(bucket, "PIECE_BYTES", PIECE)


def _failures(objects: Objects) -> dict[str, MstoreError]:
    """Make every call; return how those failed that did. Only errors of mstore come out."""
    found: dict[str, MstoreError] = {}
    for name, ask in CALLS.items():
        try:
            ask(objects)
        except MstoreError as error:
            found[name] = error
    return found


def _opened(provider: str, server: str, patch: pytest.MonkeyPatch) -> tuple[Bucket, set[str]]:
    """The remote of a provider at this server, and what its errors must not show."""
    servers.forget(patch)
    url, environment = PROVIDERS[provider](server)
    for name, value in environment.items():
        patch.setenv(name, value)
    hidden = {value for name, value in environment.items() if name not in PUBLIC}
    hidden |= {value.rpartition("sig=")[2] for value in hidden}
    return bucket.connect(url, {}), hidden


@pytest.mark.sampled(4)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_error_shows_what_was_sent(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server answers, and whatever was asked: the text, the notes, the chain and the
    traceback of the error have no credential, no signature and no query."""
    _quick(monkeypatch)
    with echoing() as (heard, server):
        objects, hidden = _opened(provider, server, monkeypatch)
        modes = ["400", "401", "403", "403 xml", "404", "404 xml", "409", "412", "416", "429"]
        modes += ["500 xml", "501", "503", "200", "200 cut", "204", "301 elsewhere", "garbage"]
        modes += ["closed"]
        failed = set()
        for heard.mode in modes:
            for name, error in _failures(objects).items():
                failed.add((heard.mode, name))
                text = servers.shown(error)
                leaked = [one for one in hidden | heard.secrets if one in text]
                assert leaked == [], (heard.mode, name, text)
                assert "SignedHeaders" not in text
        # The server was asked with what must not be shown, and every call failed at least once.
        assert heard.requests > len(modes) * len(CALLS)
        assert len(heard.secrets) > 1
        assert {name for _, name in failed} == set(CALLS)
        for mode in ("403", "500 xml", "garbage", "closed"):
            assert {name for one, name in failed if one == mode} == set(CALLS), mode


@pytest.mark.rest
def test_no_error_of_a_web_server_shows_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the address of a request: as for buckets, whatever the server answers to a read."""
    _quick(monkeypatch)
    token = secrets.token_urlsafe(32)
    with echoing() as (heard, server):
        objects = Web(f"{server}/remote", token, "ask who runs it")
        failed = 0
        for heard.mode in ("400", "401", "403 xml", "404", "416", "500", "200 cut", "garbage"):
            for error in _failures(objects).values():
                failed += not isinstance(error, Incompatible)
                assert token not in servers.shown(error)
        assert failed > 20
        assert heard.secrets == {f"Bearer {token}"}


@pytest.mark.parametrize("provider", [*PROVIDERS, "web"])
def test_a_redirect_takes_no_credentials_along(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server sends its client to another one, that one gets no key and no signature.

    obstore leaves a session token of S3 in place, which is worth nothing without its key.
    """
    _quick(monkeypatch)
    with echoing() as (heard, server), echoing() as (other, elsewhere):
        if provider == "web":
            objects: Objects = Web(f"{server}/remote", secrets.token_urlsafe(32), "ask")
        else:
            objects, _ = _opened(provider, server, monkeypatch)
        heard.mode, heard.elsewhere = "302 elsewhere", elsewhere
        _failures(objects)
        assert heard.requests > 0
        assert other.requests > 0
        assert other.secrets <= {os.environ.get("AWS_SESSION_TOKEN")}


def _closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("", "the connection is refused"),
        ("http://no-such-host.invalid", "no host of this name|cannot be reached"),
    ],
    ids=["port", "host"],
)
def test_a_server_that_is_not_there(
    provider: str, server: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call says that it cannot be reached, and shows nothing."""
    _quick(monkeypatch)
    objects, hidden = _opened(provider, server or _closed_port(), monkeypatch)
    failed = _failures(objects)
    assert set(failed) == set(CALLS)
    for error in failed.values():
        assert isinstance(error, Unavailable)
        assert re.search(says, str(error))
        # Whoever has set another endpoint than they think learns which. Of an address with a
        # signature obstore says nothing.
        is_named = re.search(r"\(http://[^/]*(127\.0\.0\.1:\d+|no-such-host)[^/]*\)", str(error))
        assert is_named or provider == "az-sas"
        assert "?" not in servers.shown(error)
        assert [one for one in hidden if one in servers.shown(error)] == []


@pytest.mark.parametrize(
    ("mode", "call", "kind", "says"),
    [
        ("403", "read_root", Unavailable, "access is denied: it answers 403 Forbidden"),
        ("403 xml", "put", Unavailable, r"403 Forbidden \(SignatureDoesNotMatch\)"),
        ("401", "list", Unavailable, "access is denied: it answers 401 Unauthorized"),
        ("404", "read", Absent, "no such object"),
        ("412", "create", Overtaken, "not what it was"),
        ("416", "read", Corrupt, "shorter"),
        ("500", "put", Unavailable, "it answers 500 Internal Server Error"),
        ("501", "probe", Incompatible, "ignores conditions"),
        ("garbage", "size", Unavailable, "cannot be understood"),
        ("closed", "size", Unavailable, "the connection breaks"),
    ],
)
def test_errors_say_what_is_wrong(
    mode: str,
    call: str,
    kind: type[MstoreError],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left of the server's answer is its status and its code, and what to do."""
    _quick(monkeypatch)
    with echoing() as (heard, server):
        objects, _ = _opened("s3", server, monkeypatch)
        heard.mode = mode
        with pytest.raises(kind, match=says) as caught:
            CALLS[call](objects)
        assert str(caught.value).startswith("s3://models/family")
        assert caught.value.hint or kind in (Absent, Overtaken, Corrupt)


def test_wrong_keys_at_real_servers(
    azurite: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azurite answers with the text that was signed, s3rver with the key's name."""
    _quick(monkeypatch)
    refused = 0
    for running, name, wrong in (
        (nullcontext(azurite), "AZURE_STORAGE_ACCOUNT_KEY", _key()),
        (servers.s3rver(tmp_path), "AWS_ACCESS_KEY_ID", secrets.token_hex(10)),
    ):
        with running as server:
            server.use(monkeypatch)
            monkeypatch.setenv(name, wrong)
            for error in _failures(bucket.connect(server.below(), {})).values():
                refused += "access is denied" in str(error)
                text = servers.shown(error)
                hidden = (wrong, "StringToSign", "SharedKey", "AWS4-HMAC", "?")
                assert [one for one in hidden if one in text] == []
    assert refused == 2 * len(CALLS)


@pytest.mark.parametrize(
    ("url", "environment", "says"),
    [
        (
            "az://models/family",
            {"AZURE_STORAGE_ACCOUNT_KEY": "SECRET"},
            "no storage account is named",
        ),
        (
            "az://models/family",
            {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": "SECRET no key"},
            "credentials",
        ),
        (
            "gs://models/family",
            {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "SECRET"}'},
            "credentials",
        ),
        (
            "gs://models/family",
            {"GOOGLE_SERVICE_ACCOUNT": "/no/such/SECRET.json"},
            "credentials",
        ),
    ],
)
def test_credentials_that_cannot_be_used(
    url: str, environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with them is said without them."""
    servers.forget(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match=says) as caught:
        bucket.connect(url, {})
    assert "SECRET" not in servers.shown(caught.value)
    assert caught.value.hint


def test_nothing_of_a_push_is_kept_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a push and a fetch no file of the store and no report has a credential."""
    with servers.gcs() as server:
        server.use(monkeypatch)
        store = Store.init(tmp_path / "store")
        small_model(tmp_path / "model", "llama")
        store.add(tmp_path / "model", name="llama")
        store.add_remote("origin", server.below())
        report: Any = store.push("origin", every=True)
        store.fetch("origin")
        store.close()
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert len(files) > 5
        for path in files:
            data = path.read_bytes()
            assert not any(one.encode() in data for one in server.secrets), path
        assert not any(one in repr(report) for one in server.secrets)
