"""Push: what refs need arrives, in one step, or nothing does; and which moves are allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from adapters import Adapter
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from exchanges import REMOTE, Place, before_swap, files, merged, place, refs, sound
from proof_models import model_files, write_files

from mstore.api import Store
from mstore.blocks.codecs import Codec
from mstore.blocks.packs import (
    NO_BASE,
    NONCE_BYTES,
    Kind,
    PackEntry,
    SentPack,
    header,
    table_of,
)
from mstore.remotes import outgoing, push
from mstore.remotes.layout import PackState
from mstore.remotes.places import RemotePlaces
from mstore.remotes.shared_directory import SharedDirectory
from mstore.snapshots.signing import SigningKey
from mstore.store import listing
from mstore.terms.errors import BadRequest, Conflict, Corrupt, Incompatible, NotFound
from mstore.terms.ids import PackId, SnapshotId

__all__ = ["place"]


def packs_of(place: Place) -> list[str]:
    """The names of the packs that lie at the remote."""
    return sorted(path.name for path in (place.remote / "packs").rglob("*.pack"))


def refs_of(place: Place) -> dict[str, SnapshotId]:
    """The refs of the remote."""
    rows = place.state().refs().values()
    return {row.name: SnapshotId(row.snapshot) for row in rows if row.snapshot is not None}


# -- what arrives --------------------------------------------------------------------------------


def test_everything_arrives(place: Place) -> None:
    """Models of every codec, merges, virtual ones, an adapter, notes, signatures, tags: all."""
    a = place.store("a")
    place.add(a, "base", 1)
    place.add(a, "raw", 2, codec="raw")
    place.add(a, "dense", 1, 1, codec="dense", base="base")
    place.add(a, "delta", 1, 2, base="base")
    place.add(a, "delta", 1, 3, base="base")
    several = {"empty": b"", "deep/binary": bytes(range(256)) * 700}
    several |= {f"one/{path}": data for path, data in model_files(3).items()}
    several |= {f"two/{path}": data for path, data in model_files(4).items()}
    a.add(write_files(place.path / "several", several), name="several", threads=1)
    ones = np.ones((4, 4), np.float32)
    Adapter({"a": (ones, ones)}).write(place.path / "lora")
    a.add(place.path / "lora", name="lora", threads=1)
    merged(a, "merge", "base", "dense", "delta")
    merged(a, "virtual", "base", "dense", "delta", virtual=True)
    a.tag("v1", "delta~1")
    a.note("merge", {"mmlu": 0.5})
    a.sign("merge", SigningKey(Ed25519PrivateKey.generate()))

    report = a.push(REMOTE, every=True)

    assert {one.name for one in report.moved} == refs(a, "branch", "tag").keys()
    b = place.clone("b")
    assert refs(b, "branch", "tag") == refs(a, "branch", "tag")
    for name in refs_of(place):
        assert b.show(name).snapshot == a.show(name).snapshot
        assert files(b, name) == files(a, name), name
    assert b.show("virtual").virtual
    assert b.explain("merge").plan == a.explain("merge").plan
    assert [one.value for one in b.notes_of("merge")] == [one.value for one in a.notes_of("merge")]
    assert len(b.verify("merge", {}).signatures) == 1
    sound(b)
    codecs = {at.codec for at in _blocks(b).values()}
    assert len(codecs) >= 4, "raw, planes, differences and constants"
    assert a.push(REMOTE, every=True).packs == 0
    assert a.fetch(REMOTE).bytes_received == 0


def _blocks(store: Store) -> dict[bytes, Any]:
    index = store._catalog.index
    with index.env.read() as transaction:
        return dict(index.blocks(transaction))


def test_a_note_that_comes_later_goes_too(place: Place) -> None:
    """Notes of a snapshot that the remote has: both sides get those of the other."""
    a = place.store("a")
    place.add(a, "base", 1)
    a.push(REMOTE, every=True)
    b = place.clone("b")
    a.note("base", {"from": "a"})
    b.note("base", {"score": 1})

    assert a.push(REMOTE, ["base"]).packs == 1
    assert b.push(REMOTE, ["base"]).packs == 1
    a.fetch(REMOTE)
    b.fetch(REMOTE)

    for store in (a, b):
        assert {one.key: one.value for one in store.notes_of("base")} == {"from": "a", "score": 1}
        sound(store)
    assert a.push(REMOTE, every=True).packs == b.push(REMOTE, every=True).packs == 0


def test_ancestors_come_as_records(place: Place) -> None:
    """Of an ancestor only the record comes, marked pruned; later its contents, and never back."""
    a = place.store("a")
    first = place.add(a, "x", 1)
    second = place.add(a, "x", 2)
    a.push(REMOTE, ["x"])
    rows = place.state().rows("snapshots")
    assert [rows[id].is_whole for id in (first, second)] == [False, True]
    b = place.clone("b")
    assert [one.snapshot for one in b.log("x")] == [second, first]
    assert [one.pruned for one in b.log("x")] == [False, True]
    with pytest.raises(NotFound, match="contents were pruned"):
        b.checkout("x~1", place.path / "out")

    a.tag("old", "x~1")
    assert a.push(REMOTE, ["old"]).snapshots == 1
    assert place.state().rows("snapshots")[bytes(first)].is_whole
    a.remove("old")
    place.add(a, "x", 3)
    a.push(REMOTE, ["x"])
    assert place.state().rows("snapshots")[bytes(first)].is_whole

    b.fetch(REMOTE)
    assert files(b, "origin/old") == model_files(1)
    assert not b.log("origin/old")[0].pruned
    sound(b)


def test_contents_of_ancestors(place: Place) -> None:
    """Asked for, ancestors come whole, and a fetch of one's own ref brings them."""
    a = place.store("a")
    first = place.add(a, "x", 1)
    place.add(a, "x", 2)
    a.push(REMOTE, ["x"], ancestors=True)
    rows = place.state().rows("snapshots")
    assert rows[bytes(first)].is_whole
    assert a.push(REMOTE, ["x"], ancestors=True).packs == 0


