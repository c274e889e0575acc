"""fsck of a remote: does it have what its refs need, whole?

    root, lists, tables   match their names
    statistics            are there, with their sizes; match their names, if they are read
    packs                 are there, with their sizes
    what refs need        has a place in a pack; so has the base of each difference
    payloads              match their ids, if they are read

Changes nothing.  Reads each pack once, by ranges; bases of differences are read again where they
lie in another pack, a few at a time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.reader import decoded, verify
from mstore.remotes import statistics
from mstore.remotes.layout import LISTS, PackRow, pack_name
from mstore.remotes.needs import Needs, gather
from mstore.remotes.objects import Absent
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import AllRecords, PackSpan, placed, read_span, spans
from mstore.remotes.state import Remote, RemoteState
from mstore.store.ahead import in_order
from mstore.store.catalog import Catalog
from mstore.terms.errors import Corrupt, MstoreError
from mstore.terms.ids import BlockId, Buffer, PackId, SnapshotId
from mstore.terms.phrases import Phrase, as_phrase, call
from mstore.terms.report import ProgressCallback, ProgressCounter, Report
from mstore.upkeep.check.findings import typed_id

_BASES: int = 64
"""Decoded bases that are kept."""


class RemoteProblem(Report, frozen=True):
    """One thing that is wrong with a remote."""

    what: str
    """what is wrong"""
    where: str
    """the object, block or record"""
    refs: tuple[str, ...]
    """refs that cannot be read because of it, as far as that is known"""


class RemoteCheckReport(Report, frozen=True):
    """What a check of a remote found."""

    remote: str
    """the remote's name"""
    url: str
    """its address"""
    generation: int
    """number of changes that the remote has seen"""
    snapshots: int
    """snapshots that were checked"""
    packs: int
    """packs that were checked"""
    blocks: int
    """blocks that refs need"""
    bytes_read: int
    """bytes of packs that were read and compared with their ids"""
    problems: tuple[RemoteProblem, ...]
    """what is wrong; empty: nothing"""
    hint: Phrase | None
    """the next command if something is wrong; null: nothing is"""
    seconds: float
    """how long it took"""


