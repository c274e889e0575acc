"""The recipe of a plan, for its store: what `merge.recipes` writes, and must be told of a method.

Every merge writes one, so this imports nothing that reads recipes (`recipes`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from msgspec import structs

from mstore.checkpoint.declared import MERGEKIT, MERGEKIT_MOE
from mstore.merge.methods import registry
from mstore.merge.methods.method import Method
from mstore.merge.methods.parameters import AROUND_BASE, DENSITY, NORM, SCALE, Parameter
from mstore.merge.planning.validate import is_retyped
from mstore.merge.recipes.recipe import DEFAULT_LIMITS, RecipeMethod, RecipeParameter
from mstore.merge.recipes.write import HEAD, named, recipe_of
from mstore.models.adapters.targets import is_adapter
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import PREPARE
from mstore.store.plans import sources_of
from mstore.store.refs import CANDIDATE, KINDS
from mstore.terms.errors import BadRequest, NotFound, Unavailable
from mstore.terms.ids import ManifestId

_OF_MIXTURES: Final = (
    "# Base, experts and routers when this was made: ids of their contents, and names of then."
)


def recipe_text(catalog: Catalog, plan: Plan) -> str:
    """Return the recipe of a plan.  Raises BadRequest if no recipe can state it.

    That of a mixture of experts is the one that it was made from.  Comments say how models that are
    stacks of layers were made.
    """
    if plan.is_mixture:
        file = catalog.manifest(plan.companions[0].manifest_id()).file(MERGEKIT_MOE)
        if file is None:
            raise BadRequest("the routers of this mixture have no recipe beside them")
        return catalog.read_parts(file.parts).decode()
    if plan.is_assembly and not plan.layers:
        raise BadRequest(
            "is an expert that was taken out of a mixture, and no recipe takes one out"
        )
    names = list(tensors_of(catalog, catalog.manifest(plan.base_id())))
    if not is_retyped(catalog, plan):
        # Whether the type was asked for does not change the merge, so it must not change its files.
        plan = structs.replace(plan, dtype=None)
    method = known_method(registry.Operations(plan).main.method)
    if method.baseless is not None and not dict(plan.operation.parameters)[method.baseless]:
        method = method.without_base()
    adapters = frozenset(
        expert.manifest
        for expert in plan.experts
        if is_adapter(tensors_of(catalog, catalog.manifest(expert.manifest_id())))
        and not is_adapter(names)
    )
    text = recipe_of(plan, method, names, adapters)
    if not plan.layers:
        members = dict.fromkeys(
            [plan.inputs[0].manifest, *(expert.manifest for expert in plan.experts)]
        )
        text += "".join(_stack_told(catalog, ManifestId(member)) for member in members)
    return text


def printed_recipe(catalog: Catalog, plan: Plan, made: ManifestId) -> str:
    """Return the recipe of a plan with the refs that this store has for its models.

    made: the content that the plan made, which has the recipe if the plan's method is not here.

    Of several refs for one model that which the merge named counts, else a branch before a tag, and
    the shortest; candidates and branches of models that were made for a recipe do not, as they may
    be removed. The recipe of a mixture is as it was written, with ids before it. Raises BadRequest
    if no recipe can state the plan.
    """
    try:
        text = recipe_text(catalog, plan)
    except Unavailable:
        stored = _stored(catalog, plan, made)
        if stored is None:
            raise
        text = stored
    told: list[str] = []
    # An input may be collected: its content is named by its id.
    with suppress(NotFound):
        sources = sources_of(catalog, plan.id(), plan)
        told = [one.name for one in (sources.base, *sources.experts)]
    if plan.is_mixture:
        # A mixture's recipe is as its author wrote it, so ids stand before it.
        models = zip(plan.inputs, told or [""] * len(plan.inputs), strict=True)
        ids = dict.fromkeys(f"# {one.manifest_id().hex()} {name}".rstrip() for one, name in models)
        return "\n".join((_OF_MIXTURES, *ids, text))
    given = set(told)
    refs: dict[str, str] = {}
    found = {name: ref for name, ref in catalog.refs().items() if ref.kind != CANDIDATE}
    rank = {name: KINDS.index(ref.kind) for name, ref in found.items()}
    for name in sorted(found, key=lambda one: (one not in given, rank[one], len(one), one)):
        record = catalog.snapshot(found[name].snapshot_id())
        if record.made != PREPARE:
            refs.setdefault(record.manifest_id().hex(), name)
    return named(text, refs)


def _stored(catalog: Catalog, plan: Plan, made: ManifestId) -> str | None:
    """Return the recipe that a merge wrote beside its model; None if that is of another merge."""
    file = catalog.manifest(made).file(MERGEKIT)
    text = (catalog.read_small(file, DEFAULT_LIMITS.max_bytes) or b"").decode(errors="replace")
    names = (f"merge_method: {plan.method}\n", *(one.manifest_id().hex() for one in plan.inputs))
    return text if text.startswith(HEAD[0]) and all(name in text for name in names) else None


def known_method(method: Method) -> RecipeMethod:
    """Return what resolving must know of a method."""
    return RecipeMethod(
        name=method.name,
        parameters={
            one.name: _rescaling(one)
            if NORM in dict(one.words)
            else RecipeParameter(
                *(one.kind, one.default, one.parse),
                each=one.each,
                of_base=one is SCALE,
                words=tuple(dict(one.words)),
            )
            for one in method.accepted
        },
        weighted=method.weighted,
        # An average has no base: mergekit counts one that is listed like any other model.
        takes_base=method.lists_base,
        baseless=AROUND_BASE.name if AROUND_BASE in method.parameters else None,
        is_alone=method.weight is not None,
        partial=method.weighted and method.experts is None,
        elects=method.combine.elects,
        is_ours=method.is_ours,
        refused={name: (usual, why) for name, usual, why in method.refuses},
    )


def _rescaling(parameter: Parameter) -> RecipeParameter:
    """Return `rescale` as recipes have it: mergekit's `true` restores the L1 norm.

    So that it never changes meaning, the rescaling of the paper is the word `density`.
    """
    norm = parameter.parse(NORM)

    def check(value: object) -> object:
        return norm if value is True else parameter.parse(value)

    def write(value: object) -> object:
        return True if value == norm and type(value) is type(norm) else value and DENSITY

    return RecipeParameter("choice", norm, check, stated=norm != parameter.default, write=write)


def _stack_told(catalog: Catalog, member: ManifestId) -> str:
    """Return comments with the recipe of a model, if it is a stack of layers that a merge made."""
    raw = catalog.read_small(catalog.manifest(member).file(MERGEKIT), DEFAULT_LIMITS.max_bytes)
    if not raw:
        return ""
    # Few merges have a parent with a recipe, and only these read one.
    from mstore.merge.recipes.parse import parse

    try:
        text = raw.decode()
        (recipe,) = parse(text, MERGEKIT)
    except (UnicodeDecodeError, ValueError, BadRequest):
        # Of another program, or of none: it says nothing that could be told here.
        return ""
    method = registry.METHODS.get(recipe.method.text)
    if method is None or not (method.combine.stacks and recipe.slices):
        return ""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    told = "".join(f"#   {line}\n" for line in lines)
    return f"#\n# {member.hex()} is a stack of layers:\n{told}"