# -- bases of differences ------------------------------------------------------------------------


def crossed(place: Place) -> tuple[Store, Store]:
    """Two stores with three models each, that chose different bases for the same blocks."""
    a, b = place.store("a"), place.store("b")
    for name, number in (("one", 0), ("two", 1), ("three", 2)):
        place.add(a, name, 1, number, base=None if number == 0 else "one")
    for name, number in (("two", 1), ("one", 0), ("three", 2)):
        place.add(b, name, 1, number, base=None if number == 1 else "two")
    bases = [{at.base for at in _blocks(store).values()} - {NO_BASE} for store in (a, b)]
    assert all(bases)
    assert bases[0].isdisjoint(bases[1])
    return a, b


def test_bases_that_the_remote_has_as_differences(place: Place) -> None:
    """A difference to a block that is itself one at the remote arrives with its base."""
    a, b = crossed(place)
    a.push(REMOTE, ["two"])
    a.push(REMOTE, ["one"])
    b.push(REMOTE, ["three"])

    c = place.clone("c")

    for number, name in enumerate(("one", "two", "three")):
        assert files(c, name) == model_files(1, number)
    sound(c)
    places = RemotePlaces(remote := place.looking(), remote.state())
    for id, at in zip(blocks := list(_blocks(c)), places.locate(Kind.BLOCK, blocks), strict=True):
        assert at is not None, id
        assert at.base == NO_BASE or places.alone([at.base])[0] is not None


def test_bases_that_are_differences_here(place: Place) -> None:
    """What comes as a difference to a block that is one here is stored without a base."""
    a, b = crossed(place)
    a.push(REMOTE, ["three"])
    b.remove("three")
    b.gc(reflog_days=0)

    b.fetch(REMOTE)

    assert files(b, "origin/three") == model_files(1, 2)
    sound(b)


# -- which moves are allowed ---------------------------------------------------------------------


def test_fast_forward_over_any_role(place: Place) -> None:
    """A branch moves to a merge of what it was, which is its base; else it stays."""
    a = place.store("a")
    place.add(a, "base", 1)
    place.add(a, "tuned", 1, 1, base="base")
    a.push(REMOTE, every=True)
    id = merged(a, "merge", "base", "tuned")
    a.reset("base", str(id))
    assert a.push(REMOTE, ["base"]).moved[0].new == id

    b = place.clone("b")
    place.add(b, "tuned", 5)
    b.push(REMOTE, ["tuned"])
    place.add(a, "tuned", 6)
    with pytest.raises(Conflict, match="no ancestor") as caught:
        a.push(REMOTE, ["tuned"])
    assert "fetch" in str(caught.value.hint)
    assert refs_of(place)["tuned"] == b.show("tuned").snapshot


