"""Recipes of sd-mecha for one store: the tensors of the models that they name, and their blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mstore.merge.methods import registry
from mstore.merge.recipes.mecha import MechaMerge, MechaRecipe, TensorKind
from mstore.merge.recipes.recipe import at
from mstore.models.network_blocks import grouped, layout_of
from mstore.terms.errors import BadRequest
from mstore.terms.requests import MergeRequest, RecipeRequest, TensorRule


def check(recipe: MechaRecipe) -> None:
    """Raise BadRequest for what is wrong with a recipe whatever its models are."""
    whole = recipe.whole
    if not whole.weights:
        raise BadRequest("no model but the base takes part", where=at(recipe.where, whole.line))
    _check(recipe, whole)


def _check(recipe: MechaRecipe, asked: MechaMerge) -> None:
    try:
        weights = tuple(asked.weights.values()) or (0.0,)
        registry.operation(asked.method, asked.parameters, weights)
    except BadRequest as error:
        error.locate(at(recipe.where, asked.line))
        raise


def request_of_mecha(
    recipe: MechaRecipe, revisions: Mapping[str, str], tensors: Mapping[str, Collection[str]]
) -> RecipeRequest:
    """Return the merge that a recipe asks for.

    revisions: of its models. tensors: of those of them that are no adapters, their names.
    """
    check(recipe)
    base = recipe.whole.base
    kinds = _kinds(recipe, tensors)
    recipe.require_few(len(set(kinds.values())))
    asked = {kind: recipe.asked(kind) for kind in set(kinds.values())}
    every = [asked[kind] for kind in dict.fromkeys(kinds.values())]
    used = {name for one in every for name, weight in one.weights.items() if weight}
    named = dict.fromkeys(name for one in (recipe.whole, *every) for name in one.weights)
    experts = [name for name in named if name in used] or [*named][:1]
    for one in every:
        _check(recipe, one)
        if one.base != base or not (one.is_sum or [*one.weights] == experts):
            raise BadRequest(
                "not all tensors are made of the same models", where=at(recipe.where, one.line)
            )

    def value(one: MechaMerge) -> tuple[str, tuple[tuple[str, Any], ...], tuple[float, ...]]:
        weights = tuple(one.weights.get(name, 0.0) for name in experts)
        return one.method, tuple(one.parameters.items()), weights

    groups = grouped({tensor: value(asked[kind]) for tensor, kind in kinds.items()})
    (method, parameters, weights), *others = groups
    request = MergeRequest(
        base=revisions[base],
        experts=tuple((revisions[name], w) for name, w in zip(experts, weights, strict=True)),
        method=method,
        parameters=dict(parameters),
        rules=tuple(
            TensorRule(
                tensors=groups[one],
                method=None if one[0] == method else one[0],
                parameters=dict(one[1]),
                weights=None if one[2] == weights else one[2],
            )
            for one in others
        ),
        allow_missing=recipe.fills,
    )
    return RecipeRequest(request=request, warnings=recipe.warnings(), remarks=())


def _kinds(recipe: MechaRecipe, tensors: Mapping[str, Collection[str]]) -> dict[str, TensorKind]:
    """Return the kind of each of the base's tensors."""
    base = recipe.whole.base
    every = tensors[base]
    blocks = layout_of(every, base).of if recipe.is_by_block else {}
    own = [set(names) for names in tensors.values()] if recipe.fills else []
    # A model with quite other names is in another layout, which the plan knows of.
    held = {name: names for name, names in zip(tensors, own, strict=False) if names & set(every)}
    return {
        one: TensorKind(
            blocks.get(one),
            frozenset(name for name, names in held.items() if one not in names),
        )
        for one in every
    }
