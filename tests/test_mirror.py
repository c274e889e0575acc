"""The text mirror of the refs: what it says, what is refused, and what it keeps of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore.blocks.schema import REFS
from mstore.store import mirror, refs, sealed_text
from mstore.store.catalog import Catalog
from mstore.store.refs import BRANCH, TAG, Ref, refs_in
from mstore.terms.errors import Conflict, Corrupt, MstoreError
from mstore.terms.ids import SnapshotId


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """An empty store."""
    catalog = Catalog.create(tmp_path / "store", 1 << 16)
    yield catalog
    catalog.close()


def ref(number: int, kind: str = BRANCH) -> Ref:
    """A ref at a made-up snapshot."""
    return Ref(kind, SnapshotId(number.to_bytes(32, "big")))


def move(catalog: Catalog, name: str, expect: Ref | None, new: Ref | None) -> None:
    """One move, published."""
    with catalog.committing() as rows:
        refs_in(catalog.index, rows).move(name, expect=expect, new=new, action="test", time_ns=7)


def kept(catalog: Catalog) -> list[str]:
    """The files beside the mirror."""
    found = (path.name for path in catalog.layout.mirror.parent.iterdir())
    return sorted(name for name in found if name != "mirror")


def test_the_mirror_is_text_for_people(catalog: Catalog) -> None:
    """Its generation, one line a ref (kind, id, name; sorted by name), and the hash of all that."""
    move(catalog, "b", None, ref(2, TAG))
    move(catalog, "a/ü", None, ref(1))
    body = (
        "mstore refs 2\ngeneration 2\n"
        f"branch {ref(1).snapshot_id()} a/ü\ntag {ref(2).snapshot_id()} b\n"
    )
    hash = blake3(body.encode()).hexdigest()
    assert catalog.layout.mirror.read_text(encoding="utf-8") == f"{body}blake3 {hash}\n"
    told = mirror.read(catalog.layout)
    assert told.generation == 2
    assert told.refs == catalog.refs()


def test_a_damaged_mirror_is_refused(catalog: Catalog) -> None:
    """Cut anywhere, any byte changed, or of another kind: Corrupt, naming the file."""
    move(catalog, "a", None, ref(1))
    move(catalog, "b/c", None, ref(2))
    whole = catalog.layout.mirror.read_bytes()
    spoiled = [whole[:end] for end in range(len(whole))]
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        spoiled.append(bytes(changed))
    spoiled += [bytes(len(whole)), b"\xff" * 100, whole + b"junk\n", b"mstore refs 2\n"]
    for contents in spoiled:
        catalog.layout.mirror.write_bytes(contents)
        with pytest.raises(Corrupt) as refusal:
            mirror.read(catalog.layout)
        assert refusal.value.where == str(catalog.layout.mirror)
        assert mirror.generation(catalog.layout) is None


def test_a_mirror_without_end_is_refused(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of it is read than the limit, and one byte more is Corrupt."""
    move(catalog, "a", None, ref(1))
    monkeypatch.setattr(sealed_text, "MAX_BYTES", catalog.layout.mirror.stat().st_size)
    assert mirror.read(catalog.layout).refs == catalog.refs()
    with catalog.layout.mirror.open("ab") as file:
        file.write(b"x")
    with pytest.raises(Corrupt, match="longer than"):
        mirror.read(catalog.layout)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_no_mirror_is_a_surprise(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    """Any bytes give refs with sound names, or an error of ours."""
    root = tmp_path_factory.getbasetemp() / "mirror store"
    if not root.exists():
        Catalog.create(root, 1 << 16).close()
    catalog = Catalog.open(root)
    body = b"mstore refs 2\ngeneration 0\n" + text
    whole = body + b"blake3 " + blake3(body).hexdigest().encode() + b"\n"
    for contents in (text, whole):
        catalog.layout.mirror.write_bytes(contents)
        try:
            for name in mirror.read(catalog.layout).refs:
                refs.check_name(name)
        except MstoreError:
            pass
    catalog.close()


def test_earlier_mirrors_stay(catalog: Catalog) -> None:
    """Those with other refs, under their generation, the newest eight; a damaged one too."""
    for number in range(1, 13):
        move(catalog, f"b{number}", None, ref(number))
    assert kept(catalog) == sorted(f"mirror.{number}" for number in range(4, 12))
    newest = mirror.earlier(catalog.layout)[0][1]
    assert (newest.generation, len(newest.refs)) == (11, 11)
    catalog.layout.mirror.write_bytes(b"?")
    move(catalog, "c", None, ref(1))
    assert "mirror.damaged" in kept(catalog)


NAMES = ("a", "b/c", "b-d", "b", "ü", "z", "Z", "a.b")
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.booleans()), max_size=12)


