"""Debian's docker-registry at a free port of this machine, and a proxy that makes faults.

A test is skipped where the program is missing (scripts/setup).  Registries without a login, with
user and password (htpasswd), and with a token service, which is a stub here.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import pytest
from servers import started

PROGRAM = "docker-registry"
USER, PASSWORD = "ada", "secret-of-ada"
HTPASSWD = "ada:$2y$05$UVXku4ympHfQaL6CYYyrrOqDKLQ4fTYbyDr.iz8zkei/OFl1u1x4G\n"
"""Of this user and password, as `htpasswd -Bbn` writes it."""
OCI = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Asked:
    """One request: method, path, the query, bytes sent, and how it was answered."""

    method: str
    path: str
    query: str
    sent: int
    status: int


@dataclass
class Registry:
    """A registry that answers at `host`.  `log` has its requests if they go through the proxy."""

    host: str
    headers: dict[str, str] = field(default_factory=dict)

    def address(self, name: str) -> str:
        """The address of an artifact."""
        return f"oci://{self.host}/{name}"

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; return status, headers by small names, body."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read()
        finally:
            connection.close()

    def put_blob(self, repository: str, data: bytes) -> str:
        """Put a blob; return its digest."""
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        status, told, _ = self.ask("POST", f"/v2/{repository}/blobs/uploads/")
        assert status == 202
        parts = urlsplit(told["location"])
        place = f"{parts.path}?{parts.query}&digest={digest}"
        kind = {"Content-Type": "application/octet-stream"}
        assert self.ask("PUT", place, data, kind)[0] == 201
        return digest

    def put_artifact(
        self,
        name: str,
        layers: Sequence[tuple[str, bytes, Mapping[str, str]]],
        *,
        kind: str = "application/vnd.cncf.model.manifest.v1+json",
        config: str = "application/vnd.cncf.model.config.v1+json",
    ) -> str:
        """Put an artifact as another tool would; return its digest.

        name: REPOSITORY:TAG. layers: media type, bytes and annotations of each.
        """
        repository, _, tag = name.partition(":")
        told = {
            "schemaVersion": 2,
            "mediaType": OCI,
            "artifactType": kind,
            "config": self._descriptor(repository, config, b"{}", {}),
            "layers": [self._descriptor(repository, *layer) for layer in layers],
        }
        return self.put_manifest(repository, tag, told)

    def _descriptor(
        self, repository: str, kind: str, data: bytes, annotations: Mapping[str, str]
    ) -> dict[str, Any]:
        digest = self.put_blob(repository, data)
        told = {"mediaType": kind, "digest": digest, "size": len(data)}
        return {**told, "annotations": dict(annotations)} if annotations else told

    def put_manifest(
        self, repository: str, tag: str, told: Mapping[str, Any], kind: str = OCI
    ) -> str:
        """Put a manifest; return its digest."""
        data = json.dumps(told).encode()
        status, headers, body = self.ask(
            "PUT", f"/v2/{repository}/manifests/{tag}", data, {"Content-Type": kind}
        )
        assert status == 201, body
        return headers["docker-content-digest"]

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest of REPOSITORY:TAG."""
        repository, _, tag = name.partition(":")
        accept = {"Accept": f"{OCI}, {INDEX}"}
        status, _, body = self.ask("GET", f"/v2/{repository}/manifests/{tag}", headers=accept)
        assert status == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of an artifact of raw layers, by plain requests."""
        repository = name.partition(":")[0]
        found = {}
        for layer in self.manifest(name)["layers"]:
            status, _, body = self.ask("GET", f"/v2/{repository}/blobs/{layer['digest']}")
            assert status == 200
            assert len(body) == layer["size"]
            found[layer["annotations"]["org.cncf.model.filepath"]] = body
        return found


@contextmanager
def registry(directory: Path, more: str = "") -> Iterator[Registry]:
    """Start a registry that keeps everything in a new directory below this one.

    more: the end of its configuration, first of its key `http`.
    """
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed (scripts/setup)")
    home = directory / "registry"
    home.mkdir()
    config = home / "config.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: info}\n"
        f"storage: {{filesystem: {{rootdirectory: {home}/data}}, delete: {{enabled: true}}}}\n"
        f'http:\n  addr: "127.0.0.1:0"\n  secret: tests\n{more}'
    )
    command = [PROGRAM, "serve", str(config)]
    with started(command, home, r"listening on (127\.0\.0\.1:\d+)") as (host, _):
        yield Registry(host)


@contextmanager
def registry_with_password(directory: Path) -> Iterator[Registry]:
    """Start a registry that lets in the user above, by the password."""
    (directory / "htpasswd").write_text(HTPASSWD)
    auth = f"auth: {{htpasswd: {{realm: tests, path: {directory}/htpasswd}}}}\n"
    basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    with registry(directory, auth) as made:
        made.headers["Authorization"] = f"Basic {basic}"
        yield made


class Proxy:
    """Between clients and a registry: logs requests, and does faults.

    fault: called with method, path and the number of the request, from 0; it returns what happens.
    "cut" sends the registry half of a body and ends both connections; "lost" ends the client's when
    the registry did it; a number is the status of an answer, and the registry is not asked. token:
    if set, requests need it, and are sent to the token service at `/token`.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.log: list[Asked] = []
        self.fault: Callable[[str, str, int], str | int | None] = lambda *_: None
        self.retry_after = "0"
        self.replaced: dict[str, bytes] = {}
        """What is sent in place of a blob, by its digest."""
        self.made: dict[str, str] = {}
        """Tags that the registry has not, with the media types of what is sent."""
        self.lists_referrers = False
        """Whether manifests are linked to their subjects; docker-registry 2.8 does not do that."""
        self.token: str | None = None
        self.elsewhere: str | None = None
        """Another host, to which clients are sent for blobs."""
        self.authorizations: set[str | None] = set()
        self.logins: list[str] = []
        """What the token service was told: the header of a GET, the form of a POST."""
        self._count = 0
        self._lock = threading.Lock()
        self._listening = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._listening.daemon_threads = True
        self.host = f"127.0.0.1:{self._listening.server_port}"
        self._thread = threading.Thread(
            target=self._listening.serve_forever, args=(0.02,), daemon=True
        )

    def number(self) -> int:
        """Return the number of a new request."""
        with self._lock:
            self._count += 1
            return self._count - 1

    def sent(self) -> int:
        """Return how many bytes of blobs went to the registry."""
        return sum(one.sent for one in self.log if "/blobs/" in one.path)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown()
        self._listening.server_close()
        self._thread.join()


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if parts.path == "/token":
                self.give_token(parts.query, body)
                return
            fault = proxy.fault(self.command, parts.path, proxy.number())
            if isinstance(fault, int):
                self.say(fault, b"", {"Retry-After": proxy.retry_after}, len(body))
                return
            if proxy.token and self.headers.get("Authorization") != f"Bearer {proxy.token}":
                realm = f'Bearer realm="http://{proxy.host}/token",service="tests"'
                self.say(401, b"", {"WWW-Authenticate": f'{realm},scope="x"'}, 0)
                return
            proxy.authorizations.add(self.headers.get("Authorization"))
            if proxy.elsewhere and self.command == "GET" and "/blobs/" in parts.path:
                place = f"http://{proxy.elsewhere}{self.path}"
                self.say(307, b"", {"Location": place}, 0)
                return
            if fault == "cut":
                self.cut(body)
                return
            status, headers, data = self.forwarded(body)
            digest = parts.path.rpartition("/")[2]
            if proxy.lists_referrers and self.command == "PUT" and b'"subject"' in body:
                headers["OCI-Subject"] = json.loads(body)["subject"]["digest"]
            if proxy.lists_referrers and "/referrers/" in parts.path:
                status, data = 200, b'{"manifests": []}'
            if digest in proxy.made:
                status, headers = 200, {"Content-Type": proxy.made[digest]}
            if self.command == "GET" and digest in proxy.replaced and status in (200, 206):
                data = proxy.replaced[digest]
                if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    data = data[int(wanted[1]) : int(wanted[2]) + 1]
            if fault == "lost":
                self.record(status, len(body))
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "half":
                self.record(status, len(body))
                self.send_response(status)
                for name in ("Location", "Range", "Docker-Content-Digest", "Content-Type"):
                    if name in headers:
                        self.send_header(name, headers[name])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.say(status, data, headers, len(body))

        def forwarded(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(proxy.server, timeout=60)
            try:
                # With the client's own Host: addresses in answers lead to the proxy.
                kept = {k: v for k, v in self.headers.items() if k != "Authorization"}
                connection.request(self.command, self.path, body, kept)
                found = connection.getresponse()
                return found.status, dict(found.getheaders()), found.read()
            finally:
                connection.close()

        def cut(self, body: bytes) -> None:
            self.record(0, len(body) // 2)
            host, _, port = proxy.server.partition(":")
            with socket.create_connection((host, int(port))) as out:
                head = f"{self.command} {self.path} HTTP/1.1\r\n"
                head += "".join(f"{k}: {v}\r\n" for k, v in self.headers.items())
                out.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def give_token(self, query: str, body: bytes) -> None:
            login = self.headers.get("Authorization", "") if self.command == "GET" else ""
            form = parse_qs(body.decode()) if self.command == "POST" else {}
            proxy.logins.append(login or json.dumps(form))
            basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if login == f"Basic {basic}" or form.get("refresh_token") == [PASSWORD]:
                self.say(200, json.dumps({"token": proxy.token}).encode(), {}, 0)
            else:
                self.say(401, b"", {}, 0)

        def record(self, status: int, sent: int) -> None:
            parts = urlsplit(self.path)
            proxy.log.append(Asked(self.command, parts.path, parts.query, sent, status))

        def say(self, status: int, data: bytes, headers: Mapping[str, str], sent: int) -> None:
            self.record(status, sent)
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                with suppress(OSError):
                    self.wfile.write(data)

    for method in ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"):
        setattr(Handler, f"do_{method}", Handler.answer)
    return Handler
