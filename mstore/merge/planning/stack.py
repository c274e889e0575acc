"""Stacks: plans whose output has layers of several models, each taken as it is.

A stack reads nothing: a tensor of the output is a tensor that an input has.  Loose tensors before
the layers (embeddings) are from the model of the first run, those after them (norm, head) from that
of the last run, as in mergekit 0.1.5.  Which tensors are in which layer follows from their names
(`recipes.layout`).  Of a model with several stacks, the text model's is stacked; its other parts
are before or after it as a whole.  Layers that a config does not count (they predict further
tokens) follow the last one, whatever its number is.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mstore.merge.planning.request import Request
from mstore.merge.planning.stacked_config import unstackable
from mstore.merge.recipes.layout import Layout, layers_of
from mstore.models.adapters.inputs import Inputs
from mstore.store.catalog import Catalog
from mstore.store.models import config_of
from mstore.store.objects.plan import Criteria, Plan, PlanOperation, Taken
from mstore.store.objects.tensor import AppliedTensor, Tensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ManifestId, TensorId


class _Member(msgspec.Struct, frozen=True):
    """An input: its tensors, and the stack of its layers.

    layers: the names of each layer's tensors, by what follows the layer's number. first, last: the
    other tensors, before and after the layers.
    """

    name: str
    tensors: Mapping[str, TensorId]
    layout: Layout
    stack: str
    layers: tuple[Mapping[str, str], ...]
    first: tuple[str, ...]
    last: tuple[str, ...]

    def moved(self, name: str, count: int) -> str:
        """Return what a tensor outside of the layers is called in a model of so many."""
        place = self.layout.part(name)
        if place is None:
            return name
        number, rest = place
        return f"{self.stack}.{number - len(self.layers) + count}.{rest}"


def stacked(catalog: Catalog, request: Request) -> Plan:
    """Return the plan of a request for layers.

    Raises BadRequest for layers that a model does not have, Incompatible for models that do not
    fit, NotFound, Corrupt, StorageFailed.
    """
    sides = (request.base, *request.experts)
    manifests = [catalog.snapshot(side.snapshot).manifest_id() for side in sides]
    names = [side.name for side in sides]
    inputs = Inputs(catalog, manifests[0], manifests[1:], names, choice=request.choice)
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
    found |= {name: (before, name) for name in members[before].first}
    one = members[after]
    found |= {one.moved(name, len(layers)): (after, name) for name in one.last}
    _require_shapes(inputs, members, found, len(layers))
    own = base.tensors
    taken = {
        name: (number, source)
        for name, (number, source) in found.items()
        if members[number].tensors[source] != own.get(name)
    }
    return Plan(
        operations=(
            PlanOperation(
                request.operation.method.name,
                tuple(sorted(request.operation.parameters.items())),
                (1.0,) * len(request.experts),
            ),
        ),
        inputs=request.inputs(manifests[0], manifests[1:]),
        dtype=None,
        block_size=catalog.block_size,
        budget=None,
        criteria=Criteria(score=request.score),
        allow_missing=False,
        full_expert_bytes=0,
        planned_expert_bytes=0,
        error_bound=0.0,
        error_estimate=0.0,
        tensors=(),
        copied=(),
        remarks=(),
        layers=tuple(layers),
        taken=tuple(Taken(name, *taken[name]) for name in sorted(taken)),
        dropped=tuple(sorted(own.keys() - found.keys())),
    )


def _member(
    catalog: Catalog, name: str, id: ManifestId, tensors: Mapping[str, TensorId]
) -> _Member:
    manifest = catalog.manifest(id)
    config = config_of(catalog, manifest)
    counted = layers_of(config)
    layout = Layout.of(tensors, counted)
    stack = layout.main
    if stack is None:
        raise Incompatible(
            "layers are stacked of models with one stack of layers, or whose config.json counts "
            f"those of the text model; this one has: {layout.listed()}",
            where=name,
        )
    if counted is not None and counted > layout.stacks[stack]:
        # Layers that share weights.
        raise Incompatible(
            f"its config.json counts {counted} layers, and its tensors have {layout.stacks[stack]}",
            where=name,
        )
    entry = unstackable(config)
    if entry is not None:
        raise Incompatible(
            f"its config.json has {entry}, so tensors outside of its layers hold values of every "
            "layer, and a stack takes tensors as they are",
            where=name,
        )
    layers: list[dict[str, str]] = [{} for _ in range(layout.stacks[stack])]
    first: list[str] = []
    last: list[str] = []
    for tensor in tensors:
        place = layout.part(tensor)
        if place is not None and place[0] < len(layers):
            layers[place[0]][place[1]] = tensor
        else:
            (last if layout.is_last(tensor) else first).append(tensor)
    return _Member(name, tensors, layout, stack, tuple(layers), tuple(first), tuple(last))


def _require_same_stack(base: _Member, one: _Member) -> None:
    if one.stack != base.stack:
        raise Incompatible(
            f"the layers of {one.name} are called {one.stack}, those of {base.name} {base.stack}",
            where="layers",
        )


def _require_shapes(
    inputs: Inputs, members: list[_Member], found: Mapping[str, tuple[int, str]], count: int
) -> None:
    """Raise Incompatible unless each tensor has the shape and the type of the base's like it."""
    base = members[0]
    known: dict[str, str] = {}
    for layer in base.layers:
        for rest, name in layer.items():
            known.setdefault(rest, name)
    loose = {base.moved(name, count): name for name in (*base.first, *base.last)}
    wanted: list[tuple[str, str, int, str]] = []
    for name, (number, source) in found.items():
        place = base.layout.part(name)
        is_layer = place is not None and place[0] < count
        like = known.get(place[1]) if place is not None and is_layer else loose.get(name)
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
                f"{members[number].name} is an adapter: merge it into its base first (in a "
                "recipe: MODEL+ADAPTER), and stack the layers of the result",
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
