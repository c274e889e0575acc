"""A small Hugging Face Hub for tests: what huggingface_hub needs, at a real socket.

Repositories are commits in memory.  Files of weights are served as the Hub serves LFS files: the
page redirects to another address, which has the bytes; others come from the page itself.  Uploads
go as to the Hub: a question how each file is to come, contents of large files at another address,
whole or in parts, then one commit, which is refused if its parent is not the newest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS = (".safetensors", ".bin", ".onnx")
GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
PAGE = 1000
"""Entries of one answer of a tree."""
PIECE = 1 << 18
"""Bytes that are sent at once."""


@dataclass
class Repository:
    """A model: its commits, newest last, and what its branches and pull requests point at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    parents: dict[str, str | None] = field(default_factory=dict)
    messages: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of each commit its summary and its description."""

    def commit(
        self,
        files: Mapping[str, bytes],
        ref: str = "main",
        message: tuple[str, str] = ("", ""),
        parent: str | None = None,
    ) -> str:
        """Make these files the newest commit of a ref; return its id."""
        text = repr((len(self.commits), ref, sorted(files))).encode()
        id = hashlib.sha1(text).hexdigest()
        self.commits[id] = dict(files)
        self.parents[id] = parent or self.refs.get(ref)
        self.messages[id] = message
        self.refs[ref] = id
        return id

    def tip(self, ref: str = "main") -> dict[str, bytes]:
        """Return the files of a ref, but those that are the Hub's own."""
        files = self.commits[self.refs[ref]]
        return {path: data for path, data in files.items() if path != ".gitattributes"}

    def resolve(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Fault:
    """An answer in place of the right one, `times` times, where the path fits."""

    path: re.Pattern[str]
    status: int
    headers: Mapping[str, str]
    times: int
    whole: bool


class Hub:
    """The server; `url` is its HF_ENDPOINT."""

    def __init__(self, port: int = 0) -> None:
        self.models: dict[str, Repository] = {}
        self.tokens = {"hf_good"}
        self.reading_tokens = {"hf_read"}
        """Tokens that may not write."""
        self.part_size = 0
        """Large files come in parts of so many bytes; 0: each in one request."""
        self.objects: dict[str, bytes] = {}
        """What was uploaded, by SHA-256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.xet: Path | None = None
        """Where Xet keeps what comes by it, a directory of this machine."""
        self.uploads: list[tuple[str, int]] = []
        """Requests that brought contents: address and bytes."""
        self.after_commit: Callable[[], int | None] = lambda: None
        """Called when a commit is made; a number is the status of the answer in its place."""
        self.before_commit: Callable[[], None] = lambda: None
        self.before_upload: Callable[[str], None] = lambda path: None
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.served: dict[str, bytes] = {}
        """What a file's content is in place of what the lists say."""
        self.before_send: Callable[[str], None] = lambda path: None
        """Called before the last bytes of a file are sent."""
        self.before_part: Callable[[str], None] = lambda path: None
        """Called before other bytes of a file are sent."""
        self.signature = 0
        """Of the addresses of large files; those with another one have expired."""
        self.expired = 0
        """Requests for such addresses."""
        self.ranges = True
        self.pace: Callable[[int], None] = lambda size: None
        """Called before so many bytes of an answer are sent."""
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Another host, to which no client may send a token.
        self.elsewhere = f"http://localhost:{self._server.server_port}"
        self.leaked: list[str] = []
        """Tokens that came with requests for the other address."""

    def model(self, id: str, files: Mapping[str, bytes], **options: Any) -> Repository:
        """Make a repository with one commit."""
        made = self.models[id] = Repository(**options)
        made.commit(files)
        return made

    def entries(self, id: str) -> None:
        """Hash the files of a model now, and not when the first client asks."""
        for files in self.models[id].commits.values():
            for path, data in files.items():
                _entry(path, data)

    def fail(
        self, path: str, status: int, times: int = 1, *, whole: bool = False, **headers: str
    ) -> None:
        """Answer `times` requests whose path has this expression with an error.

        whole: not those for a range that ends before the file does.
        """
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(re.compile(path), status, told, times, whole))

    def content(self, oid: str) -> bytes | None:
        """Return what was uploaded with this SHA-256, by whichever way."""
        if oid not in self.objects and self.xet is not None:
            self.objects |= _xet_files(self.xet, {oid}, f"{self.url}/xet-read-token")
        return self.objects.get(oid)

    def xet_bytes(self) -> int:
        """Return how many bytes of chunks came by Xet."""
        found = () if self.xet is None else self.xet.glob("xet/xorbs/xorbs/default.*")
        return sum(path.stat().st_size for path in found if path.suffix != ".tagset")

    def downloads(self) -> list[str]:
        """Return the paths of weights of which the last bytes were asked for, in order."""
        return [path for method, path in self.requests if method == "BYTES" and path.endswith(LFS)]

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def environment(url: str, home: Path) -> dict[str, str]:
    """Return what a process finds that has this Hub, and nothing else of any Hub."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**own, "HF_ENDPOINT": url, "HF_HOME": str(home)}


def directory_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory as a commit has them."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _xet_files(directory: Path, wanted: set[str], token_url: str) -> dict[str, bytes]:
    """Return files that Xet keeps, by their SHA-256.  Shards say which hash of Xet's each has."""
    import hf_xet

    group = hf_xet.XetSession().new_download_stream_group(token_refresh_url=token_url)
    found: dict[str, bytes] = {}
    for shard in directory.glob("xet/xorbs/shards/*.mdb"):
        data, at = shard.read_bytes(), 48
        while (file := data[at : at + 32]) != b"\xff" * 32:
            flags, count = struct.unpack_from("<II", data, at + 32)
            # Where the file's chunks lie, as many checks of them, and the SHA-256.
            size = sum(
                struct.unpack_from("<I", data, at + 48 * (n + 1) + 36)[0] for n in range(count)
            )
            at += 48 * (1 + count + (count if flags & 1 << 31 else 0))
            if not flags & 1 << 30:
                continue
            oid = _xet_hash(data[at : at + 32])
            at += 48
            if oid in wanted:
                info = hf_xet.XetFileInfo(_xet_hash(file), size)
                found[oid] = b"".join(map(bytes, group.download_stream(info)))
    return found


