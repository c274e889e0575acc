"""From a recipe of a mixture of experts to its plan: models are found, routers stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
from blake3 import blake3

from mstore.blocks.schema import NamedSnapshot, PlanInputs
from mstore.checkpoint.dtypes import DTYPES
from mstore.merge.moe import routers
from mstore.merge.moe.architectures import BIASES, DOWN, PARTS, Architecture, architecture_of
from mstore.merge.moe.assemble import Layer, NamedModel, layers_of, moe_plan
from mstore.merge.moe.noise import Noise
from mstore.merge.moe.recipe import DRAWN, MoeExpert, MoeRecipe
from mstore.merge.planning.recipes import Preparation, require_adapters
from mstore.merge.recipes.recipe import Text, at
from mstore.models.adapters.inputs import Inputs
from mstore.models.adapters.targets import is_adapter
from mstore.numeric.codes import CASTS, CODES, output_dtype
from mstore.store import contents
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of, tensors_of
from mstore.store.objects.plan import ROUTERS, Plan
from mstore.store.objects.snapshot import PREVIOUS
from mstore.store.plans import sources_of_merge
from mstore.terms.errors import BadRequest, Incompatible, NotFound
from mstore.terms.phrases import Call, Option, call, phrase
from mstore.terms.requests import PREPARED, MergeRequest, TensorRule

_APPLY: Final = "task_arithmetic"
_SCALE: Final = "passthrough"
_MOST_SEED: Final = 2**64 - 1
Find = Callable[[str], Input]


class ModelCopy(msgspec.Struct, frozen=True):
    """A model that is stored again before a mixture is planned.

    name, ref: as of a `Preparation`. model: the revision that it is made of. change: noise on its
    MLPs, or the element type that it is cast to.
    """

    name: str
    ref: str
    model: str
    change: Noise | str


class MixtureMember(msgspec.Struct, frozen=True):
    """A model of a mixture.

    name: what it is called. found: what the store has of it. steps: what is made of that, in order.
    """

    name: str
    found: Input
    steps: tuple[Preparation | ModelCopy, ...]


def members(
    catalog: Catalog, recipe: MoeRecipe, find: Find, seed: int
) -> tuple[MixtureMember, ...]:
    """Return the base, the experts and the shared experts, and what must be made of each first.

    find: the snapshot of a model that the recipe names.  Raises as it does, and BadRequest for an
    element type or a seed that is none.
    """
    if not 0 <= seed <= _MOST_SEED:
        raise BadRequest(f"a seed is a number from 0 to 2^64 - 1, not {seed}", where=Option("seed"))
    asked = _asked_type(recipe)
    found = {one.text: find(one.text).snapshot for one in recipe.named()}
    manifests = {name: catalog.snapshot(id).manifest_id() for name, id in found.items()}
    require_adapters(catalog, recipe.names(), manifests, recipe.where)
    for one in recipe.names():
        if is_adapter(tensors_of(catalog, catalog.manifest(manifests[one.model().text]))):
            raise BadRequest(
                f"{one} is an adapter: name it with its model, MODEL+ADAPTER",
                where=at(recipe.where, one.line),
            )
    base = find(recipe.base.model().text)
    wanted = asked or _type_of_mlps(catalog, base)

    def member(model: Text, noise: Noise | None, residual: float) -> MixtureMember:
        found = find(model.model().text)
        made = _Making(found, str(model.model()))
        adapter = model.adapter()
        if adapter is not None:
            applied = find(adapter.text)
            made.merged(str(model), "adapter", applied.snapshot, _APPLY, expert=applied.name)
        if noise is not None:
            told = f"{made.name} with noise {noise.deviation:g}"
            made.copied(told, "noise", noise.key(), noise)
        if residual != 1:
            rule = TensorRule(tensors=f"*.mlp.{DOWN}.weight", parameters={"scale": residual})
            told = f"{made.name} * {residual:g}"
            made.merged(told, "scaled", repr(residual).encode(), _SCALE, rules=[rule])
        if wanted is not None and not _is_of_type(catalog, found, wanted, every=asked is not None):
            told = f"{made.name} in {CASTS[wanted]}"
            made.copied(told, "cast", wanted.encode(), wanted)
        return MixtureMember(made.name, found, tuple(made.steps))

    def expert(number: int, one: MoeExpert) -> MixtureMember:
        noise = Noise(one.noise, seed, number) if one.noise else None
        return member(one.model, noise, one.residual)

    experts = [expert(number, one) for number, one in enumerate(recipe.every_expert())]
    return (member(recipe.base, None, 1), *experts)


class _Making:
    """The steps from a model of the store to one of a mixture, in mergekit's order.

    A step's branch is named after all that its content follows from.
    """

    def __init__(self, found: Input, name: str) -> None:
        self.name = name
        self.steps: list[Preparation | ModelCopy] = []
        self._revision = found.name
        self._key: bytes = found.snapshot

    def merged(
        self,
        name: str,
        kind: str,
        own: bytes,
        method: str,
        *,
        expert: str | None = None,
        rules: Sequence[TensorRule] = (),
    ) -> None:
        experts = [self._revision if expert is None else expert]
        request = MergeRequest(base=self._revision, experts=experts, method=method, rules=rules)
        self._add(Preparation(name, self._branch(kind, own), request))

    def copied(self, name: str, kind: str, own: bytes, change: Noise | str) -> None:
        self._add(ModelCopy(name, self._branch(kind, own), self._revision, change))

    def _branch(self, kind: str, own: bytes) -> str:
        self._key += own
        return f"{PREPARED}{kind}-{blake3(self._key).hexdigest()[:16]}"

    def _add(self, step: Preparation | ModelCopy) -> None:
        self.steps.append(step)
        self.name, self._revision = step.name, step.ref


def _asked_type(recipe: MoeRecipe) -> str | None:
    """Return the element type that a recipe asks for.  Raises BadRequest with the line."""
    if recipe.dtype is None:
        return None
    try:
        return output_dtype(recipe.dtype.text)
    except BadRequest as error:
        error.locate(at(recipe.where, recipe.dtype.line))
        error.advise("a mixture is made in bfloat16, float16 or float32")
        raise


def _type_of_mlps(catalog: Catalog, model: Input) -> str | None:
    """Return the element type of a model's MLPs; None where they have several, or no usual one."""
    types = _types(catalog, model, every=False)
    return next(iter(types)) if len(types) == 1 and types <= CODES.keys() else None


