"""A store as a remote: what a push of all its refs would put, and was never put. Read-only.

Root and lists are made when they are asked for; packs and their tables are parts of the store's
files. `mstore serve` shows it, and `copy` reads it.

    generation    of the root: the store's. A root of each is made once, and the same by any process
    table         one object for each pack: header and table, as they lie in its file
    packs         also have entries that no snapshot needs: they do no harm

**While the store changes.** A root and what it names are one *state* of the store. A lease keeps
the files of its packs, from before the index is read until nobody asks for them any more; gc may
condemn them meanwhile. Where no lease can be taken, a reader may find a pack gone, and starts
again.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final

from blake3 import blake3

from mstore.blocks.packs import ENTRY, HEADER_BYTES, TAIL_BYTES, Kind, PackGone, table_place
from mstore.blocks.schema import NOTES, PRUNED
from mstore.remotes import layout
from mstore.remotes.layout import (
    LISTS,
    MOST_ROWS,
    Named,
    NoteRow,
    PackRow,
    PackState,
    RefRow,
    RemoteRoot,
    SnapshotRow,
    TableId,
    pack_name,
    table_name,
)
from mstore.remotes.objects import ROOT, Absent, Listed, ReadOnly, RootStamp, short
from mstore.store import listing, refs
from mstore.store.catalog import Catalog
from mstore.store.leases import Lease
from mstore.store.refs import refs_in
from mstore.terms.errors import Corrupt, MstoreError
from mstore.terms.ids import Buffer, PackId

IDLE_SECONDS: Final = 600
"""A state goes if nobody asked for a part of it for so long."""
LONGEST_SECONDS: Final = 86400
"""A state goes so long after another one replaced it."""
MOST_STATES: Final = 8
_MADE: Final = 0
"""Of lists and tables: of no root, so that the same rows have the same name in each."""


class _Table:
    """Where the table of a pack lies in it, and its name."""

    __slots__ = ("id", "length", "offset")

    def __init__(self, id: TableId, offset: int, length: int) -> None:
        self.id = id
        self.offset = offset
        self.length = length


class _State:
    """One state of the store. users: answers that send a part of it now."""

    def __init__(self, number: tuple[int, int], lease: Lease | None) -> None:
        self.number = number
        self.lease = lease
        self.users = 0
        self.used_at = time.monotonic()
        self.replaced_at: float | None = None
        self.time_ns = time.time_ns()
        self.root = b""
        self.nonce = ""
        self.lists: dict[str, bytes] = {}
        self.packs: dict[str, tuple[PackId, int]] = {}
        self.tables: dict[str, tuple[PackId, _Table]] = {}

    def has(self, name: str) -> bool:
        return name in self.lists or name in self.packs or name in self.tables

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class StoreRemote(ReadOnly):
    """A store as a remote. purpose: of its leases, for who asks what gc waits for."""

    def __init__(self, catalog: Catalog, purpose: str) -> None:
        self.where = str(catalog.layout.root)
        self._catalog = catalog
        self._purpose = purpose
        self._making = Lock()
        self._lock = Lock()
        self._states: list[_State] = []
        self._tables: dict[PackId, _Table] = {}

    # -- as Objects says ---------------------------------------------------------------------

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        state = self._current()
        stamp = RootStamp(state.nonce)
        return None if stamp == known else (state.root, stamp)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        state = self._state(name)
        size = self._size(state, name)
        if any(offset < 0 or length < 0 or offset + length > size for offset, length in spans):
            raise short(self.where, name)
        return [self._read(state, name, offset, length) for offset, length in spans]

    def size(self, name: str) -> int:
        return self._size(self._state(name), name)

    def time_ns(self, name: str) -> int:
        return self._state(name).time_ns

    def names(self, below: str) -> Iterator[Listed]:
        state = self._current()
        for name in (*state.lists, *state.packs, *state.tables):
            if name.startswith(below):
                yield Listed(name, self._size(state, name), state.time_ns)

    def close(self) -> None:
        """Let go of all states."""
        with self._lock:
            states, self._states = self._states, []
        for one in states:
            one.release()

    # -- what they are -----------------------------------------------------------------------

    def _size(self, state: _State, name: str) -> int:
        if name in state.lists:
            return len(state.lists[name])
        if name in state.packs:
            return state.packs[name][1]
        return state.tables[name][1].length + HEADER_BYTES

    def _read(self, state: _State, name: str, offset: int, length: int) -> Buffer:
        if name in state.lists:
            return state.lists[name][offset : offset + length]
        read = self._catalog.packs.read
        try:
            if name in state.packs:
                return read(state.packs[name][0], offset, length)
            pack, table = state.tables[name]
            head = read(pack, 0, HEADER_BYTES)[offset : offset + length]
            start = max(0, offset - HEADER_BYTES)
            return bytes(head) + read(pack, table.offset + start, length - len(head))
        except PackGone as error:
            raise _absent(f"{self.where}/{name}") from error

    # -- states -------------------------------------------------------------------------------

    def _state(self, name: str, *, users: int = 0) -> _State:
        """Return the newest state that has an object. Raises Absent.

        users: so many answers begin to send it.
        """
        found = self._noted(name, users)
        if found is None:
            # Its root may be known from before this process, say.
            self._current()
            found = self._noted(name, users)
        if found is None:
            raise _absent(f"{self.where}/{name}")
        return found

    def _noted(self, name: str, users: int = 0) -> _State | None:
        """Note that somebody asks for an object; return the newest state that has it."""
        now = time.monotonic()
        with self._lock:
            having = [one for one in self._states if one.has(name)]
            for one in having:
                one.used_at = now
            if not having:
                return None
            having[-1].users += users
            return having[-1]

    def is_ready(self, name: str) -> bool:
        """Return whether an object is known; else looking for it reads the whole index."""
        if name != ROOT:
            return self._noted(name) is not None
        number = self._number()
        with self._lock:
            return bool(self._states) and self._states[-1].number == number

    def hold(self, name: str) -> Callable[[], None]:
        """Keep an object until the returned function is called. Raises Absent."""
        return partial(self._let_go, self._state(name, users=1))

    def _let_go(self, state: _State) -> None:
        with self._lock:
            state.users -= 1
            state.used_at = time.monotonic()

    def tidy(self) -> None:
        """Let go of states that nobody reads. Call it now and then."""
        if not self._states:
            return
        number = self._number()
        now = time.monotonic()
        with self._lock:
            for one in self._states:
                if one.number != number and one.replaced_at is None:
                    one.replaced_at = now
            gone = [one for one in self._states if one.users == 0 and _is_over(one, now)]
            self._states = [one for one in self._states if one not in gone]
        for one in gone:
            one.release()

    def _number(self) -> tuple[int, int]:
        # Asked first: it opens files that replaced those of the index.
        generation = self._catalog.generation()
        return self._catalog.index.env.times_replaced, generation

    def _current(self) -> _State:
        """Return the state of the store as it is now."""
        with self._making:
            number = self._number()
            with self._lock:
                if self._states and self._states[-1].number == number:
                    self._states[-1].used_at = time.monotonic()
                    return self._states[-1]
            state = self._made()
            with self._lock:
                self._states.append(state)
                most = [one for one in self._states[:-MOST_STATES] if one.users == 0]
                self._states = [one for one in self._states if one not in most]
        for one in most:
            one.release()
        return state

    # -- making one --------------------------------------------------------------------------

    def _made(self) -> _State:
        lease: Lease | None = None
        # Reading must go on where nothing can be written.
        with suppress(MstoreError):
            lease = Lease(self._catalog.layout, self._catalog.index, self._purpose)
        try:
            return self._filled(lease)
        except BaseException:
            if lease is not None:
                lease.release()
            raise

    def _filled(self, lease: Lease | None) -> _State:
        index = self._catalog.index
        with index.env.read() as transaction:
            # Its packs are there until the lease ends: who condemns one later sees the lease.
            state = _State((index.env.times_replaced, index.generation(transaction)), lease)
            listed = dict.fromkeys(listing.ids(index, transaction))
            named = [
                RefRow(name, ref.kind, bytes(ref.snapshot), ())
                for name, ref in refs_in(index, transaction).walk()
                if ref.kind in (refs.BRANCH, refs.TAG) and ref.snapshot_id() in listed
            ]
            sizes = dict(index.packs(transaction))
            notes = [key for key, _ in index.walk(transaction, NOTES)]
            records = index.record_spans(transaction, Kind.SNAPSHOT, listed)
            snapshot_packs = {id: pack for pack, _, _, _, id in records}
            records = index.record_spans(transaction, Kind.NOTE, [note for _, note in notes])
            note_packs = {id: pack for pack, _, _, _, id in records}
            pruned = set(index.keys(transaction, PRUNED))
        known = {pack: self._table(pack, size) for pack, size in sizes.items()}
        tables = {pack: table for pack, table in known.items() if table is not None}
        self._tables = tables
        for pack, table in tables.items():
            state.packs[pack_name(pack)] = pack, sizes[pack]
            state.tables[table_name(_MADE, table.id)] = pack, table
        rows: dict[str, list[Any]] = {
            "refs": named,
            "snapshots": [
                SnapshotRow(bytes(id), bytes(snapshot_packs[id]), bytes(id) not in pruned)
                for id in listed
                if snapshot_packs.get(id) in tables
            ],
            "packs": [
                PackRow(
                    id=bytes(pack),
                    size=sizes[pack],
                    state=PackState.LIVE,
                    time_ns=0,
                    entries=table.length // ENTRY.size,
                    made=_MADE,
                    table=bytes(table.id),
                    offset=0,
                    length=HEADER_BYTES + table.length,
                )
                for pack, table in tables.items()
            ],
            "notes": [
                NoteRow(bytes(id), bytes(note), bytes(note_packs[note]))
                for id, note in notes
                if note_packs.get(note) in tables
            ],
            # They are objects that a push makes; a store has rows of its own for them.
            "statistics": [],
        }
        self._encode(state, rows)
        return state

    def _table(self, pack: PackId, size: int) -> _Table | None:
        """Return where a pack's table lies; None if the pack is damaged: refs may not need it."""
        if pack in self._tables:
            return self._tables[pack]
        packs = self._catalog.packs
        with suppress(Corrupt):
            head = bytes(packs.read(pack, 0, HEADER_BYTES))
            tail = bytes(packs.read(pack, max(0, size - TAIL_BYTES), TAIL_BYTES))
            offset, length, _ = table_place(head, tail, size, packs.where(pack))
            data = head + bytes(packs.read(pack, offset, length))
            if PackId.of(data) == pack:
                return _Table(TableId.of(data), offset, length)
        return None

    def _encode(self, state: _State, rows: dict[str, list[Any]]) -> None:
        """Make lists and root."""
        generation = state.number[1]
        lists = []
        for kind in LISTS:
            for some in cut(sorted(rows[kind], key=lambda row: row.key)):
                id, data = layout.encode_list(kind, some)
                first = some[0].key.hex()
                named = Named(kind, str(id), first, len(some), len(data), _MADE)
                state.lists[named.name] = data
                lists.append(named)
        uuid = self._catalog.layout.uuid
        # By any process the same, and another one where the same generation is another state.
        told = f"{uuid} {generation} {' '.join(one.id for one in lists)}"
        state.nonce = blake3(told.encode()).hexdigest(length=16)
        size = self._catalog.block_size
        root = RemoteRoot(layout.VERSION, uuid, size, generation, state.nonce, tuple(lists))
        state.root = root.encode()


def cut(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut sorted rows into lists where their keys first differ.

    So a new row changes its own list, and a client reads the others from its own files.
    """
    if len(rows) <= MOST_ROWS:
        if rows:
            yield rows
        return
    first, last = rows[0].key, rows[-1].key
    length = max(len(first), len(last))
    one, other = (int.from_bytes(key.ljust(length, b"\0"), "big") for key in (first, last))
    bit = (one ^ other).bit_length() - 1
    middle = (other >> bit << bit).to_bytes(length, "big")
    at = bisect_left(rows, middle, key=lambda row: row.key.ljust(length, b"\0"))
    yield from cut(rows[:at])
    yield from cut(rows[at:])


def _is_over(state: _State, now: float) -> bool:
    replaced = state.replaced_at
    return now - state.used_at >= IDLE_SECONDS or (
        replaced is not None and now - replaced >= LONGEST_SECONDS
    )


def _absent(where: str) -> Absent:
    return Absent("there is no such object", where=where, hint="it may be gone: begin again")
