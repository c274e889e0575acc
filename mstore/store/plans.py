"""The origin of a plan's inputs: snapshots, and the names that the user gave them.

A plan names contents; a merge's parents are snapshots.  If the plan has no row in the index,
the newest snapshot with the same content stands in for an input.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.blocks.schema import PLANS, NamedSnapshot, PlanInputs
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import BASE, COMPANION, EXPERT, PREVIOUS, SnapshotRecord
from mstore.store.refs import refs_in
from mstore.store.transaction import Transaction
from mstore.terms.errors import BadName, BadRequest, NotFound
from mstore.terms.ids import ManifestId, PlanId, SnapshotId
from mstore.terms.phrases import call, phrase


def put_sources(
    catalog: Catalog, transaction: IndexTransaction, plan: PlanId, sources: PlanInputs
) -> None:
    """Store the inputs, within an open index transaction.

    If the row already names a snapshot by one of its refs, that name stays: repeating the request
    under other names does not rename the inputs of existing merges.
    """
    old = catalog.index.get(transaction, PLANS, plan)
    if old is not None and len(old.experts) == len(sources.experts):
        sources = msgspec.structs.replace(
            sources,
            base=_named_before(catalog, transaction, sources.base, old.base),
            experts=tuple(
                _named_before(catalog, transaction, new, before)
                for new, before in zip(sources.experts, old.experts, strict=True)
            ),
        )
    catalog.index.put(transaction, PLANS, plan, sources)


def named(record: SnapshotRecord, called: Mapping[SnapshotId, str]) -> PlanInputs | None:
    """Return the inputs of a merge by its parents, under these names or ids; None if unknown."""
    bases = [parent.snapshot for parent in record.parents if parent.role == BASE]
    experts = [p.snapshot for p in record.parents if p.role in (EXPERT, COMPANION)]
    if record.plan is None or len(bases) != 1:
        return None

    def source(snapshot: bytes) -> NamedSnapshot:
        id = SnapshotId(snapshot)
        return NamedSnapshot(snapshot, called.get(id, id.short))

    return PlanInputs(source(bases[0]), tuple(map(source, experts)))


def store_plan(catalog: Catalog, plan: Plan, sources: PlanInputs) -> PlanId:
    """Store a plan and the names of its inputs."""
    with Transaction(catalog, "plan") as transaction:
        id = PlanId(transaction.put_record(plan))
        transaction.commit(also=lambda rows: put_sources(catalog, rows, id, sources))
    return id


def _named_before(
    catalog: Catalog, transaction: IndexTransaction, new: NamedSnapshot, old: NamedSnapshot
) -> NamedSnapshot:
    ref = refs_in(catalog.index, transaction).get(old.name)
    return old if ref is not None and ref.snapshot == old.snapshot == new.snapshot else new


def sources_of_merge(
    catalog: Catalog, id: PlanId, plan: Plan, record: SnapshotRecord
) -> PlanInputs:
    """Return the inputs of a merged snapshot's plan: its own parents, by their names.

    The plan's row may name other snapshots with the same contents, from a later request.  A parent
    that the row lacks, or names by an id, is named by one of its refs, otherwise by an id prefix.
    """
    told = sources_of(catalog, id, plan)
    parents = [one.snapshot for one in record.parents if one.role != PREVIOUS]
    rows = (told.base, *told.experts)
    if len(parents) != len(rows):
        return told
    told_rightly = [
        row.snapshot == parent and not refs.is_like_id(row.name)
        for parent, row in zip(parents, rows, strict=True)
    ]
    if all(told_rightly):
        return told
    names = {ref.snapshot: name for name, ref in sorted(catalog.refs().items(), reverse=True)}
    base, *experts = (
        row if is_right else NamedSnapshot(parent, names.get(parent, SnapshotId(parent).short))
        for is_right, parent, row in zip(told_rightly, parents, rows, strict=True)
    )
    return msgspec.structs.replace(told, base=base, experts=tuple(experts))


def sources_of(catalog: Catalog, id: PlanId, plan: Plan) -> PlanInputs:
    """Return the inputs of a plan.  Raises NotFound if this store lacks one, Corrupt."""
    with catalog.index.env.read() as transaction:
        told = catalog.index.get(transaction, PLANS, id)
    if told is not None:
        return told
    return PlanInputs(
        _stand_in(catalog, plan.base_id()),
        tuple(_stand_in(catalog, one.manifest_id()) for one in plan.inputs[1:]),
    )


def _stand_in(catalog: Catalog, manifest: ManifestId) -> NamedSnapshot:
    found = catalog.snapshots_of(manifest)
    if not found:
        raise NotFound(
            "this store has no snapshot with an input of the plan",
            where=f"manifest {manifest}",
            hint=phrase("add the checkpoint that it was made from, with: {add}", add=call("add")),
        )
    return NamedSnapshot(found[0], found[0].short)


def find(catalog: Catalog, text: str) -> PlanId:
    """Return the plan of this id or unique prefix (4 digits or more).  Raises NotFound, BadName."""
    if len(text) < 4 or not set(text) <= set("0123456789abcdef") or len(text) > 64:
        raise BadName(
            f"{text!r} is not a plan id", hint=phrase("{plans} lists them", plans=call("plans"))
        )
    matches = [id for id in plan_ids(catalog) if id.hex().startswith(text)]
    if not matches:
        raise NotFound(
            "no such plan", where=text, hint=phrase("{plans} lists the plans", plans=call("plans"))
        )
    if len(matches) > 1:
        raise BadName(f"{text!r} is the prefix of several plans", hint="give more digits")
    return matches[0]


def plan_of(snapshot: SnapshotId, record: SnapshotRecord, *, so: str) -> PlanId:
    """Return the plan of a merge.  Raises BadRequest if it is not one; so: the consequence."""
    id = record.plan_id()
    if id is None:
        raise BadRequest(
            f"was not made by a merge, so {so}",
            where=snapshot.short,
            hint=call("show", snapshot.short),
        )
    return id


def plan_ids(catalog: Catalog) -> list[PlanId]:
    """Return every stored plan, by id."""
    with catalog.index.env.read() as transaction:
        return [PlanId(id) for id in catalog.index.record_ids(transaction, Kind.PLAN)]
