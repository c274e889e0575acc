"""Lineage: snapshots, what they came from, and their names.

Ancestors come children before parents, newest first.  The order is that of Kahn's algorithm with a
heap: of all snapshots whose reached children were all listed, the newest comes next, and ids decide
among equal times.  To know all reached children, the whole lineage would have to be read.  Where
only the first few are wanted, the index's rows tell the times of the starts and the children of
each snapshot, and records are read only of what is listed (`docs/design/036-bulk-reads.md`).  Both
ways give the same list.  Records are the truth about times: a row with a later time than its record
changes nothing; one with an earlier time, which only a faulty index has, is noticed when its
snapshot is reached, and not beyond the limit.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress

from msgspec.structs import astuple, replace

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import PINNED, PRUNED
from mstore.checkpoint.models import split_name
from mstore.snapshots.notes import NoteReport, SignatureReport
from mstore.store import listing
from mstore.store import refs as ref_rows
from mstore.store.catalog import Catalog
from mstore.store.leaning import Leaning, leaning_of
from mstore.store.models import Models, models_in
from mstore.store.not_finite import NotFiniteTensor, of_snapshot
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import PREVIOUS, SnapshotRecord
from mstore.store.objects.tensor import Tensor, VirtualTensor
from mstore.store.refs import refs_in
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import ManifestId, PlanId, SnapshotId
from mstore.terms.report import Report


class FileReport(Report, frozen=True):
    """One file of a snapshot."""

    path: str
    """path inside the snapshot"""
    size: int
    """bytes"""
    tensors: int
    """tensors in it; 0 if not safetensors"""


class TensorReport(Report, frozen=True):
    """One tensor of a snapshot."""

    name: str
    """the tensor"""
    dtype: str
    """as safetensors spells it"""
    shape: tuple[int, ...]
    """elements in each dimension"""
    nbytes: int
    """bytes of its data"""
    file: str
    """the file that holds it"""


class ParentReport(Report, frozen=True):
    """An edge of the lineage."""

    role: str
    """previous, base, expert or companion"""
    snapshot: SnapshotId
    """the snapshot's id"""
    refs: tuple[str, ...] = ()
    """refs that point at it"""
    model: str | None = None
    """the one of its models that a merge took; None if it named none"""


class OriginReport(Report, frozen=True):
    """Where a checkpoint came from."""

    url: str
    """the repository"""
    revision: str
    """branch or tag that named the commit; empty if that is not known"""
    commit: str
    """the commit"""


class SnapshotReport(Report, frozen=True):
    """One snapshot as `log` and `show` print it."""

    snapshot: SnapshotId
    """the snapshot's id"""
    manifest: ManifestId | None
    """id of the content: same bytes, same id"""
    parents: tuple[ParentReport, ...]
    """what it was made from"""
    made: str
    """by what it came to be: add, merge, prepare, cast, align, extract or combine"""
    origin: OriginReport | None
    """where it came from; None if that is not known, or it was made here"""
    author: str
    """who made it; empty if nobody said"""
    plan: PlanId | None
    """id of its merge plan; None if it was added"""
    method: str | None
    """the plan's method; None if it was added"""
    virtual: bool
    """whether its merged tensors are computed on read"""
    message: str
    """the message given with it"""
    time_ns: int
    """when, in nanoseconds since 1970 (UTC)"""
    refs: tuple[str, ...]
    """refs that point at it"""
    plain_bytes: int
    """size of the files as checked out"""
    files: int
    """number of files"""
    tensors: int
    """number of tensors in its files"""
    models: tuple[str, ...] = ()
    """its models; that of the top directory is empty. No model if the shard index that tells them
    was pruned or is damaged"""
    notes: tuple[NoteReport, ...] = ()
    """what was noted later, by key: the values that count"""
    signatures: tuple[SignatureReport, ...] = ()
    """every signature, with its state"""
    pruned: bool = False
    """whether its contents were dropped"""
    missing: bool = False
    """whether its record or manifest is lost; then what is unknown is empty or None"""
    pinned: bool = False
    """whether its blocks were rewritten raw and in file order"""
    leans_on: tuple[Leaning, ...] = ()
    """lazy remotes that have blocks of it which are not here; `show` looks, `log` does not"""
    not_finite: tuple[NotFiniteTensor, ...] = ()
    """tensors with elements that are, or may be, infinite or NaN, and are finite in the base of
    the merge, worst first"""


