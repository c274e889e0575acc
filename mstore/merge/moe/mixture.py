"""From a recipe of a mixture of experts to its plan: models are found, routers stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from blake3 import blake3

from mstore.blocks.schema import NamedSnapshot, PlanInputs
from mstore.merge.moe import routers
from mstore.merge.moe.architectures import BIASES, DOWN, architecture_of
from mstore.merge.moe.assemble import ROUTERS, Layer, NamedModel, layers_of, moe_plan
from mstore.merge.moe.recipe import DRAWN, MoeExpert, MoeRecipe
from mstore.merge.planning.recipes import Preparation
from mstore.models.adapters.inputs import Inputs
from mstore.numeric.codes import CASTS
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Incompatible, NotFound
from mstore.terms.phrases import Call, Option, call, phrase
from mstore.terms.requests import PREPARED, MergeRequest, TensorRule

_APPLY: Final = "task_arithmetic"
_SCALE: Final = "passthrough"
Find = Callable[[str], Input]


def needed(recipe: MoeRecipe, find: Find) -> list[Preparation]:
    """Return what must be made first, in order: models with an adapter, and scaled experts.

    find: the snapshot of a model that the recipe names.  Raises as it does, and BadRequest for what
    is not supported.
    """
    found: dict[str, Preparation] = {}
    for one in (*recipe.experts, *recipe.shared):
        if one.noise:
            raise BadRequest(
                "noise_scale is not supported: noise makes every expert new bytes, and training "
                "tells experts apart better",
                where=f"{recipe.where}, line {one.line}",
                hint="leave it out",
            )
        for made in _steps(one, find):
            found.setdefault(made.ref, made)
    return list(found.values())


def _steps(one: MoeExpert, find: Find) -> Iterator[Preparation]:
    base, adapter = find(one.model.model().text), one.model.adapter()
    if adapter is not None:
        applied = find(adapter.text)
        key = base.snapshot + applied.snapshot
        request = MergeRequest(base=base.name, experts=[applied.name], method=_APPLY)
        yield Preparation(one.model.text, _branch("adapter", key), request)
    if one.residual != 1:
        plain = base.name if adapter is None else _branch("adapter", key)
        told = base.snapshot if adapter is None else key
        scaled = TensorRule(tensors=f"*.mlp.{DOWN}.weight", parameters={"scale": one.residual})
        request = MergeRequest(base=plain, experts=[plain], method=_SCALE, rules=[scaled])
        yield Preparation(
            _called(one), _branch("scaled", told + repr(one.residual).encode()), request
        )


def _called(one: MoeExpert) -> str:
    """Return what an expert is called: its model, and its scale if it has one."""
    return one.model.text if one.residual == 1 else f"{one.model.text} * {one.residual:g}"


def _branch(kind: str, key: bytes) -> str:
    return f"{PREPARED}{kind}-{blake3(key).hexdigest()[:16]}"


def planned(
    catalog: Catalog,
    recipe: MoeRecipe,
    text: str,
    find: Find,
    given: Input | None,
    seed: int,
) -> tuple[Plan, PlanInputs]:
    """Return the plan of a mixture and where its inputs are from; its routers are stored.

    text: of the recipe. given: a checkpoint of routers, for modes that take prompts. Raises
    BadRequest, Incompatible, NotFound also for a model that must be made first, Corrupt,
    StorageFailed.
    """
    base = find(recipe.base.text)
    made = {one.name: one.ref for one in needed(recipe, find)}

    def expert(one: MoeExpert) -> Input:
        name = _called(one)
        try:
            found = find(made.get(name, one.model.text))
        except NotFound as error:
            if name in made:
                raise NotFound(
                    f"the mixture needs {name}, which is not made yet",
                    where=recipe.where,
                    hint=Call("prepare_moe", ("TEXT",)),
                ) from error
            raise
        return msgspec.structs.replace(found, name=name)

    experts, shared = ([expert(one) for one in some] for some in (recipe.experts, recipe.shared))
    types = {str(_config(catalog, one).get("model_type")) for one in (base, *experts, *shared)}
    asked = recipe.architecture
    kind = architecture_of(
        None if asked is None else asked.text,
        types,
        len(shared),
        where=f"{recipe.where}, line {recipe.line if asked is None else asked.line}",
    )
    tensors = Inputs(catalog, catalog.snapshot(base.snapshot).manifest_id(), [], [base.name])
    layers = layers_of(list(tensors.base))
    if not layers:
        raise Incompatible("has no layers", where=base.name)
    first = layers[0].at
    names = [f"{first}.mlp.gate_proj.weight"]
    names += [f"{first}.self_attn.{one}.weight" for one in BIASES]
    lacking = [name for name in names if name not in tensors.base]
    if lacking:
        raise Incompatible(f"has no {lacking[0]}", where=base.name)
    gate, *projections = tensors.records([tensors.base[name] for name in names])
    _require_type(recipe, gate.dtype, base.name)
    weights = _routers(
        catalog, recipe, given, seed, (layers, len(experts), len(shared), gate.shape[1])
    )
    biases = dict(zip(BIASES, (one.shape[0] for one in projections), strict=True))
    stored = routers.stored(catalog, kind, layers, weights, biases, gate.dtype, text)

    def member(one: Input) -> NamedModel:
        return NamedModel(one.name, catalog.snapshot(one.snapshot).manifest_id())

    plan = moe_plan(
        catalog,
        kind,
        member(base),
        [member(one) for one in experts],
        [member(one) for one in shared],
        catalog.snapshot(stored).manifest_id(),
        layers=layers,
        per_token=recipe.per_token,
    )
    sources = PlanInputs(
        NamedSnapshot(base.snapshot, base.name),
        (
            *(NamedSnapshot(one.snapshot, one.name) for one in (*experts, *shared)),
            NamedSnapshot(stored, ROUTERS),
        ),
    )
    return plan, sources


def _routers(
    catalog: Catalog,
    recipe: MoeRecipe,
    given: Input | None,
    seed: int,
    sizes: tuple[list[Layer], int, int, int],
) -> routers.Routers:
    layers, experts, shared, hidden = sizes
    if recipe.gate_mode in DRAWN:
        if given is not None:
            raise BadRequest(
                f"gate_mode {recipe.gate_mode} draws the routers, and others are given",
                where=Option("routers"),
            )
        return routers.drawn(recipe.gate_mode, len(layers), experts, shared, hidden, seed)
    if given is None:
        raise BadRequest(
            f"gate_mode {recipe.gate_mode} makes routers of what a model makes of the prompts",
            where=recipe.where,
            hint=phrase(
                "python examples/routers.py RECIPE DIR computes them; then give {routers}",
                routers=Option("routers", "DIR"),
            ),
        )
    return routers.given(catalog, given, layers, experts, shared, hidden)


def _require_type(recipe: MoeRecipe, own: str, base: str) -> None:
    """Raise BadRequest if a recipe asks for another element type than the models have."""
    asked = recipe.dtype
    if asked is not None and asked.text != CASTS[own]:
        raise BadRequest(
            f"the models are {CASTS[own]}, and the recipe asks for {asked.text[:40]}",
            where=f"{recipe.where}, line {asked.line}",
            hint=phrase("cast each of them first: {cast}", cast=call("cast", base)),
        )


def _config(catalog: Catalog, one: Input) -> dict[str, object]:
    return config_of(catalog, catalog.manifest_of(one.snapshot))
