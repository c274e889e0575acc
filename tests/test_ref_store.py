"""The contract of a store of refs: one suite for the index's rows and for a dictionary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstore.blocks.schema import PRUNED, REFLOG, REFS
from mstore.store.catalog import Catalog
from mstore.store.refs import BRANCH, REMOTE, TAG, Move, Ref, RefStore, refs_in
from mstore.terms.errors import Conflict, Corrupt, NotFound
from mstore.terms.ids import SnapshotId

NAMES = ["a", "a/b", "a/b/c", "ab", "a.b", "é", "a-b", "z/z", "llama/merged"]


def ref(number: int, kind: str = BRANCH) -> Ref:
    """A ref at a made-up snapshot."""
    return Ref(kind, SnapshotId(number.to_bytes(32, "big")))


class Place(ABC):
    """Somewhere that keeps refs."""

    @classmethod
    @abstractmethod
    def made(cls, path: Path) -> AbstractContextManager[Place]:
        """An empty one."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[RefStore]:
        """The refs as they are now."""

    @abstractmethod
    def committing(self) -> AbstractContextManager[RefStore]:
        """The refs in a commit, which takes effect if the block ends without an error."""

    def move(self, name: str, expect: Ref | None, new: Ref | None) -> None:
        """One move in a commit of its own."""
        with self.committing() as refs:
            refs.move(name, expect=expect, new=new, action="test", time_ns=7)

    def refs(self) -> dict[str, Ref]:
        """All refs."""
        with self.reading() as refs:
            return dict(refs.walk())

    def reflog(self, name: str) -> list[Move]:
        """All moves of a name."""
        with self.reading() as refs:
            return refs.reflog(name)