class RefReport(Report, frozen=True):
    """A name and what it points at."""

    name: str
    """the ref"""
    kind: str
    """branch, tag, remote or candidate"""
    snapshot: SnapshotId
    """the snapshot's id"""
    manifest: ManifestId | None
    """id of the content: same bytes, same id"""
    time_ns: int
    """when it last moved, in nanoseconds since 1970 (UTC)"""
    missing: bool = False
    """whether the snapshot it points at is lost"""
    pinned: bool = False
    """whether that snapshot's blocks were rewritten raw and in file order"""


class ReflogReport(Report, frozen=True):
    """One move of a ref."""

    name: str
    """the ref, possibly a removed one"""
    position: int
    """N of NAME@{N}; 0 is the latest"""
    old: SnapshotId | None
    """where it pointed before; None if the move created it"""
    new: SnapshotId | None
    """where it pointed afterwards; None if the move removed it"""
    action: str
    """what moved it"""
    time_ns: int
    """when, in nanoseconds since 1970 (UTC)"""
    is_collected: bool
    """whether `new` is no longer in the store: gc removed it"""


def names_of(catalog: Catalog) -> dict[SnapshotId, list[str]]:
    """Return the refs that point at each snapshot: branches first, by kind and name."""
    found: dict[SnapshotId, list[str]] = defaultdict(list)
    by_kind = sorted(catalog.refs().items(), key=lambda one: ref_rows.KINDS.index(one[1].kind))
    for name, ref in by_kind:
        found[ref.snapshot_id()].append(name)
    return found


def describe(
    catalog: Catalog, id: SnapshotId, names: dict[SnapshotId, list[str]]
) -> SnapshotReport:
    """Report one snapshot. Raises NotFound if it is missing."""
    # A requested snapshot must be readable; only ancestors may be missing.
    manifest = catalog.manifest_of(id)
    pinned = catalog.index.marked(PINNED)
    report = _described(catalog, id, names, _pruned(catalog, names), pinned)
    return replace(report, leans_on=() if report.pruned else leaning_of(catalog, manifest))


def _pruned(catalog: Catalog, names: dict[SnapshotId, list[str]]) -> set[SnapshotId]:
    """Return the pruned snapshots that no ref names; a ref keeps the contents of its own."""
    return catalog.index.marked(PRUNED) - names.keys()


def _described(
    catalog: Catalog,
    id: SnapshotId,
    names: dict[SnapshotId, list[str]],
    pruned: set[SnapshotId],
    pinned: set[SnapshotId],
) -> SnapshotReport:
    record = catalog.snapshot_if_there(id)
    manifest = None if record is None else catalog.manifest_if_there(record.manifest_id())
    if record is None or manifest is None:
        return _missing(id, record, names)
    plan = plan_of(catalog, record)
    return SnapshotReport(
        snapshot=id,
        manifest=record.manifest_id(),
        parents=parents(record, names, plan),
        made=record.made,
        origin=origin(record),
        author=record.author,
        plan=record.plan_id(),
        method=None if plan is None else plan.made_by,
        virtual=record.is_virtual,
        message=record.message,
        time_ns=record.time_ns,
        refs=tuple(names.get(id, ())),
        plain_bytes=manifest.plain_bytes(),
        files=len(manifest.files),
        tensors=sum(sum(1 for _ in file.tensors()) for file in manifest.files),
        models=_models(catalog, manifest),
        pruned=id in pruned,
        pinned=id in pinned,
        not_finite=_not_finite(catalog, record),
    )


def _missing(
    id: SnapshotId, record: SnapshotRecord | None, names: dict[SnapshotId, list[str]]
) -> SnapshotReport:
    """Report what is known of a snapshot whose record, or manifest, is lost."""
    return SnapshotReport(
        snapshot=id,
        manifest=None if record is None else record.manifest_id(),
        parents=() if record is None else parents(record, names),
        made="" if record is None else record.made,
        origin=None if record is None else origin(record),
        author="" if record is None else record.author,
        plan=None if record is None else record.plan_id(),
        method=None,
        virtual=record is not None and record.is_virtual,
        message="" if record is None else record.message,
        time_ns=0 if record is None else record.time_ns,
        refs=tuple(names.get(id, ())),
        plain_bytes=0,
        files=0,
        tensors=0,
        missing=True,
    )