def test_force_with_lease(place: Place) -> None:
    """A branch is replaced only where this store saw it last."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    b = place.clone("b")
    place.add(b, "x", 2)
    b.push(REMOTE, ["x"])
    place.add(a, "x", 3)
    with pytest.raises(Conflict, match="since this store looked"):
        a.push(REMOTE, ["x"], force_with_lease=True)
    a.fetch(REMOTE)
    mine = a.show("x").snapshot
    assert a.push(REMOTE, ["x"], force_with_lease=True).moved[0].new == mine
    assert refs_of(place)["x"] == mine
    assert a.show("origin/x").snapshot == mine


def test_tags_stay(place: Place) -> None:
    """A tag at the remote neither moves nor becomes a branch, nor a branch a tag."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    a.tag("v1", "x")
    a.push(REMOTE, every=True)
    place.add(b, "v1", 1)
    place.add(b, "y", 2)
    b.tag("x", "y")
    for name in ("v1", "x"):
        for force in (False, True):
            with pytest.raises(Conflict, match="is another"):
                b.push(REMOTE, [name], force_with_lease=force)
    b.remove("v1")
    b.tag("v1", "y")
    with pytest.raises(Conflict, match="tags do not move"):
        b.push(REMOTE, ["v1"])
    a.remove("v1")
    a.tag("v1", "x")
    assert not a.push(REMOTE, ["v1"]).moved


def test_delete(place: Place) -> None:
    """A ref is removed there; then its name is free, also below it; its moves stay."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    id = a.show("x").snapshot
    assert a.push(REMOTE, delete=["x"]).moved[0].new is None
    assert refs_of(place) == {}
    assert "remotes/origin/x" not in refs(a, "remote")
    moves = place.state().refs()["x"].moves
    assert [(one.old, one.new) for one in moves] == [(None, bytes(id)), (bytes(id), None)]
    with pytest.raises(NotFound, match="no such ref"):
        a.push(REMOTE, delete=["x"])
    with pytest.raises(BadRequest, match="at once"):
        a.push(REMOTE, ["x"], delete=["x"])
    a.push(REMOTE, ["x"])
    assert refs_of(place) == {"x": id}


def test_nesting(place: Place) -> None:
    """A name below or above one there is refused, unless that is removed in the same step."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    place.add(b, "x/y", 2)
    a.push(REMOTE, ["x"])
    with pytest.raises(Conflict, match="below the other"):
        b.push(REMOTE, ["x/y"])
    b.push(REMOTE, ["x/y"], delete=["x"])
    assert set(refs_of(place)) == {"x/y"}
    with pytest.raises(Conflict, match="below the other"):
        a.push(REMOTE, ["x"])
    a.fetch(REMOTE, ["x/y"])
    assert files(a, "origin/x/y") == model_files(2)
    assert "remotes/origin/x" not in refs(a, "remote")


def test_what_is_pushed(place: Place) -> None:
    """Names, patterns or all; other kinds, unknown names, nothing at all are refused."""
    a = place.store("a")
    for name in ("team/a", "team/b", "other"):
        place.add(a, name, 1)
    with pytest.raises(BadRequest, match="no ref was named"):
        a.push(REMOTE)
    with pytest.raises(BadRequest, match="not both"):
        a.push(REMOTE, ["other"], every=True)
    with pytest.raises(NotFound):
        a.push(REMOTE, ["othre"])
    with pytest.raises(NotFound, match="matches"):
        a.push(REMOTE, ["nothing/*"])
    assert not place.remote.exists()
    told = a.push(REMOTE, ["team/*"], dry_run=True)
    assert told.bytes_sent > 0
    assert told.packs == 1
    assert not place.remote.exists()
    a.push(REMOTE, ["team/*"])
    assert set(refs_of(place)) == {"team/a", "team/b"}
    with pytest.raises(BadRequest, match="only branches and tags"):
        a.push(REMOTE, ["remotes/origin/team/a"])
    before = packs_of(place)
    assert a.push(REMOTE, every=True, dry_run=True).moved[0].name == "other"
    assert packs_of(place) == before
    assert set(refs_of(place)) == {"team/a", "team/b"}


