"""What an open store remembers: decoded records, what blocks cost at rest, and numbers of rows.

Records: the most recently used in a bounded number of bytes, because every pass decodes one that
does not fit again. Costs: for one state of the index, because planning asks three times what the
same blocks cost. Numbers of rows: a merge needs them again that its plan has computed. Safe for any
number of threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from mstore.blocks.index import Index
from mstore.blocks.packs import Kind
from mstore.store.objects.canonical import Record
from mstore.terms.ids import ID_BYTES, Buffer, TensorId

if TYPE_CHECKING:
    import numpy as np

    Lengths = np.ndarray[Any, np.dtype[np.int64]]
    Singles = np.ndarray[Any, np.dtype[np.float32]]


CACHE_BYTES: Final = 64 << 20
"""About five checkpoints of 20,000 small tensors, or five of 500 GB."""

_OF_RECORD: Final = 512
"""Memory that a record takes beside its bytes: objects, a key, a table entry."""

_OF_LIST: Final = 6
"""Memory for a byte of a record that is a list of objects, and of what it looks them up by."""

Key = bytes
"""The kind (one byte), then the id."""


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values that were last used, at most `limit` bytes of them, and always one.

    Not thread-safe: who shares it locks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def get(self, key: K) -> V | None:
        """Return a value that is kept, or None."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        return kept[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value of this many bytes."""
        replaced = self._kept.pop(key, None)
        self._size += size - (0 if replaced is None else replaced[1])
        self._kept[key] = value, size
        while self._size > self._limit and len(self._kept) > 1:
            _, (_, gone) = self._kept.popitem(last=False)
            self._size -= gone


class RecordCache:
    """Records by kind and id, at most about `limit` bytes; a single larger record is kept alone."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._lock = Lock()
        self._kept: Recent[Key, Record] = Recent(limit)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Record | None:
        """Return a cached record, or None."""
        with self._lock:
            return self._kept.get(key)

    def get_many(self, keys: Iterable[Key]) -> dict[Key, Record]:
        """Return those of these records that are cached."""
        with self._lock:
            each = ((key, self._kept.get(key)) for key in keys)
            return {key: record for key, record in each if record is not None}

    def put(self, records: Iterable[tuple[Key, Record, int]]) -> None:
        """Cache records, each with the length in bytes that it was decoded from."""
        with self._lock:
            for key, record, length in records:
                each = 1 if record.kind == Kind.TENSOR else _OF_LIST
                self._kept.put(key, record, _OF_RECORD + length * each)


class RowNumbers:
    """What planning computed of the rows of two tensors, by their ids: the latest, 32 MiB at most.

    That is a number for each row of 8 M rows.
    """

    def __init__(self, limit: int = 32 << 20) -> None:
        self._limit = limit
        self._lock = Lock()
        self._kept: Recent[tuple[TensorId, TensorId], Singles] = Recent(limit)

    def get(self, base: TensorId, expert: TensorId) -> Singles | None:
        """Return the number of each row, float32[rows], or None."""
        with self._lock:
            return self._kept.get((base, expert))

    def put(self, base: TensorId, expert: TensorId, numbers: Singles) -> None:
        """Keep them, not to be written to, in place of earlier ones of other tensors."""
        if numbers.nbytes <= self._limit:
            with self._lock:
                self._kept.put((base, expert), numbers, numbers.nbytes)


MOST: Final = 1 << 21
"""The most blocks whose lengths are kept: 16 MiB."""


class StoredLengths:
    """What is known of one store's blocks.  look_up: `Catalog.stored_lengths`."""

    def __init__(self, index: Index, look_up: Callable[[Buffer], Lengths]) -> None:
        self._index = index
        self._look_up = look_up
        self._lock = Lock()
        self._state: tuple[int, int] | None = None
        self._known: dict[bytes, Lengths] = {}
        self._count = 0

    def of(self, lists: Sequence[bytes]) -> list[Lengths]:
        """Return the lengths of each block list's blocks: int64[blocks], not to be written to."""
        state = self.state()
        with self._lock:
            self._follow(state)
            known = {blocks: self._known[blocks] for blocks in lists if blocks in self._known}
        missing = [blocks for blocks in dict.fromkeys(lists) if blocks not in known]
        if missing:
            news = dict(zip(missing, self._found(missing), strict=True))
            known |= news
            count = sum(map(len, news.values()))
            # What a commit may have changed meanwhile is used, and not kept.
            if self.state() == state:
                with self._lock:
                    if self._state == state and self._count + count <= MOST:
                        self._known |= news
                        self._count += count
        return [known[blocks] for blocks in lists]

    def outlive(self, number: int) -> None:
        """Keep what is known after the caller's own transaction, which changed no length.

        number: of that transaction, which is committed and wrote something.
        """
        with self._lock:
            if self._state is not None and self._state[1] == number - 1:
                self._state = self._state[0], number

    def _follow(self, state: tuple[int, int]) -> None:
        if state != self._state:
            self._state, self._known, self._count = state, {}, 0

    def state(self) -> tuple[int, int]:
        """Return what changes with every commit to the index."""
        env = self._index.env
        with env.read() as transaction:
            return env.times_replaced, transaction.id()

    def _found(self, lists: Sequence[bytes]) -> list[Lengths]:
        import numpy as np  # late: most commands open a store and never need it

        lengths = self._look_up(b"".join(lists))
        lengths.flags.writeable = False
        ends = np.cumsum([len(one) // ID_BYTES for one in lists])
        return np.split(lengths, ends[:-1])