class IndexPlace(Place):
    """The index of a store."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    @classmethod
    @contextmanager
    def made(cls, path: Path) -> Iterator[Place]:
        catalog = Catalog.create(path, 1 << 16)
        yield cls(catalog)
        catalog.close()

    @contextmanager
    def reading(self) -> Iterator[RefStore]:
        with self.catalog.index.env.read() as rows:
            yield refs_in(self.catalog.index, rows)

    @contextmanager
    def committing(self) -> Iterator[RefStore]:
        with self.catalog.committing() as rows:
            yield refs_in(self.catalog.index, rows)


class DictionaryRefs(RefStore):
    """Refs in memory: the least that keeps the contract."""

    def __init__(self, named: dict[str, Ref], logs: dict[str, list[Move]], number: int) -> None:
        self.named = dict(named)
        self.logs = {name: list(lines) for name, lines in logs.items()}
        self.number = number

    def get(self, name: str) -> Ref | None:
        return self.named.get(name)

    def walk(self) -> Iterator[tuple[str, Ref]]:
        return iter(sorted(self.named.items(), key=lambda one: one[0].encode()))

    def names(self, begin: str = "") -> Iterator[str]:
        return (name for name, _ in self.walk() if name.startswith(begin))

    def reflog(self, name: str) -> list[Move]:
        return list(self.logs.get(name, ()))

    def reflogs(self) -> Iterator[tuple[str, Move]]:
        for name in sorted(self.logs, key=str.encode):
            for line in self.logs[name]:
                yield name, line

    def count_moves(self, name: str) -> int:
        return len(self.logs.get(name, ()))

    def _generation(self) -> int:
        return self.number

    def _set(self, name: str, ref: Ref | None) -> None:
        self.named.pop(name, None)
        if ref is not None:
            self.named[name] = ref

    def _append(self, name: str, line: Move) -> None:
        self.logs.setdefault(name, []).append(line)


class DictionaryPlace(Place):
    """A dictionary that is replaced by each commit."""

    def __init__(self) -> None:
        self._now = DictionaryRefs({}, {}, 0)

    @classmethod
    @contextmanager
    def made(cls, path: Path) -> Iterator[Place]:
        yield cls()

    @contextmanager
    def reading(self) -> Iterator[RefStore]:
        yield self._now

    @contextmanager
    def committing(self) -> Iterator[RefStore]:
        now = self._now
        new = DictionaryRefs(now.named, now.logs, now.number + 1)
        yield new
        self._now = new


class Suite:
    """What each store of refs promises."""

    KIND: type[Place]

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        """An empty one."""
        with self.KIND.made(tmp_path / "store") as place:
            yield place

    def test_compare_and_swap(self, place: Place) -> None:
        """A move from what the ref is succeeds; any other is a Conflict, and not done."""
        place.move("a", None, ref(1))
        for expect in (None, ref(2), ref(1, TAG)):
            with pytest.raises(Conflict, match="moved") as conflict:
                place.move("a", expect, ref(3))
            assert conflict.value.where == "a"
            assert conflict.value.hint is not None
        assert place.refs() == {"a": ref(1)}
        place.move("a", ref(1), ref(3))
        assert place.refs() == {"a": ref(3)}
        assert len(place.reflog("a")) == 2

    def test_a_commit_is_whole_or_nothing(self, place: Place) -> None:
        """Moves of a commit see each other, and nobody else does before its end; a failing one
        leaves nothing."""
        place.move("a", None, ref(1))
        with place.committing() as refs:
            refs.move("a", expect=ref(1), new=None, action="rename", time_ns=1)
            refs.move("a/b", expect=None, new=ref(1), action="rename", time_ns=2)
            assert dict(refs.walk()) == {"a/b": ref(1)}
            assert refs.get("a") is None
        assert place.refs() == {"a/b": ref(1)}
        before = place.reflog("a/b"), place.reflog("a")

        def move_two() -> None:
            with place.committing() as refs:
                refs.move("c", expect=None, new=ref(2), action="test", time_ns=3)
                refs.move("a/b", expect=ref(2), new=ref(3), action="test", time_ns=4)

        with pytest.raises(Conflict):
            move_two()
        assert place.refs() == {"a/b": ref(1)}
        assert (place.reflog("a/b"), place.reflog("a"), place.reflog("c")) == (*before, [])

    @pytest.mark.parametrize(
        ("there", "new"),
        [("a", "a/b"), ("a", "a/b/c"), ("a/b", "a"), ("a/b/c", "a"), ("a/b/c", "a/b")],
    )
    def test_a_name_is_no_directory_of_another(self, place: Place, there: str, new: str) -> None:
        """Of two names one of which would be a directory of the other, the second is a Conflict
        that names the first; when that is removed, it works."""
        place.move(there, None, ref(1))
        with pytest.raises(Conflict, match=there):
            place.move(new, None, ref(2))
        assert place.refs() == {there: ref(1)}
        place.move(there, ref(1), None)
        place.move(new, None, ref(2))
        assert place.refs() == {new: ref(2)}

    def test_neighbours_are_not_nested(self, place: Place) -> None:
        """Names that only begin alike live side by side, and come by their bytes."""
        names = ["a", "a-", "a.b", "ab", "b/a", "b/ab", "é"]
        for number, name in enumerate(reversed(names)):
            place.move(name, None, ref(number))
        assert list(place.refs()) == names
        with place.reading() as refs:
            assert list(refs.names()) == names
            assert list(refs.names("b/")) == ["b/a", "b/ab"]
            assert list(refs.names("c")) == []

    def test_the_reflog_keeps_every_move(self, place: Place) -> None:
        """Creation, many moves, removal and a second life are all there, in order."""
        history = [None, *(ref(number) for number in range(1, 40)), None, ref(5)]
        for old, new in pairwise(history):
            place.move("a", old, new)
            place.move("a-neighbour", place.refs().get("a-neighbour"), ref(0))
        found = place.reflog("a")
        steps = [None if step is None else bytes(step.snapshot) for step in history]
        assert [(line.old, line.new) for line in found] == list(pairwise(steps))
        assert {(line.action, line.time_ns) for line in found} == {("test", 7)}
        # The neighbour's moves are commits, too.
        assert [line.generation for line in found] == list(range(1, 2 * len(found), 2))
        assert [line.kind for line in found[-3:]] == [BRANCH, "", BRANCH]
        with place.reading() as refs:
            assert refs.count_moves("a") == len(found)
            assert refs.count_moves("never") == 0
            told = [*(("a", one) for one in found)]
            told += [("a-neighbour", one) for one in refs.reflog("a-neighbour")]
            assert list(refs.reflogs()) == told

    def test_what_was_removed(self, place: Place) -> None:
        """A removed name is known by what it was last; a ref, or what never was, is not removed."""
        place.move("v1", None, ref(1, TAG))
        place.move("v1", ref(1, TAG), None)
        place.move("a", None, ref(2))
        with place.reading() as refs:
            assert refs.removed("v1") == ref(1, TAG)
            assert refs.removed("a") is refs.removed("never") is None

    def test_what_a_name_means(self, place: Place) -> None:
        """REMOTE/NAME is a remote's ref where no branch or tag has that name."""
        place.move("remotes/o/a", None, ref(1, REMOTE))
        with place.reading() as refs:
            assert refs.meant("o/a") == refs.meant("remotes/o/a") == ref(1, REMOTE)
        place.move("o/a", None, ref(2))
        with place.reading() as refs:
            assert (refs.meant("o/a"), refs.meant("o/b")) == (ref(2), None)

    def test_what_others_say_is_restored(self, place: Place) -> None:
        """A ref is written as it is told; its reflog has a line only if it was elsewhere."""
        with place.committing() as refs:
            for new, old in ((ref(1), None), (ref(1), ref(1)), (ref(2), ref(1)), (None, ref(2))):
                was = None if old is None else old.snapshot
                refs.restore("a", new, old=was, action="reindex", time_ns=1)
            refs.restore("b", None, old=None, action="reindex", time_ns=1)
        assert place.refs() == {}
        ids = [ref(number).snapshot for number in range(3)]
        told = [(line.old, line.new) for line in place.reflog("a")]
        assert told == [(None, ids[1]), (ids[1], ids[2]), (ids[2], None)]
        assert place.reflog("b") == []

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
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
        self,
        tmp_path_factory: pytest.TempPathFactory,
        moves: list[tuple[str, Ref | None, Ref | None]],
    ) -> None:
        """Any sequence of moves does what it would do to a dictionary without nested names."""
        with self.KIND.made(tmp_path_factory.mktemp("refs") / "store") as place:
            self._check_a_dictionary(place, moves)

    def _check_a_dictionary(
        self, place: Place, moves: list[tuple[str, Ref | None, Ref | None]]
    ) -> None:
        told: dict[str, Ref] = {}
        history: dict[str, int] = {}
        for name, expect, new in moves:
            nested = any(f"{name}/".startswith(f"{other}/") for other in told)
            nested = nested or any(other.startswith(f"{name}/") for other in told)
            allowed = told.get(name) == expect and not (expect is None and nested)
            try:
                place.move(name, expect, new)
            except Conflict:
                assert not allowed
                continue
            assert allowed
            history[name] = history.get(name, 0) + 1
            if new is None:
                told.pop(name, None)
            else:
                told[name] = new
        assert place.refs() == told
        logs = {name: len(place.reflog(name)) for name in NAMES}
        assert {name: count for name, count in logs.items() if count} == history

    def test_what_is_not_there(self, place: Place) -> None:
        """Names that cannot be refs are looked up without surprise, and are not found."""
        for name in ("", "never", "x" * 5000, "a\0b", "\ud800", "\udc80"):
            assert place.refs().get(name) is None
            assert place.reflog(name) == []
            with place.reading() as refs, pytest.raises(NotFound):
                refs.require(name)


