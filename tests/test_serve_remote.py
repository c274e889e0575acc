"""A store as a remote, and how a server shows it: `mstore.remotes.store_remote`, below /remote/."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints import write_safetensors
from http_server import Served, served
from small_models import BLOCK, files_of, small_model

from mstore import Store
from mstore.api.exchanging import remote_of
from mstore.blocks.location import Location
from mstore.blocks.packs import Kind
from mstore.blocks.segments import Segments
from mstore.remotes import layout, store_remote
from mstore.remotes.layout import PackRow, pack_name
from mstore.remotes.objects import ROOT, Absent, RootStamp
from mstore.remotes.state import Remote, RemoteState
from mstore.remotes.store_remote import StoreRemote, cut
from mstore.remotes.web import server_of
from mstore.store import leases
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    MstoreError,
    StorageFailed,
    Unavailable,
)
from mstore.terms.ids import PackId

pytest.importorskip("obstore")

TOKEN = "a-token.of-some/letters"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of a base and a model on it."""
    small_model(tmp_path / "in" / "base", "base")
    small_model(tmp_path / "in" / "new", "base", changed="new")
    with Store.init(tmp_path / "store", block_size=BLOCK, author="me") as store:
        store.add(tmp_path / "in" / "base", name="base")
        store.add(tmp_path / "in" / "new", name="new", base="base")
        store.tag("v1", "base")
        store.note("new", {"score": 1})
        yield store


def address(server: Served) -> str:
    return f"http://127.0.0.1:{server.info.port}/remote"


def same(store: Path, name: str, source: Path) -> None:
    """A store has a model, byte for byte, and is sound."""
    with Store.open(store) as opened:
        out = store.with_name(f"{store.name}-{name}")
        opened.checkout(name, out)
        assert files_of(out) == files_of(source)
        assert opened.fsck(read_data=True).problems == ()


def state_of(objects: StoreRemote, directory: Path) -> RemoteState:
    remote = Remote("x", objects, directory)
    remote.make_directory()
    return remote.state()


# -- over HTTP ---------------------------------------------------------------------------------


def test_a_served_store_is_cloned_and_fetched(store: Store, tmp_path: Path) -> None:
    """A clone has all branches and tags, byte for byte, and notes; later a fetch brings what is
    new, and only that."""
    with served(store.path) as server:
        Store.clone(address(server), tmp_path / "clone")
        same(tmp_path / "clone", "new", tmp_path / "in" / "new")
        small_model(tmp_path / "in" / "newer", "base", changed="newer")
        store.add(tmp_path / "in" / "newer", name="newer", base="base")
        store.remove("v1")
        with Store.open(tmp_path / "clone") as clone:
            assert sorted(clone) == ["base", "new", "v1"]
            assert [one.value for one in clone.notes_of("new")] == [1]
            told = clone.fetch("origin")
            assert {(one.name, one.new is None) for one in told.fetched} == {
                ("newer", False),
                ("v1", True),
            }
            assert told.bytes_received < 20_000
            assert clone.remote_contents("origin").uuid == str(store.uuid)
            clone.pull("origin")
        same(tmp_path / "clone", "newer", tmp_path / "in" / "newer")


