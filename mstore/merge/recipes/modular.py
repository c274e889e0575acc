"""Recipes with modules: each module is a recipe of its own for its tensors.

Pure, as `resolve`, which it calls for each module.  As in mergekit 0.1.5 a module has models or
slices of its own, and its parameters come between those of a slice and those of the recipe.  A
model that is not in a module has weight 0 there.

*Modules* are the parts of a model that a recipe may name.  Names as in mergekit 0.1.5, in two ways
that a recipe chooses by using them:

    by role     `default` of a model with one stack of layers; `text_decoder`, `vision_tower`,
                `vision_model`, `audio_tower`, `multi_modal_projector` of one that sees or hears;
                `encoder`, `decoder`, `shared` of one that has these two
    by stack    the stack's name (`model.visual.blocks`), and `default` for the other tensors:
                mergekit's names of modules in architectures for which it has no template
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NoReturn

import msgspec
from msgspec import structs

from mstore.merge.recipes import resolve as single
from mstore.merge.recipes.layout import AHEAD, BEHIND, Layout
from mstore.merge.recipes.recipe import Module, Recipe, RecipeMethod, Setting, Settings, at, base_of
from mstore.store.objects.shapes import literal_name, literal_pattern
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.requests import MergeRequest, RecipeRequest, TensorRule, Vocabulary

DEFAULT: Final = "default"
TEXT: Final = "text_decoder"
_SHARED: Final = "shared"
_SIDES: Final = ("encoder", "decoder")
_VISION: Final = "vision_tower"
_PROJECTOR: Final = "multi_modal_projector"
_HEARING = re.compile(r"audio|speech|apm")
_PROJECTORS: Final = frozenset(
    (
        *(_PROJECTOR, "mm_projector", "connector", "aligner", "resampler", "perceiver_resampler"),
        *("qformer", "projector", "mlp1", "language_projection", "audio_projection"),
        *("merger", "deepstack_merger_list"),
    )
)
_NUMBERED = re.compile(r"(.+?)\.[0-9]{1,6}\..")


class Modules(msgspec.Struct, frozen=True):
    """The modules of one model. by_stack: see above."""

    layout: Layout
    by_stack: bool

    @classmethod
    def of(cls, layout: Layout, asked: Collection[str]) -> Modules | None:
        """Return the modules of a model, by the names that a recipe uses.

        None if neither way of naming fits the model.
        """
        stacks = layout.stacks
        if len(stacks) > 1 and any(name in stacks for name in asked):
            return cls(layout, by_stack=True)
        found = cls(layout, by_stack=False)
        return found if len(stacks) < 2 or found._has_sides() or found._has_text() else None

    def module(self, name: str) -> str:
        """Return the module of a tensor."""
        if self.by_stack:
            stack = _NUMBERED.match(name)
            return stack[1] if stack is not None and stack[1] in self.layout.stacks else DEFAULT
        if len(self.layout.stacks) < 2:
            return DEFAULT
        path = name.split(".")
        if self._has_sides():
            return next((word for word in path[:-1] if word in _SIDES), _SHARED)
        ahead = [word for word in path if word in AHEAD]
        if not ahead:
            return TEXT
        if _PROJECTORS.intersection(path):
            return _PROJECTOR
        if _HEARING.search(name):
            return "audio_tower"
        return "vision_model" if ahead[0] == "vision_model" else _VISION

    def known(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the modules of the tensors of these names."""
        return tuple(sorted({self.module(name) for name in names}))

    def of_main(self) -> str | None:
        """Return the module of the main stack, None if there is none."""
        main = self.layout.main
        return None if main is None else self.module(f"{main}.0.weight")

    def _has_sides(self) -> bool:
        """Return whether the model is an encoder and a decoder."""
        found = [[word for word in one.split(".") if word in _SIDES] for one in self.layout.stacks]
        return sorted(found) == sorted([word] for word in _SIDES)

    def _has_text(self) -> bool:
        """Return whether one stack is in no part that makes input for a text model."""
        known = AHEAD | BEHIND
        return sum(not known.intersection(one.split(".")) for one in self.layout.stacks) == 1


Values = tuple[tuple[tuple[str, object], ...], tuple[float, ...] | None]
"""Parameters and weights of a tensor."""