def origin(record: SnapshotRecord) -> OriginReport | None:
    """Report where a snapshot came from."""
    return None if record.origin is None else OriginReport(*astuple(record.origin))


def _not_finite(catalog: Catalog, record: SnapshotRecord) -> tuple[NotFiniteTensor, ...]:
    with suppress(NotFound, Corrupt):
        return of_snapshot(catalog, record)
    return ()


def _models(catalog: Catalog, manifest: Manifest) -> tuple[str, ...]:
    # Of a pruned snapshot, the indexes that tell its models may be gone.
    with suppress(NotFound, Corrupt):
        return tuple(models_in(catalog, manifest).named)
    return ()


def plan_of(catalog: Catalog, record: SnapshotRecord) -> Plan | None:
    """Return the plan of a merge; None without one, or if it is lost."""
    id = record.plan_id()
    with suppress(NotFound, Corrupt):
        return None if id is None else catalog.record(Plan, id)
    return None


def plain_bytes(catalog: Catalog, id: SnapshotId) -> int:
    """Return the bytes of a snapshot's files; 0 if it is missing."""
    record = catalog.snapshot_if_there(id)
    manifest = None if record is None else catalog.manifest_if_there(record.manifest_id())
    return 0 if manifest is None else manifest.plain_bytes()


def parents(
    record: SnapshotRecord, names: dict[SnapshotId, list[str]], plan: Plan | None = None
) -> tuple[ParentReport, ...]:
    """Report a snapshot's parents, in the order of its record; plan: that of a merge."""
    # The previous snapshot comes first, the others are the inputs of the plan.
    inputs = () if plan is None else plan.inputs
    models = [None] * (len(record.parents) - len(inputs)) + [one.model for one in inputs]
    return tuple(
        ParentReport(p.role, p.snapshot_id(), tuple(names.get(p.snapshot_id(), ())), model)
        for p, model in zip(record.parents, models, strict=False)
    )


def log(
    catalog: Catalog, starts: Iterable[SnapshotId] | None, limit: int | None
) -> list[SnapshotReport]:
    """Report the lineage of some snapshots, or of all refs but candidates."""
    names = names_of(catalog)
    if starts is None:
        named = catalog.refs().values()
        starts = {ref.snapshot_id() for ref in named if ref.kind != ref_rows.CANDIDATE}
    reached = ancestry(catalog, starts, limit)
    pruned, pinned = _pruned(catalog, names), catalog.index.marked(PINNED)
    return [_described(catalog, id, names, pruned, pinned) for id in reached]


def unnamed_without(catalog: Catalog, removed: set[str]) -> int:
    """Count the snapshots that refs reach now and that none reaches once these are removed."""
    named = catalog.refs()
    kept = {ref.snapshot_id() for name, ref in named.items() if name not in removed}
    waiting = [ref.snapshot_id() for name, ref in named.items() if name in removed]
    led_to: dict[SnapshotId, bool] = {}
    gone: set[SnapshotId] = set()
    while waiting:
        id = waiting.pop()
        # If a remaining ref reaches a snapshot, it reaches all its ancestors as well.
        if id not in gone and not is_led_to(catalog, id, kept, led_to):
            gone.add(id)
            waiting += parents_of(catalog, id)
    return sum(catalog.snapshot_if_there(id) is not None for id in gone)


def reflog(catalog: Catalog, name: str | None) -> list[ReflogReport]:
    """Return the moves of a name, or of all names ever used, newest first. Raises NotFound."""
    with catalog.index.env.read() as transaction:
        if name is None:
            every: dict[str, list[ref_rows.Move]] = defaultdict(list)
            for one, move in refs_in(catalog.index, transaction).reflogs():
                every[one].append(move)
        else:
            every = {name: refs_in(catalog.index, transaction).reflog(name)}
            if not every[name]:
                refs_in(catalog.index, transaction).require(name)
        ever = {move.new for moves in every.values() for move in moves if move.new is not None}
        gone = {id for id in ever if _is_gone(catalog, transaction, id)}
    found = [
        ReflogReport(
            name=one,
            position=position,
            old=None if move.old is None else SnapshotId(move.old),
            new=None if move.new is None else SnapshotId(move.new),
            action=move.action,
            time_ns=move.time_ns,
            is_collected=move.new in gone,
        )
        for one, moves in every.items()
        for position, move in enumerate(reversed(moves))
    ]
    # Within one name the positions decide, whatever the clock said.
    return found if name is not None else sorted(found, key=lambda move: -move.time_ns)