class TestIndexRefs(Suite):
    """Rows of the index."""

    KIND = IndexPlace

    def test_damage_is_no_other_value(self, place: Place) -> None:
        """An unreadable row is Corrupt to who reads it; names are listed all the same."""
        assert isinstance(place, IndexPlace)
        place.move("a", None, ref(1))
        place.move("b", None, ref(2))
        index = place.catalog.index
        with index.env.write() as rows:
            rows.put(REFS.key.encode("a"), b"junk", db=index.db(REFS.name))
            rows.put(REFLOG.key.encode(("b", 0)), b"junk", db=index.db(REFLOG.name))
        with place.reading() as refs:
            assert list(refs.names()) == ["a", "b"]
            assert refs.get("b") == ref(2)
            for ask in (refs.get, refs.reflog):
                with pytest.raises(Corrupt):
                    ask("a" if ask == refs.get else "b")

    def test_one_commit_with_the_other_rows(self, place: Place) -> None:
        """A ref moves in the transaction that the index's other rows commit in."""
        assert isinstance(place, IndexPlace)
        catalog = place.catalog

        def move(*, fails: bool) -> None:
            with catalog.committing() as rows:
                moved = refs_in(catalog.index, rows)
                moved.move("a", expect=None, new=ref(1), action="test", time_ns=1)
                catalog.index.put(rows, PRUNED, SnapshotId(bytes(32)), 1)
                if fails:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            move(fails=True)
        assert (place.refs(), catalog.generation()) == ({}, 0)
        move(fails=False)
        assert (place.refs(), catalog.generation()) == ({"a": ref(1)}, 1)
        with catalog.index.env.read() as rows:
            assert catalog.index.get(rows, PRUNED, SnapshotId(bytes(32))) == 1


class TestDictionaryRefs(Suite):
    """A dictionary."""

    KIND = DictionaryPlace
