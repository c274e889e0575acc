"""Plans of mixtures of experts: every tensor is one of the models' own, or of their routers.

Attention, norms, embeddings and head are the base's.  The MLPs of each expert get another name, so
they take no new bytes.  Routers, and biases of zeros where a mixture has some that dense models
lack, are a small checkpoint of its own (`routers`), a companion in the role `routers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mstore.checkpoint.strict_json import entries_between
from mstore.merge.moe.architectures import BIASES, PARTS, Architecture, mixture_of
from mstore.merge.planning.stack import assembly
from mstore.merge.recipes.layers import ModelLayers
from mstore.models.adapters.inputs import Inputs
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of, whole_config_of
from mstore.store.objects.plan import BASE, EXPERT, ROUTERS, Plan, PlanInput, PlanOperation, Taken
from mstore.store.objects.tensor import AppliedTensor
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import ManifestId, TensorId
from mstore.terms.phrases import few

_AS_IT_IS: Final = ("passthrough", (("scale", 1.0),))
_WEIGHT: Final = ".weight"
_MLP: Final = "mlp."


class NamedModel(msgspec.Struct, frozen=True):
    """A model of a mixture: what errors call it, and its content."""

    name: str
    manifest: ManifestId

    @classmethod
    def of(cls, catalog: Catalog, one: Input) -> NamedModel:
        """Return the content of a snapshot under the name that the caller used."""
        return cls(one.name, catalog.snapshot(one.snapshot).manifest_id())


class Layer(msgspec.Struct, frozen=True):
    """A layer of a dense model: how the names of its tensors begin, and how they go on."""

    number: int
    at: str
    rests: frozenset[str]


def layers_of(names: Sequence[str]) -> list[Layer]:
    """Return the layers by their numbers."""
    layout = ModelLayers.of(names)
    found: dict[int, set[str]] = {}
    for number, rest in filter(None, map(layout.part, names)):
        found.setdefault(number, set()).add(rest)
    return [Layer(n, f"{layout.main}.{n}", frozenset(found[n])) for n in sorted(found)]


def mlp_name(layer: Layer, part: str) -> str:
    """Return the name of a matrix of a dense layer's MLP."""
    return f"{layer.at}.{_MLP}{part}{_WEIGHT}"


def router_name(layer: int) -> str:
    """Return the name of a layer's router in the checkpoint of routers: [experts, hidden]."""
    return f"layers.{layer}.router"


def shared_router_name(layer: int) -> str:
    """Return the name of what scales the shared expert of a layer: [1, hidden]."""
    return f"layers.{layer}.shared_router"


def bias_name(layer: int, projection: str) -> str:
    """Return the name of a bias of zeros."""
    return f"layers.{layer}.{projection}.bias"


def moe_plan(
    catalog: Catalog,
    kind: Architecture,
    base: NamedModel,
    experts: Sequence[NamedModel],
    shared: Sequence[NamedModel],
    routers: ManifestId,
    *,
    layers: Sequence[Layer],
    per_token: int,
    remarks: Sequence[str] = (),
) -> Plan:
    """Return the plan of a mixture.  layers: of the base (`layers_of`). remarks: more of
    the plan's.

    Raises Incompatible for models that do not fit, NotFound, Corrupt, StorageFailed.
    """
    members = [*experts, *shared]
    inputs = Inputs(
        catalog,
        base.manifest,
        [*(one.manifest for one in members), routers],
        [base.name, *(one.name for one in members), ROUTERS],
        companions=[(ROUTERS, None)],
    )
    taken: list[Taken] = []
    dropped: list[str] = []
    for layer in layers:
        _require_dense(layer, kind, base)
        dropped += [mlp_name(layer, part) for part in PARTS]
        taken += _of_experts(layer, kind, len(experts), len(shared))
        taken += _of_routers(layer, kind, 1 + len(members), has_shared=bool(shared))
    _require_alike(inputs, [base, *members], taken)
    left = [_left_out(inputs, number, member) for number, member in enumerate(members, start=1)]
    config = whole_config_of(catalog, catalog.manifest(base.manifest))
    fields = kind.config(config, len(experts), per_token)
    return assembly(
        catalog,
        PlanOperation(*_AS_IT_IS, (1.0,) * len(members)),
        (
            PlanInput(BASE, None, base.manifest),
            *(PlanInput(EXPERT, None, one.manifest) for one in members),
            PlanInput(ROUTERS, None, routers),
        ),
        taken,
        dropped,
        config=entries_between(config, fields),
        remarks=(*remarks, *(one for one in left if one is not None)),
    )


def _of_experts(layer: Layer, kind: Architecture, experts: int, shared: int) -> Iterator[Taken]:
    for part in PARTS:
        source = mlp_name(layer, part)
        for number in range(experts):
            name = f"{layer.at}.{kind.expert_part(number, part)}{_WEIGHT}"
            yield Taken(name, 1 + number, source)
        if shared:
            yield Taken(f"{layer.at}.{kind.shared}.{part}{_WEIGHT}", 1 + experts, source)


def _of_routers(
    layer: Layer, kind: Architecture, member: int, *, has_shared: bool
) -> Iterator[Taken]:
    yield Taken(f"{layer.at}.{kind.router}", member, router_name(layer.number))
    if has_shared:
        yield Taken(f"{layer.at}.{kind.shared_router}", member, shared_router_name(layer.number))
    for projection in lacking_biases(layer, kind):
        name = f"{layer.at}.self_attn.{projection}.bias"
        yield Taken(name, member, bias_name(layer.number, projection))


def lacking_biases(layer: Layer, kind: Architecture) -> list[str]:
    """Return the projections whose biases a mixture has and this dense layer lacks."""
    if not kind.has_biases:
        return []
    return [one for one in BIASES if f"self_attn.{one}.bias" not in layer.rests]


