"""Revisions: what a person may type for a snapshot, and which snapshot that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.store import listing
from mstore.store.catalog import Catalog
from mstore.store.objects.snapshot import BASE, PREVIOUS, Parent, SnapshotRecord
from mstore.store.refs import BRANCH, TAG, Ref, check_name, refs_in
from mstore.store.revisions import Revision, parse
from mstore.store.transaction import RefMove, Transaction, choose_moves
from mstore.terms.errors import BadName, MstoreError, NotFound
from mstore.terms.ids import ManifestId, SnapshotId

NAMES = st.text(alphabet="abé日./-_09", min_size=1, max_size=30).filter(
    lambda name: not name.startswith(("-", "."))
)


# -- parsing -----------------------------------------------------------------------------------


@given(
    name=NAMES,
    back=st.none() | st.integers(0, 999_999_999),
    steps=st.lists(st.none() | st.integers(0, 999), max_size=4),
)
def test_what_is_written_is_read(name: str, back: int | None, steps: list[int | None]) -> None:
    """NAME, @{N} and any number of ~N come apart again; a bare ~ is one step."""
    text = name + ("" if back is None else f"@{{{back}}}")
    text += "".join("~" if step is None else f"~{step}" for step in steps)
    total = sum(1 if step is None else step for step in steps)
    assert parse(text) == Revision(name, back, total)


@given(st.text(max_size=60) | st.text(alphabet="ab~@{}019 \n", max_size=60))
def test_parsing_never_surprises(text: str) -> None:
    """Any text is a revision or a BadName with a hint; whatever could be a ref is just its name."""
    try:
        parsed = parse(text)
    except BadName as error:
        assert error.hint is not None  # noqa: PT017 -- any text may be one or the other
        return
    assert parsed.name
    assert parsed.steps >= 0
    assert text.startswith(parsed.name)
    try:
        check_name(text)
    except BadName:
        return
    assert parsed == Revision(text, None, 0)


@pytest.mark.parametrize("text", ["", "a\n", "~" * 100_000 + "x", "a" * 5000])
def test_no_name_no_revision(text: str) -> None:
    """Nothing, several lines, and endless texts are refused at once, and briefly."""
    with pytest.raises(BadName) as refusal:
        parse(text)
    assert len(str(refusal.value)) < 1100


# -- resolving ---------------------------------------------------------------------------------


class Lineage:
    """A store with a chain of four snapshots, the last under `main`, and a base beside it."""

    def __init__(self, root: Path) -> None:
        self.catalog = Catalog.create(root, 1 << 16)
        self.base = self._add("base", [], None)
        self.chain: list[SnapshotId] = []
        for number in range(4):
            parents = [Parent(PREVIOUS, self.chain[-1])] if self.chain else []
            expect = Ref(BRANCH, self.chain[-1]) if self.chain else None
            new = self._add(f"{number}", [*parents, Parent(BASE, self.base)], expect)
            self.chain.append(new)

    def _add(self, message: str, parents: list[Parent], expect: Ref | None) -> SnapshotId:
        manifest = ManifestId(bytes(32))
        record = SnapshotRecord(
            manifest, tuple(parents), "add", None, "", None, None, message, 1, "test"
        )
        id = record.id()
        name = "base" if message == "base" else "main"
        with Transaction(self.catalog, "test") as transaction:
            move = RefMove(name, expect, Ref(BRANCH, id), message)
            transaction.commit(snapshots=[record], moves=[move])
        return id


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lineage]:
    """The store above."""
    lineage = Lineage(tmp_path_factory.mktemp("lineage") / "store")
    yield lineage
    lineage.catalog.close()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("main", 3),
        ("main~0", 3),
        ("main~", 2),
        ("main~1", 2),
        ("main~~", 1),
        ("main~2~1", 0),
        ("main@{0}", 3),
        ("main@{3}", 0),
        ("main@{1}~1", 1),
    ],
)
def test_resolving(lineage: Lineage, text: str, number: int) -> None:
    """Steps go along the first parent, positions back in the reflog, and both may be combined."""
    assert lineage.catalog.resolve(text) == lineage.chain[number]


def test_past_the_previous_comes_the_base(lineage: Lineage) -> None:
    """The first snapshot's first parent is its base, and there the lineage ends."""
    assert lineage.catalog.resolve("main~4") == lineage.base
    with pytest.raises(NotFound, match="lineage ends") as end:
        lineage.catalog.resolve("main~5")
    assert end.value.where == "main~5"
    assert str(end.value.hint) == "store.log('main')"
    with pytest.raises(NotFound, match="lineage ends"):
        lineage.catalog.resolve("main~999999999")


