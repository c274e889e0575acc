"""The server: requests at a real socket, in threads of this process."""

from __future__ import annotations

import asyncio
import email.parser
import email.policy
import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from checkpoints import write_safetensors
from damage import flip_bit
from http_server import Answer, Served, served, taken
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import files_of, small_model

from mstore import MergeRequest, Store
from mstore.store.catalog import Catalog
from mstore.store.view import SnapshotView
from mstore.terms.errors import Corrupt, StorageFailed, Unavailable, Unreadable
from mstore_serve import bodies, documents, pages, shown
from mstore_serve.bodies import Ahead, Body, Threads
from mstore_serve.conditions import Validators, http_date
from mstore_serve.ranges import Span
from mstore_serve.shown import ServedBytes, Shown

BLOCK = 1 << 16
PIECE = 3 << 14
BIG = 12 << 20
"""More than the buffers of two sockets hold: the rest waits in the server."""
ROOM = 1 << 16
"""A connection takes a piece if it has no more than this to send."""
NS = 1_000_000_000
FOREVER = "max-age=31536000, immutable"


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Answers of many pieces, whose ends are not those of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", PIECE)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `one` and `big`, and a store of both."""
    root = tmp_path_factory.mktemp("serve")
    one = small_model(root / "one", "one")
    (one / "sub" / "deep").mkdir(parents=True)
    (one / "sub" / "deep" / 'ünï "c:d"#?% e.txt').write_text("deep\n")
    (one / "sub" / "<b>&amp;").write_bytes(b"<script>")
    (one / "empty").write_bytes(b"")
    (one / "LICENSE").write_text("free\n")
    (one / "noise.dat").write_bytes(random.Random(1).randbytes(7 * PIECE + 77))
    payload = random.Random(2).randbytes(BIG)
    write_safetensors(root / "big" / "big.safetensors", [("t", "U8", (BIG,), payload)])
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "one", name="llama/one")
        store.add(root / "big", name="big")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    """A server of that store.  Tests that use it only read."""
    with served(root / "store") as found:
        yield found


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The same store, free to be changed."""
    return Path(shutil.copytree(root / "store", tmp_path / "store"))


def of(server: Served, ref: str = "llama/one") -> str:
    """The address of a ref's snapshot."""
    return f"/snapshots/{server.store.ref(ref).snapshot.hex()}"


def document(answer: Answer) -> Any:
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)


# -- whole files -------------------------------------------------------------------------------


