"""Refs: which names may be, compare-and-swap, and the reflog."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import small_model

from mstore.api import Store
from mstore.errors import BadName, Conflict, NotFound
from mstore.ids import SnapshotId
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.refs import BRANCH, TAG, Move, Ref

NAMES = ["a", "a/b", "a/b/c", "ab", "a.b", "é", "a-b", "z/z", "llama/merged"]


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
    """One move in a transaction of its own."""
    with catalog.index.env.write() as rows:
        refs.move(catalog.index, rows, name, expect=expect, new=new, action="test", time_ns=7)


def reflog(catalog: Catalog, name: str) -> list[Move]:
    """All moves of a name."""
    with catalog.index.env.read() as rows:
        return refs.reflog(catalog.index, rows, name)


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "main",
        "llama/merged",
        "a/b/c/d",
        "v1.0",
        "x+y,z",
        "UPPER",
        "日本/モデル",
        "ünïcödé",
        "🦙",
        "a..b",
        "a.",
        "dead-beef",
        "deadbeef",
        "0123456789abcde",
        "0123456789ABCDEF",
        "x" * 200,
    ],
)
def test_good_names(name: str) -> None:
    """Letters of any script, digits, dots inside, dashes inside, slashes between."""
    refs.check_name(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("/a", "empty part"),
        ("a/", "empty part"),
        ("a//b", "empty part"),
        (".", "starts with"),
        ("..", "starts with"),
        ("a/../b", "starts with"),
        ("a/.hidden", "starts with"),
        ("-rf", "starts with"),
        ("a/-b", "starts with"),
        ("a.lock", "ends with"),
        ("a.lock/b", "ends with"),
        ("a b", "contains ' '"),
        ("a\tb", "contains"),
        ("a\nb", "contains"),
        ("a\0b", "contains"),
        ("a\x85b", "contains"),
        ("a\xa0b", "contains"),
        ("\x9b2J", "contains"),
        ("a\u2028b", "contains"),
        ("gpj\u202e.exe", "contains"),
        ("a\u200bb", "contains"),
        ("a~1", "contains '~'"),
        ("a@{1}", "contains '@'"),
        ("a:b", "contains ':'"),
        ("a=1", "contains '='"),
        ("a\\b", "contains"),
        ("$HOME", "contains"),
        ("a*", "contains"),
        ("0123456789abcdef", "looks like an id"),
        ("f" * 64, "looks like an id"),
        ("x" * 201, "longer than 200 bytes"),
        ("é" * 101, "longer than 200 bytes"),
        ("e\u0301", "normal form C"),
        ("half \ud83d pair", "not valid Unicode"),
    ],
)
def test_bad_names(name: str, why: str) -> None:
    """Each bad name is refused for its own reason, with a hint, in one printable line."""
    with pytest.raises(BadName, match=why) as refusal:
        refs.check_name(name)
    assert refusal.value.hint is not None
    assert str(refusal.value).isprintable()


def test_a_new_name_hides_no_snapshot(tmp_path: Path) -> None:
    """What begins a stored snapshot's id is refused as a new name; other hex digits are fine."""
    with Store.init(tmp_path / "store") as store:
        id = str(store.add(small_model(tmp_path / "model", "s"), name="m").snapshot)
        for length in (4, 8, 12, 15):
            with pytest.raises(BadName, match="begins with it"):
                store.add(tmp_path / "model", name=id[:length])
            with pytest.raises(BadName, match="begins with it"):
                store.tag(id[:length], "m")
        assert [ref.name for ref in store.refs()] == ["m"]
        other = "20250101" if not id.startswith("2025") else "30250101"
        store.tag(other, "m")
        assert str(store[id[:12]].id) == id


@given(st.text(max_size=220))
@example("\ud800")
def test_an_accepted_name_is_safe_everywhere(name: str) -> None:
    """Whatever is accepted is a relative path below any directory, one word, and no revision."""
    try:
        refs.check_name(name)
    except BadName:
        return
    assert PurePosixPath("/mount/refs", name).parts == ("/", "mount", "refs", *name.split("/"))
    assert not {"..", "."} & set(name.split("/"))
    assert len(name.split()) == len(name.splitlines()) == 1
    assert not set(name) & set("~^:@{}*?\\\0")
    assert unicodedata.normalize("NFC", name) == name
    assert name.encode().decode() == name