def test_prefixes(lineage: Lineage) -> None:
    """Four or more digits name the one snapshot that begins so; a whole id names itself."""
    for id in lineage.chain:
        for length in (12, 13, 40, 64):
            assert lineage.catalog.resolve(id.hex()[:length]) == id
        assert lineage.catalog.resolve(f"{id.hex()[:12]}~0") == id
    with pytest.raises(NotFound):
        lineage.catalog.resolve("f" * 64)
    with pytest.raises(NotFound):
        lineage.catalog.resolve(lineage.chain[0].hex()[:3])


def test_ambiguous_prefixes_are_refused(lineage: Lineage, tmp_path: Path) -> None:
    """A prefix of several snapshots is a BadName that lists them; one more digit may decide."""
    catalog = Catalog.create(tmp_path / "store", 1 << 16)
    ids = [SnapshotId(bytes.fromhex(f"abc{n:x}".ljust(64, "0"))) for n in (0, 1, 15)]
    with catalog.index.env.write() as rows:
        for id in (*ids, SnapshotId(b"\xff" * 32), SnapshotId(bytes(32))):
            rows.put(id, bytes(40), db=catalog.index.db("snapshots"))
    with catalog.index.env.read() as rows:
        assert listing.with_prefix(catalog.index, rows, "abc") == ids
        assert listing.with_prefix(catalog.index, rows, "abc1") == ids[1:2]
        assert listing.with_prefix(catalog.index, rows, "ffff") == [SnapshotId(b"\xff" * 32)]
        assert listing.with_prefix(catalog.index, rows, "abd") == []
    with pytest.raises(NotFound):
        catalog.resolve("abd0")
    assert catalog.resolve("abc1") == ids[1]
    with catalog.index.env.write() as rows:
        also = SnapshotId(bytes.fromhex("abc1".ljust(64, "1")))
        rows.put(also, bytes(40), db=catalog.index.db("snapshots"))
    with pytest.raises(BadName, match="several snapshots") as refusal:
        catalog.resolve("abc1")
    assert ids[1].short in str(refusal.value)
    assert also.short in str(refusal.value)
    catalog.close()


def test_names_go_before_prefixes(tmp_path: Path) -> None:
    """A ref that reads like the beginning of an id is the ref; a new one is not let in."""
    lineage = Lineage(tmp_path / "store")
    prefix = lineage.chain[0].hex()[:6]
    tag = Ref(TAG, lineage.base)
    with pytest.raises(BadName, match="begins with it"):
        choose_moves(lineage.catalog, lambda _: [RefMove(prefix, None, tag, "tag")])
    index = lineage.catalog.index
    with index.env.write() as rows:
        # As if the name had been there first, and the snapshot of that id came later.
        refs_in(index, rows).move(prefix, expect=None, new=tag, action="tag", time_ns=1)
    assert lineage.catalog.resolve(prefix) == lineage.base
    assert lineage.catalog.resolve(lineage.chain[0].hex()[:7]) == lineage.chain[0]
    lineage.catalog.close()


def test_the_reflog_survives_its_ref(tmp_path: Path) -> None:
    """A removed ref is not found, and the error says how to restore it; where it was is found; the
    removal itself points nowhere."""
    lineage = Lineage(tmp_path / "store")
    last = Ref(BRANCH, lineage.chain[3])
    choose_moves(lineage.catalog, lambda _: [RefMove("main", last, None, "rm")])
    with pytest.raises(NotFound, match="was removed") as removed:
        lineage.catalog.resolve("main")
    assert str(removed.value.hint) == "store.reset('main', 'main@{1}')"
    with pytest.raises(NotFound, match="removed at that move"):
        lineage.catalog.resolve("main@{0}")
    assert lineage.catalog.resolve("main@{1}") == lineage.chain[3]
    with pytest.raises(NotFound, match="only 5 entries"):
        lineage.catalog.resolve("main@{5}")
    lineage.catalog.close()


@given(st.text(max_size=40))
def test_resolving_never_surprises(lineage: Lineage, text: str) -> None:
    """Any text names a snapshot that is there, or raises an error of ours."""
    try:
        found = lineage.catalog.resolve(text)
    except MstoreError:
        return
    assert found in [lineage.base, *lineage.chain]


@pytest.mark.parametrize(
    "text", ["\ud800", "\udc80@{1}", "a\0b", "x" * 999, "never", "never@{0}", "~", "~1", "@{1}"]
)
def test_odd_names_are_not_found(lineage: Lineage, text: str) -> None:
    """Texts that cannot be stored as names are looked up all the same, and not found."""
    with pytest.raises(NotFound):
        lineage.catalog.resolve(text)


@pytest.mark.parametrize("text", ["main~x", "main~-1", "main@{x}", "main@{-1}", "main@{", "m~1x"])
def test_what_follows_a_name_is_a_whole_number(lineage: Lineage, text: str) -> None:
    """A name with an odd number behind it is told what may stand there, not another name."""
    with pytest.raises(NotFound) as caught:
        lineage.catalog.resolve(text)
    assert caught.value.where == text
    assert caught.value.hint == "REF~N and REF@{N} take a whole number"
