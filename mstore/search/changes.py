"""What changed from one position of a branch to the next: how each was made, in words."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan, PlanInput
from mstore.store.objects.snapshot import MERGE, SnapshotRecord
from mstore.store.plans import sources_of_merge
from mstore.terms.errors import NotFound
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import few
from mstore.terms.sizes import format_size

_EXPERTS_NAMED = 8


class _Made(msgspec.Struct, frozen=True):
    """How a snapshot was made.  plan, inputs: of a merge: its base, experts, companions by name."""

    record: SnapshotRecord
    plan: Plan | None
    inputs: dict[str, PlanInput]

    @property
    def weights(self) -> dict[str, float]:
        """The weights of its experts, by name."""
        if self.plan is None:
            return {}
        experts = [name for name, one in self.inputs.items() if one in self.plan.experts]
        return dict(zip(experts, self.plan.operation.weights, strict=False))


def what(catalog: Catalog, id: SnapshotId) -> str:
    """Return what a snapshot is, by how it was made: `a merge of code, math by ties`."""
    made = _made(catalog, id)
    message = f": {made.record.message}" if made.record.message else ""
    if made.plan is None:
        return f"made by {made.record.made}{message}"
    experts = few(list(made.weights), _EXPERTS_NAMED)
    return f"a merge of {experts} by {made.plan.method}{message}"


def changes(catalog: Catalog, before: SnapshotId, after: SnapshotId) -> tuple[str, ...]:
    """Return what is not as before in how a snapshot was made: `weight of chat: 0.3, was 0.02`."""
    old, new = _made(catalog, before), _made(catalog, after)
    return tuple(f"{name}: {now}, was {then}" for name, now, then in _changes(old, new))


def _made(catalog: Catalog, id: SnapshotId) -> _Made:
    record = catalog.snapshot(id)
    plan_id = record.plan_id()
    if record.made != MERGE or plan_id is None:
        return _Made(record, None, {})
    try:
        plan = catalog.record(Plan, plan_id)
        sources = sources_of_merge(catalog, plan_id, plan, record)
    except NotFound:
        # A merge from elsewhere may have come without its plan.
        return _Made(record, None, {})
    names = [one.name for one in (sources.base, *sources.experts)]
    return _Made(record, plan, dict(zip(names, plan.inputs, strict=True)))


def _changes(old: _Made, new: _Made) -> Iterator[tuple[str, str, str]]:
    """Yield name, value now, value before."""
    if old.plan is None or new.plan is None:
        if new.record.made != old.record.made:
            yield "made by", new.record.made, old.record.made
        origins = [str(one.record.origin or "unknown") for one in (new, old)]
        if origins[0] != origins[1]:
            yield "origin", origins[0], origins[1]
        return
    bases = [next(iter(one.inputs.items())) for one in (new, old)]
    if bases[0][1].key != bases[1][1].key:
        yield "base", _called(*bases[0]), _called(*bases[1])
    for name in dict.fromkeys((*new.inputs, *old.inputs)):
        weights = new.weights.get(name), old.weights.get(name)
        if weights[0] != weights[1]:
            yield f"weight of {name}", _told(weights[0]), _told(weights[1])
        contents = [one.inputs.get(name) for one in (new, old)]
        is_base = name in (bases[0][0], bases[1][0])
        if contents[0] and contents[1] and contents[0].key != contents[1].key and not is_base:
            yield f"content of {name}", _called("", contents[0]), _called("", contents[1])
    yield from _differing(*map(_request, (new.plan, old.plan)))
    if new.plan.operations[1:] != old.plan.operations[1:]:
        now, then = (str(len(plan.operations) - 1) for plan in (new.plan, old.plan))
        yield "groups of tensors with values of their own", now, then


def _request(plan: Plan) -> dict[str, object]:
    """Return what a merge was asked for, but its models and their weights."""
    return {
        "method": plan.method,
        **dict(plan.operation.parameters),
        "type": plan.dtype,
        "budget": None if plan.budget is None else format_size(plan.budget),
        **msgspec.structs.asdict(plan.criteria),
    }


def _differing(new: dict[str, object], old: dict[str, object]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys((*new, *old)):
        if new.get(name) != old.get(name):
            now, then = (_told(one[name]) if name in one else "the default" for one in (new, old))
            yield name.replace("_", " "), now, then


def _called(name: str, one: PlanInput) -> str:
    return f"{name} {one.manifest_id().short}".strip()


def _told(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(_told, value)) if isinstance(value, tuple) else str(value)
