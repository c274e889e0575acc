"""A bucket in memory that speaks as much S3 as obstore, s5cmd and restic need, for `remote.py`.

    python bench/bucket_server.py PORT [ADDRESS]

It is fast: a body goes from the socket to memory, and no signature is checked. Every name exists as
a bucket. `GET /-/requests` tells the requests since it was asked last: method, name, bytes of body
and answer; `DELETE /-/objects` drops all objects. It listens on 127.0.0.1, or on ADDRESS.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@dataclass
class Stored:
    """An object: its parts, and the tag and time of its put."""

    parts: list[bytearray]
    e_tag: str
    seconds: float = field(default_factory=time.time)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


class Server(ThreadingHTTPServer):
    """The bucket's objects, its open uploads, and what it was asked."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        super().__init__((address, port), Request)
        self.lock = threading.Lock()
        self.number = count(1)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, bytearray]] = defaultdict(dict)
        self.requests: list[tuple[str, str, int, int]] = []

    def new_tag(self) -> str:
        """A tag that no other object has."""
        return f'"{hashlib.md5(str(next(self.number)).encode()).hexdigest()}"'


class Request(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _asked(self) -> None:
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).lstrip("/")
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}

    def _body(self) -> bytearray:
        data = bytearray(int(self.headers.get("Content-Length") or 0))
        view, done = memoryview(data), 0
        while done < len(data):
            got = self.rfile.readinto(view[done:])
            if not got:
                raise ConnectionResetError
            done += got
        if "aws-chunked" in self.headers.get("Content-Encoding", "") or self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-"):
            return _unframed(data)
        return data

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, Any] | None = None, taken: int = 0
    ) -> None:
        told = {"Content-Length": len(body), **(headers or {})}
        self.send_response(status)
        for name, value in told.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self._note(taken, len(body))

    def _note(self, taken: int, given: int) -> None:
        if not self.key.startswith("-/"):
            self.server.requests.append((self.command, self.key, taken, given))

    def _xml(self, text: str, taken: int = 0) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        self._answer(200, body, {"Content-Type": "application/xml"}, taken)

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._answer(status, body, {"Content-Type": "application/xml"})

    def do_PUT(self) -> None:
        self._asked()
        data = self._body()
        if "/" not in self.key.rstrip("/"):
            self._answer(200)
            return
        tag = self.server.new_tag()
        if "partNumber" in self.query:
            self.server.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = data
        else:
            with self.server.lock:
                known = self.server.objects.get(self.key)
                must = self.headers.get("If-Match")
                is_new = self.headers.get("If-None-Match") != "*" or known is None
                is_that = must is None or (known is not None and known.e_tag == must)
                if is_new and is_that:
                    self.server.objects[self.key] = Stored([data], tag)
            if not (is_new and is_that):
                self._refuse(412, "PreconditionFailed")
                return
        self._answer(200, headers={"ETag": tag}, taken=len(data))

    def do_POST(self) -> None:
        self._asked()
        data = self._body()
        bucket, _, key = map(escape, self.key.partition("/"))
        where = f"<Bucket>{bucket}</Bucket><Key>{key}</Key>"
        if "uploads" in self.query:
            id = f"u{next(self.server.number)}"
            name = "InitiateMultipartUploadResult"
            self._xml(f"<{name} {XMLNS}>{where}<UploadId>{id}</UploadId></{name}>")
        elif "delete" in self.query:
            for one in data.decode().split("<Key>")[1:]:
                self.server.objects.pop(f"{bucket}/{one.partition('<')[0]}", None)
            self._xml(f"<DeleteResult {XMLNS}></DeleteResult>")
        else:
            parts = self.server.uploads.pop(self.query["uploadId"])
            tag = self.server.new_tag()
            self.server.objects[self.key] = Stored([parts[one] for one in sorted(parts)], tag)
            name = "CompleteMultipartUploadResult"
            self._xml(f"<{name} {XMLNS}>{where}<ETag>{escape(tag)}</ETag></{name}>", len(data))

    def do_GET(self) -> None:
        self._asked()
        if self.key == "-/requests":
            told, self.server.requests = self.server.requests, []
            self._answer(200, json.dumps(told).encode())
        elif "/" not in self.key.rstrip("/"):
            self._of_bucket()
        else:
            self._object()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _of_bucket(self) -> None:
        if "location" in self.query:
            self._xml(f"<LocationConstraint {XMLNS}></LocationConstraint>")
            return
        begin = f"{self.key.rstrip('/')}/"
        prefix = self.query.get("prefix", "")
        found = sorted(
            (name.removeprefix(begin), one)
            for name, one in list(self.server.objects.items())
            if name.startswith(begin + prefix)
        )
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(one)}</Size>"
            f"<ETag>{escape(one.e_tag)}</ETag><LastModified>"
            f"{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(one.seconds))}</LastModified>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for name, one in found
        )
        self._xml(
            f"<ListBucketResult {XMLNS}><Name>{escape(begin[:-1])}</Name>"
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
            f"<MaxKeys>{len(found) + 1}</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{rows}</ListBucketResult>"
        )

    def _object(self) -> None:
        one = self.server.objects.get(self.key)
        if one is None:
            self._refuse(404, "NoSuchKey")
            return
        known = self.headers.get("If-None-Match")
        if known == one.e_tag:
            self._answer(304, headers={"ETag": one.e_tag})
            return
        size, start, end, status = len(one), 0, len(one), 200
        asked = self.headers.get("Range")
        headers: dict[str, Any] = {"ETag": one.e_tag, "Accept-Ranges": "bytes"}
        headers["Last-Modified"] = formatdate(one.seconds, usegmt=True)
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if self.command == "HEAD":
            self._answer(200, headers=headers | {"Content-Length": size})
            return
        self.send_response(status)
        for name, value in (headers | {"Content-Length": end - start}).items():
            self.send_header(name, str(value))
        self.end_headers()
        at = 0
        for part in one.parts:
            view = memoryview(part)[max(0, start - at) : max(0, end - at)]
            at += len(part)
            if view:
                self.connection.sendall(view)
        self._note(0, end - start)

    def do_DELETE(self) -> None:
        self._asked()
        if self.key == "-/objects":
            self.server.objects.clear()
        else:
            self.server.objects.pop(self.key, None)
        self._answer(204)


def _unframed(data: bytearray) -> bytearray:
    """A body without the signatures between its chunks."""
    found, at = bytearray(), 0
    while True:
        line = data.index(b"\r\n", at)
        size = int(data[at:line].partition(b";")[0], 16)
        if size == 0:
            return found
        found += data[line + 2 : line + 2 + size]
        at = line + 2 + size + 2


if __name__ == "__main__":
    Server(int(sys.argv[1]), *sys.argv[2:]).serve_forever()
