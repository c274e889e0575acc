"""Refs: which names may be, and of which kinds."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import small_model

from mstore.api import Store
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.store import refs
from mstore.store.refs import BRANCH, CANDIDATE, REMOTE, TAG, Ref, below, refs_in
from mstore.store.transaction import RefMove, choose_moves
from mstore.terms.errors import BadName, NotFound

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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("main", BRANCH),
        ("a/b", TAG),
        ("remotes/origin/llama/merged", REMOTE),
        ("remotes/origin/" + "x" * 200, REMOTE),
        ("candidates/run-7/llama/merged", CANDIDATE),
        ("candidates/0123456789abcdef0123456789abcdef01234567/m", CANDIDATE),
    ],
)
def test_a_name_tells_its_kind(name: str, kind: str) -> None:
    """Remote refs and candidates have directories of their own; no name is of two of these."""
    refs.check(name, kind)
    refs.check(name)
    for other in {BRANCH, REMOTE, CANDIDATE} - ({BRANCH} if kind == TAG else {kind}):
        with pytest.raises(BadName):
            refs.check(name, other)


@pytest.mark.parametrize(
    "name",
    [
        *("remotes", "candidates", "remotes/origin", "candidates/run", "remotes//a"),
        *("remotes/origin/", "remotes/o r/a", "remotes/origin/a b", "remotes/-o/a"),
        *("remotes/origin/remotes/a/b", "candidates/run/candidates/a/b"),
        *("candidates/" + "r" * 65 + "/a", "remotes/origin/0123456789abcdef"),
    ],
)
def test_names_of_no_kind(name: str) -> None:
    """What is below a kind's directory names a remote or run, and a branch or tag of it."""
    for kind in (None, *refs.KINDS, "other"):
        with pytest.raises(BadName):
            refs.check(name, kind)


def test_no_command_makes_a_branch_or_tag_there(tmp_path: Path) -> None:
    """Branches and tags of these names are refused, whoever makes them, and so are renamed refs."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        source = small_model(tmp_path / "in", "one")
        store.add(source, name="main")
        calls: list[Callable[[str], object]] = [
            lambda name: store.add(source, name=name),
            lambda name: store.tag(name, "main"),
            lambda name: store.reset(name, "main"),
            lambda name: store.move(name, None, "main"),
            lambda name: store.rename("main", name),
        ]
        for name in ("remotes", "remotes/origin/a", "candidates/run/a", "candidates/a"):
            for call in calls:
                with pytest.raises(BadName, match=name.partition("/")[0]):
                    call(name)
        assert [one.name for one in store.refs()] == ["main"]


def test_patterns_stay_in_their_directory() -> None:
    """A pattern matches remote refs or candidates only if it begins like them."""
    known = ["a", "x/a", "remotes/o/a", "remotes/p/a", "candidates/r/a"]
    assert refs.chosen(known, ["*"]) == ["a", "x/a"]
    assert refs.chosen(known, ["*/a"]) == ["x/a"]
    assert refs.chosen(known, ["remotes/*"]) == ["remotes/o/a", "remotes/p/a"]
    assert refs.chosen(known, ["remotes/o/*", "candidates/*"]) == ["remotes/o/a", "candidates/r/a"]
    with pytest.raises(NotFound):
        refs.chosen(known, ["c*"])


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


# -- remotes -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with two models."""
    with Store.init(tmp_path / "store", block_size=1 << 16) as store:
        for name in ("one", "two"):
            store.add(small_model(tmp_path / name, name), name=name)
        yield store


def follow(store: Store, remote: str, **found: str) -> None:
    """The remote has these branches."""

    def moves(transaction: IndexTransaction) -> list[RefMove]:
        known = refs_in(store._catalog.index, transaction)
        named = {
            below(REMOTE, remote, name): Ref(REMOTE, store[of].id) for name, of in found.items()
        }
        return [RefMove(name, known.get(name), ref, "fetch") for name, ref in named.items()]

    choose_moves(store._catalog, moves)


@pytest.mark.parametrize("remote", ["a/b", "", "x" * 65, "-x"])
def test_the_name_of_a_remote_is_one_word(store: Store, remote: str) -> None:
    """It is a part of a path, and short."""
    with pytest.raises(BadName):
        follow(store, remote, main="one")


def test_a_remote_ref_has_a_short_name(store: Store) -> None:
    """REMOTE/NAME names it where no branch or tag has that name; its name in full always does."""
    follow(store, "origin", main="one")
    follow(store, "origin", main="two")
    for name in ("origin/main", "remotes/origin/main"):
        assert store[name].id == store["two"].id
        assert store[f"{name}@{{1}}"].id == store["one"].id
    store.tag("origin/main", "one")
    assert store["origin/main"].id == store["origin/main@{0}"].id == store["one"].id
    assert store["remotes/origin/main"].id == store["two"].id
    store.remove("origin/main")
    assert store["origin/main"].id == store["two"].id


def test_a_remote_ref_keeps_its_snapshot(store: Store) -> None:
    """gc keeps it as a branch's, prune keeps its contents, and reindex brings it back."""
    follow(store, "origin", main="one")
    one = store["one"].id
    store.remove("one")
    store.gc(reflog_days=0)
    assert store["origin/main"].id == one
    store.prune(keep_last=1)
    (store.path / "index" / "data.mdb").unlink()
    path = store.path
    store.close()
    Store.reindex(path)
    with Store.open(path) as again:
        assert again.ref("remotes/origin/main").snapshot == one
        assert again.ref("remotes/origin/main").kind == REMOTE
        assert not again.fsck().problems
        again.gc(reflog_days=0)
        assert again["remotes/origin/main"].id == one
