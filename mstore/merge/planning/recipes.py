"""Recipes for one store: its methods, the tensors and layers of the models that they name, and the
models that must be made first.

Owns what `merge.recipes` must be told, and the branches of models that are made for a recipe.
Does not own what a recipe means, nor which models it needs (`recipes.prepared`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from mstore.merge.methods import registry
from mstore.merge.planning import mecha
from mstore.merge.planning.recipe_text import known_method
from mstore.merge.planning.tensors import first_names
from mstore.merge.recipes.layers import ModelLayers, layers_of
from mstore.merge.recipes.mecha import MechaRecipe, parse_mecha, ref_of
from mstore.merge.recipes.mecha_lines import is_mecha
from mstore.merge.recipes.modular import check, resolve
from mstore.merge.recipes.parse import parse
from mstore.merge.recipes.prepared import APPLY, STACK, Applied, Needed, prepare
from mstore.merge.recipes.recipe import Parts, Recipe, RecipeMethod, Text, at, base_of
from mstore.merge.recipes.resolve import DTYPES
from mstore.models.adapters.inputs import Inputs, ModelChoice
from mstore.models.adapters.targets import has_keys, is_adapter
from mstore.numeric.codes import CODES
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, model_of, snapshot_of, tensors_of
from mstore.store.tied import ties_embeddings
from mstore.terms.errors import BadName, BadRequest, NotFound
from mstore.terms.ids import ManifestId, SnapshotId
from mstore.terms.phrases import Call
from mstore.terms.report import Report
from mstore.terms.requests import PREPARED, MergeRequest, RecipeRequest


class PreparedModel(Report, frozen=True):
    """A model that was made for a recipe."""

    name: str
    """what it is: layers of models, or a model with an adapter"""
    ref: str
    """the branch that it is stored on"""
    snapshot: SnapshotId
    """its snapshot"""
    new_snapshot: bool
    """false if the branch already was this"""
    bytes_written: int
    """bytes that were written for it"""


class Preparation(msgspec.Struct, frozen=True):
    """A model that must be made before a recipe's merge is planned.

    name: what the recipe calls it. ref: the branch that it is stored on; the name follows from the
    contents that it is made of. request: the merge that makes it.
    """

    name: str
    ref: str
    request: MergeRequest

    def made(self, snapshot: SnapshotId, *, is_new: bool, written: int) -> PreparedModel:
        """Return the model once it is stored."""
        return PreparedModel(self.name, self.ref, snapshot, is_new, written)


def preparations(
    catalog: Catalog,
    text: str,
    *,
    where: str,
    models: Mapping[str, str],
    document: int | None,
    strict: bool,
) -> tuple[Preparation, ...]:
    """Return what a recipe needs first, in order; see `Store.prepare_recipe`."""
    if is_mecha(text):
        return ()
    recipe = chosen(parse(text, where, strict=strict), document)
    # Nothing is stored for a recipe that cannot be planned.
    _check(recipe)
    _, found = _prepared(catalog, recipe, _method(recipe), _revisions(recipe, models))
    return found


def request_of(
    catalog: Catalog,
    text: str,
    *,
    where: str,
    models: Mapping[str, str],
    document: int | None,
    strict: bool,
) -> RecipeRequest:
    """Return the merge that a recipe asks for; see `Store.read_recipe`."""
    if is_mecha(text):
        return _of_mecha(catalog, parse_mecha(text, where, strict=strict), models)
    recipe = chosen(parse(text, where, strict=strict), document)
    method = _method(recipe)
    revisions = _revisions(recipe, models)
    recipe, first_made = _prepared(catalog, recipe, method, revisions)
    method = _method(recipe)
    for one in first_made:
        try:
            catalog.resolve(one.ref)
        except NotFound as error:
            raise NotFound(
                f"the recipe needs {one.name}, which is not made yet",
                where=where,
                hint=Call("prepare_recipe", ("TEXT",)),
            ) from error
        revisions[one.name] = one.ref
    manifests = _manifests_of(catalog, recipe, revisions)
    base_text = base_of(recipe, needs_base=not method.takes_base).text
    base = manifests[base_text]
    record = catalog.manifest(base)
    tensors = tensors_of(catalog, record)
    dtypes = {tensor.dtype for tensor in catalog.tensors(list(tensors.values()))}
    members = [one.text for one in recipe.models_named()]
    first = first_names(
        tensors,
        Inputs(
            *(catalog, base, [manifests[one] for one in members], [base_text, *members]),
            choice=ModelChoice(
                model_of(revisions[base_text]), tuple(model_of(revisions[one]) for one in members)
            ),
        ).experts,
        tied=ties_embeddings(catalog, record),
    )
    found = resolve(
        recipe,
        list(tensors),
        method,
        models=revisions,
        layers=layers_of(config_of(catalog, record)),
        tied={name: other for name, other in first.items() if name != other},
        dtypes=dtypes & CODES.keys(),
    )
    filtering = [one for one in recipe.conditions() if not one.for_all]
    filters = [str(one.filter) for one in filtering]
    parts = Parts(filters)
    used = {filters[number] for name in tensors for number in parts.within(name)}
    idle = tuple(
        f"{at(where, one.line)}: no tensor has {one.filter} in its name"
        for one in filtering
        if one.filter not in used
    )
    return replace(found, remarks=(*found.remarks, *idle))


def _of_mecha(catalog: Catalog, recipe: MechaRecipe, models: Mapping[str, str]) -> RecipeRequest:
    named = recipe.named()
    revisions = {one.text: models.get(one.text, ref_of(one.text)) for one in named}
    found = {}
    for one in named:
        manifest = _manifest(catalog, one, revisions[one.text], recipe.where)
        names = tensors_of(catalog, catalog.manifest(manifest))
        is_lora = is_adapter(names) or has_keys(names)
        if is_lora != (one.text in recipe.adapters):
            told = ("a LoRA", "a model") if is_lora else ("a model", "a LoRA")
            raise BadRequest(
                f"{one} is {told[0]}, and by its model_config {told[1]}",
                where=at(recipe.where, one.line),
            )
        if not is_lora:
            found[one.text] = names
    return mecha.request_of_mecha(recipe, revisions, found)


def _revisions(recipe: Recipe, models: Mapping[str, str]) -> dict[str, str]:
    return {one.text: models.get(one.text, one.text) for one in recipe.named()}


def checked(text: str, *, where: str, strict: bool) -> dict[int, Recipe | MechaRecipe]:
    """Return the recipes of a file by number, checked as far as they can be without their models.

    Their order is one to merge in: one may name the merge of another by that one's name.  Raises
    BadRequest that names the line.
    """
    if is_mecha(text):
        only = parse_mecha(text, where, strict=strict)
        mecha.check(only)
        return {0: only}
    recipes = parse(text, where, strict=strict)
    # The name of one recipe alone means nothing.
    found = {0: recipes[0]} if len(recipes) == 1 else _in_order(recipes)
    for recipe in found.values():
        _check(recipe)
    return {**found}


def _in_order(recipes: Sequence[Recipe]) -> dict[int, Recipe]:
    """Return recipes by number, each after those that it names, the one without a name last."""
    numbers: dict[str | None, int] = {}
    for number, recipe in enumerate(recipes):
        name = None if recipe.name is None else recipe.name.text
        if name in numbers:
            raise BadRequest(
                "each recipe of a file but one has a name of its own, for those that need it"
                if name is None
                else f"two recipes of the file are called {name}",
                where=at(recipe.where, recipe.line if recipe.name is None else recipe.name.line),
                hint="name: step1",
            )
        numbers[name] = number
    found: dict[int, Recipe] = {}
    above: list[int] = []

    def take(number: int) -> None:
        above.append(number)
        for model in recipes[number].named():
            other = numbers.get(model.text)
            if other in above:
                circle = [str(recipes[one].name) for one in above[above.index(other) :]]
                raise BadRequest(
                    f"recipes that need each other: {', '.join([*circle, model.text])}",
                    where=at(recipes[number].where, model.line),
                )
            if other is not None and other not in found:
                take(other)
        above.pop()
        found[number] = recipes[number]

    for number in sorted(numbers.values(), key=lambda one: recipes[one].name is None):
        if number not in found:
            take(number)
    return found


def _check(recipe: Recipe) -> None:
    method = _method(recipe)
    # What a model has is not known yet; a name alone says which one it is.
    recipe, _ = prepare(
        recipe,
        method,
        same=lambda a, b: a.text == b.text,
        layers=lambda _: None,
        dtypes=lambda _: (),
    )
    method = _method(recipe)
    own = check(recipe, method)
    if own is not None:
        try:
            registry.operation(recipe.method.text, *own)
        except BadRequest as error:
            found = registry.find(recipe.method.text)
            wanted = found.least if found.experts is None else found.experts
            if len(own[1]) < wanted or (found.experts is not None and len(own[1]) > wanted):
                error.advise(_models_of(recipe, wanted))
            error.locate(at(recipe.where, recipe.method.line))
            raise


def _models_of(recipe: Recipe, count: int) -> str:
    names = [str(one.model) for one in recipe.every_source() if str(one.model) != str(recipe.base)]
    names = [*dict.fromkeys(names), "MODEL"]
    told = ", ".join(f"{{model: {name}}}" for name in names[:count])
    return f"models: [{told}]"


def chosen(recipes: tuple[Recipe, ...], document: int | None) -> Recipe:
    """Return the recipe of this number, or the only one.

    Raises BadRequest if there is none, or several and no number.
    """
    if document is None and len(recipes) > 1:
        raise BadRequest(
            f"there are {len(recipes)} recipes in it, and a later one may need the merge of an "
            "earlier one",
            where=at(recipes[0].where, recipes[1].line),
            hint="give the number of one, from 0, as document",
        )
    number = document or 0
    if not 0 <= number < len(recipes):
        raise BadRequest(
            f"there is no document {number}: it has {len(recipes)}", where=recipes[0].where
        )
    return recipes[number]


def _method(recipe: Recipe) -> RecipeMethod:
    try:
        method = known_method(registry.find(recipe.method.text))
    except BadRequest as error:
        error.locate(at(recipe.where, recipe.method.line))
        raise
    has_base = recipe.base is not None or any(
        part.base is not None for part in recipe.every_slice()
    )
    method = replace(method, others=_parameters())
    return method if has_base or method.baseless is None else method.without_base()


@cache
def _parameters() -> frozenset[str]:
    found = {one.name for method in registry.METHODS.values() for one in method.parameters}
    return frozenset(found | registry.PARAMETERS_ELSEWHERE)


# -- what is made first ------------------------------------------------------------------------


def layers_in(catalog: Catalog, manifest: ManifestId) -> int | None:
    """Return how many layers the main stack of a model has; None if it has none, or several."""
    record = catalog.manifest(manifest)
    layout = ModelLayers.of(tensors_of(catalog, record), layers_of(config_of(catalog, record)))
    return None if layout.main is None else layout.stacks[layout.main]


def _manifests_of(
    catalog: Catalog, recipe: Recipe, revisions: Mapping[str, str]
) -> dict[str, ManifestId]:
    return {
        one.text: _manifest(catalog, one, revisions[one.text], recipe.where)
        for one in recipe.named()
    }


def _prepared(
    catalog: Catalog, recipe: Recipe, method: RecipeMethod, revisions: Mapping[str, str]
) -> tuple[Recipe, tuple[Preparation, ...]]:
    """Return the recipe as it is once its models are made, and what makes them."""
    manifests = _manifests_of(catalog, recipe, revisions)
    require_adapters(catalog, recipe.names(), manifests, recipe.where)

    counts: dict[ManifestId, int | None] = {}

    def layers(model: Text) -> int | None:
        manifest = manifests[model.text]
        if manifest not in counts:
            counts[manifest] = layers_in(catalog, manifest)
        return counts[manifest]

    def same(one: Text, other: Text) -> bool:
        return manifests[one.text] == manifests[other.text]

    @cache
    def dtypes(model: Text) -> frozenset[str]:
        tensors = catalog.tensors(
            list(tensors_of(catalog, catalog.manifest(manifests[model.text])).values())
        )
        found = {tensor.dtype for tensor in tensors} & CODES.keys()
        return frozenset(DTYPES.get(one, one) for one in found)

    recipe, needed = prepare(recipe, method, same=same, layers=layers, dtypes=dtypes)
    known = dict(revisions)
    # What is made of a model that is not made yet is named after that one's branch.
    ids = {name: id.hex() for name, id in manifests.items()}
    found = []
    own: list[object]
    for one in needed:
        if isinstance(one, Applied):
            kind, own = "applied", [ids[one.model.text], ids[one.adapter.text]]
        else:
            runs = [[ids[model.text], first, end] for model, first, end in one.runs]
            kind, own = "stack", [ids[one.base.text], *runs]
        digest = blake3(json.dumps(own).encode()).hexdigest()[:12]
        made = Preparation(one.name, f"{PREPARED}{kind}-{digest}", _request_for(one, known))
        known[one.name] = ids[one.name] = made.ref
        found.append(made)
    return recipe, tuple(found)


def require_adapters(
    catalog: Catalog, names: Iterable[Text], manifests: Mapping[str, ManifestId], where: str
) -> None:
    """Raise BadRequest for MODEL+ADAPTER where the first is no model, or the second no adapter.

    where: the name of the recipe's file. manifests: contents by the recipe's names.
    """
    for one in names:
        adapter = one.adapter()
        if adapter is None:
            continue
        for part, wanted in ((one.model(), False), (adapter, True)):
            if is_adapter(tensors_of(catalog, catalog.manifest(manifests[part.text]))) != wanted:
                raise BadRequest(
                    f"{one} is a model and an adapter of it, and {part} is "
                    + ("no adapter" if wanted else "an adapter"),
                    where=at(where, one.line),
                )


def _request_for(needed: Needed, revisions: Mapping[str, str]) -> MergeRequest:
    if isinstance(needed, Applied):
        return MergeRequest(
            base=revisions[needed.model.text],
            experts=[revisions[needed.adapter.text]],
            method=APPLY,
        )
    base = revisions[needed.base.text]
    runs = [(revisions[model.text], first, end) for model, first, end in needed.runs]
    others = dict.fromkeys(model for model, _, _ in runs if model != base)
    return MergeRequest(base=base, experts=list(others) or [base], method=STACK, layers=runs)


def _manifest(catalog: Catalog, model: Text, revision: str, where: str) -> ManifestId:
    try:
        return catalog.snapshot(catalog.resolve(snapshot_of(revision))).manifest_id()
    except (NotFound, BadName) as error:
        place = at(where, model.line)
        raise NotFound(f"no model {model} in this store", where=place) from error
