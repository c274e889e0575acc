"""Recipes for one store: its methods, and the tensors and layers of the models that they name.

Owns what `mstore.recipes` must be told.  Does not own what a recipe means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from mstore.adapters.inputs import Inputs, ModelChoice
from mstore.errors import BadRequest, NotFound
from mstore.merge.methods import registry
from mstore.merge.planning.prepared import Preparation, manifests_of, prepared
from mstore.merge.planning.recipe_text import known_method
from mstore.merge.planning.tied import first_names
from mstore.numeric.codes import CODES
from mstore.phrases import Call
from mstore.recipes.layout import layers_of
from mstore.recipes.modular import check, resolve
from mstore.recipes.nodes import at
from mstore.recipes.parse import parse
from mstore.recipes.prepared import prepare
from mstore.recipes.recipe import Parts, Recipe
from mstore.recipes.resolve import KnownMethod, base_of
from mstore.requests import RecipeRequest
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, model_of, tensors_of
from mstore.store.tied import ties_embeddings


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
    recipe = chosen(parse(text, where, strict=strict), document)
    # Nothing is stored for a recipe that cannot be planned.
    _check(recipe)
    _, found = prepared(catalog, recipe, _method(recipe), _revisions(recipe, models))
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
    recipe = chosen(parse(text, where, strict=strict), document)
    method = _method(recipe)
    revisions = _revisions(recipe, models)
    recipe, first_made = prepared(catalog, recipe, method, revisions)
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
    manifests = manifests_of(catalog, recipe, revisions)
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
        known_parameters=_parameters(),
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


def _revisions(recipe: Recipe, models: Mapping[str, str]) -> dict[str, str]:
    return {one.text: models.get(one.text, one.text) for one in recipe.named()}


def checked(text: str, *, where: str, strict: bool) -> tuple[Recipe, ...]:
    """Return the recipes of a file, checked as far as they can be without their models.

    A later one may name the merge of an earlier one by that one's name.  Raises BadRequest that
    names the line.
    """
    recipes = parse(text, where, strict=strict)
    names: set[str] = set()
    for recipe in recipes[:-1]:
        if recipe.name is None or recipe.name.text in names:
            raise BadRequest(
                "each recipe of a file but the last has a name of its own, for those after it",
                where=at(recipe.where, recipe.line if recipe.name is None else recipe.name.line),
                hint="name: step1",
            )
        names.add(recipe.name.text)
    for recipe in recipes:
        _check(recipe)
    return recipes


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
    own = check(recipe, method, known_parameters=_parameters())
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
    """Return what a recipe with so many experts says."""
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


def _method(recipe: Recipe) -> KnownMethod:
    try:
        method = known_method(registry.find(recipe.method.text))
    except BadRequest as error:
        error.locate(at(recipe.where, recipe.method.line))
        raise
    has_base = recipe.base is not None or any(
        part.base is not None for part in recipe.every_slice()
    )
    return method if has_base or method.baseless is None else method.without_base()


@cache
def _parameters() -> frozenset[str]:
    """Return the names of all parameters of methods here, and mergekit's."""
    found = {one.name for method in registry.METHODS.values() for one in method.parameters}
    return frozenset(found | registry.PARAMETERS_ELSEWHERE)
