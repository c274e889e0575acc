"""Pruning: give up the contents of old snapshots and keep their place in the lineage.

Removes nothing here except tags that are in the way: it marks snapshots as pruned, and the next
garbage collection drops the contents that nothing else keeps. Until then they can be read, and
naming a snapshot again unmarks it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from mstore.blocks.schema import PRUNED
from mstore.snapshots.lineage import ancestry, positions
from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.transaction import RefMove, apply_moves
from mstore.terms.errors import BadRequest, NotFound
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call
from mstore.terms.report import Report
from mstore.upkeep.reachability import Roots, window_start

NS_A_SECOND = 1_000_000_000


class PruneReport(Report, frozen=True):
    """The snapshots whose contents were dropped, or with `dry_run` would be; gc frees the space."""

    dry_run: bool
    """whether this only reports what would be pruned"""
    snapshots: tuple[SnapshotId, ...]
    """ids of the snapshots whose contents were dropped, newest first"""
    tags_removed: tuple[str, ...]
    """tags that named some of them"""
    held: tuple[SnapshotId, ...]
    """those of them that a reflog or a running operation still keeps"""
    seconds: float
    """how long it took"""


class PruneRules(msgspec.Struct, frozen=True):
    """What to prune of these branches, or of all: see `Store.prune`.

    Periods are counted as restic does: days in this machine's time zone, weeks as in ISO 8601.
    """

    keep_last: int = 0
    branches: tuple[str, ...] = ()
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_yearly: int = 0
    keep_tagged: bool = True
    unnamed_inputs: bool = False


def prune(catalog: Catalog, rules: PruneRules, *, reflog_days: int, dry_run: bool) -> PruneReport:
    """Prune, or with `dry_run` only report. Raises BadRequest, NotFound, StorageFailed."""
    began = time.monotonic()
    counts = (rules.keep_last, *(count for count, _ in _periods(rules)))
    if min(counts) < 0 or not any(counts):
        raise BadRequest(
            "at least one snapshot of a branch is kept", hint=call("prune", keep_last=1)
        )
    if dry_run:
        chosen, tags = _choose(catalog, rules)
    else:
        # Hold the lock, so that no one publishes between the choice and its commit.
        with catalog.publishing():
            chosen, tags = _choose(catalog, rules)
            if chosen:
                _write(catalog, chosen, tags)
    with catalog.index.env.read() as transaction:
        roots = Roots.read(catalog, transaction, window_start(reflog_days))
    return PruneReport(
        dry_run=dry_run,
        snapshots=tuple(chosen),
        tags_removed=tuple(sorted(tags)),
        held=tuple(id for id in chosen if id in roots.loose),
        seconds=time.monotonic() - began,
    )


def _write(catalog: Catalog, chosen: Sequence[SnapshotId], tags: dict[str, refs.Ref]) -> None:
    with catalog.advancing() as transaction:
        now = now_ns()
        for id in chosen:
            catalog.index.put(transaction, PRUNED, id, now, overwrite=False)
        moves = [RefMove(name, ref, None, "prune") for name, ref in sorted(tags.items())]
        apply_moves(catalog, transaction, moves)


def _choose(catalog: Catalog, rules: PruneRules) -> tuple[list[SnapshotId], dict[str, refs.Ref]]:
    """Return the snapshots to prune, newest first, and the tags to remove with them."""
    named = catalog.refs()
    branches = {name: ref for name, ref in named.items() if ref.kind == refs.BRANCH}
    for name in rules.branches:
        if name not in branches:
            what = f"is a {named[name].kind}" if name in named else "no such branch"
            raise NotFound(what, where=name, hint=call("refs"))
    asked = set(rules.branches or branches)
    kept: set[SnapshotId] = {ref.snapshot_id() for ref in branches.values()}
    older: set[SnapshotId] = set()
    chains: set[SnapshotId] = set()
    for name, ref in branches.items():
        chain = positions(catalog, ref.snapshot_id())
        chains.update(chain)
        # Keep everything on branches that were not requested.
        stays = _kept(catalog, chain, rules) if name in asked else set(chain)
        kept.update(stays)
        older.update(set(chain) - stays)
    if rules.unnamed_inputs:
        tips = [branches[name].snapshot_id() for name in asked]
        older.update(set(ancestry(catalog, tips)) - chains)
    tagged = {name: ref for name, ref in named.items() if ref.kind == refs.TAG}
    kept.update(
        ref.snapshot_id() for ref in named.values() if ref.kind not in (refs.BRANCH, refs.TAG)
    )
    if rules.keep_tagged:
        kept.update(ref.snapshot_id() for ref in tagged.values())
    else:
        # A tag outside all branches is not an old state of one of them.
        kept.update({ref.snapshot_id() for ref in tagged.values()} - chains)
    chosen = set(_unpruned(catalog, older - kept, tagged))
    tags = {name: ref for name, ref in tagged.items() if ref.snapshot_id() in chosen}
    order = [id for id in ancestry(catalog, chosen) if id in chosen]
    return order, tags


def _periods(rules: PruneRules) -> list[tuple[int, str]]:
    """Return, for each kind of period, how many to keep and its strftime form."""
    return [
        (rules.keep_daily, "%Y-%m-%d"),
        (rules.keep_weekly, "%G-%V"),
        (rules.keep_monthly, "%Y-%m"),
        (rules.keep_yearly, "%Y"),
    ]


def _kept(catalog: Catalog, chain: Sequence[SnapshotId], rules: PruneRules) -> set[SnapshotId]:
    """Return what to keep of a branch, listed newest first. Unknown times count for no period."""
    kept = {*chain[:1], *chain[: rules.keep_last]}
    periods = [(count, form) for count, form in _periods(rules) if count]
    if not periods:
        return kept
    dates = {
        id: datetime.fromtimestamp(record.time_ns // NS_A_SECOND)  # noqa: DTZ006 -- days are local
        for id in chain
        if (record := catalog.snapshot_if_there(id)) is not None
    }
    for count, form in periods:
        newest: dict[str, SnapshotId] = {}
        for id, date in dates.items():
            newest.setdefault(date.strftime(form), id)
        kept.update(list(newest.values())[:count])
    return kept


def _unpruned(
    catalog: Catalog, snapshots: Iterable[SnapshotId], tagged: dict[str, refs.Ref]
) -> list[SnapshotId]:
    known = catalog.index.marked(PRUNED)
    named = {ref.snapshot_id() for ref in tagged.values()}
    found = [id for id in snapshots if id not in known or id in named]
    # A missing snapshot has no contents to prune.
    return [id for id in found if catalog.snapshot_if_there(id) is not None]
