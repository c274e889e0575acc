"""Stored lengths: bytes at rest of the blocks of whole tensors, looked up once per state.

Planning asks three times what the same blocks cost: for the request's key, for the survey, and for
the plan.  An answer holds while nothing was committed to the index, which its transaction's number
shows.  Safe in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from mstore.blocks.index import Index
from mstore.ids import ID_BYTES

if TYPE_CHECKING:
    import numpy as np

    Lengths = np.ndarray[Any, np.dtype[np.int64]]

MOST: Final = 1 << 21
"""The most blocks whose lengths are kept: 16 MiB."""


class StoredLengths:
    """What is known of one store's blocks.  look_up: `Catalog.stored_lengths`."""

    def __init__(self, index: Index, look_up: Callable[[Sequence[bytes]], Lengths]) -> None:
        self._index = index
        self._look_up = look_up
        self._lock = Lock()
        self._state: tuple[int, int] | None = None
        self._known: dict[bytes, Lengths] = {}
        self._count = 0

    def of(self, lists: Sequence[bytes]) -> list[Lengths]:
        """Return the lengths of each block list's blocks: int64[blocks], not to be written to.

        Raises Corrupt naming a block that is not stored.
        """
        state = self._now()
        with self._lock:
            if state != self._state:
                self._state, self._known, self._count = state, {}, 0
            known = {blocks: self._known[blocks] for blocks in lists if blocks in self._known}
        missing = [blocks for blocks in dict.fromkeys(lists) if blocks not in known]
        if missing:
            news = dict(zip(missing, self._found(missing), strict=True))
            known |= news
            count = sum(map(len, news.values()))
            # What a commit may have changed meanwhile is used, and not kept.
            if self._now() == state:
                with self._lock:
                    if self._state == state and self._count + count <= MOST:
                        self._known |= news
                        self._count += count
        return [known[blocks] for blocks in lists]

    def _now(self) -> tuple[int, int]:
        """Return what changes with every commit to the index."""
        env = self._index.env
        with env.read() as transaction:
            return env.epoch, transaction.id()

    def _found(self, lists: Sequence[bytes]) -> list[Lengths]:
        import numpy as np  # late: most commands open a store and never need it

        raw = b"".join(lists)
        ids = [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]
        lengths = self._look_up(ids)
        lengths.flags.writeable = False
        ends = np.cumsum([len(one) // ID_BYTES for one in lists])
        return np.split(lengths, ends[:-1])