# -- moves -------------------------------------------------------------------------------------


def test_compare_and_swap(catalog: Catalog) -> None:
    """A move from what the ref is succeeds; from anything else it is a Conflict, and not done."""
    move(catalog, "a", None, ref(1))
    for expect in (None, ref(2), ref(1, TAG)):
        with pytest.raises(Conflict, match="moved") as conflict:
            move(catalog, "a", expect, ref(3))
        assert conflict.value.where == "a"
        assert conflict.value.hint is not None
    assert catalog.ref("a") == ref(1)
    move(catalog, "a", ref(1), ref(3))
    assert catalog.ref("a") == ref(3)
    assert len(reflog(catalog, "a")) == 2


@pytest.mark.parametrize(
    ("there", "new"), [("a", "a/b"), ("a", "a/b/c"), ("a/b", "a"), ("a/b/c", "a"), ("a/b/c", "a/b")]
)
def test_a_name_is_no_directory_of_another(catalog: Catalog, there: str, new: str) -> None:
    """Of two names one of which would be a directory of the other, the second is a Conflict that
    names the first; when that is removed, it works."""
    move(catalog, there, None, ref(1))
    with pytest.raises(Conflict, match=there):
        move(catalog, new, None, ref(2))
    assert catalog.refs() == {there: ref(1)}
    move(catalog, there, ref(1), None)
    move(catalog, new, None, ref(2))
    assert catalog.refs() == {new: ref(2)}


def test_neighbours_are_not_nested(catalog: Catalog) -> None:
    """Names that only begin alike live side by side."""
    for number, name in enumerate(["a", "a.b", "ab", "a-", "b/a", "b/ab"]):
        move(catalog, name, None, ref(number))
    assert len(catalog.refs()) == 6


def test_the_reflog_keeps_every_move(catalog: Catalog) -> None:
    """Creation, many moves, removal and a second life are all there, in order."""
    history = [None, *(ref(number) for number in range(1, 300)), None, ref(5)]
    for old, new in pairwise(history):
        move(catalog, "a", old, new)
        move(catalog, "a-neighbour", catalog.ref("a-neighbour"), ref(0))
    found = reflog(catalog, "a")
    steps = [None if step is None else bytes(step.snapshot) for step in history]
    assert [(line.old, line.new) for line in found] == list(pairwise(steps))
    assert {(line.action, line.time_ns) for line in found} == {("test", 7)}
    with catalog.index.env.read() as rows:
        assert refs.next_position(catalog.index, rows, "a") == len(found)
        assert refs.next_position(catalog.index, rows, "never") == 0


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.none() | st.integers(0, 3).map(ref),
            st.none() | st.integers(0, 3).map(ref),
        ),
        max_size=25,
    )
)
def test_refs_are_a_dictionary_with_a_history(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, Ref | None, Ref | None]]
) -> None:
    """Any sequence of moves does what it would do to a dictionary without nested names."""
    catalog = Catalog.create(tmp_path_factory.mktemp("refs") / "store", 1 << 16)
    told: dict[str, Ref] = {}
    history: dict[str, int] = {}
    for name, expect, new in moves:
        nested = any(f"{a}/".startswith(f"{b}/") for a, b in [(name, t) for t in told])
        nested = nested or any(t.startswith(f"{name}/") for t in told)
        allowed = told.get(name) == expect and not (expect is None and nested)
        try:
            move(catalog, name, expect, new)
        except Conflict:
            assert not allowed
            continue
        assert allowed
        history[name] = history.get(name, 0) + 1
        if new is None:
            told.pop(name, None)
        else:
            told[name] = new
    assert catalog.refs() == told
    assert {name: len(reflog(catalog, name)) for name in NAMES if reflog(catalog, name)} == history
    catalog.close()


def test_what_is_not_there(catalog: Catalog) -> None:
    """Names that cannot be refs are looked up without surprise, and are not found."""
    for name in ("", "never", "x" * 5000, "a\0b", "\ud800", "\udc80"):
        assert catalog.ref(name) is None
        assert reflog(catalog, name) == []
        with catalog.index.env.read() as rows, pytest.raises(NotFound):
            refs.require(catalog.index, rows, name)
