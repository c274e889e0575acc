"""As much of Google Cloud Storage's XML API as obstore uses, in a thread of this process.

There is no emulator of it: fake-gcs-server knows the JSON API only. Objects have generations; a
write with `x-goog-if-generation-match` succeeds only at that generation, 0 for none.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Kept:
    """An object."""

    data: bytes
    generation: int
    time: float

    @property
    def e_tag(self) -> str:
        return f'"{self.generation:x}"'


@dataclass
class Stub:
    """One bucket, and what was asked of it.

    token: the only bearer token that is let in. read_only: whether writes are denied.
    """

    bucket: str
    token: str
    read_only: bool = False
    endpoint: str = ""
    objects: dict[str, Kept] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    generations: Iterator[int] = field(default_factory=lambda: count(1))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body go out in two writes.
    disable_nagle_algorithm = True
    stub: ClassVar[Stub]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        stub = self.stub
        parts = urlsplit(self.path)
        query = {name: value[0] for name, value in parse_qs(parts.query, True).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        _, bucket, *rest = unquote(parts.path).split("/", 2)
        name = rest[0] if rest else ""
        with stub.lock:
            stub.requests.append(f"{self.command} {self.path}")
            if self.headers.get("authorization") != f"Bearer {stub.token}":
                self._error(401, "AuthenticationRequired")
            elif self.command not in ("GET", "HEAD") and stub.read_only:
                self._error(403, "AccessDenied")
            elif bucket != stub.bucket:
                self._error(404, "NoSuchBucket")
            elif not name:
                self._list(query)
            elif "uploadId" in query and query["uploadId"] not in stub.uploads:
                self._error(404, "NoSuchUpload")
            elif self.command == "PUT" and "uploadId" in query:
                stub.uploads[query["uploadId"]][int(query["partNumber"])] = body
                self._send(200, {"ETag": f'"{query["partNumber"]}"'})
            elif self.command == "PUT":
                self._put(name, body)
            elif self.command == "POST" and "uploads" in query:
                upload = f"{next(stub.generations)}"
                stub.uploads[upload] = {}
                self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
            elif self.command == "POST":
                numbers = map(int, re.findall(rb"<PartNumber>(\d+)<", body))
                pieces = stub.uploads.pop(query["uploadId"])
                self._put(name, b"".join(pieces[number] for number in numbers), is_upload=True)
            elif "uploadId" in query:
                del stub.uploads[query["uploadId"]]
                self._send(204)
            elif name not in stub.objects:
                self._error(404, "NoSuchKey")
            elif self.command == "DELETE":
                del stub.objects[name]
                self._send(204)
            else:
                self._get(stub.objects[name])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def _put(self, name: str, data: bytes, *, is_upload: bool = False) -> None:
        before = self.stub.objects.get(name)
        match = self.headers.get("x-goog-if-generation-match")
        if match is not None and int(match) != (before.generation if before else 0):
            self._error(412, "PreconditionFailed")
            return
        new = Kept(data, next(self.stub.generations), time.time())
        self.stub.objects[name] = new
        told = {"ETag": new.e_tag, "x-goog-generation": str(new.generation)}
        if is_upload:
            self._xml("CompleteMultipartUploadResult", f"<ETag>{escape(new.e_tag)}</ETag>", told)
        else:
            self._send(200, told)

    def _get(self, one: Kept) -> None:
        told = {
            "ETag": one.e_tag,
            "x-goog-generation": str(one.generation),
            "Last-Modified": formatdate(one.time, usegmt=True),
        }
        if self.headers.get("if-none-match") == one.e_tag:
            self._send(304, told)
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if span is None:
            self._send(200, told, one.data)
            return
        start, end = int(span[1]), min(int(span[2] or len(one.data)) + 1, len(one.data))
        if start >= len(one.data):
            self._error(416, "InvalidRange")
            return
        told["Content-Range"] = f"bytes {start}-{end - 1}/{len(one.data)}"
        self._send(206, told, one.data[start:end])

    def _list(self, query: dict[str, str]) -> None:
        """Two names a page, so that every listing has several."""
        begin, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = sorted(n for n in self.stub.objects if n.startswith(begin) and n > after)
        rows = []
        for name in names[:2]:
            one = self.stub.objects[name]
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(one.time))
            rows.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{escape(one.e_tag)}</ETag><Size>{len(one.data)}</Size></Contents>"
            )
        if len(names) > 2:
            rows.append(f"<NextContinuationToken>{escape(names[1])}</NextContinuationToken>")
        self._xml("ListBucketResult", "".join(rows))

    def _error(self, status: int, code: str) -> None:
        self._send(status, body=f"<Error><Code>{code}</Code></Error>".encode())

    def _xml(self, name: str, content: str, headers: dict[str, str] | None = None) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'
        self._send(200, headers, text.encode())

    def _send(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)


class QuietServer(ThreadingHTTPServer):
    """A server that says nothing where a client leaves in the middle of an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """Serve at a free port of this machine while the block runs."""
    handler = type("Handler", (_Handler,), {"stub": stub})
    server = QuietServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    stub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
