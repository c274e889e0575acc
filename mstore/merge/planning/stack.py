"""Stacks: plans whose output has layers of several models, each taken as it is.

A stack reads nothing: a tensor of the output is a tensor that an input has.  Loose tensors before
the layers (embeddings) are from the model of the first run, those after them (norm, head) from that
of the last run, as in mergekit 0.1.5.  Which tensors are in which layer follows from their names
(`recipes.layout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstore.adapters.inputs import Inputs
from mstore.errors import BadRequest, Incompatible
from mstore.ids import ManifestId, TensorId
from mstore.merge.planning.request import Request
from mstore.objects.applied import AppliedTensor
from mstore.objects.plan import Criteria, Plan, PlanExpert, Taken
from mstore.objects.tensor import Tensor
from mstore.recipes.layout import Layout, is_last, layers_of
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of


@dataclass(frozen=True, slots=True)
class _Member:
    """An input: its tensors, the one stack of its layers, and how many it has.

    layers: the names of each layer's tensors, by what follows the layer's number.
    """

    name: str
    tensors: Mapping[str, TensorId]
    stack: str
    layers: tuple[Mapping[str, str], ...]
    loose: tuple[str, ...]


def stacked(catalog: Catalog, request: Request) -> Plan:
    """Return the plan of a request for layers.

    Raises BadRequest for layers that a model does not have, Incompatible for models that do not
    fit, NotFound, Corrupt, StorageFailed.
    """
    sides = (request.base, *request.experts)
    manifests = [catalog.snapshot(side.snapshot).manifest_id() for side in sides]
    names = [side.name for side in sides]
    inputs = Inputs(catalog, manifests[0], manifests[1:], names[1:])
    members = [
        _member(catalog, name, id, tensors)
        for name, id, tensors in zip(names, manifests, inputs.members, strict=True)
    ]
    base = members[0]
    found: dict[str, tuple[int, str]] = {}
    layers: list[tuple[int, int]] = []
    for number, first, end in request.layers:
        one = members[number]
        _require_same_stack(base, one)
        if end > len(one.layers):
            raise BadRequest(f"{one.name} has {len(one.layers)} layers, not {end}", where="layers")
        for layer in range(first, end):
            for rest, source in one.layers[layer].items():
                found[f"{base.stack}.{len(layers)}.{rest}"] = (number, source)
            layers.append((number, layer))
    before, after = request.layers[0][0], request.layers[-1][0]
    for number, wants_last in ((before, False), (after, True)):
        for name in members[number].loose:
            if is_last(name) == wants_last:
                if name in found:
                    raise Incompatible(
                        f"{name} of {members[number].name} is in no layer, and a stack of "
                        f"{len(layers)} layers has one of that name",
                        where="layers",
                    )
                found[name] = (number, name)
    _require_shapes(inputs, members, found)
    own = base.tensors
    taken = {
        name: (number, source)
        for name, (number, source) in found.items()
        if members[number].tensors[source] != own.get(name)
    }
    return Plan(
        method=request.operation.method.name,
        parameters=tuple(sorted(request.operation.parameters.items())),
        base=manifests[0],
        experts=tuple(PlanExpert(id, 1.0) for id in manifests[1:]),
        dtype=None,
        block_size=catalog.block_size,
        budget=None,
        criteria=Criteria(score=request.score),
        full_expert_bytes=0,
        planned_expert_bytes=0,
        error_bound=0.0,
        error_estimate=0.0,
        tensors=(),
        copied=(),
        notes=(),
        layers=tuple(layers),
        taken=tuple(Taken(name, *taken[name]) for name in sorted(taken)),
        dropped=tuple(sorted(own.keys() - found.keys())),
    )


def _member(
    catalog: Catalog, name: str, id: ManifestId, tensors: Mapping[str, TensorId]
) -> _Member:
    manifest = catalog.manifest(id)
    layout = Layout.of(tensors, layers_of(config_of(catalog, manifest)))
    if len(layout.stacks) != 1:
        told = ", ".join(f"{stack} ({n})" for stack, n in layout.stacks.items()) or "none"
        raise Incompatible(
            f"layers are stacked of models with one stack of layers; this one has: {told}",
            where=name,
        )
    ((stack, count),) = layout.stacks.items()
    layers: list[dict[str, str]] = [{} for _ in range(count)]
    loose = []
    for tensor in tensors:
        place = layout.layer(tensor)
        if place is None:
            loose.append(tensor)
        else:
            rest = tensor.removeprefix(f"{stack}.").partition(".")[2]
            layers[place[0]][rest] = tensor
    return _Member(name, tensors, stack, tuple(layers), tuple(loose))


def _require_same_stack(base: _Member, one: _Member) -> None:
    if one.stack != base.stack:
        raise Incompatible(
            f"the layers of {one.name} are called {one.stack}, those of {base.name} {base.stack}",
            where="layers",
        )


def _require_shapes(
    inputs: Inputs, members: list[_Member], found: Mapping[str, tuple[int, str]]
) -> None:
    """Raise Incompatible unless each tensor has the shape and the type of the base's like it."""
    base = members[0]
    known: dict[str, str] = {}
    for layer in base.layers:
        for rest, name in layer.items():
            known.setdefault(rest, name)
    wanted: list[tuple[str, str, int, str]] = []
    for name, (number, source) in found.items():
        rest = name.removeprefix(f"{base.stack}.").partition(".")[2]
        like = name if name in base.loose else known.get(rest) if rest else None
        if like is None:
            raise Incompatible(
                f"{members[number].name} has {source}, and {base.name} nothing like it",
                where="layers",
            )
        wanted.append((like, name, number, source))
    ours = inputs.records([base.tensors[like] for like, _, _, _ in wanted])
    theirs = inputs.records([members[number].tensors[source] for _, _, number, source in wanted])
    for (like, _, number, source), one, other in zip(wanted, ours, theirs, strict=True):
        if isinstance(other, AppliedTensor):
            raise Incompatible(
                f"{members[number].name} is an adapter: merge it into its base first, and stack "
                "the layers of the result",
                where="layers",
            )
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise Incompatible(
                f"{source} of {members[number].name} is {_told(other)}, {like} of {base.name} "
                f"{_told(one)}",
                where="layers",
            )


def _told(record: Tensor) -> str:
    return f"{record.dtype} {list(record.shape)}"