def _xet_hash(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


@lru_cache(maxsize=1000)
def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    made: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if path.endswith(LFS):
        sha = hashlib.sha256(data).hexdigest()
        made["lfs"] = {"oid": sha, "size": len(data), "pointerSize": 134}
    return made


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            hub.requests.append((self.command, path))
            self.sent = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            is_part = self.is_part(path)
            for fault in hub.faults:
                if fault.whole and is_part:
                    continue
                if fault.times and fault.path.search(path):
                    fault.times -= 1
                    self.say(fault.status, b"", fault.headers)
                    return
            query = parse_qs(parts.query)
            if self.command in ("POST", "PUT"):
                self.take(path, query)
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commits/(.+)", path):
                self.history(found[1], found[2])
            elif hub.xet is not None and re.search(r"/xet-(write|read)-token", path):
                if "write" not in path or self.may_write():
                    end = int(time.time()) + 3600
                    self.told({"accessToken": "t", "exp": end, "casUrl": f"local://{hub.xet}"})
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions", path):
                self.discussions(found[1], int(query.get("p", ["0"])[0]))
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.info(found[1], found[2] or "main")
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
                self.tree(found[1], found[2], int(query.get("cursor", ["0"])[0]))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path):
                self.resolve(found[1], found[2], found[3])
            elif found := re.fullmatch(r"/lfs/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
                if "Authorization" in self.headers:
                    hub.leaked.append(self.headers["Authorization"])
                if query["signed"] != [str(hub.signature)]:
                    hub.expired += 1
                    self.say(403, b"", {})
                    return
                self.body(found[3], hub.models[found[1]].commits[found[2]][found[3]], {})
            else:
                self.say(404, b"", {})

        # -- what comes --------------------------------------------------------------------------

        def take(self, path: str, query: Mapping[str, list[str]]) -> None:
            if found := re.fullmatch(r"/lfs-upload/([0-9a-f]{64})(?:/(\d+))?", path):
                self.take_content(found[1], None if found[2] is None else int(found[2]))
                return
            if found := re.fullmatch(r"/lfs-complete/([0-9a-f]{64})", path):
                parts = hub.parts.pop(found[1])
                told = [one["partNumber"] for one in json.loads(self.sent)["parts"]]
                assert told == sorted(parts)
                self.keep(found[1], b"".join(parts[number] for number in told))
                return
            if not self.may_write():
                return
            if path == "/api/repos/create":
                self.create(json.loads(self.sent))
            elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                self.batch(json.loads(self.sent))
            elif found := re.fullmatch(
                r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path
            ):
                repository = hub.models.get(found[1])
                if repository is None:
                    self.say(404, b"", {"X-Error-Code": "RepoNotFound"})
                elif found[2] == "branch":
                    self.branch(repository, found[3], json.loads(self.sent))
                elif found[2] == "preupload":
                    self.preupload(json.loads(self.sent))
                else:
                    self.commit(found[1], repository, found[3], is_proposed="create_pr" in query)
            else:
                self.say(404, b"", {})

        def may_write(self) -> bool:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if token in hub.tokens:
                return True
            if token in hub.reading_tokens:
                self.told({"error": "this token may only read"}, 403)
            else:
                self.told({"error": "Invalid username or password."}, 401)
            return False

        def create(self, asked: Mapping[str, Any]) -> None:
            id = f"{asked['organization']}/{asked['name']}"
            if id in hub.models:
                self.told({"error": "You already created this model repo"}, 409)
                return
            private = asked.get("private") is True or asked.get("visibility") == "private"
            hub.model(id, {".gitattributes": GITATTRIBUTES}, private=private)
            self.told({"url": f"{hub.url}/{id}"})

        def branch(self, repository: Repository, name: str, asked: Mapping[str, Any]) -> None:
            if name in repository.refs:
                self.told({"error": "it is there"}, 409)
                return
            start = asked.get("startingPoint", "main")
            repository.refs[name] = str(repository.resolve(start))
            self.told({})

        def preupload(self, asked: Mapping[str, Any]) -> None:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for one in asked["files"]
            ]
            self.told({"files": files})

        def batch(self, asked: Mapping[str, Any]) -> None:
            self.told(
                {"objects": [self.action(one["oid"], one["size"]) for one in asked["objects"]]}
            )

        def action(self, oid: str, size: int) -> dict[str, Any]:
            named: dict[str, Any] = {"oid": oid, "size": size}
            if oid in hub.objects:
                return named
            upload: dict[str, Any] = {"href": f"{hub.elsewhere}/lfs-upload/{oid}"}
            if hub.part_size and size > hub.part_size:
                count = -(-size // hub.part_size)
                header = {
                    str(n): f"{hub.elsewhere}/lfs-upload/{oid}/{n}" for n in range(1, count + 1)
                }
                upload["header"] = {"chunk_size": str(hub.part_size), **header}
                upload["href"] = f"{hub.elsewhere}/lfs-complete/{oid}"
            return {**named, "actions": {"upload": upload}}

        def take_content(self, oid: str, part: int | None) -> None:
            if "Authorization" in self.headers:
                hub.leaked.append(self.headers["Authorization"])
            hub.before_upload(oid)
            hub.uploads.append((f"{oid}/{part or ''}", len(self.sent)))
            if part is None:
                self.keep(oid, self.sent)
                return
            hub.parts.setdefault(oid, {})[part] = self.sent
            self.say(200, b"", {"ETag": f'"{part}"'})

        def keep(self, oid: str, data: bytes) -> None:
            if hashlib.sha256(data).hexdigest() != oid:
                self.told({"error": "other bytes"}, 400)
                return
            hub.objects[oid] = data
            self.told({})

        def commit(
            self, id: str, repository: Repository, branch: str, *, is_proposed: bool
        ) -> None:
            hub.before_commit()
            lines = [json.loads(line) for line in self.sent.splitlines()]
            header = lines[0]["value"]
            tip = repository.refs.get(branch)
            if tip is None:
                self.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            if header.get("parentCommit") not in (None, tip):
                self.told({"error": "A commit has happened since. Please refresh."}, 412)
                return
            files = dict(repository.commits[tip])
            for one in lines[1:]:
                value = one["value"]
                match one["key"]:
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        content = hub.content(value["oid"])
                        if content is None:
                            self.told({"error": f"no object {value['oid']}"}, 400)
                            return
                        files[value["path"]] = content
                    case "deletedFile":
                        del files[value["path"]]
            numbers = [ref for ref in repository.refs if ref.startswith("refs/pr/")]
            ref = f"refs/pr/{len(numbers) + 1}" if is_proposed else branch
            message = (header["summary"], header["description"])
            made = repository.commit(files, ref, message, tip)
            status = hub.after_commit()
            if status is not None:
                self.told({"error": "time out"}, status)
                return
            answer = {"commitOid": made, "commitUrl": f"{hub.url}/{id}/commit/{made}"}
            if is_proposed:
                answer["pullRequestUrl"] = f"{hub.url}/{id}/discussions/{len(numbers) + 1}"
            self.told({"success": True, **answer})

        def history(self, id: str, revision: str) -> None:
            repository = self.allowed(id, content=False)
            if repository is None:
                return
            found, commit = [], repository.resolve(revision)
            while commit is not None:
                title, message = repository.messages[commit]
                told = {"id": commit, "title": title, "message": message, "authors": []}
                found.append({**told, "date": "2026-01-01T00:00:00.000Z"})
                commit = repository.parents[commit]
            self.told(found)

        def discussions(self, id: str, page: int) -> None:
            repository = self.allowed(id, content=False)
            if repository is None:
                return
            numbers = [int(ref[8:]) for ref in repository.refs if ref.startswith("refs/pr/")]
            common = {
                "status": "open",
                "isPullRequest": True,
                "title": "",
                "repo": {"name": id, "type": "model"},
            }
            common |= {"author": {"name": "me"}, "createdAt": "2026-01-01T00:00:00.000Z"}
            found = [{**common, "num": number} for number in reversed(numbers)] if not page else []
            self.told({"discussions": found, "count": len(numbers), "start": 0})

        def told(self, answer: Any, status: int = 200) -> None:
            self.say(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        # -- what goes ---------------------------------------------------------------------------

        def is_part(self, path: str) -> bool:
            """Whether a range is asked for that ends before the file does."""
            wanted = re.fullmatch(r"bytes=\d+-(\d+)", self.headers.get("Range", ""))
            found = re.fullmatch(r"(?:/lfs)?/([^/]+/[^/]+)/(?:resolve/)?([^/]+)/(.+)", path)
            if wanted is None or found is None or found[1] not in hub.models:
                return False
            repository = hub.models[found[1]]
            files = repository.commits.get(repository.resolve(found[2]) or "", {})
            data = hub.served.get(found[3], files.get(found[3], b""))
            return int(wanted[1]) < len(data) - 1

        def allowed(self, id: str, *, content: bool) -> Repository | None:
            repository = hub.models.get(id)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if repository is None or (repository.private and token not in hub.tokens):
                self.say(401, b"", {"X-Error-Code": "RepoNotFound"})
                return None
            if content and repository.gated and token not in hub.tokens:
                self.say(403, b"", {"X-Error-Code": "GatedRepo"})
                return None
            return repository

        def info(self, id: str, revision: str) -> None:
            repository = self.allowed(id, content=False)
            if repository is None:
                return
            sha = repository.resolve(revision)
            if sha is None:
                self.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            files = [{"rfilename": path} for path in repository.commits[sha]]
            told = {"id": id, "modelId": id, "sha": sha, "siblings": files, "tags": []}
            told |= {"private": repository.private, "cardData": repository.card}
            self.say(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def tree(self, id: str, rest: str, cursor: int) -> None:
            repository = self.allowed(id, content=False)
            if repository is None:
                return
            known = [*repository.refs, *repository.commits]
            revision = next((one for one in known if f"{rest}/".startswith(f"{one}/")), None)
            sha = None if revision is None else repository.resolve(revision)
            if sha is None or revision is None:
                self.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            below = rest[len(revision) :].strip("/")
            files = repository.commits[sha]
            entries = [
                _entry(path, data)
                for path, data in files.items()
                if not below or path.startswith(f"{below}/")
            ]
            if below and not entries:
                self.say(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            directories = {p.rpartition("/")[0] for p in files if "/" in p}
            entries += [
                {"type": "directory", "path": one, "oid": "0" * 40, "size": 0}
                for one in sorted(directories)
                if not below or one.startswith(f"{below}/")
            ]
            headers = {"Content-Type": "application/json"}
            if cursor + PAGE < len(entries):
                place = f"{hub.url}/api/models/{id}/tree/{quote(rest)}"
                following = f"{place}?recursive=true&cursor={cursor + PAGE}"
                headers["Link"] = f'<{following}>; rel="next"'
            self.say(200, json.dumps(entries[cursor : cursor + PAGE]).encode(), headers)

        def resolve(self, id: str, revision: str, path: str) -> None:
            repository = self.allowed(id, content=True)
            if repository is None:
                return
            sha = repository.resolve(revision)
            data = None if sha is None else repository.commits[sha].get(path)
            if data is None or sha is None:
                code = "RevisionNotFound" if sha is None else "EntryNotFound"
                self.say(404, b"", {"X-Error-Code": code})
                return
            entry = _entry(path, data)
            headers = {"X-Repo-Commit": sha, "ETag": f'"{entry["oid"]}"'}
            if "lfs" in entry:
                headers["X-Linked-Etag"] = f'"{entry["lfs"]["oid"]}"'
                headers["X-Linked-Size"] = str(len(data))
                place = f"{hub.elsewhere}/lfs/{id}/{sha}/{quote(path)}"
                headers["Location"] = f"{place}?signed={hub.signature}"
                self.say(302, b"", headers)
                return
            self.body(path, data, headers)

        def body(self, path: str, data: bytes, headers: dict[str, str]) -> None:
            data = hub.served.get(path, data)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status, start, end = 200, 0, len(data)
            if wanted is not None and hub.ranges:
                start = int(wanted[1])
                end = min(int(wanted[2]) + 1, len(data)) if wanted[2] else len(data)
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
                status = 206
            if self.command == "GET" and not self.is_part(unquote(urlsplit(self.path).path)):
                hub.requests.append(("BYTES", path))
                hub.before_send(path)
            elif self.command == "GET":
                hub.before_part(path)
            self.say(status, memoryview(data)[start:end], {**headers, "Accept-Ranges": "bytes"})

        def say(self, status: int, data: bytes | memoryview, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                for at in range(0, len(data), PIECE):
                    hub.pace(min(PIECE, len(data) - at))
                    self.wfile.write(data[at : at + PIECE])
            except OSError:
                self.close_connection = True

    return Handler