def test_another_block_size(place: Place) -> None:
    """A store with other blocks neither pushes nor fetches."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    with Store.init(place.path / "other", block_size=1 << 17) as other:
        other.add_remote(REMOTE, place.url)
        other.add(place.model(1), name="y", threads=1)
        with pytest.raises(Incompatible, match="blocks of"):
            other.push(REMOTE, ["y"])
        with pytest.raises(Incompatible, match="blocks of"):
            other.fetch(REMOTE)


# -- others, meanwhile ---------------------------------------------------------------------------


def test_overtaken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ref that moves first: the push reads again, sends nothing twice, both refs stand."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "x", 1)
    place.add(b, "y", 2)
    place.add(a, "start", 3)
    a.push(REMOTE, ["start"])
    with before_swap(monkeypatch, lambda: b.push(REMOTE, ["y"]) and None) as swaps:
        report = a.push(REMOTE, ["x"])
    assert len(swaps) == 3
    assert report.packs == 1
    assert len(packs_of(place)) == 3
    assert set(refs_of(place)) == {"start", "x", "y"}
    sound(place.clone("c"))


def test_overtaken_with_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else pushes the same contents first: nothing is lost, and the ref decides again."""
    a, b = place.store("a"), place.store("b")
    place.add(a, "start", 3)
    a.push(REMOTE, ["start"])
    place.add(a, "x", 1)
    place.add(b, "x", 1, 1)
    place.add(b, "same", 1)
    with (
        before_swap(monkeypatch, lambda: b.push(REMOTE, every=True) and None),
        pytest.raises(Conflict, match="no ancestor"),
    ):
        a.push(REMOTE, ["x"])
    assert refs_of(place)["x"] == b.show("x").snapshot
    b.fetch(REMOTE)
    sound(place.clone("c"))


def change_packs(place: Place, state: PackState) -> list[str]:
    """Give every pack of the remote a state; return their names."""
    rows = place.state().packs().values()
    place.change("packs", *(msgspec.structs.replace(row, state=state, time_ns=5) for row in rows))
    return packs_of(place)


def test_condemned_packs_live_again(place: Place) -> None:
    """A push that needs what lies in condemned packs makes these live, and sends nothing."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    change_packs(place, PackState.CONDEMNED)
    a.tag("v1", "x")
    assert a.push(REMOTE, ["v1"]).packs == 0
    assert {row.state for row in place.state().packs().values()} == {PackState.LIVE}


@pytest.mark.parametrize("state", [PackState.DELETING, PackState.DELETED])
def test_deleted_packs_never_come_back(place: Place, state: PackState) -> None:
    """What lay in deleted packs is sent again, in a pack of another name."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    before = change_packs(place, state)
    if state == PackState.DELETED:
        for path in (place.remote / "packs").rglob("*.pack"):
            path.unlink()
    a.tag("v1", "x")
    assert a.push(REMOTE, ["v1"]).packs == 1
    rows = place.state().packs().values()
    assert [row.state for row in rows if f"{row.pack.hex()}.pack" in before] == [state]
    assert [row.state for row in rows].count(PackState.LIVE) == 1
    c = place.clone("c")
    assert files(c, "x") == files(c, "v1") == model_files(1)
    sound(c)


