"""A remote as a client sees it: one root and the lists that it names, and how they change.

Owns what this store keeps of a remote, in `remotes/NAME/`, all of which can be read again:

    root        the root that was read last, and which it was
    lists/      lists, by their names
    places/     where entries lie in the remote's packs (`mstore.blocks.segments`)
    sent/       tables of packs that were put, and that no root names yet; the next push that ends
                forgets them
    statistics  ids of the objects of statistics that this store has taken, or put itself
    incoming/   packs that came whole, and are not published yet; the next fetch uses or removes
                them
    fetch.lock  held by a fetch
    lock        held while one of root, lists/ and sent/ is written or listed
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from mstore import fs
from mstore.remotes import layout
from mstore.remotes.layout import LISTS, Named, NoteRow, PackRow, RefRow, RemoteRoot, SnapshotRow
from mstore.remotes.objects import (
    MOST_ROOT_BYTES,
    PROBE,
    PROBE_PUTS,
    Absent,
    Objects,
    Overtaken,
    RootStamp,
    read_several,
    requests_to_put,
)
from mstore.store.layout import KEPT_LISTS, KEPT_ROOT
from mstore.terms.errors import Conflict, Corrupt, StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call

T = TypeVar("T")
_ATTEMPTS: Final = 50
_FIRST_WAIT: Final = 0.02
_LONGEST_WAIT: Final = 1.0
"""Seconds: before the second attempt, and at most; the longest doubles with each."""
_LOCK: Final = "lock"


class RemoteState:
    """What one root says. Lists are read once, when they are needed. For one thread."""

    def __init__(
        self, root: RemoteRoot, stamp: RootStamp, read: Callable[[Named], list[Any]]
    ) -> None:
        self.root = root
        self.stamp = stamp
        self._read = read
        self._rows: dict[str, dict[bytes, Any]] = {}

    def rows(self, kind: str) -> Mapping[bytes, Any]:
        """Return all rows of a kind by their keys, in order. Raises Corrupt, Unavailable."""
        if kind not in self._rows:
            found: dict[bytes, Any] = {}
            last: bytes | None = None
            with closing(read_several(self.root.of(kind), self._read)) as lists:
                for named, rows in lists:
                    some = {row.key: row for row in rows}
                    if last is not None and next(iter(some)) <= last:
                        raise Corrupt(f"the remote's lists of {kind} overlap", where=named.id)
                    found |= some
                    last = next(reversed(some))
            self._rows[kind] = found
        return self._rows[kind]

    def refs(self) -> dict[str, RefRow]:
        """Return the refs, removed ones too, by name."""
        return {row.name: row for row in self.rows("refs").values()}

    def packs(self) -> Mapping[bytes, PackRow]:
        """Return all packs by id, also those that are deleted."""
        return self.rows("packs")

    def snapshot(self, id: SnapshotId) -> SnapshotRow | None:
        """Return the row of a snapshot."""
        found: SnapshotRow | None = self.rows("snapshots").get(id)
        return found

    def notes(self) -> Iterable[NoteRow]:
        """Return the rows of notes."""
        return self.rows("notes").values()

    def changed(self, kind: str, change: layout.Change) -> Iterator[tuple[Named, bytes | None]]:
        """Yield the lists of a kind after a change, and the bytes of those that are new."""
        lists = self.root.of(kind)
        by_list: dict[int, dict[bytes, Any]] = {}
        for key, row in change.items():
            by_list.setdefault(layout.place(lists, key), {})[key] = row
        for at, named in enumerate(lists or [None]):
            if at not in by_list:
                assert named is not None
                yield named, None
                continue
            rows = {} if named is None else {row.key: row for row in self._read(named)}
            rows |= by_list[at]
            kept = [rows[key] for key in sorted(rows) if rows[key] is not None]
            for some in layout.split(kept):
                id, data = layout.encode_list(kind, some)
                first, made = some[0].key.hex(), self.root.generation + 1
                yield Named(kind, str(id), first, len(some), len(data), made), data


class Changes(msgspec.Struct):
    """What a command changes at a remote, by kind of list; and what it needs of the state."""

    rows: dict[str, dict[bytes, Any]] = msgspec.field(
        default_factory=lambda: {kind: {} for kind in LISTS}
    )

    def put(self, kind: str, row: Any) -> None:
        """Put a row."""
        self.rows[kind][row.key] = row

    def __bool__(self) -> bool:
        return any(self.rows.values())


class Remote:
    """One remote of one store.

    dry_run: whether what would be put is only counted. requests: those that put something there,
    or with `dry_run` would.
    """

    def __init__(self, name: str, objects: Objects, directory: Path) -> None:
        self.name = name
        self.objects = objects
        self.directory = directory
        self.dry_run = False
        self.requests = 0

    @property
    def where(self) -> str:
        """Its address."""
        return self.objects.where

    def make_directory(self) -> None:
        """Make the directory for what is kept of this remote."""
        for one in (KEPT_LISTS, "sent"):
            fs.make_directories(self.directory / one)

    # -- reading -----------------------------------------------------------------------------

    def state(self) -> RemoteState:
        """Return what the remote is now: one request if nothing changed. Raises Absent."""
        saved = self._saved()
        try:
            got = self.objects.read_root(None if saved is None else saved[1])
        except Absent as error:
            raise Absent(
                "there is no remote" if saved is None else "the remote is gone",
                where=self.where,
                hint=self.objects.how_to_begin(self.name),
            ) from error
        if got is None:
            assert saved is not None
            data, stamp = saved
        else:
            data, stamp = got
        root = layout.read_root(data, self.where)
        if saved is not None:
            self._refuse_older(layout.read_root(saved[0], str(self.directory / KEPT_ROOT)), root)
        return self._state(root, stamp)

    def with_state(self, act: Callable[[RemoteState], T]) -> T:
        """Do something with what the remote is now; again, if that was replaced meanwhile.

        A gc may remove what an older root names while this reads it.
        """
        for _ in self.attempts():
            state = self.state()
            try:
                return act(state)
            except Absent as error:
                self.require_replaced(state, error)
        raise AssertionError

    def require_replaced(self, state: RemoteState, missing: Absent) -> None:
        """Raise Corrupt if the root that lacks an object is still the remote's."""
        if self.state().root.nonce == state.root.nonce:
            raise Corrupt(
                f"{self.name} lacks an object that it needs",
                where=missing.where,
                hint=call("remote_fsck", self.name),
            ) from missing

    def _refuse_older(self, before: RemoteRoot, now: RemoteRoot) -> None:
        if before.uuid != now.uuid:
            raise Conflict(
                "another remote is at this address than before",
                where=self.where,
                hint="if that is right, remove the remote and add it again",
            )
        if before.generation > now.generation or (
            before.generation == now.generation and before.nonce != now.nonce
        ):
            raise Conflict(
                f"the remote went back from generation {before.generation} to {now.generation}: "
                "an older root was put back, or this is a copy",
                where=self.where,
                hint="if that is right, remove the remote, add it again, and push what it lacks",
            )

    def _state(self, root: RemoteRoot, stamp: RootStamp) -> RemoteState:
        return RemoteState(root, stamp, self._list)

    def _saved(self) -> tuple[bytes, RootStamp] | None:
        """Return the root that was seen last, and its stamp; None if it is not known or damaged."""
        try:
            data = fs.read_file(self.directory / KEPT_ROOT, 2 * MOST_ROOT_BYTES)
        except StorageFailed:
            return None
        head, _, body = data.partition(b"\n")
        with suppress(msgspec.MsgspecError, Corrupt):
            stamp = msgspec.json.decode(head, type=RootStamp)
            layout.read_root(body, "")
            return body, stamp
        return None

    def remember(self, state: RemoteState) -> None:
        """Keep this root: a read of it costs one request, and an older one is refused."""
        saved = self._saved()
        if saved is not None:
            before = layout.read_root(saved[0], "")
            if before.uuid == state.root.uuid and before.generation > state.root.generation:
                # Another command has seen a later one meanwhile.
                return
        data = msgspec.json.encode(state.stamp) + b"\n" + state.root.encode()
        self.keep(KEPT_ROOT, data)
        wanted = {one.file for one in state.root.lists}
        for name in self.kept(KEPT_LISTS):
            if name not in wanted:
                fs.unlink(self.directory / KEPT_LISTS / name, missing_ok=True)

    def keep(self, name: str, data: bytes) -> None:
        """Write a file of root, lists/ or sent/, by its path in the remote's directory."""
        with fs.locked(self.directory / _LOCK):
            fs.replace_file(self.directory / name, data)

    def kept(self, below: str) -> list[str]:
        """Return the names of files in lists/ or sent/.

        What is written at this moment is not among them. So a caller may remove all that it does
        not know: a temporary file is of a command that was killed.
        """
        with fs.locked(self.directory / _LOCK), fs.translated(self.directory):
            return fs.listed(self.directory / below)

    def _list(self, named: Named) -> list[Any]:
        path = self.directory / KEPT_LISTS / named.file
        with suppress(StorageFailed, Corrupt):
            return layout.decode_list(named, fs.read_file(path, named.size + 1), str(path))
        data = bytes(self.objects.read_each(named.name, [(0, named.size)])[0])
        rows = layout.decode_list(named, data, f"{self.where}/{named.name}")
        self.keep(f"{KEPT_LISTS}/{named.file}", data)
        return rows

    # -- changing ----------------------------------------------------------------------------

    def change(self, before: RemoteState, changes: Changes) -> RemoteState:
        """Put the changed lists, then the root. Raises Overtaken: read the state, decide again."""
        # Of a kind that a newer version has added: they stay.
        lists = [one for one in before.root.lists if one.kind not in LISTS]
        for kind in LISTS:
            if not changes.rows[kind]:
                lists += before.root.of(kind)
                continue
            try:
                for named, data in before.changed(kind, changes.rows[kind]):
                    if data is not None:
                        self.put_bytes(named.name, data)
                        if not self.dry_run:
                            self.keep(f"{KEPT_LISTS}/{named.file}", data)
                    lists.append(named)
            except Absent as error:
                # A gc has removed a list that only older roots name.
                self.require_replaced(before, error)
                raise Overtaken("the remote changed meanwhile", where=self.where) from error
        root = msgspec.structs.replace(
            before.root,
            generation=before.root.generation + 1,
            nonce=secrets.token_hex(16),
            lists=tuple(lists),
        )
        self.requests += 1
        if self.dry_run:
            return before
        return self._state(root, self.objects.swap_root(root.encode(), before.stamp))

    def put_bytes(self, name: str, data: bytes) -> None:
        """Put an object that is not the root."""
        self.requests += requests_to_put(len(data))
        if not self.dry_run:
            self.objects.put_bytes(name, data)

    def clock_ns(self, put: str | None = None) -> int:
        """Return the time by the remote's clock, in ns since the epoch; 0 in a dry run.

        put: an object that was just put, if there is one.
        """
        name = put or f"{PROBE}{secrets.token_hex(16)}"
        if put is None:
            self.put_bytes(name, b"")
        if self.dry_run:
            return 0
        if put is not None:
            return self.objects.time_ns(put)
        try:
            return self.objects.time_ns(name)
        finally:
            self.objects.remove(name)

    def attempts(self) -> Iterator[int]:
        """Count attempts to change the remote. Raises Conflict when others are always first.

        Waits before each but the first, for a random time: those who were overtaken together come
        back one by one. So read the root in the attempt: what was read before the wait is old.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(
                    random.SystemRandom().uniform(0, min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt))
                )
            yield attempt
        raise Conflict(
            "others change the remote all the time", where=self.where, hint="run the command again"
        )

    def create(self, root: RemoteRoot) -> RemoteState:
        """Make the remote, unless somebody else just did; return what it is."""
        self.requests += PROBE_PUTS + 1
        if self.dry_run:
            return self._state(root, RootStamp(None))
        self.objects.probe(root.nonce)
        try:
            stamp = self.objects.swap_root(root.encode(), None)
        except Overtaken:
            return self.state()
        return self._state(root, stamp)


Opens = Callable[[str], AbstractContextManager[Remote]]
"""Opens a remote by its name."""
