"""Where refs and their reflogs are kept: moved by compare-and-swap, with every move in the reflog.

Owns the tables `refs` and `reflog` of the index. `refs_in` alone decides where refs are kept; all
else asks the `RefStore` that it returns. Who publishes decides what else belongs to a commit
(`mstore.store.transaction`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import REFLOG, REFS
from mstore.store import refs
from mstore.store.refs import Move, Ref
from mstore.terms.errors import Conflict, NotFound
from mstore.terms.phrases import call, phrase


class RefStore(ABC):
    """Refs and their reflogs, as one reader or one commit sees them.

    An implementation promises:

    state    All answers are of one moment, and know the moves made through the same object.
    commit   These moves become visible together, or none does: with the commit that the object was
             made for, and never before the snapshots that they name are durable. So an index that
             holds the refs commits them with its rows; another store of refs moves them after the
             commit of the index. What a crash leaves between the two is garbage, not a loss.
    swap     Nobody else moves a ref between an answer and the commit, or the commit raises
             Conflict. So what `move` compared still holds when the move becomes visible.
    reflog   A move adds one line; a removal keeps the lines. Positions count from 0, without gaps.
    order    Refs come in the order of the bytes of their names, lines oldest first.
    damage   What cannot be read raises Corrupt, and is never another value; `names` reads no ref.

    Used by one thread.
    """

    @abstractmethod
    def get(self, name: str) -> Ref | None:
        """Return the ref of this name; None if there is none, or no ref can have it."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[str, Ref]]:
        """Yield all refs by name."""

    @abstractmethod
    def names(self, begin: str = "") -> Iterator[str]:
        """Yield the names that begin so, also of unreadable refs; skips unreadable names."""

    @abstractmethod
    def reflog(self, name: str) -> list[Move]:
        """Return all moves of a name, oldest first, even if the ref was removed."""

    @abstractmethod
    def reflogs(self) -> Iterator[tuple[str, Move]]:
        """Yield all moves of all names, removed ones too: by name, oldest first."""

    @abstractmethod
    def count_moves(self, name: str) -> int:
        """Return how many lines the reflog of a name has: the position of the next one."""

    @abstractmethod
    def _generation(self) -> int:
        """Return the generation of the commit, which the publisher has set."""

    @abstractmethod
    def _set(self, name: str, ref: Ref | None) -> None:
        """Write or remove a ref."""

    @abstractmethod
    def _append(self, name: str, line: Move) -> None:
        """Write the next line of a reflog."""

    # -- what all stores do alike --------------------------------------------------------------

    def move(
        self, name: str, *, expect: Ref | None, new: Ref | None, action: str, time_ns: int
    ) -> None:
        """Compare-and-swap one ref, and append the move to the reflog.

        `new` None removes the ref and keeps its reflog. Raises Conflict if the ref is not `expect`
        any more, or if one of two names would be a directory of the other.
        """
        if self.get(name) != expect:
            raise Conflict(
                "the ref moved while this command was running",
                where=name,
                hint=phrase("{reflog}, then run the command again", reflog=call("reflog", name)),
            )
        if expect is None:
            self.refuse_nesting(name)
        self._set(name, new)
        self._log(name, None if expect is None else expect.snapshot, new, action, time_ns)

    def restore(
        self, name: str, new: Ref | None, *, old: bytes | None, action: str, time_ns: int
    ) -> None:
        """Write what others say of a ref, without comparing it first.

        old: where the last line of the reflog moved it; if that is where it is, there is no line.
        """
        self._set(name, new)
        if old != (None if new is None else new.snapshot):
            self._log(name, old, new, action, time_ns)

    def _log(
        self, name: str, old: bytes | None, new: Ref | None, action: str, time_ns: int
    ) -> None:
        snapshot, kind = (None, "") if new is None else (new.snapshot, new.kind)
        self._append(name, Move(old, snapshot, action, time_ns, self._generation(), kind))

    def meant(self, name: str) -> Ref | None:
        """Return the ref that a name in a revision means, or None.

        REMOTE/NAME is a remote's ref if no branch or tag has that name.
        """
        found = self.get(name)
        return self.get(refs.of_remote(name)) if found is None else found

    def require(self, name: str) -> Ref:
        """Return the ref of this name. Raises NotFound with the most similar names."""
        ref = self.get(name)
        if ref is None:
            raise self.missing(name)
        return ref

    def missing(self, name: str) -> NotFound:
        """Build the error for a missing ref, with the most similar name."""
        return refs.missing(name, self.names())

    def removed(self, name: str) -> Ref | None:
        """Return what a removed name was last; None if it is a ref, or never was, or who knows."""
        moves = self.reflog(name)
        if len(moves) < 2 or moves[-1].new is not None or moves[-2].new is None:
            return None
        return Ref(moves[-2].kind, moves[-2].new)

    def refuse_nesting(self, name: str) -> None:
        """Raise Conflict if a new name would be below or above a ref."""
        parts = name.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if self.get(above) is not None:
                what = f"{above!r} is a ref, so {name!r} cannot be one below it"
                raise Conflict(what, where=name)
        below = next(self.names(f"{name}/"), None)
        if below is not None:
            what = f"{below!r} is a ref, so {name!r} cannot be one above it"
            raise Conflict(what, where=name)


class IndexRefs(RefStore):
    """Refs as rows of the index, in an open transaction of it: they commit with its other rows."""

    def __init__(self, index: Index, transaction: IndexTransaction) -> None:
        self._index = index
        self._transaction = transaction

    def get(self, name: str) -> Ref | None:
        if not 0 < len(name.encode(errors="surrogatepass")) <= refs.MAX_KEY_BYTES:
            return None
        return self._index.get(self._transaction, REFS, name)

    def walk(self) -> Iterator[tuple[str, Ref]]:
        return self._index.walk(self._transaction, REFS)

    def names(self, begin: str = "") -> Iterator[str]:
        keys = self._index.keys(self._transaction, REFS, *([begin] if begin else []))
        return (key.decode(errors="ignore") for key in keys)

    def reflog(self, name: str) -> list[Move]:
        return [move for _, move in self._index.walk(self._transaction, REFLOG, name)]

    def reflogs(self) -> Iterator[tuple[str, Move]]:
        for (name, _), move in self._index.walk(self._transaction, REFLOG):
            yield name, move

    def count_moves(self, name: str) -> int:
        last = self._index.last(self._transaction, REFLOG, name)
        return 0 if last is None else last[1] + 1

    def _generation(self) -> int:
        return self._index.generation(self._transaction)

    def _set(self, name: str, ref: Ref | None) -> None:
        # For the mirror, which follows the commit.
        self._index.moved.add(name)
        if ref is None:
            self._index.delete(self._transaction, REFS, name)
        else:
            self._index.put(self._transaction, REFS, name, ref)

    def _append(self, name: str, line: Move) -> None:
        self._index.put(self._transaction, REFLOG, (name, self.count_moves(name)), line)


def refs_in(index: Index, transaction: IndexTransaction) -> RefStore:
    """Return the refs of a store, as this transaction of its index sees and moves them."""
    return IndexRefs(index, transaction)