def test_deleted_while_pushing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that this push put, and gc removed before the root named it, is not named by it."""
    a = place.store("a")
    place.add(a, "start", 3)
    a.push(REMOTE, ["start"])
    place.add(a, "x", 1)
    start = next(iter(place.state().packs()))

    def remove() -> None:
        [new] = [one for one in packs_of(place) if not one.startswith(start.hex())]
        (place.remote / "packs" / new[:2] / new).unlink()
        row = place.state().packs()[start]
        gone = msgspec.structs.replace(
            row,
            id=bytes.fromhex(new.removesuffix(".pack")),
            state=PackState.DELETED,
            entries=0,
            table=bytes(32),
            offset=0,
            length=0,
        )
        place.change("packs", gone)

    with before_swap(monkeypatch, remove):
        assert a.push(REMOTE, ["x"]).packs == 2
    c = place.clone("c")
    assert files(c, "x") == model_files(1)
    sound(c)


def test_neither_here_nor_there(place: Place) -> None:
    """A push of what this store has lost, and the remote never had, names it."""
    a = place.store("a")
    place.add(a, "x", 1)
    index = a._catalog.index
    lost = next(id for id, at in _blocks(a).items() if at.stored_length > 1000)
    with a._catalog.committing() as transaction:
        index.delete_row(transaction, (Kind.BLOCK, lost))
    with pytest.raises(Corrupt, match="neither here nor at origin") as caught:
        a.push(REMOTE, ["x"])
    assert caught.value.where == bytes(lost).hex()
    assert packs_of(place) == []


def test_what_is_lost_here_and_there_is_pushed(place: Place) -> None:
    """A push needs no bytes from here that the remote has."""
    a = place.store("a")
    place.add(a, "x", 1)
    a.push(REMOTE, ["x"])
    a.tag("v1", "x")
    for path in (place.path / "a" / "packs").rglob("*.pack"):
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[4096 + 100] ^= 1
        path.write_bytes(data)
    assert a.push(REMOTE, ["v1"]).packs == 0


def test_damage_here_is_not_sent(place: Place) -> None:
    """A block that does not match its id stops the push; nothing is visible."""
    a = place.store("a")
    place.add(a, "x", 1)
    for path in (place.path / "a" / "packs").rglob("*.pack"):
        path.chmod(0o600)
        data = bytearray(path.read_bytes())
        data[4096 + 100] ^= 1
        path.write_bytes(data)
    with pytest.raises(Corrupt):
        a.push(REMOTE, ["x"])
    assert refs_of(place) == {}
    assert packs_of(place) == []


# -- interruption --------------------------------------------------------------------------------


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 32 KiB, so that a model needs several."""
    monkeypatch.setattr(outgoing, "PACK_BYTES", 32 << 10)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_packs")