@given(STEPS, st.sampled_from(("nothing", "mirror lost", "mirror damaged", "mirror behind")))
@settings(max_examples=12, deadline=None)
def test_a_move_leaves_the_mirror_that_is_written_whole(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, bool]],
    accident: str,
) -> None:
    """Line by line or whole: byte for byte the same, whatever was there before."""
    catalog = Catalog.create(tmp_path_factory.mktemp("moves") / "store", 1 << 16)
    path = catalog.layout.mirror
    for number, (name, snapshot, is_tag) in enumerate(steps):
        if number == len(steps) // 2:
            if accident == "mirror lost":
                path.unlink()
            elif accident == "mirror damaged":
                path.write_bytes(b"?")
            elif accident == "mirror behind":
                with catalog.index.env.write() as rows:
                    catalog.index.set_generation(rows, catalog.index.generation(rows) + 1)
        now = catalog.refs().get(name)
        with suppress(Conflict):
            move(catalog, name, now, ref(snapshot, TAG if is_tag else BRANCH) if snapshot else None)
    # Refused moves write no mirror: if all after the accident were, this is the first that does.
    move(catalog, "last", None, ref(1))
    followed = path.read_bytes()
    path.unlink()
    mirror.write(catalog.layout, catalog.index)
    assert path.read_bytes() == followed
    catalog.close()


def test_a_move_does_not_mirror_what_damaged_rows_say(catalog: Catalog) -> None:
    """The lines of other refs stay as they were, and the move is mirrored."""
    move(catalog, "a", None, ref(1))
    move(catalog, "b", None, ref(2))
    with catalog.index.env.write() as rows:
        rows.put(b"a", b"junk", db=catalog.index.db("refs"))
    move(catalog, "b", ref(2), ref(3))
    assert mirror.read(catalog.layout) == mirror.Mirror(3, {"a": ref(1), "b": ref(3)})


def test_a_mirror_with_other_refs_than_the_index_is_written_whole(catalog: Catalog) -> None:
    """Where their numbers differ, no line of it is kept."""
    move(catalog, "a", None, ref(1))
    with catalog.index.env.write() as rows:
        catalog.index.put(rows, REFS, "c", ref(7))
    move(catalog, "b", None, ref(2))
    assert mirror.read(catalog.layout).refs == catalog.refs()


def test_a_commit_that_moves_no_ref_keeps_no_mirror(catalog: Catalog) -> None:
    """Only the generation is another: what was replaced said the same."""
    move(catalog, "a", None, ref(1))
    before = kept(catalog)
    with catalog.committing():
        pass
    assert mirror.read(catalog.layout).generation == 2
    assert kept(catalog) == before


def test_a_later_mirror_is_never_replaced(catalog: Catalog) -> None:
    """Where the mirror knows more than the index, it stays as it is."""
    move(catalog, "a", None, ref(1))
    move(catalog, "b", None, ref(1))
    whole = catalog.layout.mirror.read_bytes()
    with catalog.index.env.write() as rows:
        catalog.index.set_generation(rows, 1)
    with pytest.raises(Corrupt) as refusal:
        mirror.write(catalog.layout, catalog.index)
    assert refusal.value.hint == "mstore.Store.reindex(PATH)"
    assert catalog.layout.mirror.read_bytes() == whole