def resolve(
    recipe: Recipe,
    tensors: Sequence[str],
    method: RecipeMethod,
    *,
    models: Mapping[str, str],
    layers: int | None = None,
    tied: Mapping[str, str] = MappingProxyType({}),
    dtypes: Collection[str] = (),
) -> RecipeRequest:
    """Return the merge that a recipe asks for; see `mstore.merge.recipes.resolve.resolve`."""

    def of_one(one: Recipe, names: Sequence[str], count: int | None) -> RecipeRequest:
        own = {name: other for name, other in tied.items() if {name, other} <= set(names)}
        return single.resolve(
            one,
            names,
            method,
            models=models,
            layers=count,
            tied=own,
            dtypes=dtypes,
        )

    if not recipe.modules:
        return of_one(recipe, tensors, layers)
    _require_experts(recipe, method)
    modules = _modules(recipe, Layout.of(tensors, layers))
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        names.setdefault(modules.module(tensor), []).append(tensor)
    _require_modules(recipe, names)
    main = modules.of_main()
    parts = []
    for module in recipe.modules:
        own = names[module.name.text]
        is_main = module.name.text == main
        if _is_idle(recipe, module, method):
            parts.append(_Part(module, own, None))
            continue
        one = _alone(recipe, module, is_main=is_main or main is None)
        found = of_one(one, own, layers if is_main else None)
        if found.request.layers and not is_main:
            _refuse(recipe, module, "layers are stacked in the text model only")
        parts.append(_Part(module, own, found))
    parts.sort(key=lambda part: (part.found is None, part.module.name.text != main))
    if parts[0].found is None:
        _refuse(recipe, recipe.modules[0], "no model but the base takes part")
    if parts[0].found.request.layers:
        return _stacked(recipe, parts)
    return _Combined(recipe, method, models, parts).request(tied)


def check(
    recipe: Recipe, method: RecipeMethod
) -> tuple[Mapping[str, object], tuple[float, ...]] | None:
    """Raise BadRequest for what is wrong with a recipe whatever its models are.

    Returns as `mstore.merge.recipes.resolve.check`, for the first of its modules.
    """
    _require_experts(recipe, method)
    parts = [
        _alone(recipe, module, is_main=True)
        for module in recipe.modules
        if not _is_idle(recipe, module, method)
    ]
    if recipe.modules and not parts:
        _refuse(recipe, recipe.modules[0], "no model but the base takes part")
    found = [single.check(one, method) for one in parts or [recipe]]
    return found[0]


class _Part(msgspec.Struct, frozen=True):
    """A module, its tensors, and the merge that it asks for; None: they stay as in the base."""

    module: Module
    names: Sequence[str]
    found: RecipeRequest | None


class _Combined:
    """One request for the tensors of all modules."""

    def __init__(
        self,
        recipe: Recipe,
        method: RecipeMethod,
        models: Mapping[str, str],
        parts: Sequence[_Part],
    ) -> None:
        self._recipe = recipe
        self._method = method
        self._parts = parts
        self._base = base_of(recipe, needs_base=not method.takes_base)
        self._revision = models[self._base.text]
        asked = [part.found.request for part in parts if part.found is not None]
        experts = [str(expert) for one in asked for expert, _ in one.weighted()]
        self._experts = tuple(dict.fromkeys(experts))
        used = {name for one in asked for name in one.parameters}
        used |= {name for one in asked for rule in one.rules for name in rule.parameters}
        self._used = sorted(used)
        if not method.partial:
            for part, one in zip(parts, asked, strict=True):
                if {str(e) for e, _ in one.weighted()} != {str(e) for e, _ in asked[0].weighted()}:
                    _refuse(
                        recipe,
                        part.module,
                        f"{method.name} needs the same models in every module; with linear and "
                        "weight 1, each module may be of another model",
                    )

    def request(self, tied: Mapping[str, str]) -> RecipeRequest:
        first = self._parts[0].found
        assert first is not None
        requests = [part.found for part in self._parts if part.found is not None]
        warnings = dict.fromkeys(text for one in requests for text in one.warnings)
        remarks = dict.fromkeys(text for one in requests for text in one.remarks)
        found: dict[str, Values] = {}
        places: dict[str, int] = {}
        for number, part in enumerate(self._parts):
            found |= self._of(part)
            places |= dict.fromkeys(part.names, number)
        for name, other in tied.items():
            if found.pop(name) != found[other] and places[name] != places[other]:
                where = at(self._recipe.where, self._recipe.line)
                remarks.setdefault(
                    f"{where}: {name} is one tensor with {other}, and merged as that"
                )
        main = self._values(first.request, None)
        groups: dict[Values, list[str]] = {}
        for name, values in found.items():
            if values != main:
                groups.setdefault(values, []).append(name)
        parameters, weights = main
        request = replace(
            first.request,
            base=self._revision,
            experts=tuple(
                (expert, 1.0 if weights is None else weights[number])
                for number, expert in enumerate(self._experts)
            ),
            parameters=dict(parameters),
            rules=tuple(
                TensorRule(
                    tensors=tuple(literal_pattern(name) for name in names),
                    parameters=dict(own),
                    weights=own_weights,
                )
                for (own, own_weights), names in groups.items()
            ),
        )
        return RecipeRequest(request, tuple(warnings), tuple(remarks), self._vocabulary())

    def _of(self, part: _Part) -> dict[str, Values]:
        """Return the values of a module's tensors."""
        if part.found is None:
            nothing = self._values(None, None)
            return dict.fromkeys(part.names, nothing)
        request = part.found.request
        found = dict.fromkeys(part.names, self._values(request, None))
        for rule in request.rules:
            values = self._values(request, rule)
            for pattern in rule.patterns():
                name = literal_name(pattern)
                assert name is not None
                found[name] = values
        return found

    def _values(self, request: MergeRequest | None, rule: TensorRule | None) -> Values:
        """Return the values of a module or of a rule of it, for all experts and parameters."""
        own = () if request is None else request.weighted()
        given = dict(zip((str(e) for e, _ in own), (w for _, w in own), strict=True))
        if rule is not None and rule.weights is not None:
            given = dict(zip(given, rule.weights, strict=True))
        parameters = {} if request is None else dict(request.parameters)
        if rule is not None:
            parameters |= rule.parameters
        values = []
        for name in self._used:
            known = self._method.parameters.get(name)
            default = None if known is None else known.default
            value = parameters.get(name, default)
            if known is not None and known.each and isinstance(value, tuple):
                each = dict(zip(given, value, strict=True))
                value = tuple(each.get(expert, value[0]) for expert in self._experts)
            if value is not None:
                values.append((name, value))
        weights = tuple(given.get(expert, 0.0) for expert in self._experts)
        return tuple(values), weights if self._method.weighted else None

    def _vocabulary(self) -> Vocabulary | None:
        return next(
            (
                part.found.vocabulary
                for part in self._parts
                if part.found is not None and part.found.vocabulary is not None
            ),
            None,
        )