def _is_of_type(catalog: Catalog, model: Input, dtype: str, *, every: bool) -> bool:
    """Return whether a model's MLPs, or all its tensors of floating point, have a type already."""
    return _types(catalog, model, every=every) <= {dtype}


def _types(catalog: Catalog, model: Input, *, every: bool) -> set[str]:
    mlps = tuple(f".mlp.{part}.weight" for part in PARTS)
    tensors = tensors_of(catalog, catalog.manifest_of(model.snapshot))
    ids = [id for name, id in tensors.items() if every or name.endswith(mlps)]
    return {one.dtype for one in catalog.tensors(ids) if DTYPES[one.dtype].floating}


def checked(recipe: MoeRecipe, types: Collection[str], *, has_routers: bool) -> Architecture:
    """Return the kind of mixture that a recipe asks for, of models of these types.

    has_routers: whether a checkpoint of routers is given. Raises BadRequest, Incompatible for what
    is wrong with the recipe whatever else is in the models.
    """
    _asked_type(recipe)
    asked = recipe.architecture
    kind = architecture_of(
        None if asked is None else asked.text,
        types,
        len(recipe.shared),
        where=at(recipe.where, recipe.line if asked is None else asked.line),
    )
    mode = recipe.gate_mode
    if mode in DRAWN and has_routers:
        raise BadRequest(
            f"gate_mode {mode} draws the routers, and others are given", where=Option("routers")
        )
    if mode not in DRAWN and not has_routers:
        raise BadRequest(
            f"gate_mode {mode} makes routers of what a model makes of the prompts",
            where=recipe.where,
            hint=phrase(
                "examples/routers.py of mstore's source makes them of a mount or a checkout of the "
                "base: python routers.py RECIPE BASE_FILES DIR; then {add}, and {routers}",
                add=call("add", "DIR", name="routers"),
                routers=Option("routers", "routers"),
            ),
        )
    return kind


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
    found = members(catalog, recipe, find, seed)
    base, *others = (_made(find, recipe, one) for one in found)
    experts, shared = others[: len(recipe.experts)], others[len(recipe.experts) :]
    types = {str(_config(catalog, one).get("model_type")) for one in (base, *others)}
    kind = checked(recipe, types, has_routers=given is not None)
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
    weights = _routers(catalog, recipe, found[0].found, given, seed, layers, gate.shape[1])
    biases = dict(zip(BIASES, (one.shape[0] for one in projections), strict=True))
    remarks = []
    if recipe.architecture is None and kind.shared and "qwen2" not in types:
        # mergekit chooses so, too.
        remarks.append(
            f"the shared expert makes this a {kind.name}, as a mixtral has none "
            "(`architecture: qwen` in the recipe says so)"
        )
    stored = routers.stored(catalog, kind, layers, weights, biases, gate.dtype, text)
    plan = moe_plan(
        catalog,
        kind,
        NamedModel.of(catalog, base),
        [NamedModel.of(catalog, one) for one in experts],
        [NamedModel.of(catalog, one) for one in shared],
        catalog.snapshot(stored).manifest_id(),
        layers=layers,
        per_token=recipe.per_token,
        remarks=remarks,
    )
    sources = PlanInputs(
        NamedSnapshot(base.snapshot, base.name),
        (
            *(NamedSnapshot(one.snapshot, one.name) for one in others),
            NamedSnapshot(stored, ROUTERS),
        ),
    )
    return plan, sources