@pytest.mark.parametrize("at", ["in a pack", "between packs", "before the root"])
def test_interrupted(place: Place, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """An interrupted push shows nothing; the next one puts no finished pack again."""
    a = place.store("a")
    place.add(a, "start", 9, 1)
    a.push(REMOTE, ["start"])
    began = place.state()
    place.add(a, "base", 1)
    place.add(a, "x", 1, 1, base="base")
    put = SharedDirectory.put
    names: list[str] = []
    count = 0

    def stopping(
        self: SharedDirectory, name: str, size: int, pieces: Any, *, jobs: int = 1
    ) -> None:
        nonlocal count
        count += 1
        if at == "between packs" and count == 3:
            raise KeyboardInterrupt
        if at == "in a pack" and count == 3:
            some = iter(pieces)
            pieces = [next(some), next(some)]

            def cut() -> Iterator[bytes]:
                yield from pieces
                raise KeyboardInterrupt

            put(self, name, size, cut(), jobs=jobs)
        if at == "before the root" and not name.startswith("packs/"):
            raise KeyboardInterrupt
        put(self, name, size, pieces, jobs=jobs)
        names.append(name)

    with monkeypatch.context() as patch:
        patch.setattr(SharedDirectory, "put", stopping)
        with pytest.raises(KeyboardInterrupt):
            a.push(REMOTE, every=True)
    assert place.state().root == began.root
    finished = [name for name in names if name.startswith("packs/")]
    assert finished

    again: list[str] = []

    def telling(self: SharedDirectory, name: str, *rest: Any, **more: Any) -> None:
        again.append(name)
        put(self, name, *rest, **more)

    monkeypatch.setattr(SharedDirectory, "put", telling)
    a.push(REMOTE, every=True)
    assert not set(finished) & set(again)
    named = {f"packs/{row.pack.hex()[:2]}/{row.pack.hex()}.pack" for row in _packs(place)}
    assert set(finished) <= named
    assert not any((place.path / "a" / "remotes" / REMOTE / "sent").iterdir())
    c = place.clone("c")
    for name in ("start", "base", "x"):
        assert files(c, name) == files(a, name)
    sound(c)


def _packs(place: Place) -> list[Any]:
    return list(place.state().packs().values())


@pytest.mark.usefixtures("small_packs")
def test_interrupted_and_removed_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted push put, and somebody removed, is sent again."""
    a = place.store("a")
    place.add(a, "x", 1)
    with monkeypatch.context() as patch:
        patch.setattr(push.TableId, "of", _interrupting)
        with pytest.raises(KeyboardInterrupt):
            a.push(REMOTE, ["x"])
    for path in list((place.remote / "packs").rglob("*.pack"))[::2]:
        path.unlink()
    a.push(REMOTE, ["x"])
    c = place.clone("c")
    assert files(c, "x") == model_files(1)
    sound(c)


def _interrupting(_data: bytes) -> None:
    raise KeyboardInterrupt


def test_where_sent_packs_have_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their tables are looked at together, a form that needs no base goes first."""
    ids = [bytes([number]) * 32 for number in range(1, 7)]
    base = bytes(31) + b"b"

    def pack(*own: tuple[bytes, bytes, int]) -> SentPack:
        _, rows = table_of(
            PackEntry(id, Kind.BLOCK, Codec.RAW, 2, 4096, size, 64, of) for id, of, size in own
        )
        data = header(os.urandom(NONCE_BYTES)) + rows
        return SentPack(PackId.of(data), 8192, data)

    packs = [
        pack((ids[0], NO_BASE, 10), (ids[1], base, 11), (ids[2], base, 12)),
        pack(),
        pack((ids[0], base, 20), (ids[1], NO_BASE, 21), (ids[2], base, 22)),
        pack((ids[3], NO_BASE, 33)),
    ]
    for most in (1, 1 << 20):
        monkeypatch.setattr(outgoing, "_TABLE_BYTES", most)
        sent = outgoing.SentPacks()
        assert not sent.found(Kind.BLOCK, ids).is_there.any()
        sent.add(*packs)
        found = sent.found(Kind.BLOCK, ids)
        assert found.stored.tolist()[:2] == [10, 21]
        assert found.stored[2] in (12, 22)
        assert found.stored.tolist()[3:] == [33, -1, -1]
        assert found.is_alone.tolist() == [True, True, False, True, False, False]
        assert found.packs[found.pack[3]] == packs[3].id
        assert not sent.found(Kind.TENSOR, ids).is_there.any()
        assert not len(sent.found(Kind.BLOCK, []).stored)
        sent.drop([packs[0].id])
        assert sent.found(Kind.BLOCK, ids[:3]).stored.tolist() == [20, 21, 22]


def test_a_store_that_is_only_read(place: Place) -> None:
    """Who may not write a store can push from it; nothing is written there."""
    a = place.store("a")
    place.add(a, "x", 1)
    patch = pytest.MonkeyPatch()
    with patch.context() as within:
        for where in ("mstore.remotes.registry.may_write", "mstore.remotes.push.may_write"):
            within.setattr(where, lambda catalog: False)
        assert a.push(REMOTE, ["x"]).packs == 1
        assert a.push(REMOTE, ["x"]).packs == 0
        assert a.remote_contents(REMOTE).packs == 1
    assert not (place.path / "a" / "remotes").exists()
    assert not refs(a, "remote")
    assert files(place.clone("c"), "x") == model_files(1)


def test_history_that_ends(place: Place) -> None:
    """A parent that a repair dropped, here and at the remote, ends the history there, too."""
    a = place.store("a")
    first = place.add(a, "x", 1)
    second = place.add(a, "x", 2)
    index = a._catalog.index
    with a._catalog.committing() as transaction:
        listing.unlist(index, transaction, first)
        index.delete_row(transaction, (Kind.SNAPSHOT, first))
    a.push(REMOTE, ["x"])
    assert list(place.state().rows("snapshots")) == [second]
    c = place.clone("c")
    assert list(c._catalog.snapshot_ids()) == [second]
    assert files(c, "x") == model_files(2)
    [problem] = c.fsck(read_data=True).problems
    assert problem.what.endswith("is missing"), "as fsck says where it was dropped"
    place.add(c, "x", 3)
    c.push(REMOTE, ["x"])
    a.pull(REMOTE)
    assert files(a, "x") == model_files(3)


def test_a_file_in_the_way(place: Place) -> None:
    """Records of packs that were put are only believed if they prove themselves."""
    a = place.store("a")
    place.add(a, "x", 1)
    with suppress(NotFound):
        a.fetch(REMOTE)
    sent = place.path / "a" / "remotes" / REMOTE / "sent"
    sent.mkdir(parents=True, exist_ok=True)
    Path(sent / "name").write_bytes(b"")
    (sent / ("ab" * 32)).write_bytes(json.dumps({}).encode())
    a.push(REMOTE, ["x"])
    assert files(place.clone("c"), "x") == model_files(1)
