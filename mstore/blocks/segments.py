"""The segments of a directory: a list of them, which changes in one step.

    directory   list                 names the segments
                <SegmentId>.segment  a segment (`blocks.segment`); immutable, read-only
                lock                 held by who changes the list
    list        a line "mstore segments 1", a line "<SegmentId> <rows>" for each segment, the
                largest first, and a line "blake3 <64 digits>" of all bytes before it

All rows come from tables of packs and can be made from them again.

Log-structured: each segment has at least twice the rows of the next, so their number grows with the
logarithm of the rows. Merging streams, with memory for `_MERGED` rows and the PackIds.

Crash promise: the list changes in one step, after the files that it names are durable. A directory
has the rows from before a change or from after it; a file that the list does not name is garbage,
which the next change removes. Any number of threads and processes may read while one changes it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.location_arrays import Flags, Numbers
from mstore.blocks.pack_tables import PackTable
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.segment import (
    COLUMNS,
    FIELDS,
    HINT,
    KEY,
    MOST_ROWS,
    ROW,
    Rows,
    Segment,
    SegmentGone,
    ordered,
    packs_of,
    path_of,
    rows_of,
    write,
)
from mstore.terms.errors import Corrupt, StorageFailed
from mstore.terms.ids import ID_BYTES, PackId, SegmentId

LIST: Final = "list"
_GATHERED: Final = 1 << 18
"""Rows that are sorted in memory."""
_MERGED: Final = 1 << 16
"""Rows in memory while segments are merged."""
_MOST_RUNS: Final = 16
_MOST_LISTED: Final = 1 << 16
"""Longest list that is read, in bytes."""
_HEAD: Final = b"mstore segments 1\n"
_LINE: Final = re.compile(rb"([0-9a-f]{64}) ([1-9][0-9]{0,9})")
_END: Final = len("blake3 \n") + 64
_GARBAGE: Final = re.compile(r"[0-9a-f]{64}\.segment|[0-9a-f]{16}\.new|\.list\.[0-9a-f]{8}")


class Found(msgspec.Struct):
    """Where ids were found, as arrays: half a million places are 30 MB.

    stored: bytes at rest of each, int64, -1 for one that is not there. pack: its pack, as a place
    in `packs`. base: id of what it is a difference to, V32, zeros for none.
    """

    stored: Numbers
    pack: Numbers
    base: npt.NDArray[np.void]
    packs: list[PackId]

    @classmethod
    def nothing(cls, count: int) -> Found:
        """Return so many places of nothing."""
        absent = np.full(count, -1, np.int64)
        return cls(absent, np.zeros(count, np.int64), np.zeros(count, f"V{ID_BYTES}"), [])

    def put(self, places: Numbers, packs: Sequence[PackId], rows: Rows) -> None:
        """Put rows, with numbers of these packs, at these places."""
        fields = rows.view(FIELDS)
        self.stored[places] = fields["stored"]
        self.pack[places] = fields["pack"].astype(np.int64) + len(self.packs)
        self.base[places] = fields["base"]
        self.packs += packs

    def put_one(self, number: int, at: Location | None) -> None:
        """Put one place."""
        self.stored[number] = -1 if at is None else at.stored_length
        if at is not None:
            self.pack[number] = len(self.packs)
            self.base[number] = np.void(at.base)
            self.packs.append(at.pack)

    @property
    def is_there(self) -> Flags:
        """bool for each: whether it was found."""
        there: Flags = self.stored >= 0
        return there

    @property
    def is_alone(self) -> Flags:
        """bool for each: whether it was found, and is no difference."""
        alone: Flags = self.is_there & (self.base == np.void(NO_BASE))
        return alone

    def packs_of(self, which: Flags) -> set[PackId]:
        """Return the packs of these places."""
        return {self.packs[at] for at in np.unique(self.pack[which]).tolist()}

    def bases(self) -> list[bytes]:
        """Return what the differences are made to, each once."""
        some = self.base[self.is_there & ~self.is_alone]
        return list(dict.fromkeys(some.tolist()))


class Segments:
    """The segments of a directory as its list named them when they were opened, or changed here.

    Any number of threads may read, also while another process changes the directory: what is open
    stays. Every method may raise Corrupt or StorageFailed, which names the file.
    """

    def __init__(self, directory: Path) -> None:
        """Open what the list names.  Raises Corrupt, Incompatible, StorageFailed."""
        self.directory = directory
        self._segments = _opened(directory)

    @classmethod
    def create(cls, directory: Path) -> Segments:
        """Open a directory; make it, with an empty list, if it is missing."""
        if fs.make_directory(directory, exist_ok=True):
            fs.sync_directory(directory.parent)
        with _locked(directory):
            if not fs.is_there(directory / LIST):
                _write_list(directory, ())
        return cls(directory)

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(map(len, self._segments))

    def sizes(self) -> list[int]:
        """Return the number of rows of each segment, the largest first."""
        return list(map(len, self._segments))

    def packs(self) -> set[PackId]:
        """Return the packs whose tables were added."""
        return {pack for segment in self._segments for pack in segment.packs()}

    def has_pack(self, pack: PackId) -> bool:
        """Return whether the table of a pack was added."""
        return any(segment.has_pack(pack) for segment in self._segments)

    def has(self, kind: Kind, ids: bytes) -> Flags:
        """Return for each of concatenated ids whether it has a row."""
        there = np.zeros(len(ids) // ID_BYTES, np.bool_)
        for _, places, _ in self._found(kind, ids):
            there[places] = True
        return there

    def locations(self, kind: Kind, ids: bytes) -> list[Location | None]:
        """Return a place of each of concatenated ids; None for one without a row."""
        result: list[Location | None] = [None] * (len(ids) // ID_BYTES)
        for segment, places, numbers in self._found(kind, ids):
            for place, found in zip(places.tolist(), segment.locations(numbers), strict=True):
                result[place] = found
        return result

    def found(self, kind: Kind, ids: bytes) -> Found:
        """Return what `locations` does, as arrays."""
        result = Found.nothing(len(ids) // ID_BYTES)
        for segment, places, numbers in self._found(kind, ids):
            packs, rows = segment.fields(numbers)
            result.put(places, packs, rows)
        return result

    def places(self, kind: Kind, id: bytes) -> Iterator[Location]:
        """Yield every place of one block or record."""
        key = id + bytes([kind])
        for segment in self._segments:
            yield from segment.places(key)

    def walk(self) -> Iterator[tuple[int, bytes, Location]]:
        """Yield kind, id and place of every row, in order of ids."""
        names = [segment.packs() for segment in self._segments]
        packs = sorted({pack for some in names for pack in some})
        for rows in _joined(self._segments, names, packs):
            fields = rows.view(FIELDS)
            places = [packs[number] for number in fields["pack"].tolist()]
            columns = (fields[name].tolist() for name in COLUMNS)
            found = map(Location, places, *columns)
            yield from zip(fields["kind"].tolist(), fields["id"].tolist(), found, strict=True)

    def copy_to(self, directory: Path, other: Path) -> None:
        """Make a directory with the same segments, durably; what was copied is checked there.

        other: a directory on the same disk. Segments that it has are linked, not copied.
        """
        fs.make_directory(directory)
        for segment in self._segments:
            if not _linked(segment.id, other, directory):
                segment.copy_to(directory)
        _write_list(directory, [(one.id, len(one)) for one in self._segments])

    def verify(self) -> None:
        """Check every byte of every segment."""
        for segment in self._segments:
            segment.verify()

    def add(self, tables: Iterable[tuple[PackId, PackTable]]) -> None:
        """Add the rows of packs, given their tables; pass over packs that are there already.

        Holds the tables of a quarter of a million rows, and at least of one pack.  An error, or
        the end of the process, leaves the rows as they were.
        """
        with self._changing() as segments:
            passed = self.packs()
            runs: list[Segment] = []
            gathered: dict[PackId, PackTable] = {}
            count = 0
            for pack, table in tables:
                if pack in passed or not len(table):
                    continue
                passed.add(pack)
                gathered[pack] = table
                count += len(table)
                if count >= _GATHERED:
                    runs += self._run(gathered)
                    gathered, count = {}, 0
                if len(runs) == _MOST_RUNS:
                    runs = _merge(self.directory, runs, ())
            runs += self._run(gathered)
            self._settle(segments, runs, sum(map(len, runs)))

    def drop(self, packs: Collection[PackId]) -> None:
        """Remove the rows of packs; those of other packs stay, also of the same blocks."""
        with self._changing() as segments:
            gone = set(packs)
            touched = [one for one in segments if not gone.isdisjoint(one.packs())]
            left = 0
            for segment in touched:
                names = segment.packs()
                kept = np.array([pack not in gone for pack in names])
                left += sum(int(kept[packs_of(rows)].sum()) for rows in segment.rows())
            if touched:
                self._settle([one for one in segments if one not in touched], touched, left, gone)

    def _run(self, tables: Mapping[PackId, PackTable]) -> list[Segment]:
        if not tables:
            return []
        packs, rows = rows_of(tables)
        id = write(self.directory, packs, iter([rows] if len(rows) else []), len(rows))
        return [] if id is None else [Segment(self.directory, id)]

    def _settle(
        self,
        kept: list[Segment],
        changed: list[Segment],
        rows: int,
        dropped: Collection[PackId] = (),
    ) -> None:
        """Merge what changed, and what is too near in size, and publish the result.

        rows: how many rows of `changed` stay.
        """
        while near := [
            one
            for one in kept
            if len(one) < 2 * rows and rows < 2 * len(one) and rows + len(one) <= MOST_ROWS
        ]:
            changed, kept = changed + near, [one for one in kept if one not in near]
            rows += sum(map(len, near))
        if len(changed) > 1 or dropped:
            changed = _merge(self.directory, changed, dropped)
        self._publish(sorted(kept + changed, key=len, reverse=True))

    def _publish(self, segments: list[Segment]) -> None:
        _write_list(self.directory, [(one.id, len(one)) for one in segments])
        self._segments = segments
        self._tidy()

    def _tidy(self) -> None:
        """Remove what a change left that did not end, and what the last one replaced."""
        named = {one.path.name for one in self._segments}
        with fs.translated(self.directory):
            names = fs.listed(self.directory)
        garbage = [name for name in names if _GARBAGE.fullmatch(name) and name not in named]
        if garbage:
            # Who replaced the list may have ended before that was durable: the one before needs
            # what is removed here.
            fs.sync_directory(self.directory)
        for name in garbage:
            fs.unlink(self.directory / name, missing_ok=True)

    @contextmanager
    def _changing(self) -> Iterator[list[Segment]]:
        """Yield the segments as they are now, while no other process changes them."""
        with _locked(self.directory):
            listed = _read_list(self.directory)
            if [(one.id, len(one)) for one in self._segments] != listed:
                self._segments = _opened(self.directory)
            self._tidy()
            yield list(self._segments)

    def _found(self, kind: Kind, ids: bytes) -> Iterator[tuple[Segment, Numbers, Numbers]]:
        """Yield, for each segment, places of the ids that are first found in it, and their rows."""
        bytes_ = np.full((len(ids) // ID_BYTES, ID_BYTES + 1), int(kind), np.uint8)
        bytes_[:, :ID_BYTES] = np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES)
        keys = bytes_.view(("S", ID_BYTES + 1))[:, 0]
        # In sorted order, each search finds the page of the one before in the processor's cache.
        order = np.argsort(keys.view(KEY)["first"].astype(np.uint64))
        keys = keys[order]
        for segment in self._segments:
            if not len(keys):
                return
            found = segment.find(keys)
            there = found >= 0
            if there.any():
                yield segment, order[there], found[there]
                keys, order = keys[~there], order[~there]


def merged(streams: Iterable[Iterator[Rows]]) -> Iterator[Rows]:
    """Yield the rows of ascending streams, ascending, each once, and no empty batch.

    Holds one batch of each stream.
    """
    waiting = list(streams)
    held: list[Rows] = [np.empty(0, ROW)] * len(waiting)
    while True:
        for place in reversed(range(len(waiting))):
            while not len(held[place]):
                some = next(waiting[place], None)
                if some is None:
                    del waiting[place], held[place]
                    break
                held[place] = some
        if not held:
            return
        # What comes later is greater than the least of these.
        limit = min(rows[-1] for rows in held)
        cuts = [int(np.searchsorted(rows, limit, side="right")) for rows in held]
        ready = [rows[:cut] for rows, cut in zip(held, cuts, strict=True)]
        held = [rows[cut:] for rows, cut in zip(held, cuts, strict=True)]
        yield ordered(np.concatenate(ready))


def _merge(
    directory: Path, segments: Sequence[Segment], dropped: Collection[PackId]
) -> list[Segment]:
    """Write one segment of several, without the rows of some packs; none if no row is left."""
    names = [segment.packs() for segment in segments]
    packs = sorted({pack for some in names for pack in some} - set(dropped))
    most = sum(map(len, segments))
    id = write(directory, packs, _joined(segments, names, packs), most)
    return [] if id is None else [Segment(directory, id)]


def _joined(
    segments: Sequence[Segment], names: Sequence[Sequence[PackId]], packs: Sequence[PackId]
) -> Iterator[Rows]:
    """Yield the rows of segments, ascending, numbered by `packs`, without those of other packs."""
    numbers = {pack: number for number, pack in enumerate(packs)}
    most = sum(map(len, segments))
    streams = []
    for segment, some in zip(segments, names, strict=True):
        new = np.array([numbers.get(pack, -1) for pack in some], np.int64)
        # Batches end at about the same ids, so that none waits long.
        streams.append(_renumbered(segment.rows(_MERGED * len(segment) // most), new))
    return merged(streams)


def _renumbered(batches: Iterator[Rows], numbers: Numbers) -> Iterator[Rows]:
    """Yield rows with new numbers of packs, without those whose pack has none."""
    for rows in batches:
        new = numbers[packs_of(rows)]
        kept = rows[new >= 0]
        kept.view(FIELDS)["pack"] = new[new >= 0]
        yield kept


def _linked(id: SegmentId, source: Path, target: Path) -> bool:
    """Give a segment a second name; return False where that cannot be, or it is damaged."""
    try:
        Segment(source, id)
        fs.link(path_of(source, id), path_of(target, id))
    except (Corrupt, StorageFailed):
        return False
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = fs.LockFile(directory / "lock")
    try:
        lock.acquire()
        yield
    finally:
        lock.release()


def _opened(directory: Path) -> list[Segment]:
    """Open what the list names."""
    while True:
        listed = _read_list(directory)
        try:
            segments = [Segment(directory, id) for id, _ in listed]
        except SegmentGone:
            # Another process may have replaced the list, and then removed what it named.
            if _read_list(directory) == listed:
                raise
            continue
        for segment, (_, rows) in zip(segments, listed, strict=True):
            if len(segment) != rows:
                raise Corrupt(
                    f"the list says that {segment.path.name} has {rows} rows, and it has "
                    f"{len(segment)}",
                    where=str(directory / LIST),
                    hint=HINT,
                )
        return segments


def _write_list(directory: Path, segments: Iterable[tuple[SegmentId, int]]) -> None:
    lines = "".join(f"{id} {rows}\n" for id, rows in segments)
    body = _HEAD + lines.encode()
    fs.replace_file(directory / LIST, body + f"blake3 {blake3(body).hexdigest()}\n".encode())


def _read_list(directory: Path) -> list[tuple[SegmentId, int]]:
    path = directory / LIST
    try:
        data = fs.read_file(path, _MOST_LISTED)
    except StorageFailed as error:
        if error.errno != errno.ENOENT:
            raise
        raise Corrupt("the list of segments is missing", where=str(path), hint=HINT) from error
    body, check = data[:-_END], data[-_END:]
    if check != f"blake3 {blake3(body).hexdigest()}\n".encode() or not body.startswith(_HEAD):
        raise Corrupt("the list of segments is damaged", where=str(path), hint=HINT)
    segments = []
    for line in body[len(_HEAD) :].splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise Corrupt("the list of segments is damaged", where=str(path), hint=HINT)
        segments.append((SegmentId.parse(found[1].decode()), int(found[2])))
    return segments