def test_every_file_is_what_was_added(server: Served, root: Path) -> None:
    """Each file is there under its id, for ever, and under its ref, to be asked for again."""
    time_ns = server.store["llama/one"].time_ns
    for path, content in files_of(root / "one").items():
        fixed = server.ask(f"{of(server)}/files/{quote(path)}")
        assert (fixed.status, fixed.body) == (200, content), path
        assert fixed.headers["content-length"] == str(len(content))
        assert fixed.headers["cache-control"] == FOREVER
        assert fixed.headers["last-modified"] == http_date(time_ns // NS)
        assert fixed.headers["accept-ranges"] == "bytes"
        moving = server.ask(f"/refs/llama/one/-/files/{quote(path, safe='')}")
        assert (moving.status, moving.body) == (200, content)
        assert moving.headers["cache-control"] == "no-cache"
        assert moving.headers["etag"] == fixed.headers["etag"]
        assert moving.headers["x-mstore-snapshot"] == of(server).rpartition("/")[2]
        assert "last-modified" not in moving.headers


def test_types(server: Served) -> None:
    """JSON and text say so, all else is bytes, and nothing is ever taken for a page."""
    for path, kind in (
        ("config.json", "application/json"),
        ("LICENSE", "text/plain; charset=utf-8"),
        (quote('sub/deep/ünï "c:d"#?% e.txt'), "text/plain; charset=utf-8"),
        ("model.safetensors", "application/octet-stream"),
        (quote("sub/<b>&amp;"), "application/octet-stream"),
    ):
        found = server.ask(f"{of(server)}/files/{path}").headers
        assert (found["content-type"], found["x-content-type-options"]) == (kind, "nosniff")


def test_an_etag_is_the_content(copy: Path, root: Path, tmp_path: Path) -> None:
    """Equal bytes have one ETag in every snapshot, and other bytes another."""
    small_model(tmp_path / "two", "one", changed="x")
    with Store.open(copy) as store:
        store.add(tmp_path / "two", name="two")
    with served(copy) as server:
        tags = [
            {one["path"]: one["etag"] for one in document(server.ask(of(server, ref)))["files"]}
            for ref in ("llama/one", "two")
        ]
    assert tags[0]["config.json"] == tags[1]["config.json"]
    assert tags[0]["model.safetensors"] != tags[1]["model.safetensors"]
    assert len(set(tags[0].values())) == len(tags[0])


def test_head_is_get_without_bytes(server: Served) -> None:
    """HEAD gives the headers of GET and nothing else, for every kind of address; it ignores
    ranges."""
    addresses = ["/", "/refs", "/refs/llama/one", "/snapshots", of(server), f"{of(server)}/files/"]
    addresses += [f"{of(server)}/{path}" for path in ("files/noise.dat", "tensors/", "tensors/a")]
    addresses += ["/nothing", f"{of(server)}/files/sub"]
    for path in addresses:
        got, head = server.ask(path), server.ask(path, {"Range": "bytes=0-0"}, method="HEAD")
        for headers in (got.headers, head.headers):
            headers.pop("date")  # type: ignore[attr-defined]
        assert (head.status, head.headers, head.body) == (got.status, got.headers, b""), path


def test_several_requests_on_one_connection(server: Served, root: Path) -> None:
    """A connection serves one request after another, also after an error and a 304."""
    content = (root / "one" / "noise.dat").read_bytes()
    path = f"{of(server)}/files/noise.dat"
    lines = [path, "/nothing", path]
    with server.connect(1 << 20) as client:
        for line in lines:
            client.sendall(f"GET {line} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode())
        client.sendall(b"If-None-Match: *\r\n\r\n")
        found = taken(client)
    assert [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", found)] == [200, 404, 200, 304]
    assert found.count(content) == 2


# -- parts of files ----------------------------------------------------------------------------


def parts_of(answer: Answer) -> list[tuple[str, bytes]]:
    """The ranges of a multipart answer, and their bytes."""
    raw = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode("latin-1") + answer.body
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(raw)
    found = []
    for part in message.iter_parts():
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        found.append((str(part["Content-Range"]), content))
    return found


EDGES = [0, 1, PIECE - 1, PIECE, PIECE + 1, BLOCK, 7 * PIECE, 7 * PIECE + 76, 7 * PIECE + 77]
PLACE = st.one_of(st.sampled_from(EDGES), st.integers(0, 7 * PIECE + 200))


@settings(max_examples=60)
@given(PLACE, st.none() | PLACE)
def test_a_range_is_a_slice(server: Served, root: Path, first: int, last: int | None) -> None:
    """A range is the bytes of Python's slice of the file, whatever it cuts; beyond the end 416."""
    content = (root / "one" / "noise.dat").read_bytes()
    path = f"{of(server)}/files/noise.dat"
    found = server.ask(path, {"Range": f"bytes={first}-{'' if last is None else last}"})
    if last is not None and last < first:
        assert (found.status, found.body) == (200, content)
    elif first >= len(content):
        assert found.status == 416
        assert found.headers["content-range"] == f"bytes */{len(content)}"
    else:
        wanted = content[first : None if last is None else last + 1]
        assert (found.status, found.body) == (206, wanted)
        end = first + len(wanted) - 1
        assert found.headers["content-range"] == f"bytes {first}-{end}/{len(content)}"


@settings(max_examples=30)
@given(st.lists(st.tuples(PLACE, st.integers(0, 2 * PIECE)), min_size=2, max_size=5))
def test_ranges_are_slices(server: Served, root: Path, asked: list[tuple[int, int]]) -> None:
    """Several ranges are one answer with a part for each, as long as it says."""
    content = (root / "one" / "noise.dat").read_bytes()
    header = ", ".join(f"{first}-{first + length}" for first, length in asked)
    found = server.ask(f"{of(server)}/files/noise.dat", {"Range": f"bytes={header}"})
    if found.status == 416:
        assert all(first >= len(content) for first, _ in asked)
        return
    assert found.status == 206
    kind = found.headers["content-type"]
    whole = [(found.headers.get("content-range", ""), found.body)]
    parts = parts_of(found) if kind.startswith("multipart/byteranges") else whole
    covered = set()
    for told, piece in parts:
        first, last, size = (int(n) for n in re.findall(r"\d+", told))
        assert (piece, size) == (content[first : last + 1], len(content))
        covered |= set(range(first, last + 1))
    assert covered == {
        n for first, length in asked for n in range(len(content))[first : first + length + 1]
    }


def test_the_last_bytes(server: Served, root: Path) -> None:
    """A suffix is the end of the file; of an empty file, the whole."""
    content = (root / "one" / "model.safetensors").read_bytes()
    path = f"{of(server)}/files/model.safetensors"
    assert server.ask(path, {"Range": "bytes=-9"}).body == content[-9:]
    assert server.ask(path, {"Range": f"bytes=-{len(content) + 5}"}).body == content
    assert server.ask(path, {"Range": "bytes=-0"}).status == 416
    empty = f"{of(server)}/files/empty"
    assert server.ask(empty, {"Range": "bytes=-5"}).status == 200
    assert server.ask(empty, {"Range": "bytes=0-"}).status == 416
    assert server.ask(empty).body == b""


def test_conditions(server: Served) -> None:
    """Who has these bytes gets 304; who wants others, 412; a range of other bytes is the whole."""
    path = f"{of(server)}/files/noise.dat"
    whole = server.ask(path)
    tag, date = whole.headers["etag"], whole.headers["last-modified"]
    for headers in ({"If-None-Match": tag}, {"If-Modified-Since": date}):
        known = server.ask(path, headers)
        assert (known.status, known.body, known.headers["etag"]) == (304, b"", tag)
    assert server.ask(path, {"If-Match": '"other"'}).status == 412
    part = {"Range": "bytes=1-2"}
    for validator in (tag, date):
        assert server.ask(path, part | {"If-Range": validator}).body == whole.body[1:3]
    assert server.ask(path, part | {"If-Range": '"other"'}).body == whole.body
    moving = "/refs/llama/one/-/files/noise.dat"
    assert server.ask(moving, {"If-None-Match": tag}).status == 304
    assert server.ask(moving, part | {"If-Range": tag}).body == whole.body[1:3]
    assert server.ask(moving, part | {"If-Range": date}).body == whole.body


# -- documents ---------------------------------------------------------------------------------


def keys_fit(value: Any, kind: type) -> None:
    assert list(value) == list(kind.__struct_fields__)


def test_documents(server: Served, root: Path) -> None:
    """Each document has the keys of its class, and what they say is so."""
    top = document(server.ask("/"))
    keys_fit(top, documents.RootDocument)
    assert (top["service"], top["store"]) == ("mstore", server.store.uuid)
    refs = document(server.ask(f"/{top['links']['refs']}"))["refs"]
    assert [one["name"] for one in refs] == ["big", "llama/one"]
    assert document(server.ask("/refs/llama/one")) == refs[1]
    ids = document(server.ask(f"/{top['links']['snapshots']}"))["snapshots"]
    assert set(ids) == {one["snapshot"] for one in refs}
    snapshot = document(server.ask(of(server)))
    keys_fit(snapshot, documents.SnapshotDocument)
    assert snapshot["snapshot"] == refs[1]["snapshot"]
    content = files_of(root / "one")
    assert {one["path"]: one["size"] for one in snapshot["files"]} == {
        path: len(raw) for path, raw in content.items()
    }
    for one in snapshot["files"]:
        keys_fit(one, documents.ServedFile)
        assert server.ask(f"{of(server)}/files/{quote(one['path'])}").headers["etag"] == one["etag"]
    assert document(server.ask("/refs/llama/one/-")) == snapshot
    tensors = document(server.ask(f"{of(server)}/tensors/"))["tensors"]
    assert [one["name"] for one in tensors] == ["a", "zeros", "b"]


def listed_links(answer: Answer) -> list[bytes]:
    """The addresses in the table of a page, without those of the bar above."""
    return re.findall(rb'href="([^"]*)"', answer.body.partition(b"<tbody>")[2])


def test_directories(server: Served) -> None:
    """A directory is a page of relative links that lead to its entries, and JSON for who asks."""
    top = f"{of(server)}/files/"
    page = server.ask(top)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    links = listed_links(page)
    assert b"sub/" in links
    assert all(server.ask(top + link.decode()).status == 200 for link in links)
    below = server.ask(f"{top}sub/deep/")
    [up, only] = listed_links(below)
    assert up == b"../"
    assert server.ask(f"{top}sub/deep/{only.decode()}").body == b"deep\n"
    assert b"<b>" not in server.ask(f"{top}sub/").body.partition(b"<tbody>")[2]
    told = server.ask(f"{top}sub/", {"Accept": "application/json"})
    listed = document(told)
    keys_fit(listed, documents.DirectoryDocument)
    assert [(one["name"], one["size"]) for one in listed["entries"]] == [
        ("<b>&amp;", 8),
        ("deep/", None),
    ]
    assert told.headers["vary"] == "Accept"
    assert told.headers["etag"] != server.ask(f"{top}sub/").headers["etag"]


def test_where_an_address_leads(server: Served) -> None:
    """The beginning of an id leads to the whole id, and a directory to its slash."""
    whole = of(server)
    found = server.ask(f"{whole[: len('/snapshots/') + 8]}/files/config.json")
    assert found.status == 307
    assert found.headers["location"] == f"../../{whole.rpartition('/')[2]}/files/config.json"
    assert server.ask(f"{whole}/files").headers["location"] == "files/"
    assert server.ask(f"{whole}/files/sub/deep").headers["location"] == "deep/"
    assert server.ask(f"{whole}/files/sub%2Fdeep").headers["location"] == "sub/deep/"


def test_tensors(server: Served, root: Path) -> None:
    """The bytes of a tensor are those in its file, in ranges too, with its type and shape."""
    raw = (root / "one" / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    found = server.ask(f"{of(server)}/tensors/a")
    assert found.body == raw[begin : begin + 33 * 1024 * 2]
    told = (found.headers["x-mstore-dtype"], found.headers["x-mstore-shape"])
    assert told == ("BF16", "33,1024")
    part = server.ask(f"{of(server)}/tensors/a", {"Range": "bytes=65000-67000"})
    assert part.body == found.body[65000:67001]


# -- what is not there, or not allowed ---------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/nothing", "/refs/nobody", "/refs/*", "/refs/llama", "/refs/llama/one/files/x"),
        *(
            "/refs/llama/one/-/blocks",
            "/refs/nobody/-/files/x",
            "/refs/llama/one@{{0}}",
            "/refs/%ff",
        ),
        *("/snapshots/xyz", "/snapshots/00ff", f"/snapshots/{'0' * 64}", "/snapshots/big"),
        *("{one}/files/nothing", "{one}/files/sub/nothing/", "{one}/files//config.json"),
        *("{one}/files/../../../../../../etc/passwd", "{one}/files/%2e%2e/format"),
        *("{one}/files/%2Fetc%2Fpasswd", "{one}/files/config.json/", "{one}/files/config.json%00"),
        *("{one}/tensors/nothing", "{one}/files/%ff"),
    ],
)
def test_not_found(server: Served, path: str) -> None:
    """What is not in a manifest is 404, with a document that names no path of this machine."""
    found = server.ask(path.format(one=of(server)))
    assert found.status == 404
    error = document(found)
    keys_fit(error, documents.ErrorDocument)
    keys_fit(error["error"], documents.ErrorReport)
    assert error["error"]["code"] == "not-found"
    assert str(server.store.path).encode() not in found.body
    assert found.headers["cache-control"] == "no-store"


def test_a_content_is_no_snapshot(server: Served) -> None:
    """An address below /snapshots names a snapshot by its own id, not by its content's."""
    manifest = server.store["llama/one"].manifest
    assert server.ask(f"/snapshots/{manifest.hex()}").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_read_only(server: Served, method: str) -> None:
    """Every other method is 405, wherever it goes."""
    found = server.ask("/refs", method=method)
    assert (found.status, found.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example"])
def test_other_names(server: Served, host: str) -> None:
    """A loopback server does not answer to names that a web page may have pointed at it."""
    assert server.ask("/refs", {"Host": host}).status == 421


def test_own_names(root: Path, server: Served) -> None:
    """It answers to its own names with any port, and to those that it was given."""
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:5"):
        assert server.ask("/", {"Host": host}).status == 200
    with served(root / "store", names=("models.example",)) as named:
        assert named.ask("/", {"Host": "models.example:80"}).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_request(server: Served, request_bytes: bytes) -> None:
    """What is no HTTP, or has a head without end, is 400, and the connection ends."""
    with server.connect() as client:
        # It may end before the client has sent everything, which then loses the answer.
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(request_bytes)
        found = taken(client)
    assert found == b"" or found.startswith(b"HTTP/1.1 400 ")
    assert server.ask("/").status == 200


# -- many clients ------------------------------------------------------------------------------


@pytest.mark.rest
def test_nobody_waits_for_a_client_that_takes_nothing(server: Served, root: Path) -> None:
    """While eight clients take nothing of their answers, twenty others get theirs; and when the
    eight go on, theirs are whole."""
    content = (root / "big" / "big.safetensors").read_bytes()
    path = "/refs/big/-/files/big.safetensors"
    stalled = [server.begin(path) for _ in range(8)]
    try:
        small = (root / "one" / "noise.dat").read_bytes()
        asked = [(path, content)] * 2 + [(f"{of(server)}/files/noise.dat", small)] * 18
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(server.ask, [file for file, _ in asked]))
        assert [one.body for one in answers] == [wanted for _, wanted in asked]
        for client in stalled:
            client.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = taken(client).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body[: len(content)] == content
            assert body[len(content) :].startswith(b"HTTP/1.1 404 ")
    finally:
        for client in stalled:
            client.close()


@pytest.mark.rest
def test_nothing_is_read_for_a_client_without_room(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that takes nothing has the server read what two sockets hold and two pieces."""
    with served(root / "store") as server:
        read: list[int] = []
        whole = SnapshotView.read

        def counted(self: SnapshotView, path: str, offset: int, size: int) -> bytes:
            read.append(size)
            return whole(self, path, offset, size)

        monkeypatch.setattr(SnapshotView, "read", counted)
        # A third of what fits into the largest buffers, so that this needs no other machine's.
        with server.begin("/refs/big/-/files/big.safetensors") as client:
            wait_until(lambda: stands_still(read))
            assert held_by(server) <= PIECE + ROOM
            assert sum(read) < BIG
            client.recv(100)


def test_one_piece_waits_and_one_is_sent() -> None:
    """For a client that takes one piece and no more, two pieces are read, however long the file."""
    read: list[int] = []
    second = asyncio.Event()

    def piece(offset: int, size: int) -> bytes:
        read.append(offset)
        if len(read) == 2:
            loop.call_soon_threadsafe(second.set)
        return bytes(size)

    loop: asyncio.AbstractEventLoop
    source = ServedBytes(lambda: lambda: None, piece, None, is_computed=False)
    shown = Shown(20 * PIECE, "", Validators('"x"', None), "", source=source)

    async def answered() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        room = asyncio.Event()
        room.set()

        async def send(message: Any) -> None:
            await room.wait()
            if message.get("body"):
                room.clear()

        async def receive() -> Any:
            await asyncio.Event().wait()

        threads = Threads()
        body = Body(shown, [Span(0, shown.size)], threads, Ahead())
        sending = asyncio.ensure_future(body.send({"type": "http.response.start"}, receive, send))
        await second.wait()
        await asyncio.sleep(0.3)
        assert read == [0, PIECE]
        sending.cancel()
        threads.close()

    asyncio.run(answered())


@pytest.mark.rest
def test_a_hold_waits_for_who_may_not_have_seen_it(tmp_path: Path) -> None:
    """A snapshot without a ref may be in the course of being collected: its bytes are sent once
    that is published."""
    source = tmp_path / "model"
    write_safetensors(source / "model.safetensors", [("w", "F32", (4,), bytes(16))])
    done = []
    with Store.init(tmp_path / "store") as store, closing(Catalog.open(store.path)) as catalog:
        held = store.add(source, name="model").snapshot
        store.remove("model")
        showing = shown.Showing(store)

        def hold() -> None:
            showing.hold(held)()
            done.append("held")

        thread = threading.Thread(target=hold)
        with catalog.publishing():
            thread.start()
            thread.join(0.5)
            done.append("published")
        thread.join()
    assert done == ["published", "held"]


def held_by(server: Served) -> int:
    """The most bytes that one connection of the server has and cannot send."""
    every = server.server.server_state.connections
    return max(one.transport.get_write_buffer_size() for one in every)


def stands_still(read: list[int]) -> bool:
    """Whether nothing was read for a while, of what was begun."""
    before = len(read)
    threading.Event().wait(0.3)
    return bool(read) and len(read) == before


def wait_until(condition: Any) -> None:
    for _ in range(1200):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came true")


@pytest.mark.rest
def test_a_client_that_takes_nothing_is_dropped(root: Path) -> None:
    """Who takes nothing of an answer, or sends no whole request, loses the connection."""
    with served(root / "store", timeout=1.0) as server:
        stalled = server.begin("/refs/big/-/files/big.safetensors")
        silent = server.connect()
        half = server.connect()
        half.sendall(b"GET /refs HTTP/1.1\r\nHost: loc")
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) == 3)
        wait_until(lambda: not connections)
        assert taken(silent) == taken(half) == b""
        assert len(taken(stalled)) < BIG
        for client in (stalled, silent, half):
            client.close()
        assert server.ask("/").status == 200


def test_too_many_requests(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests at once than are allowed get 503 and when to come back; the others go on."""
    with served(root / "store", most=2) as server:
        begun, go_on = threading.Semaphore(0), threading.Event()
        whole = SnapshotView.read

        def waits(self: SnapshotView, path: str, offset: int, size: int) -> bytes:
            begun.release()
            assert go_on.wait(120)
            return whole(self, path, offset, size)

        monkeypatch.setattr(SnapshotView, "read", waits)
        with ThreadPoolExecutor(2) as pool:
            path = f"{of(server)}/files/config.json"
            slow = [pool.submit(server.ask, path) for _ in range(2)]
            for _ in slow:
                assert begun.acquire(timeout=120)
            refused = server.ask("/")
            assert (refused.status, refused.headers["retry-after"]) == (503, "2")
            go_on.set()
            assert [one.result().status for one in slow] == [200, 200]
        assert server.ask("/").status == 200


def test_computing_delays_no_file(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks of a virtual merge are computed for many clients, plain files are read."""
    with Store.open(copy) as store:
        request = MergeRequest(base="llama/one", experts=["llama/one"], method="linear")
        plan = store.plan(request, allow_noop=True)
        store.merge(plan, name="virtual", virtual=True)
        expected = store["virtual"].read("model.safetensors")
    with served(copy) as server:
        go_on = threading.Event()
        whole = SnapshotView.read

        def waits(self: SnapshotView, path: str, offset: int, size: int) -> bytes:
            assert not self.is_virtual or go_on.wait(120)
            return whole(self, path, offset, size)

        monkeypatch.setattr(SnapshotView, "read", waits)
        with ThreadPoolExecutor(16) as pool:
            path = "/refs/virtual/-/files/model.safetensors"
            slow = [pool.submit(server.ask, path) for _ in range(16)]
            assert server.ask(f"{of(server)}/files/noise.dat").status == 200
            go_on.set()
            assert all(one.result().body == expected for one in slow)


# -- a store that changes, or breaks -----------------------------------------------------------


def test_refs_are_looked_up_anew(copy: Path, root: Path, tmp_path: Path) -> None:
    """A ref shows what it names now; what an id shows stays."""
    small_model(tmp_path / "two", "two")
    path = "/refs/llama/one/-/files/model.safetensors"
    with served(copy) as server:
        old, fixed = server.ask(path), of(server)
        with Store.open(copy) as store:
            store.add(tmp_path / "two", name="llama/one")
        new = server.ask(path, {"If-None-Match": old.headers["etag"]})
        assert new.status == 200
        assert new.body == (tmp_path / "two" / "model.safetensors").read_bytes()
        assert new.headers["x-mstore-snapshot"] != old.headers["x-mstore-snapshot"]
        assert server.ask(f"{fixed}/files/model.safetensors").body == old.body


def test_gc_leaves_what_is_being_sent(copy: Path, root: Path) -> None:
    """A snapshot without a name stays while it is sent, and is gone for the next request."""
    with served(copy) as server, Store.open(copy) as store:
        path = f"{of(server, 'big')}/files/big.safetensors"
        client = server.begin(path)
        assert client.recv(10) == b"HTTP/1.1 2"
        store.configure("reflog_days", 0)
        store.remove("big")
        store.gc()
        assert server.ask(path).status == 200
        store.gc()
        body = b""
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        body = taken(client).partition(b"\r\n\r\n")[2]
        content = (root / "big" / "big.safetensors").read_bytes()
        assert body[: len(content)] == content
        client.close()
        wait_until(lambda: not list((copy / "tmp").glob("*.pin")))
        store.gc()
        assert server.ask(path).status == 404
        assert server.ask(of(server)).status == 200


def test_bytes_that_move_are_found(root: Path, tmp_path: Path) -> None:
    """When gc moves a file's blocks to another pack, the server finds them there."""
    content = (root / "one" / "noise.dat").read_bytes()
    shutil.copytree(root / "one", tmp_path / "both")
    shutil.copytree(root / "big", tmp_path / "both", dirs_exist_ok=True)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "both", name="both")
        store.add(root / "one", name="one")
        with served(tmp_path / "store") as server:
            path = f"{of(server, 'one')}/files/noise.dat"
            assert server.ask(path, {"Range": "bytes=0-99"}).body == content[:100]
            store.configure("reflog_days", 0)
            store.remove("both")
            assert store.gc().packs_rewritten
            assert server.ask(path).body == content


def test_a_flipped_bit_is_never_sent(
    copy: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged block at the beginning is 500; later, the answer ends before its length and before
    the first wrong byte. The log names the block, the answer nothing of this machine."""
    content = (root / "one" / "noise.dat").read_bytes()
    flip_bit(copy, content[3 * BLOCK + 9 : 3 * BLOCK + 99])
    with served(copy) as server:
        view = server.store.view("llama/one")
        [extent] = view.extents("noise.dat", 3 * BLOCK, 1)
        path = f"{of(server)}/files/noise.dat"
        with server.begin(path, 1 << 20) as client:
            head, _, body = taken(client).partition(b"\r\n\r\n")
        assert b"\r\ncontent-length: %d" % len(content) in head
        assert 0 < len(body) <= 3 * BLOCK
        assert content.startswith(body)
        failed = server.ask(path, {"Range": f"bytes={3 * BLOCK}-"})
        assert failed.status == 500
        assert document(failed)["error"]["code"] == "corrupt"
        assert str(copy).encode() not in failed.body
        assert server.ask(path, {"Range": "bytes=0-99"}).body == content[:100]
        assert server.ask(path, {"Range": "bytes=-99"}).body == content[-99:]
    told = [one.getMessage() for one in caplog.records if one.name == "mstore_serve"]
    assert len([line for line in told if str(extent.block) in line]) == 2


def test_a_lost_pack(copy: Path, root: Path) -> None:
    """A pack that is gone is 500, and what lies elsewhere is still served."""
    with Store.open(copy) as store:
        [one] = {
            e.location.pack for e in store.view("big").physical_extents("big.safetensors", 0, 1)
        }  # type: ignore[union-attr]
    next(copy.rglob(f"{one}.pack")).unlink()
    with served(copy) as server:
        assert server.ask("/refs/big/-/files/big.safetensors").status == 500
        assert server.ask("/refs").status == 200


def test_a_short_read_is_never_sent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the library give fewer bytes than a piece has, the answer is an error, or ends."""
    whole = SnapshotView.read

    def short(self: SnapshotView, path: str, offset: int, size: int) -> bytes:
        return whole(self, path, offset, size - (offset == 2 * PIECE))

    with served(root / "store") as server:
        monkeypatch.setattr(SnapshotView, "read", short)
        path = f"{of(server)}/files/noise.dat"
        assert server.ask(path, {"Range": f"bytes={2 * PIECE}-"}).status == 500
        with server.begin(path, 1 << 20) as client:
            body = taken(client).partition(b"\r\n\r\n")[2]
        assert body == (root / "one" / "noise.dat").read_bytes()[: 2 * PIECE]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Corrupt("x", where="/secret"), 500, "corrupt"),
        (Unreadable("x", where="/secret"), 500, "unreadable"),
        (OSError(24, "x", "/secret"), 503, "storage-failed"),
        (StorageFailed("x", where="/secret", errno=24), 503, "storage-failed"),
        (Unavailable("x", where="/secret"), 503, "unavailable"),
        (MemoryError("/secret"), 503, "out-of-memory"),
        (RuntimeError("/secret"), 500, "bug"),
    ],
)
def test_failures_tell_nothing_of_the_machine(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
) -> None:
    """Whatever fails in the server, the answer has a kind and no path, and the server goes on."""

    def fails(*_: object) -> bytes:
        raise error

    with served(root / "store") as server, monkeypatch.context() as patch:
        patch.setattr(SnapshotView, "read", fails)
        found = server.ask(f"{of(server)}/files/noise.dat")
        assert (found.status, document(found)["error"]["code"]) == (status, code)
        assert b"secret" not in found.body
        patch.undo()
        assert server.ask(f"{of(server)}/files/noise.dat").status == 200


# -- programs ----------------------------------------------------------------------------------


def test_long_documents_delay_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many clients wait for long documents, files, refs and pages are found and sent."""
    with served(root / "store") as server:
        go_on = threading.Event()
        whole = Store.tensors

        def waits(self: Store, revision: Any) -> Any:
            assert go_on.wait(120)
            return whole(self, revision)

        monkeypatch.setattr(Store, "tensors", waits)
        with ThreadPoolExecutor(16) as pool:
            slow = [pool.submit(server.ask, f"{of(server)}/tensors/") for _ in range(16)]
            wait_until(lambda: len(server.server.server_state.connections) == 16)
            short = ["/", "/refs", "/refs/llama/one", f"{of(server)}/files/"]
            for path in (*short, f"{of(server)}/files/noise.dat"):
                assert server.ask(path).status == 200, path
            assert server.ask("/snapshots/abcdef/tensors/").status == 404
            go_on.set()
            assert all(one.result().status == 200 for one in slow)


def test_clients_that_left_delay_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document is not made for a client that left before its turn."""
    with served(root / "store") as server:
        go_on = threading.Event()
        made: list[object] = []
        whole = Store.show

        def waits(self: Store, revision: Any) -> Any:
            made.append(revision)
            assert go_on.wait(120)
            return whole(self, revision)

        monkeypatch.setattr(Store, "show", waits)
        waiting = [server.begin(of(server)) for _ in range(12)]
        connections = server.server.server_state.connections
        wait_until(lambda: len(made) == 2 and len(connections) == 12)
        for client in waiting:
            client.close()
        wait_until(lambda: not connections)
        wait_until(lambda: not server.server.server_state.tasks)
        go_on.set()
        assert server.ask(of(server)).status == 200
        assert len(made) == 3


def test_a_list_of_tensors_is_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers share the list of a snapshot's tensors, unless it is long."""
    made: list[object] = []
    whole = Store.tensors

    def counted(self: Store, revision: Any) -> Any:
        made.append(revision)
        return whole(self, revision)

    monkeypatch.setattr(Store, "tensors", counted)
    with served(root / "store") as server:
        first, again = (server.ask(f"{of(server)}/tensors/") for _ in range(2))
        assert first.body == again.body
        assert len(made) == 1
        monkeypatch.setattr(shown, "_KEPT_BYTES", 10)
        for _ in range(2):
            assert server.ask("/refs/big/-/tensors/").status == 200
        assert len(made) == 3


def test_long_directories_are_made_like_documents(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories of a snapshot with many files say the same."""
    with served(root / "store") as server:
        paths = [f"{of(server)}/files/{path}" for path in ("", "sub/", "sub", "nothing")]
        found = [server.ask(path) for path in paths]
        monkeypatch.setattr(shown, "SHORT", 1)
        monkeypatch.setattr(pages, "SHORT", 1)
        again = [server.ask(path) for path in paths]
    assert [(one.status, one.body) for one in found] == [(one.status, one.body) for one in again]
    assert [one.status for one in again] == [200, 200, 307, 404]


@pytest.mark.rest
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_resumes(server: Served, root: Path, tmp_path: Path) -> None:
    """Four curls at once, each stopped and resumed, end with the whole file."""
    content = (root / "big" / "big.safetensors").read_bytes()
    url = f"{server.info.url}{of(server, 'big')[1:]}/files/big.safetensors"

    def fetch(number: int) -> bytes:
        target = tmp_path / str(number)
        target.write_bytes(content[: 1_000_003 * (number + 1)])
        line = ["curl", "-sS", "--fail", "-C", "-", "-o", str(target), url]
        subprocess.run(line, check=True, timeout=300)
        return target.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert all(found == content for found in pool.map(fetch, range(4)))


@pytest.mark.skipif(shutil.which("wget") is None, reason="no wget")
def test_wget_follows_the_pages(server: Served, root: Path, tmp_path: Path) -> None:
    """`wget -r` writes the whole snapshot, whatever its files are called."""
    url = f"{server.info.url}{of(server)[1:]}/files/"
    line = ["wget", "-q", "-r", "-np", "-nH", "--cut-dirs=3", "-R", "index.html*"]
    line += ["--restrict-file-names=nocontrol", "-e", "robots=off", "--local-encoding=UTF-8"]
    subprocess.run([*line, url], check=True, cwd=tmp_path, timeout=300)
    assert files_of(tmp_path) == files_of(root / "one")


def test_a_tensor_by_ranges(server: Served, root: Path) -> None:
    """A program that knows safetensors gets one tensor with two ranges: the header, the bytes."""
    path = f"{of(server)}/files/model.safetensors"
    length = int.from_bytes(server.ask(path, {"Range": "bytes=0-7"}).body, "little")
    head = json.loads(server.ask(path, {"Range": f"bytes=8-{7 + length}"}).body)
    begin, end = (8 + length + offset for offset in head["b"]["data_offsets"])
    found = server.ask(path, {"Range": f"bytes={begin}-{end - 1}"}).body
    assert found == server.store["llama/one"].tensor("b").tobytes()


def test_fsspec_reads_files(server: Served, root: Path) -> None:
    """fsspec's HTTP filesystem opens, seeks and lists."""
    pytest.importorskip("aiohttp")
    import fsspec

    content = (root / "one" / "noise.dat").read_bytes()
    url = f"{server.info.url}{of(server)[1:]}/files/"
    with fsspec.open(f"{url}noise.dat", block_size=BLOCK) as file:
        file.seek(-BLOCK, 2)
        assert file.read(100) == content[-BLOCK:][:100]
        file.seek(0)
        assert file.read() == content
    assert f"{url}config.json" in fsspec.filesystem("http").ls(url, detail=False)