def _is_gone(catalog: Catalog, transaction: IndexTransaction, id: bytes) -> bool:
    try:
        return not listing.is_listed(catalog.index, transaction, SnapshotId(id))
    except Corrupt:
        # There is a row; what is wrong with it matters to who reads the snapshot.
        return False


def files(catalog: Catalog, id: SnapshotId, model: str | None = None) -> list[FileReport]:
    """Report the files of a snapshot, or of one of its models, by path."""
    manifest = catalog.manifest_of(id)
    return reported(manifest.files if model is None else models_in(catalog, manifest).files(model))


def reported(files: Iterable[File]) -> list[FileReport]:
    """Report some files."""
    return [FileReport(one.path, one.size, sum(1 for _ in one.tensors())) for one in files]


def refs(catalog: Catalog) -> list[RefReport]:
    """Report all refs by name; `time_ns` is when each last moved."""
    moved: dict[str, int] = {}
    with catalog.index.env.read() as transaction:
        named = dict(refs_in(catalog.index, transaction).walk())
        for name, move in refs_in(catalog.index, transaction).reflogs():
            moved[name] = move.time_ns
    pinned = catalog.index.marked(PINNED)
    contents = catalog.contents(ref.snapshot_id() for ref in named.values())
    return [_named(name, ref, contents, moved.get(name, 0), pinned) for name, ref in named.items()]


def ref(catalog: Catalog, name: str) -> RefReport:
    """Report one ref, without reading others. Raises NotFound."""
    with catalog.index.env.read() as transaction:
        found = refs_in(catalog.index, transaction).require(name)
        moves = refs_in(catalog.index, transaction).reflog(name)
    time_ns = moves[-1].time_ns if moves else 0
    contents = catalog.contents([found.snapshot_id()])
    return _named(name, found, contents, time_ns, catalog.index.marked(PINNED))


def _named(
    name: str,
    ref: ref_rows.Ref,
    contents: Mapping[SnapshotId, ManifestId],
    time_ns: int,
    pinned: set[SnapshotId],
) -> RefReport:
    id = ref.snapshot_id()
    content = contents.get(id)
    return RefReport(
        name, ref.kind, id, content, time_ns, missing=content is None, pinned=id in pinned
    )


def tensors(catalog: Catalog, id: SnapshotId, model: str | None = None) -> list[TensorReport]:
    """Report the tensors of a snapshot, or of one of its models, in file and data order."""
    models = models_in(catalog, catalog.manifest_of(id))
    return [
        tensor(models, name, catalog.content(id))
        for name, id in models.tensors.items()
        if model is None or split_name(name)[0] == model
    ]


def tensor(models: Models, name: str, of: Tensor | VirtualTensor) -> TensorReport:
    """Report a tensor of some models, with its record."""
    return TensorReport(name, of.dtype, of.shape, of.nbytes, models.home(name))


_WALKED = 8
_WALKED_ANYWAY = 64
"""A lineage is walked whole if it has at most `_WALKED * limit + _WALKED_ANYWAY` snapshots."""


def ancestry(
    catalog: Catalog, starts: Iterable[SnapshotId], limit: int | None = None
) -> list[SnapshotId]:
    """Return the snapshots reached from `starts`: children before parents, newest first.

    A parent never comes before its child, even if clocks disagree. Missing snapshots are included,
    and their own parents are unknown.

    limit: the most to return; then it takes time linear in the starts and in what is returned, but
    for snapshots that are older than their parents, or not reached themselves.
    """
    roots = sorted(set(starts))
    if limit is not None:
        counts = _children_count(catalog, roots, _WALKED * limit + _WALKED_ANYWAY)
        if counts is not None:
            return _ordered(catalog, roots, counts, limit)
        # Records say what a damaged or faulty row of the index does not.
        with suppress(Corrupt):
            return _newest(catalog, roots, limit)
    counts = _children_count(catalog, roots, None)
    assert counts is not None
    return _ordered(catalog, roots, counts, limit)


