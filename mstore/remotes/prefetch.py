"""Prefetch and drop: blocks of lazy remotes come here before anything reads them, and go again.

`prefetch` brings blocks as a fetch does, into packs of this store. `drop` removes the rows of
blocks that the remote has and nothing else here needs; gc then frees their space.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.location import Location, base_of
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.schema import PINNED
from mstore.remotes.arrival import Arrival, Incoming
from mstore.remotes.layout import PackRow, PackState
from mstore.remotes.needs import LocalRecords, Needs, gather
from mstore.remotes.places import RemotePlaces
from mstore.remotes.state import Opens, Remote, RemoteState
from mstore.store import contents
from mstore.store import layout as layouts
from mstore.store.catalog import Catalog
from mstore.store.leaning import counted, not_here
from mstore.store.objects.shapes import matching, require_matches
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import Conflict, Corrupt
from mstore.terms.ids import BlockId, PackId, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, Report

_WHOLE: Final = 0.95
"""A pack of which this share is needed is downloaded whole."""


class PrefetchReport(Report, frozen=True):
    """What a prefetch brought, or with `dry_run` would bring."""

    snapshots: tuple[SnapshotId, ...]
    """what was named"""
    dry_run: bool
    """whether this only reports what would come"""
    blocks: int
    """blocks that are new here"""
    bytes: int
    """their size at the remote, at rest"""
    bytes_received: int
    """bytes of packs and parts of packs that were downloaded"""
    seconds: float
    """how long it took"""


class DropReport(Report, frozen=True):
    """What a drop removed, or with `dry_run` would remove."""

    snapshots: tuple[SnapshotId, ...]
    """what was named and a lazy remote has"""
    only_here: tuple[SnapshotId, ...]
    """what else `every` names: no lazy remote has it, so its blocks stay"""
    dry_run: bool
    """whether this only reports what would be removed"""
    blocks: int
    """blocks that are only at the remote now"""
    bytes: int
    """their size here, at rest: what gc can free"""
    kept_blocks: int
    """blocks that stay, because something else here needs them"""
    seconds: float
    """how long it took"""


def prefetch(
    catalog: Catalog,
    opens: Opens,
    snapshots: Sequence[SnapshotId],
    *,
    only: Sequence[str],
    dry_run: bool,
    jobs: int,
    progress: ProgressCallback | None,
) -> PrefetchReport:
    """Bring blocks of snapshots that are only at lazy remotes; see `Store.prefetch`."""
    began = time.monotonic()
    layouts.require_writable(catalog.layout)
    blocks = received = 0
    with contents.held(catalog, snapshots):
        by_remote = _by_remote(catalog, snapshots, only)
        leaning = counted(catalog, (BlockId(one) for some in by_remote.values() for one in some))
        if dry_run:
            blocks, by_remote = sum(one.blocks for one in leaning), {}
        for name, wanted in by_remote.items():
            with opens(name) as remote:
                remote.make_directory()

                def bring(
                    state: RemoteState, remote: Remote = remote, wanted: list[bytes] = wanted
                ) -> Arrival:
                    return _bring(catalog, remote, state, wanted, jobs, progress)

                with fs.locked(remote.directory / "fetch.lock"):
                    arrival = remote.with_state(bring)
            blocks += arrival.blocks
            received += arrival.received
    size = sum(one.bytes for one in leaning)
    seconds = time.monotonic() - began
    return PrefetchReport(tuple(snapshots), dry_run, blocks, size, received, seconds)


def _by_remote(
    catalog: Catalog, snapshots: Sequence[SnapshotId], only: Sequence[str]
) -> dict[str, list[bytes]]:
    """Return the blocks that are not here, by the remote that has them."""
    elsewhere = catalog.index.elsewhere
    if elsewhere is None:
        return {}
    needs = gather(LocalRecords(catalog), snapshots, set(snapshots).__contains__)
    wanted: Iterable[bytes] = needs.blocks
    if only:
        chosen = _chosen(catalog, snapshots, only)
        wanted = (block for block in needs.blocks if block in chosen)
    blocks = [BlockId(block) for block in wanted]
    lacking = not_here(catalog, blocks)
    found: dict[str, list[bytes]] = defaultdict(list)
    lost = 0
    for block, at in zip(lacking, elsewhere.locate(lacking), strict=True):
        name = None if at is None else elsewhere.name_of(at.pack)
        if name is None:
            lost += 1
        else:
            found[name].append(bytes(block))
    if lost:
        raise Corrupt(
            f"{lost} blocks are neither here nor at a lazy remote: somebody removed there what "
            "needed them",
            hint=phrase(
                "{fetch} says what is there now; who has them pushes them again",
                fetch=call("fetch", catalog.config.lazy_remotes[0].name),
            ),
        )
    return found


def _chosen(catalog: Catalog, snapshots: Sequence[SnapshotId], only: Sequence[str]) -> set[bytes]:
    """Return the blocks of tensors that match the patterns."""
    blocks: set[bytes] = set()
    for id in snapshots:
        parts = [one for file in catalog.manifest_of(id).files for one in file.parts if one.name]
        names = [str(one.name) for one in parts]
        require_matches(names, only, (), str(id))
        kept = matching(names, only)
        for part in parts:
            content = catalog.content(part.tensor_id())
            if part.name in kept and isinstance(content, Tensor):
                blocks.update(content.block_ids())
    return blocks


def _bring(
    catalog: Catalog,
    remote: Remote,
    state: RemoteState,
    blocks: Sequence[bytes],
    jobs: int,
    progress: ProgressCallback | None,
) -> Arrival:
    incoming = Incoming(remote.directory)
    incoming.remove_parts()
    places = RemotePlaces(remote, state)
    needs = Needs(blocks=dict.fromkeys(blocks))
    with Transaction(catalog, f"prefetch from {remote.name}") as transaction:
        arrival = Arrival(
            *(catalog, remote, transaction, needs, places, state, incoming),
            jobs=jobs,
            progress=progress,
            # Who prefetches has little room.
            whole=_WHOLE,
        )
        arrival.run()
        if transaction.has_news:
            transaction.commit()
    remote.remember(state)
    incoming.keep(())
    return arrival


# -- drop ----------------------------------------------------------------------------------------


def drop(
    catalog: Catalog,
    opens: Opens,
    snapshots: Mapping[SnapshotId, str],
    *,
    every: bool,
    dry_run: bool,
) -> DropReport:
    """Remove local copies of blocks that lazy remotes have; see `Store.drop`.

    snapshots: what each is called. every: pass over those that no lazy remote has.
    """
    began = time.monotonic()
    pinned = catalog.index.marked(PINNED)
    for id, called in snapshots.items():
        if id in pinned and not every:
            raise Conflict("it is pinned", where=called, hint=call("unpin", called))
    named = {id: called for id, called in snapshots.items() if id not in pinned}
    left = frozenset(named)
    gone: dict[BlockId, Location] = {}
    kept = 0
    for config in catalog.config.lazy_remotes:
        if left:
            with opens(config.name) as remote:
                remote.make_directory()
                found = remote.with_state(partial(_droppable, catalog, remote, left))
            left -= found.snapshots
            gone |= found.gone
            kept += found.kept
    if left and not every:
        called = next(called for id, called in named.items() if id in left)
        raise Conflict(
            "no lazy remote has a ref that reaches this snapshot with its contents: this copy may "
            "be the only one",
            where=called,
            hint=call("push", "NAME", refs=(called,)),
        )
    if gone and not dry_run:
        _remove(catalog, gone)
    return DropReport(
        snapshots=tuple(id for id in named if id not in left),
        only_here=tuple(id for id in named if id in left),
        dry_run=dry_run,
        blocks=len(gone),
        bytes=sum(at.stored_length for at in gone.values()),
        kept_blocks=kept,
        seconds=time.monotonic() - began,
    )


class _Droppable(msgspec.Struct, frozen=True):
    """Snapshots that a remote has, their blocks that can go, and how many of these stay."""

    snapshots: set[SnapshotId]
    gone: dict[BlockId, Location]
    kept: int


def _droppable(
    catalog: Catalog, remote: Remote, asked: Collection[SnapshotId], state: RemoteState
) -> _Droppable:
    there = _reached(catalog, state)
    snapshots = there.intersection(asked)
    source = LocalRecords(catalog)
    own = gather(source, list(snapshots), snapshots.__contains__).blocks
    stay = catalog.index.marked(PINNED) | (set(catalog.snapshot_ids()) - there)
    others = [id for id in stay if source.has_contents(id)]
    staying = gather(source, others, set(others).__contains__).blocks
    # Small files are here in every lazy store.
    staying |= gather(source, list(snapshots), snapshots.__contains__, weights=False).blocks
    places = RemotePlaces(remote, state)
    remote.remember(state)
    rows = state.packs()
    wanted = [block for block in own if block not in staying]
    found = places.locate(Kind.BLOCK, wanted)
    bases = places.alone([at.base for at in found if at is not None and at.base != NO_BASE])
    live = {at.pack for at in (*found, *bases) if at is not None and _is_live(rows, at.pack)}
    index = catalog.index
    with index.env.read() as transaction:
        gone = {
            BlockId(block): here
            for block, at in zip(wanted, found, strict=True)
            if at is not None and at.pack in live
            if (here := index.block(transaction, BlockId(block))) is not None
        }
        kept = sum(
            index.block(transaction, BlockId(block)) is not None
            for block in own
            if BlockId(block) not in gone
        )
    # What differences that stay are made to stays with them.
    for batch in index.block_batches():
        for id, row in batch:
            base = base_of(row)
            if base is not None and BlockId(id) not in gone and BlockId(base) in gone:
                del gone[BlockId(base)]
                kept += 1
    return _Droppable(snapshots, gone, kept)


def _is_live(rows: Mapping[bytes, PackRow], pack: PackId) -> bool:
    return pack in rows and rows[pack].state == PackState.LIVE


def _reached(catalog: Catalog, state: RemoteState) -> set[SnapshotId]:
    """Return the snapshots that refs of the remote reach, and that it has with contents."""
    waiting = [SnapshotId(row.snapshot) for row in state.refs().values() if row.snapshot]
    seen: set[SnapshotId] = set()
    while waiting:
        id = waiting.pop()
        record = None if id in seen else catalog.snapshot_if_there(id)
        seen.add(id)
        if record is not None:
            waiting += [parent.snapshot_id() for parent in record.parents]
    rows = {id: state.snapshot(id) for id in seen}
    return {id for id, row in rows.items() if row is not None and row.is_whole}


def _remove(catalog: Catalog, gone: Mapping[BlockId, Location]) -> None:
    """Remove the rows that are as they were."""
    index = catalog.index
    with catalog.committing() as transaction:
        for block, at in gone.items():
            if index.block(transaction, block) == at:
                index.delete_row(transaction, (Kind.BLOCK, block))
