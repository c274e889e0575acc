"""Objects: what a remote must be able to do. Owns the contract, and the errors.

    root        the one object that changes; replaced only by who knows what it was
    others      named by their content, so that a second put changes nothing

`bucket` keeps them in object storage, `shared_directory` in a directory, `bundle` in one file, and
`store_remote` shows those of a store. Names are relative to the remote's address, with `/` between
their parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final, NoReturn, TypeVar

import msgspec

from mstore.store.ahead import in_order
from mstore.terms.errors import Conflict, Corrupt, Incompatible, NotFound
from mstore.terms.ids import Buffer
from mstore.terms.phrases import Text, call, phrase

ROOT: Final = "mstore-remote"
PROBE: Final = "probe/"
MOST_ROOT_BYTES: Final = 1 << 16
PIECE_BYTES: Final = 8 << 20
"""Bytes of one request for a part of a large object: above the least that S3 takes (5 MiB)."""
PROBE_PUTS: Final = 4
"""How often `probe` puts something."""
MOST_JOBS: Final = 16
"""Parts that are sent at once, at most: with `PIECE_BYTES` each, 128 MiB."""
_READS: Final = 16
"""Requests at once."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Absent(NotFound):
    """There is no such object."""


class Overtaken(Conflict):
    """The root is not what it was when it was read: somebody else replaced it."""


class RootStamp(msgspec.Struct, frozen=True):
    """Which root was read, as the place tells it: for a conditional read or replacement."""

    e_tag: str | None
    version: str | None = None


class Listed(msgspec.Struct, frozen=True):
    """An object of a listing: name, bytes, and when it was put, in ns by the place's own clock."""

    name: str
    size: int
    time_ns: int


class Objects(ABC):
    """The objects of one remote.

    *Root.* `swap_root` replaces the root that `before` says, or creates it (None); of several who
    try at once, one succeeds. An answer that is lost is no conflict: `swap_root` reads back whether
    its own root stands. Raises Overtaken if another root is there.

    *Others.* After `put` the object is there whole, also after a power loss of this machine; before
    it, or if it raises, whole or not at all. A read gives the bytes that were put; they are not
    trusted: whoever reads checks them against a name.

    Every call may raise Unavailable (the place does not answer, or refuses), and Absent where an
    object is missing. No call waits for ever. No error shows a credential. Any number of threads
    may use it; a process that was forked may not.
    """

    where: str
    """The address, as errors and reports show it."""

    @abstractmethod
    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        """Return the root and which it is; None if it is still the known one.

        Raises Absent if there is no remote, Corrupt if the root is longer than it may be.
        """

    @abstractmethod
    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        """Replace the root `before`, or create one. Raises Overtaken."""

    @abstractmethod
    def probe(self, name: str) -> None:
        """Try conditional creation and replacement below `probe/`; remove what was put there.

        Raises Incompatible if the place ignores conditions: two pushes could then undo each other.
        """

    @abstractmethod
    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each (offset, length). Raises Corrupt where the object ends."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of an object. Raises Absent."""

    @abstractmethod
    def time_ns(self, name: str) -> int:
        """Return when an object was put, in ns since the epoch, by the place's clock."""

    @abstractmethod
    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        """Put an object of `size` bytes, given in pieces of any length; `jobs` parts at once."""

    @abstractmethod
    def names(self, below: str) -> Iterator[Listed]:
        """Yield the objects whose names begin so."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object; a missing one is no error."""

    def require_writable(self) -> None:  # noqa: B027 -- most places can be written
        """Raise Incompatible if nothing can be put here, whoever asks."""

    def how_to_begin(self, name: str) -> Text:
        """Return what to do where there is no remote yet, which a store knows by this name."""
        return phrase(
            "check the address; {push} makes a remote", push=call("push", name, every=True)
        )

    def put_bytes(self, name: str, data: bytes) -> None:
        """Put an object."""
        self.put(name, len(data), [data])

    def wake(self) -> None:  # noqa: B027 -- at most places nothing waits for a turn
        """Let calls that wait for their turn, in any thread, end at once: the work has failed."""

    def close(self) -> None:  # noqa: B027 -- a place may hold nothing open
        """Close what is open; idempotent."""


class ReadOnly(Objects):
    """Objects that are only read. Whatever would change them raises Incompatible."""

    def require_writable(self) -> NoReturn:
        raise Incompatible(
            "this remote is read-only",
            where=self.where,
            hint="use object storage or a shared directory for that",
        )

    def how_to_begin(self, name: str) -> Text:
        return "check the address"

    def swap_root(self, data: bytes, before: RootStamp | None) -> NoReturn:
        self.require_writable()

    def probe(self, name: str) -> NoReturn:
        self.require_writable()

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> NoReturn:
        self.require_writable()

    def remove(self, name: str) -> NoReturn:
        self.require_writable()


def read_several(
    items: Sequence[Item], read: Callable[[Item], Result]
) -> Generator[tuple[Item, Result]]:
    """Yield each item, in order, with what `read` returns of it, which asks a remote.

    Several are asked for at once: each waits as long as a round trip takes. Raises as `read`.
    """
    if len(items) < 2:
        yield from ((item, read(item)) for item in items)
        return
    with (
        ThreadPoolExecutor(min(_READS, len(items)), "read") as pool,
        closing(in_order(lambda item: pool.submit(read, item), items, ahead=_READS)) as done,
    ):
        yield from done


def requests_to_put(size: int) -> int:
    """Return how many requests put an object: one, or a beginning, its parts and an end."""
    return 1 if size <= PIECE_BYTES else -(-size // PIECE_BYTES) + 2


def short(where: str, name: str) -> Corrupt:
    """Return the error for an object that ends before what was asked of it."""
    return Corrupt("the object is shorter than what lists it says", where=f"{where}/{name}")