def _stacked(recipe: Recipe, parts: Sequence[_Part]) -> RecipeRequest:
    """Return the request of a text model's layers, if all else is the first layer's model's."""
    found = parts[0].found
    assert found is not None
    model = found.request.layers[0][0]
    for part in parts[1:]:
        own = None if part.found is None else part.found.request
        experts = [] if own is None else [expert for expert, _ in own.weighted()]
        if own is None or own.layers or experts != [model]:
            _refuse(
                recipe,
                part.module,
                "where layers are stacked, every other module is of the model of the first layer, "
                f"{recipe.every_slice()[0].sources[0].model}",
            )
    return found


def _modules(recipe: Recipe, layout: Layout) -> Modules:
    asked = [module.name.text for module in recipe.modules]
    found = Modules.of(layout, asked)
    if found is None:
        _refuse(
            recipe,
            recipe.modules[0],
            f"the modules of the base are not known; name them by its stacks: {layout.listed()}, "
            "and default for all else",
        )
    return found


def _require_modules(recipe: Recipe, known: Collection[str]) -> None:
    """Raise BadRequest unless the recipe has these modules and no other."""
    for module in recipe.modules:
        if module.name.text not in known:
            raise BadRequest(
                f"the base has no module {module.name}; its modules: {', '.join(known)}",
                where=at(recipe.where, module.name.line),
                hint=did_you_mean(module.name.text, known),
            )
    asked = {module.name.text for module in recipe.modules}
    missing = [name for name in known if name not in asked]
    if missing:
        raise BadRequest(
            f"a recipe says what every module is made of, and this one lacks {', '.join(missing)}",
            where=at(recipe.where, recipe.modules[0].name.line),
            hint=f"{missing[0]}: {{models: [{{model: {recipe.every_source()[0].model}}}]}}",
        )


def _is_idle(recipe: Recipe, module: Module, method: RecipeMethod) -> bool:
    """Return whether a module stays as in the base: only this is in it."""
    return not method.takes_base and method.partial and _is_of_base(recipe, module)


def _require_experts(recipe: Recipe, method: RecipeMethod) -> None:
    """Raise BadRequest for a module of the base alone, if the method cannot leave it as it is."""
    for module in recipe.modules:
        if not method.takes_base and not method.partial and _is_of_base(recipe, module):
            _refuse(recipe, module, f"{method.name} needs another model than the base here")


def _is_of_base(recipe: Recipe, module: Module) -> bool:
    sources = (*module.models, *(one for part in module.slices for one in part.sources))
    return {str(source.model) for source in sources} == {str(recipe.base)}


def _alone(recipe: Recipe, module: Module, *, is_main: bool) -> Recipe:
    """Return a module as a recipe. is_main: what the recipe says of tokens is of this one."""
    return structs.replace(
        recipe,
        models=module.models,
        slices=module.slices,
        modules=(),
        settings=_within(module.settings, recipe.settings),
        tokenizer=recipe.tokenizer if is_main else None,
        template=recipe.template if is_main else None,
    )


def _within(inner: Settings, outer: Settings) -> Settings:
    """Return the settings of both scopes; the conditions of the inner one come first."""
    both = dict(outer)
    for name, setting in inner.items():
        after = both[name].conditions if name in both else ()
        both[name] = Setting((*setting.conditions, *after), setting.line)
    return both


def _refuse(recipe: Recipe, module: Module, what: str) -> NoReturn:
    raise BadRequest(what, where=at(recipe.where, module.name.line))