class RemoteCheck:
    """One check of one remote."""

    def __init__(
        self,
        catalog: Catalog,
        remote: Remote,
        *,
        jobs: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._catalog = catalog
        self._remote = remote
        self._jobs = jobs
        self._progress = progress
        self._found: dict[tuple[str, str], list[str]] = {}
        self._read = 0

    def run(self, *, read_data: bool) -> RemoteCheckReport:
        """Check. Raises Corrupt only where the root or a list cannot be read, Unavailable."""
        began = time.monotonic()
        self._remote.make_directory()
        for _ in self._remote.attempts():
            self._found.clear()
            self._read = 0
            try:
                report = self._remote.with_state(
                    lambda state: self._checked(state, read_data=read_data, began=began)
                )
            except Corrupt as error:
                # Nothing else says what the remote has.
                error.advise("put this object back, from an older version or a copy of it")
                raise
            # What is missing may be what a gc has removed since.
            if not report.problems or self._remote.state().root.generation == report.generation:
                break
        return report

    def _checked(self, state: RemoteState, *, read_data: bool, began: float) -> RemoteCheckReport:
        for kind in LISTS:
            state.rows(kind)
        places = RemotePlaces(self._remote, state)
        there = self._packs(state)
        needs = self._needs(state, places)
        self._statistics(state, read_data=read_data)
        if read_data:
            self._payloads(state, places, there)
        problems = tuple(
            RemoteProblem(what, where, tuple(refs)) for (what, where), refs in self._found.items()
        )
        hint = as_phrase(call("push", self._remote.name, every=True)) if problems else None
        return RemoteCheckReport(
            remote=self._remote.name,
            url=self._remote.where,
            generation=state.root.generation,
            snapshots=len(needs.snapshots),
            packs=len(there),
            blocks=len(needs.blocks),
            bytes_read=self._read,
            problems=problems,
            hint=hint,
            seconds=time.monotonic() - began,
        )

    def _tell(self, what: str, where: str, refs: Sequence[str] = ()) -> None:
        place = where.removeprefix(f"{self._remote.where}/")
        self._found.setdefault((what, place), []).extend(refs)

    def _packs(self, state: RemoteState) -> list[PackRow]:
        """Return the packs that are there, whole by their sizes."""
        sizes = {one.name: one.size for one in self._remote.objects.names("packs/")}
        whole = []
        for row in state.packs().values():
            if not (row.is_there and row.is_known):
                continue
            size = sizes.get(pack_name(row.pack))
            if size is None:
                self._tell("there is no such object", pack_name(row.pack))
            elif size != row.size:
                self._tell(f"the pack has {size} bytes, not {row.size}", pack_name(row.pack))
            else:
                whole.append(row)
        return whole

    def _statistics(self, state: RemoteState, *, read_data: bool) -> None:
        sizes = {one.name: one.size for one in self._remote.objects.names("stats/")}
        for row in state.rows("statistics").values():
            size = sizes.get(row.name)
            if size is None:
                self._tell("there is no such object", row.name)
            elif size != row.size:
                self._tell(f"the statistics have {size} bytes, not {row.size}", row.name)
            elif read_data:
                try:
                    [data] = self._remote.objects.read_each(row.name, [(0, size)])
                    statistics.decode(row, bytes(data), row.name)
                    self._read += size
                except (Corrupt, Absent) as error:
                    self._tell(error.what, row.name)

    def _needs(self, state: RemoteState, places: RemotePlaces) -> Needs:
        """Walk down from each ref; what one lacks is told with its name."""
        all_needs = Needs()
        source = AllRecords(self._catalog, self._remote, places, state, reads_local=False)
        for name, row in state.refs().items():
            if row.snapshot is None:
                continue
            head = SnapshotId(row.snapshot)
            try:
                if not source.has_contents(head):
                    raise Corrupt("the contents of its snapshot are not there", where=name)
                needs = gather(source, [head], source.has_contents)
            except (Corrupt, Absent) as error:
                self._tell(error.what, error.where or name, [name])
                continue
            for (kind, id), at, _ in placed(needs, places):
                if at is None:
                    self._tell(f"this {kind.name.lower()} is in no pack", id.hex(), [name])
            all_needs.snapshots |= needs.snapshots
            all_needs.blocks |= needs.blocks
        return all_needs

    # -- payloads ----------------------------------------------------------------------------

    def _payloads(self, state: RemoteState, places: RemotePlaces, rows: Sequence[PackRow]) -> None:
        tick = ProgressCounter("check", sum(row.size for row in rows), self._progress)
        bases = _Bases(self._remote, places)
        with ThreadPoolExecutor(self._jobs, "check") as pool:
            for row in rows:
                name = pack_name(row.pack)
                entries = places.entries(row, self._catalog.block_size)

                def bring(span: PackSpan, pack: PackId = row.pack) -> Buffer:
                    return read_span(self._remote, pack, span)

                some = spans(entries)
                try:
                    for span, data in in_order(
                        lambda one, bring=bring: pool.submit(bring, one),  # type: ignore[misc]
                        some,
                        ahead=self._jobs,
                    ):
                        self._read += len(data)
                        self._span(span, data, bases)
                except (Corrupt, Absent) as error:
                    self._tell(error.what, error.where or name)
                tick(row.size)

    def _span(self, span: PackSpan, data: Buffer, bases: _Bases) -> None:
        view = memoryview(data)
        for (kind, id), at in span.entries:
            start = at.offset - span.start
            payload = view[start : start + at.stored_length]
            try:
                _prove(kind, id, at, payload, bases, self._catalog.block_size)
            except MstoreError as error:
                self._tell(error.what, f"{pack_name(at.pack)}: {kind.name.lower()} {id.hex()}")


class _Bases:
    """Decoded bases of differences, a few at a time."""

    def __init__(self, remote: Remote, places: RemotePlaces) -> None:
        self._remote = remote
        self._places = places
        self._kept: OrderedDict[bytes, Buffer] = OrderedDict()

    def get(self, block: bytes, block_size: int) -> Buffer:
        """Return the plain bytes of a base. Raises Corrupt, Unavailable."""
        if block not in self._kept:
            [at] = self._places.alone([block])
            if at is None:
                raise Corrupt("the base of this difference is in no pack", where=block.hex())
            if max(at.raw_length, at.stored_length) > block_size:
                raise Corrupt("longer than the block size", where=f"block {block.hex()}")
            span = (at.offset, at.stored_length)
            [payload] = self._remote.objects.read_each(pack_name(PackId(at.pack)), [span])
            data = decoded(BlockId(block), at, payload)
            verify(BlockId(block), at, data)
            self._kept[block] = data
            if len(self._kept) > _BASES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(block)
        return self._kept[block]


def _prove(
    kind: Kind, id: bytes, at: Location, payload: Buffer, bases: _Bases, block_size: int
) -> None:
    """Raise Corrupt unless a payload is what its id says."""
    name = typed_id(kind, id)
    if not isinstance(name, BlockId):
        if type(name).of(payload) != name:
            raise Corrupt("does not match its id", where=str(name))
        return
    if max(at.raw_length, at.stored_length) > block_size:
        raise Corrupt("longer than the block size", where=f"block {name}")
    base = None if at.base == NO_BASE else bases.get(at.base, block_size)
    verify(name, at, decoded(name, at, payload, base), base)