def _require_dense(layer: Layer, kind: Architecture, base: NamedModel) -> None:
    """Raise Incompatible unless a layer has what a mixture has, and nothing else."""
    mlp = {f"{_MLP}{part}{_WEIGHT}" for part in PARTS}
    lacks = mlp - layer.rests
    if lacks:
        raise Incompatible(
            f"layer {layer.number} has no {few(sorted(lacks))}: its MLP is none of a dense model",
            where=base.name,
        )
    allowed = {f"self_attn.{one}.bias" for one in BIASES} if kind.has_biases else set()
    more = {
        one for one in layer.rests - mlp - allowed if one.startswith(_MLP) or one.endswith(".bias")
    }
    if more:
        raise Incompatible(
            f"layer {layer.number} has {few(sorted(more))}, which a {kind.name} has no place for",
            where=base.name,
        )


def _require_alike(inputs: Inputs, members: Sequence[NamedModel], taken: Sequence[Taken]) -> None:
    """Raise Incompatible unless all MLPs have the shapes and the type of the base's."""
    some = [one for one in taken if one.member < len(members)]
    for one in some:
        if one.source not in inputs.members[one.member]:
            raise Incompatible(f"has no {one.source}", where=members[one.member].name)
    theirs = inputs.records([inputs.members[one.member][one.source] for one in some])
    ours = inputs.records([inputs.base[one.source] for one in some])
    for one, own, like in zip(some, theirs, ours, strict=True):
        where = members[one.member].name
        # Adapters were refused by name (`mixture.members`).
        assert not isinstance(own, AppliedTensor)
        if (own.dtype, own.shape) != (like.dtype, like.shape):
            raise Incompatible(
                f"{one.source} is {own.dtype} {list(own.shape)}, that of {members[0].name} "
                f"{like.dtype} {list(like.shape)}",
                where=where,
            )


def _left_out(inputs: Inputs, number: int, member: NamedModel) -> str | None:
    """Return which of a model's changes a mixture does not have, as a remark."""
    lost = _outside(inputs.members[number], inputs.base)
    return lost and f"{member.name} differs from the base in {lost}; the mixture has the base's"


def _outside(theirs: Mapping[str, TensorId], ours: Mapping[str, TensorId]) -> str | None:
    """Return which tensors outside of MLPs differ from those of a base; None if none does."""
    mlp = tuple(f".{_MLP}{part}{_WEIGHT}" for part in PARTS)
    lost = [
        name for name, id in theirs.items() if ours.get(name, id) != id and not name.endswith(mlp)
    ]
    return f"{len(lost)} tensors outside of its MLPs ({few(lost, 3)})" if lost else None


# -- back to dense models ------------------------------------------------------------------------


def experts_in(catalog: Catalog, mixture: NamedModel) -> tuple[Architecture, int]:
    """Return what kind of mixture a model is, and how many experts it has.

    Raises Incompatible for any other model.
    """
    config = whole_config_of(catalog, catalog.manifest(mixture.manifest))
    kind = mixture_of(config)
    count = config.get(kind.counts) if kind is not None else None
    if kind is None or not isinstance(count, int) or count < 1:
        raise Incompatible(
            f"is no mixture of experts that can be taken apart: its config.json says "
            f"model_type {config.get('model_type')!r}",
            where=mixture.name,
        )
    return kind, count


def dense_plan(
    catalog: Catalog, mixture: NamedModel, expert: int, made_of: Sequence[NamedModel]
) -> Plan:
    """Return the plan of one expert of a mixture as a dense model.

    made_of: the base and the experts that the mixture was made of, none if they are not known. With
    them the dense model has the config and the names of the base.

    Raises Incompatible for what is no mixture with a tensor for each expert, BadRequest for an
    expert that it does not have.
    """
    kind, count = experts_in(catalog, mixture)
    if not 0 <= expert < count:
        raise BadRequest(f"has experts 0 to {count - 1}, not {expert}", where=mixture.name)
    inputs = Inputs(catalog, mixture.manifest, [], [mixture.name])
    taken: list[Taken] = []
    dropped: list[str] = []
    for layer in layers_of(list(inputs.base)):
        for part in PARTS:
            source = f"{layer.at}.{kind.expert_part(expert, part)}{_WEIGHT}"
            if source not in inputs.base:
                raise Incompatible(
                    f"has no {source}: its experts lie in one tensor, and are no blocks of their "
                    "own",
                    where=mixture.name,
                )
            taken.append(Taken(mlp_name(layer, part), 0, source))
        inside = kind.expert.partition(".")[0] + "."
        dropped += [f"{layer.at}.{rest}" for rest in layer.rests if rest.startswith(inside)]
    remarks = []
    config = whole_config_of(catalog, catalog.manifest(mixture.manifest))
    dense = kind.dense_config(config)
    if made_of:
        base, model = (catalog.manifest(made_of[n].manifest) for n in (0, 1 + expert))
        own = tensors_of(catalog, base)
        # Biases of zeros, too.
        dropped = [name for name in inputs.base if name not in own]
        dense = whole_config_of(catalog, base)
        lost = _outside(tensors_of(catalog, model), own)
        if lost is not None:
            name = made_of[1 + expert].name
            remarks.append(f"expert {expert} lacks what {name} changed in {lost}")
    if kind.shared is not None:
        remarks.append("the mixture's shared expert is in none of its experts")
    return assembly(
        catalog,
        PlanOperation(*_AS_IT_IS, ()),
        (PlanInput(BASE, None, mixture.manifest),),
        taken,
        dropped,
        config=entries_between(config, dense),
        remarks=tuple(remarks),
    )