def made_of(catalog: Catalog, mixture: Input) -> list[NamedModel]:
    """Return the base and the experts that a mixture was made of, the shared one last.

    None for a mixture that was added, or whose models are no longer there.
    """
    record = catalog.snapshot(mixture.snapshot)
    id = record.plan_id()
    plan = None if id is None else catalog.record(Plan, id)
    if id is None or plan is None or not plan.is_mixture:
        return []
    try:
        for parent in record.parents:
            if parent.role != PREVIOUS:
                contents.require(catalog, parent.snapshot_id(), mixture.name)
        told = sources_of_merge(catalog, id, plan, record)
    except NotFound:
        return []
    models = zip((plan.inputs[0], *plan.experts), (told.base, *told.experts), strict=False)
    return [NamedModel(source.name, one.manifest_id()) for one, source in models]


def _made(find: Find, recipe: MoeRecipe, one: MixtureMember) -> Input:
    """Return a model as the mixture takes it.  Raises NotFound if it must be made first."""
    if not one.steps:
        return msgspec.structs.replace(one.found, name=one.name)
    try:
        found = find(one.steps[-1].ref)
    except NotFound as error:
        raise NotFound(
            f"the mixture needs {one.name}, which is not made yet",
            where=recipe.where,
            hint=Call("prepare_moe", ("TEXT",)),
        ) from error
    return msgspec.structs.replace(found, name=one.name)


def _routers(
    catalog: Catalog,
    recipe: MoeRecipe,
    base: Input,
    given: Input | None,
    seed: int,
    layers: Sequence[Layer],
    hidden: int,
) -> routers.Routers:
    if given is None:
        counts = len(layers), len(recipe.experts), len(recipe.shared)
        return routers.drawn(recipe.gate_mode, *counts, hidden, seed)
    return routers.given(catalog, given, recipe, base, layers, hidden)


def _config(catalog: Catalog, one: Input) -> dict[str, object]:
    return config_of(catalog, catalog.manifest_of(one.snapshot))