def test_an_unchanged_store_costs_one_request(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fetch of a store that did not change is one GET, answered by 304; after a change, lists
    that are as before are not read again."""
    with served(store.path) as server:
        Store.clone(address(server), tmp_path / "clone")
        with Store.open(tmp_path / "clone") as clone:
            # Waited for, so that its lines are not among those of the next one.
            requests(caplog, lambda: clone.fetch("origin"))
            assert requests(caplog, lambda: clone.fetch("origin")) == [f"GET /remote/{ROOT} 304"]
            small_model(tmp_path / "in" / "newer", "base", changed="newer")
            store.add(tmp_path / "in" / "newer", name="newer", base="base")
            asked = requests(caplog, lambda: clone.fetch("origin"))
            kinds = sorted(one.split("/")[2].partition(" ")[0] for one in asked)
            # All but that of notes.
            assert kinds.count("lists") == 3, asked


def requests(caplog: pytest.LogCaptureFixture, call: Callable[[], object]) -> list[str]:
    """What a call asks of servers of this process: method, path and status."""
    caplog.clear()

    def seen() -> list[str]:
        found = (record.args for record in caplog.records if record.name == "mstore_serve.access")
        return [f"{one[1]} {one[2]} {one[4]}" for one in found if isinstance(one, tuple)]

    with caplog.at_level(logging.INFO, logger="mstore_serve.access"):
        call()
        # A server writes its line after its answer: until no more come.
        before = None
        for _ in range(100):
            now = seen()
            if now and now == before:
                break
            before = now
            time.sleep(0.2)
    return seen()


def test_objects_are_what_their_names_say(store: Store, tmp_path: Path) -> None:
    """Each list, table and pack is proved by its name; HEAD, ranges and conditions work; what is
    named by its bytes may be kept for ever, the root is asked for again."""
    with served(store.path) as server:
        answer = server.ask(f"/remote/{ROOT}")
        root = layout.read_root(answer.body, "")
        assert answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        assert server.ask(f"/remote/{ROOT}", {"If-None-Match": tag}).status == 304
        packs: list[PackRow] = []
        for named in root.lists:
            data = server.ask(f"/remote/{named.name}").body
            rows = layout.decode_list(named, data, "")
            packs += rows if named.kind == "packs" else []
        assert len(packs) >= 2
        for row in packs:
            table = server.ask(f"/remote/{row.table_name}")
            assert table.headers["cache-control"].startswith("max-age=")
            assert str(layout.TableId.of(table.body)) == row.table.hex()
            assert PackId.of(table.body) == row.pack
            path = f"/remote/{pack_name(row.pack)}"
            whole = server.ask(path)
            assert len(whole.body) == row.size
            assert int(server.ask(path, method="HEAD").headers["content-length"]) == row.size
            part = server.ask(path, {"Range": "bytes=4096-4999"})
            assert (part.status, part.body) == (206, whole.body[4096:5000])
            # The table is two parts of the file.
            part = server.ask(f"/remote/{row.table_name}", {"Range": "bytes=40-59"})
            assert part.body == table.body[40:60]


@pytest.mark.parametrize(
    "path",
    [
        *("", "x", "../refs", f"lists/{'0' * 16}-{'0' * 64}", f"packs/00/{'0' * 64}.pack"),
        *("packs/00/..%2F..%2F..%2Fformat", "format", "..%2Fformat", "config", f"{ROOT}/x"),
    ],
)
def test_nothing_else_is_shown(store: Store, path: str) -> None:
    """Below /remote/ there are objects of the remote, and no other files of the store."""
    with served(store.path) as server:
        assert server.ask(f"/remote/{path}").status == 404


def test_a_served_store_is_read_only(store: Store, tmp_path: Path) -> None:
    """A push to a web server is refused before anything is sent; the server takes no PUT."""
    with served(store.path) as server:
        Store.clone(address(server), tmp_path / "clone")
        with Store.open(tmp_path / "clone") as clone:
            with pytest.raises(Incompatible, match="read-only"):
                clone.push("origin", every=True)
            with pytest.raises(Incompatible, match="list"):
                clone.remote_fsck("origin")
        assert server.ask(f"/remote/{ROOT}", method="PUT").status == 405


# -- tokens ------------------------------------------------------------------------------------


def test_a_token_is_needed_for_everything(store: Store) -> None:
    """With a token, each address is refused without it, with 401; no answer shows it."""
    with served(store.path, token=TOKEN) as server:
        for path in ("/", "/refs", f"/remote/{ROOT}", "/nothing"):
            for given in (None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN):
                headers = {} if given is None else {"Authorization": given}
                answer = server.ask(path, headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert TOKEN.encode() not in answer.body
                assert json.loads(answer.body)["error"]["code"] == "unauthorized"
        assert server.ask("/refs", {"Authorization": f"bearer {TOKEN}"}).status == 200
        assert server.ask("/refs", {"Authorization": "Bearer ü".encode().decode("latin-1")}).status


def test_a_clone_with_the_token_and_without(store: Store, tmp_path: Path) -> None:
    """The right token gives a clone; without one or with another there is an error without it."""
    with served(store.path, token=TOKEN) as server:
        for token in ("", f"{TOKEN}x"):
            with pytest.raises(Unavailable, match="denied") as caught:
                Store.clone(address(server), tmp_path / "clone", token=token)
            assert "token" in str(caught.value.hint)
            assert TOKEN not in repr(caught.value)
            assert not (tmp_path / "clone").exists()
        with pytest.raises(BadRequest) as refused:
            Store.clone(address(server), tmp_path / "clone", token="one two of three words")
        assert "two" not in str(refused.value)
        Store.clone(address(server), tmp_path / "clone", token=TOKEN)
    same(tmp_path / "clone", "new", tmp_path / "in" / "new")
    assert all(TOKEN.encode() not in one for one in files_of(tmp_path / "clone").values())


def test_a_token_goes_only_to_a_server_that_the_user_names(store: Store, tmp_path: Path) -> None:
    """What a store's settings name gets no token; the error says how to trust it."""
    with served(store.path, token=TOKEN) as server:
        Store.clone(address(server), tmp_path / "clone", token=TOKEN)
        with Store.open(tmp_path / "clone") as clone:
            clone.token = TOKEN
            with pytest.raises(Unavailable, match="denied") as caught:
                clone.fetch("origin")
            here = server_of(address(server))
            assert caught.value.hint == f"store.trust({here!r})"
            clone.trusted_endpoints = {here}
            clone.fetch("origin")


class _Heard(http.server.BaseHTTPRequestHandler):
    """Redirects to another server if there is one, and notes what it was sent."""

    protocol_version = "HTTP/1.1"
    other = ""
    heard: list[str | None]

    def do_GET(self) -> None:
        self.heard.append(self.headers.get("Authorization"))
        self.send_response(307 if self.other else 404)
        if self.other:
            self.send_header("Location", f"{self.other}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _listening(other: str) -> Iterator[tuple[str, list[str | None]]]:
    heard: list[str | None] = []
    kind = type("Handler", (_Heard,), {"other": other, "heard": heard})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


def test_a_redirect_takes_no_token_along(tmp_path: Path) -> None:
    """A server that redirects to another one does not make the client send the token there."""
    with (
        _listening("") as (second, there),
        _listening(second) as (first, here),
        pytest.raises(MstoreError),
    ):
        Store.clone(f"{first}/remote", tmp_path / "clone", token=TOKEN)
    assert here == [f"Bearer {TOKEN}"]
    assert there == [None]


@pytest.mark.parametrize(
    "url", ["http://user@host/x", "http://:pw@host/x", "https://host/x?token=1", "http:///x"]
)
def test_addresses_with_secrets(url: str, store: Store) -> None:
    """An address has no user, password or query; nor has a web server an endpoint or a region."""
    with pytest.raises(BadRequest):
        store.add_remote("x", url)
    with pytest.raises(BadRequest):
        store.add_remote("x", "http://host/x", region="eu")
    assert store.remotes() == []


# -- while the store changes -------------------------------------------------------------------


@pytest.fixture
def remote(store: Store) -> Iterator[StoreRemote]:
    """That store as a remote."""
    with closing(remote_of(store, "a test")) as remote:
        yield remote


def collected(store: Store, name: str) -> int:
    """Drop a branch and what only it needs; return the bytes that wait for readers."""
    store.remove(name)
    return store.gc(reflog_days=0, dead_share=0.0).waiting_bytes


def test_a_root_leads_to_what_it_names_whatever_gc_does(
    store: Store, remote: StoreRemote, tmp_path: Path
) -> None:
    """Whoever has read a root gets all that it names, though gc dropped it meanwhile; once nobody
    asks for it any more it goes, and new readers see only what is there."""
    small_model(tmp_path / "in" / "gone", "gone")
    store.add(tmp_path / "in" / "gone", name="gone")
    state = state_of(remote, tmp_path / "x")
    assert collected(store, "gone") > 0
    now = state_of(remote, tmp_path / "y")
    assert set(state.refs()) - set(now.refs()) == {"gone"}
    assert now.root.generation > state.root.generation
    old = [one for one in state.packs() if one not in now.packs()]
    assert old
    for row in state.packs().values():
        [data] = remote.read_each(pack_name(row.pack), [(0, row.size)])
        assert len(data) == row.size
        assert PackId.of(remote.read_each(row.table_name, [(0, row.length)])[0]) == row.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_remote, "IDLE_SECONDS", 0)
        held = remote.hold(pack_name(PackId(old[0])))
        remote.tidy()
        remote.size(pack_name(PackId(old[0])))
        held()
        remote.tidy()
    assert store.gc(reflog_days=0).waiting_bytes == 0
    with pytest.raises(Absent):
        remote.size(pack_name(PackId(old[0])))
    assert state_of(remote, tmp_path / "z").root.generation >= now.root.generation


def test_states_that_nobody_reads_go(
    store: Store, remote: StoreRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state stays while it is read, though another one replaced it, and for a day at most; there
    are few at a time."""

    def count() -> int:
        return len(leases.live(store._catalog.layout))

    remote.read_root()
    remote.read_root()
    assert count() == 1
    remote.tidy()
    assert count() == 1
    store.note("new", {"a": 1})
    remote.read_root()
    remote.tidy()
    assert count() == 2
    monkeypatch.setattr(store_remote, "LONGEST_SECONDS", 0)
    remote.tidy()
    assert count() == 1
    monkeypatch.setattr(store_remote, "MOST_STATES", 2)
    for number in range(5):
        store.note("new", {"a": number + 2})
        remote.read_root()
    assert count() == 2
    remote.close()
    assert count() == 0


def test_a_root_is_the_same_by_any_process(store: Store, remote: StoreRemote) -> None:
    """Root and lists of one generation are the same bytes again; of another they have other names,
    and a client that knows the root gets none."""
    got = remote.read_root()
    assert got is not None
    with closing(remote_of(store, "another")) as other:
        assert other.read_root() == got
        assert {one.name for one in other.names("")} == {one.name for one in remote.names("")}
    assert remote.read_root(got[1]) is None
    store.note("new", {"a": 1})
    new = remote.read_root(got[1])
    assert new is not None
    assert new[1] != got[1]
    assert remote.read_root(RootStamp("x")) == new


def test_an_object_of_a_root_that_was_read_before(store: Store, remote: StoreRemote) -> None:
    """A server that was started again has the objects of the root that a client knows."""
    name = next(one.name for one in remote.names("lists/"))
    with closing(remote_of(store, "another")) as other:
        assert other.size(name) == remote.size(name)


@pytest.mark.rest
def test_a_store_put_back_from_a_backup_is_not_mistaken(store: Store, tmp_path: Path) -> None:
    """A client notices that a served store went back, and takes nothing from it."""
    store.backup(tmp_path / "backup")
    with served(store.path) as server:
        store.note("new", {"a": 1})
        Store.clone(address(server), tmp_path / "clone")
        store.close()
        store.path.rename(tmp_path / "aside")
        (tmp_path / "backup").rename(store.path)
        with Store.open(tmp_path / "clone") as clone, pytest.raises(Conflict, match="went back"):
            clone.fetch("origin")


def test_a_store_that_may_only_be_read_is_served(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lease can be taken, all works but the promise; what gc removed is then Absent."""

    def refused(*_: object) -> Any:
        raise StorageFailed("read-only", where="x", errno=30)

    small_model(tmp_path / "in" / "gone", "gone")
    store.add(tmp_path / "in" / "gone", name="gone")
    with monkeypatch.context() as patch, closing(remote_of(store, "a test")) as remote:
        patch.setattr(store_remote, "Lease", refused)
        state = state_of(remote, tmp_path / "x")
        assert collected(store, "gone") == 0
        now = state_of(remote, tmp_path / "y")
        (gone, *_) = (row for id, row in state.packs().items() if id not in now.packs())
        with pytest.raises(Absent):
            remote.read_each(pack_name(gone.pack), [(0, 1)])


def test_a_damaged_pack_harms_only_what_needs_it(store: Store, tmp_path: Path) -> None:
    """A pack whose ends are damaged is not named; models in other packs are cloned."""
    small_model(tmp_path / "in" / "other", "other")
    known = set(store.path.rglob("*.pack"))
    store.add(tmp_path / "in" / "other", name="other")
    for pack in set(store.path.rglob("*.pack")) - known:
        pack.chmod(0o644)
        with pack.open("r+b") as file:
            file.seek(-64, 2)
            file.write(bytes(64))
    with Store.init(tmp_path / "to", block_size=BLOCK) as to:
        with pytest.raises(Corrupt):
            store.copy_to(to.path, ["other"])
        store.copy_to(to.path, ["new"])
    same(tmp_path / "to", "new", tmp_path / "in" / "new")


@pytest.mark.rest
def test_what_a_pack_has_beyond_the_needed_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack may still have a difference whose base is gone: the block is taken from where it lies
    in full, whichever pack a client finds first."""
    draw = np.random.default_rng(0)
    old = (0.02 * draw.standard_normal(1 << 18)).astype(np.float32)
    new = old * (1 + 3e-3 * draw.standard_normal(1 << 18)).astype(np.float32)
    for name, values in (("old", old), ("new", new)):
        path = tmp_path / "in" / name / "model.safetensors"
        write_safetensors(path, [("t", "F32", (1 << 18,), values.tobytes())])
    # It keeps the pack of the differences from being rewritten.
    (tmp_path / "in" / "new" / "more.bin").write_bytes(draw.bytes(4 << 20))
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(tmp_path / "in" / "old", name="m")
        store.add(tmp_path / "in" / "new", name="m", base="m")
        store.pin("m", raw=True)
        store.prune(["m"], keep_last=1)
        store.gc(reflog_days=0, dead_share=0.9)
        locations = Segments.locations
        differences = []

        def first(self: Segments, kind: Kind, ids: bytes) -> list[Location | None]:
            found = locations(self, kind, ids)
            for number in range(len(found)):
                id = ids[32 * number : 32 * number + 32]
                for at in self.places(kind, id):
                    if any(at.base):
                        found[number] = at
                        differences.append(id)
            return found

        monkeypatch.setattr(Segments, "locations", first)
        Store.init(tmp_path / "to", block_size=BLOCK).close()
        store.copy_to(tmp_path / "to", ["m"])
    assert differences
    same(tmp_path / "to", "m", tmp_path / "in" / "new")


# -- lists -------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    key: bytes


def test_lists_are_cut_where_a_new_row_changes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are in the lists, in order, at most so many in each; a row more or less changes the
    list that has it, which may fall into two."""
    monkeypatch.setattr(store_remote, "MOST_ROWS", 16)
    draw = np.random.default_rng(3)
    keys = sorted({draw.bytes(32) for _ in range(500)} | {b"refs", b"refs/a", b"ref", b"x" * 64})
    rows = [_Row(key) for key in keys]
    lists = [tuple(some) for some in cut(rows)]
    assert [row for some in lists for row in some] == rows
    assert max(map(len, lists)) <= 16
    assert list(cut([])) == []
    for key in (draw.bytes(32) for _ in range(50)):
        more = {tuple(some) for some in cut(sorted([*rows, _Row(key)], key=lambda row: row.key))}
        assert len(set(lists) - more) == 1
        assert len(more - set(lists)) in (1, 2)
