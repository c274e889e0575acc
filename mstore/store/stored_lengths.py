"""Stored lengths: bytes at rest of the blocks of whole tensors, looked up once per state.

Planning asks three times what the same blocks cost: for the request's key, for the survey, and for
the plan.  An answer holds while nothing was committed to the index, which its transaction's number
shows, but what this process committed itself and knows to change no length (`outlive`).  So the
costs of a plan hold from planning to the merge that follows.  Safe in any thread.
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
        self._sums: dict[bytes, tuple[int, int]] = {}

    def of(self, lists: Sequence[bytes]) -> list[Lengths]:
        """Return the lengths of each block list's blocks: int64[blocks], not to be written to.

        Raises Corrupt naming a block that is not stored.
        """
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

    def sums(self, key: bytes) -> tuple[int, int] | None:
        """Return what `keep_sums` kept, if it still holds."""
        state = self.state()
        with self._lock:
            self._follow(state)
            return self._sums.get(key)

    def keep_sums(self, key: bytes, sums: tuple[int, int], since: tuple[int, int]) -> None:
        """Keep two sums of lengths by a key, in place of others.

        since: the state before the first length of them was looked up.  If it has changed, they may
        be of lengths that never were at one time, and are not kept.
        """
        state = self.state()
        if state == since:
            with self._lock:
                self._follow(state)
                self._sums = {key: sums}

    def outlive(self, number: int) -> None:
        """Go on after a transaction of this number, which is committed and changed no length.

        It was the caller's own, and wrote something: no other has its number.
        """
        with self._lock:
            if self._state is not None and self._state[1] == number - 1:
                self._state = self._state[0], number

    def _follow(self, state: tuple[int, int]) -> None:
        if state != self._state:
            self._state, self._known, self._count, self._sums = state, {}, 0, {}

    def state(self) -> tuple[int, int]:
        """Return what changes with every commit to the index."""
        env = self._index.env
        with env.read() as transaction:
            return env.files, transaction.id()

    def _found(self, lists: Sequence[bytes]) -> list[Lengths]:
        import numpy as np  # late: most commands open a store and never need it

        raw = b"".join(lists)
        ids = [raw[at : at + ID_BYTES] for at in range(0, len(raw), ID_BYTES)]
        lengths = self._look_up(ids)
        lengths.flags.writeable = False
        ends = np.cumsum([len(one) // ID_BYTES for one in lists])
        return np.split(lengths, ends[:-1])