def positions(catalog: Catalog, tip: SnapshotId) -> list[SnapshotId]:
    """Return a snapshot and its predecessors on the branch, newest first."""
    chain = [tip]
    while True:
        record = catalog.snapshot_if_there(chain[-1])
        parents = () if record is None else record.parents
        before = next((p.snapshot_id() for p in parents if p.role == PREVIOUS), None)
        if before is None or before in chain[-1:]:
            return chain
        chain.append(before)


def parents_of(catalog: Catalog, id: SnapshotId) -> set[SnapshotId]:
    """Return the parents of a snapshot; none if it is missing."""
    record = catalog.snapshot_if_there(id)
    return set() if record is None else {parent.snapshot_id() for parent in record.parents}


def _ordered(
    catalog: Catalog, roots: list[SnapshotId], waiting: dict[SnapshotId, int], limit: int | None
) -> list[SnapshotId]:
    ready = [(-_time_ns(catalog, id), id) for id in roots if waiting[id] == 0]
    heapq.heapify(ready)
    found: list[SnapshotId] = []
    while ready and (limit is None or len(found) < limit):
        _, id = heapq.heappop(ready)
        found.append(id)
        for parent in parents_of(catalog, id):
            waiting[parent] -= 1
            if waiting[parent] == 0:
                heapq.heappush(ready, (-_time_ns(catalog, parent), parent))
    return found


def _time_ns(catalog: Catalog, id: SnapshotId) -> int:
    record = catalog.snapshot_if_there(id)
    return 0 if record is None else record.time_ns


def _children_count(
    catalog: Catalog, roots: list[SnapshotId], at_most: int | None
) -> dict[SnapshotId, int] | None:
    """Return how many reached children each reached snapshot has; None if more are reached."""
    counts: dict[SnapshotId, int] = dict.fromkeys(roots, 0)
    stack = list(roots)
    seen = set(roots)
    while at_most is None or len(counts) <= at_most:
        if not stack:
            return counts
        for parent in parents_of(catalog, stack.pop()):
            counts[parent] = counts.get(parent, 0) + 1
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return None


def _newest(catalog: Catalog, roots: list[SnapshotId], limit: int) -> list[SnapshotId]:
    """Return the first snapshots of the same list.  Raises Corrupt at a damaged or faulty row.

    Candidates are the roots and the parents of what was listed.  The newest is listed unless it has
    a reached child that is not; it is a candidate again once such a child is listed.
    """
    tips = set(roots)
    times = catalog.times(roots)
    # Of a snapshot without a row only its record has a time.
    waiting = [(-(times[id] if id in times else _time_ns(catalog, id)), id) for id in roots]
    heapq.heapify(waiting)
    queued = set(roots)
    listed: dict[SnapshotId, None] = {}
    led_to: dict[SnapshotId, bool] = {}
    while waiting and len(listed) < limit:
        before, id = heapq.heappop(waiting)
        now = -_time_ns(catalog, id)
        if now != before:
            # Its row has another time than its record, which may be lost.
            if now < before:
                raise Corrupt("the index has an earlier time for this snapshot", where=str(id))
            heapq.heappush(waiting, (now, id))
            continue
        queued.remove(id)
        if any(
            child not in listed
            and catalog.snapshot_if_there(child) is not None
            and is_led_to(catalog, child, tips, led_to)
            for child in catalog.children(id)
        ):
            continue
        listed[id] = None
        for parent in parents_of(catalog, id) - queued - listed.keys():
            queued.add(parent)
            heapq.heappush(waiting, (-_time_ns(catalog, parent), parent))
    return list(listed)


def is_led_to(
    catalog: Catalog, id: SnapshotId, tips: AbstractSet[SnapshotId], known: dict[SnapshotId, bool]
) -> bool:
    """Return whether a tip is this snapshot or a descendant, searching from parent to child.

    known: results of earlier calls with the same tips, to be reused and extended.
    """
    passed: list[SnapshotId] = []
    waiting = [id]
    while waiting:
        one = waiting.pop()
        if one in known and not known[one]:
            continue
        # The parents of a missing snapshot are unknown.
        if one != id and catalog.snapshot_if_there(one) is None:
            continue
        if one in tips or one in known:
            for other in passed:
                del known[other]
            known[id] = True
            return True
        known[one] = False
        passed.append(one)
        waiting += sorted(catalog.children(one), key=tips.__contains__)
    return False
