"""Resolving: what a recipe asks for each tensor of a model, as a `MergeRequest`.

Pure.  The names of the base's tensors, the number of layers, the methods and the revisions of the
models are handed in.  Semantics as in mergekit 0.1.5:

    precedence  source, then slice, then recipe; the first that has a value for this tensor counts
    t           of a gradient: 0 at a slice's first layer and 1 at its last; 1 if it has only one; 0
                for tensors outside of layers, for which the first or the last slice says
    base model  takes part if it is an input of the method; else its own parameters have no effect

Tensors with equal values are a rule of the request.  The values that hold for tensors that no
filter names are those of the request itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NoReturn

import msgspec

from mstore.merge.recipes.layers import ModelLayers
from mstore.merge.recipes.recipe import (
    Given,
    Ignored,
    Kind,
    NotThatKind,
    Recipe,
    RecipeMethod,
    RecipeSlice,
    Settings,
    Source,
    Text,
    at,
    base_of,
)
from mstore.store.objects.shapes import literal_pattern
from mstore.terms.errors import BadRequest, MstoreError, did_you_mean
from mstore.terms.requests import (
    BASE,
    MergeRequest,
    RecipeRequest,
    TensorRule,
    TokenRow,
    Vocabulary,
)

WEIGHT: Final = "weight"
PER_MODEL: Final = frozenset((WEIGHT, "density", "gamma", "epsilon", "tall_mask_lambda"))
"""Parameters that each model has for itself."""

_WITHOUT_EFFECT: Final = "int8_mask"
_RESCALE: Final = "rescale"
_DENSITY: Final = "density"
_NORMALIZE: Final = "normalize"
DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""The types that an output can have, as safetensors and as recipes name them."""
PREFIX: Final = "torch."
"""What the name of a type may begin with."""
_KINDS: Final[Mapping[Kind, str]] = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "choice": "true, false or a word",
}

Values = tuple[tuple[str, object], ...]


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
    """Return the merge that a recipe asks for.

    tensors: names of the base's tensors, in its order. models: the revision of each model that the
    recipe names. layers: how many layers the base has by its config. tied:
    tensors that are one with another tensor, and this tensor; they are merged as it is. dtypes: the
    types of the base's floating-point tensors; a recipe that asks for the only one asks for
    nothing. Raises BadRequest that names the line.
    """
    layout = ModelLayers.of(tensors, layers)
    found = _Resolver(recipe, method, models, layout).resolve(tensors, tied)
    if [DTYPES.get(one) for one in dtypes] != [found.request.dtype]:
        asked = recipe.out_dtype or recipe.dtype
        if found.request.layers and asked is not None:
            own = " and ".join(DTYPES.get(one, one) for one in sorted(dtypes))
            raise BadRequest(
                f"a stack keeps the type of its layers, {own}: leave out {asked}",
                where=at(recipe.where, asked.line),
            )
        return found
    return msgspec.structs.replace(found, request=dataclasses.replace(found.request, dtype=None))


def check(
    recipe: Recipe, method: RecipeMethod
) -> tuple[Mapping[str, object], tuple[float, ...]] | None:
    """Raise BadRequest for what is wrong with a recipe whatever its models are.

    Returns parameters and weights for tensors that no filter names; None if it has none for these.
    """
    names = {one.text: one.text for one in recipe.named()}
    return _Resolver(recipe, method, names, None).check()


class _Tensor(msgspec.Struct, frozen=True):
    """What decides over a tensor's values: its name, its slice, and its place t."""

    name: str
    slice: int
    t: float


class _Missing(BadRequest):
    """A parameter that has no value for a tensor, and no default."""


class _Resolver:
    def __init__(
        self,
        recipe: Recipe,
        method: RecipeMethod,
        models: Mapping[str, str],
        layout: ModelLayers | None,
    ) -> None:
        self._recipe = recipe
        self._method = method
        self._models = models
        self._layout = layout
        self._warnings: dict[str, None] = {}
        self._remarks: dict[str, None] = {}
        self._meant: list[str] = []
        for one in recipe.ignored:
            self._ignore(one)
        self._stacked = False
        self._base = base_of(recipe, needs_base=not method.takes_base)
        self._slices = self._sliced()
        self._experts = self._inputs()
        self._used = self._parameters()

    def check(self) -> tuple[Mapping[str, object], tuple[float, ...]] | None:
        """Raise what `resolve` raises whatever the tensors are; return the merge's own values."""
        self._dtype()
        self._vocabulary()
        if self._stacked:
            return {}, (1.0,)
        found = []
        for number in range(len(self._slices)):
            try:
                found.append(self._values(_Tensor("", number, 0.0)))
            except _Missing:
                if number == 0:
                    return None
        parameters, weights = found[0]
        return dict(parameters), weights

    def resolve(self, tensors: Sequence[str], tied: Mapping[str, str]) -> RecipeRequest:
        self.check()
        self._remark_layers()
        if self._stacked:
            return self._stack()
        found = {name: self._values(self._place(name)) for name in tensors}
        groups: dict[tuple[Values, tuple[float, ...]], list[str]] = {}
        for name, values in found.items():
            if name not in tied:
                groups.setdefault(values, []).append(name)
            elif values != found[tied[name]]:
                self._remark(
                    f"{name} is one tensor with {tied[name]}, and merged as that", self._recipe.line
                )
        main = self._main(groups)
        parameters, weights = main
        rules = [
            TensorRule(
                tensors=tuple(literal_pattern(name) for name in names),
                parameters=dict(own),
                weights=own_weights if self._method.weighted else None,
            )
            for (own, own_weights), names in groups.items()
            if (own, own_weights) != main
        ]
        request = MergeRequest(
            base=self._models[self._base.text],
            experts=tuple(
                (self._models[(one.adapter() or one).text], weight)
                for one, weight in zip(self._experts, weights, strict=True)
            ),
            method=self._method.name,
            parameters=dict(parameters),
            dtype=self._dtype(),
            rules=tuple(rules),
            companions=self._companions(),
        )
        return self._with_remarks(request)

    def _companions(self) -> dict[str, str]:
        found = {}
        for key, one in self._recipe.companions:
            role, colon, of = key.text.partition(":")
            found[f"{role}{colon}{self._models.get(of, of)}"] = self._models[one.text]
        return found

    def _stack(self) -> RecipeRequest:
        """Return the request of slices whose layers are taken as they are."""
        experts = [one for one in self._experts if str(one) != str(self._base)] or [self._base]
        layers = []
        for part in self._slices:
            (source,) = part.sources
            assert source.layers is not None
            layers.append((self._models[source.model.text], *source.layers))
        request = MergeRequest(
            base=self._models[self._base.text],
            experts=tuple((self._models[one.text], 1.0) for one in experts),
            method=self._method.name,
            dtype=self._dtype(),
            layers=tuple(layers),
        )
        return self._with_remarks(request)

    def _main(
        self, groups: Mapping[tuple[Values, tuple[float, ...]], Sequence[str]]
    ) -> tuple[Values, tuple[float, ...]]:
        """Return the values of the merge itself: those of a tensor that no filter names.

        They must not depend on which tensors differ, or a recipe written from a plan would not give
        that plan.  If no such tensor has values, those of most tensors do.
        """
        try:
            return self._values(_Tensor("", 0, 0.0))
        except _Missing:
            if not groups:
                raise
            return max(groups, key=lambda one: len(groups[one]))

    # -- models --------------------------------------------------------------------------------

    def _sliced(self) -> tuple[RecipeSlice, ...]:
        """Return the slices: of models, one of all layers.  Raises BadRequest."""
        recipe = self._recipe
        if recipe.models:
            sources = recipe.models
            if recipe.base is not None and all(str(s.model) != str(self._base) for s in sources):
                sources += (Source(recipe.base, {}, None, recipe.base.line),)
            self._require_different(sources)
            return (RecipeSlice(sources, {}, None, recipe.line),)
        first = recipe.slices[0]
        self._stacked = self._is_stack(recipe.slices)
        if self._stacked:
            return recipe.slices
        self._require_different(first.sources)
        if not self._method.takes_base and str(self._base) not in {
            str(s.model) for s in first.sources
        }:
            self._refuse(
                f"the base model {self._base} is not among the sources of the slice", first.line
            )
        self._require_all_layers(recipe.slices)
        return recipe.slices

    def _is_stack(self, slices: Sequence[RecipeSlice]) -> bool:
        """Return whether the slices take layers of models as they are, in an order of their own."""
        if not self._method.is_alone or any(len(part.sources) != 1 for part in slices):
            return False
        runs = [(str(part.sources[0].model), part.sources[0].layers) for part in slices]
        place = 0
        for model, layers in runs:
            if model != runs[0][0] or layers is None or layers[0] != place:
                break
            place = layers[1]
        else:
            layout = self._layout
            main = None if layout is None else layout.main
            if layout is None or (main is not None and layout.stacks[main] == place):
                return False
        return True

    def _require_different(self, sources: Sequence[Source]) -> None:
        known: set[str] = set()
        for source in sources:
            if source.model.text in known:
                self._refuse(f"{source.model} is given twice", source.model.line)
            known.add(source.model.text)

    def _require_all_layers(self, slices: Sequence[RecipeSlice]) -> None:
        """Raise BadRequest unless the slices are the base's layers (`recipes.prepared`)."""
        if self._layout is None:
            return
        if self._layout.main is None:
            self._refuse(
                "slices need a model with one stack of layers, or a config.json that counts those "
                f"of its text model; {self._base} has: {self._layout.listed()}",
                slices[0].line,
            )
        count = self._layout.stacks[self._layout.main]
        _, end = slices[-1].sources[0].layers or (0, count)
        if end != count:
            self._refuse(
                f"the slices have {end} layers in all, and {self._base} has {count}: its files "
                "are for as many",
                slices[-1].line,
            )

    def _inputs(self) -> tuple[Text, ...]:
        """Return the experts, in the recipe's order."""
        if self._stacked:
            models = {str(s.model): s.model for part in self._slices for s in part.sources}
            return tuple(models.values())
        sources = self._slices[0].sources
        if self._method.takes_base:
            return tuple(source.model for source in sources)
        for part in self._slices:
            for source in part.sources:
                if str(source.model) == str(self._base):
                    for name, setting in source.settings.items():
                        if name in PER_MODEL:
                            self._remark(f"{name} of the base model has no effect", setting.line)
        experts = tuple(s.model for s in sources if str(s.model) != str(self._base))
        if not experts:
            self._refuse("no model but the base takes part", self._recipe.line)
        return experts

    # -- parameters ----------------------------------------------------------------------------

    def _parameters(self) -> tuple[str, ...]:
        """Return the method's parameters that the recipe sets somewhere, or must set.

        Remarks on unknown ones and those without effect, or refuses unknown ones.
        """
        used: dict[str, None] = {}
        for settings, is_model in self._scopes():
            for name, setting in settings.items():
                if name == WEIGHT and self._method.weighted:
                    continue
                if name in self._method.refused:
                    self._refuse_missing_parameter(name, settings)
                elif name in self._method.parameters:
                    one = self._method.parameters[name]
                    if is_model and not (one.each or self._method.is_alone):
                        what = f"{name} has no effect as a parameter of one model"
                        self._remark(what, setting.line)
                        continue
                    used.setdefault(name)
                    if one.of_base and not self._method.is_ours:
                        what = f"{name} with {self._method.name} is mstore's: mergekit ignores it"
                        self._remark(what, setting.line)
                elif name in self._method.others | {WEIGHT, _WITHOUT_EFFECT}:
                    # Known to change nothing, so it is not worth a word.
                    if name != _WITHOUT_EFFECT:
                        self._remark(f"{name} has no effect with {self._method.name}", setting.line)
                    self._refuse_effect(name, settings)
                else:
                    self._refuse_or_ignore(name, setting.line)
        parameters = self._method.parameters.items()
        needed = {name for name, one in parameters if one.default is None or one.stated}
        return tuple(sorted(used.keys() | needed))

    def _scopes(self) -> Iterator[tuple[Settings, bool]]:
        yield self._recipe.settings, False
        for part in self._slices:
            yield part.settings, False
            for source in part.sources:
                yield source.settings, True

    def _with_remarks(self, request: MergeRequest) -> RecipeRequest:
        return RecipeRequest(
            request, tuple(self._warnings), tuple(self._remarks), self._vocabulary()
        )

    def _refuse_or_ignore(self, name: str, line: int) -> None:
        known = {*self._method.parameters, *((WEIGHT,) if self._method.weighted else ())}
        what = f"{self._method.name} has no parameter {name!r}"
        hint = did_you_mean(name, sorted(known))
        if self._recipe.strict:
            raise BadRequest(what, where=at(self._recipe.where, line), hint=hint)
        self._ignore(Ignored(what, line, None if hint is None else str(hint)))

    def _ignore(self, one: Ignored) -> None:
        self._warnings.setdefault(f"{at(self._recipe.where, one.line)}: {one.warning()}")
        if one.meant is not None:
            self._meant.append(f"line {one.line}: {one.what}; {one.meant}")

    def _refuse_missing_parameter(self, name: str, settings: Settings) -> None:
        """Refuse a parameter that the method here does not have, unless its value is the usual."""
        usual, why = self._method.refused[name]
        for value, line in settings[name].values():
            if str(value).lower() != str(usual).lower():
                self._refuse(f"{self._method.name} has no parameter {name}: {why}", line)

    def _refuse_effect(self, name: str, settings: Settings) -> None:
        """Refuse what has an effect in mergekit that the method here does not have."""
        if name != _RESCALE or _DENSITY not in self._method.parameters:
            return
        for value, line in settings[name].values():
            if str(value).lower() not in ("false", "0", "no", "off"):
                self._refuse(f"{self._method.name} does not rescale", line)

    def _place(self, name: str) -> _Tensor:
        assert self._layout is not None
        found = self._layout.layer(name)
        if found is None or self._layout.part(name) is None:
            number = len(self._slices) - 1 if self._layout.is_last(name) else 0
            return _Tensor(name, number, 0.0 if found is None else _place_in(*found))
        layer, count = found
        for number, part in enumerate(self._slices):
            first, last = part.sources[0].layers or (0, count)
            if first <= layer < last:
                return _Tensor(name, number, _place_in(layer - first, last - first))
        raise AssertionError(name)

    def _values(self, tensor: _Tensor) -> tuple[Values, tuple[float, ...]]:
        """Return a tensor's parameters, by name, and its weights.  Raises BadRequest."""
        own = self._slices[tensor.slice]
        shared = (own.settings, self._recipe.settings)
        sources = {str(source.model): source for source in own.sources}
        scopes = [(sources[str(expert)].settings, *shared) for expert in self._experts]
        weights = (1.0,) * len(self._experts)
        if self._method.weighted:
            weights = tuple(
                self._weight(tensor, scope, expert)
                for scope, expert in zip(scopes, self._experts, strict=True)
            )
        values: list[tuple[str, object]] = []
        if self._method.is_baseless:
            values.append((str(self._method.baseless), False))
        for name in self._used:
            if not self._method.parameters[name].each:
                scope = scopes[0] if self._method.is_alone else shared
                values.append((name, self._checked(name, tensor, scope, None)))
                continue
            is_nothing = [name == _DENSITY and self._is_none(tensor, scope) for scope in scopes]
            # Nothing of such an expert is left, as if it had no weight.
            weights = tuple(
                0.0 if none else weight for none, weight in zip(is_nothing, weights, strict=True)
            )
            each = tuple(
                1.0 if none else self._checked(name, tensor, scope, expert)
                for none, scope, expert in zip(is_nothing, scopes, self._experts, strict=True)
            )
            values.append((name, each[0] if len(set(each)) == 1 else each))
        return tuple(values), weights

    def _is_none(self, tensor: _Tensor, scopes: Sequence[Settings]) -> bool:
        """Return whether nothing of an expert is left in a tensor: its density is 0."""
        density, _ = self._found(_DENSITY, "float", tensor, scopes)
        if density != 0 or not self._method.weighted:
            return False
        if self._method.elects:
            return True
        divides, _ = self._found(_NORMALIZE, "bool", tensor, scopes[-2:])
        usual = self._method.parameters[_NORMALIZE].default
        # The weight of one of which nothing is left would still count in the divisor.
        return not (usual if divides is None else divides)

    def _checked(
        self, name: str, tensor: _Tensor, scopes: Sequence[Settings], model: Text | None
    ) -> object:
        """Return a parameter's value as the method takes it; its default if there is none."""
        known = self._method.parameters[name]
        value, line = self._found(name, known.kind, tensor, scopes, known.words)
        if value is None:
            if known.default is None:
                self._refuse_missing(name, tensor, model, scopes)
            return known.default
        try:
            found = known.check(value)
        except MstoreError as error:
            what, _, _ = error.texts
            raise BadRequest(what, where=at(self._recipe.where, line)) from error
        if known.of_base and found != known.default and not self._names_base:
            self._refuse(
                f"{name} says how far to go from the base, and the recipe has no base_model", line
            )
        return found

    @property
    def _names_base(self) -> bool:
        return any((self._recipe.base, *(part.base for part in self._recipe.slices)))

    def _weight(self, tensor: _Tensor, scopes: Sequence[Settings], model: Text) -> float:
        value, _ = self._found(WEIGHT, "float", tensor, scopes)
        if value is None:
            self._refuse_missing(WEIGHT, tensor, model, scopes)
        return float(value)

    def _found(
        self,
        name: str,
        kind: Kind,
        tensor: _Tensor,
        scopes: Sequence[Settings],
        words: Sequence[str] = (),
    ) -> tuple[Given | None, int]:
        for settings in scopes:
            setting = settings.get(name)
            if setting is None:
                continue
            try:
                found = setting.value(tensor.name, tensor.t, kind)
            except NotThatKind as error:
                if error.args[0] in words:
                    return error.args[0], setting.line
                self._refuse(f"{name} takes {_KINDS[kind]}, not {error.args[0]!r}", setting.line)
            if found is not None:
                return found
        return None, self._recipe.line

    def _refuse_missing(
        self, name: str, tensor: _Tensor, model: Text | None, scopes: Sequence[Settings]
    ) -> NoReturn:
        of_model = "" if model is None else f" of {model}"
        for_tensor = f" for {tensor.name}" if tensor.name else ""
        line = self._recipe.method.line if model is None else model.line
        what = f"{self._method.name} needs the {name}{of_model}{for_tensor}"
        hint = next(iter(self._meant), f"parameters: {{{name}: 0.5}}")
        if model is not None and model is self._recipe.base:
            hint = (
                f"{self._method.name} averages base_model like the others: remove it, or list it "
                "in models"
            )
        # With filters, other tensors may have one.
        error = _Missing if any(name in settings for settings in scopes) else BadRequest
        raise error(what, where=at(self._recipe.where, line), hint=hint)

    # -- the rest ------------------------------------------------------------------------------

    def _dtype(self) -> str | None:
        recipe = self._recipe
        for one in (recipe.dtype, recipe.out_dtype):
            if one is not None and one.text.removeprefix(PREFIX) not in DTYPES.values():
                self._refuse(
                    f"{one} is not supported; types: {', '.join(DTYPES.values())}",
                    one.line,
                )
        chosen = recipe.out_dtype or recipe.dtype
        return None if chosen is None else chosen.text.removeprefix(PREFIX)

    def _vocabulary(self) -> Vocabulary | None:
        asked, template = self._recipe.tokenizer, self._recipe.template
        chat_template = None if template is None else template.text
        if asked is None:
            return (
                None if template is None else Vocabulary(source=BASE, chat_template=chat_template)
            )
        taking = {one.text: self._models[one.text] for one in self._experts if not one.adapter()}
        taking[self._base.text] = BASE
        for one in (asked.model, *(token.model for token in asked.tokens)):
            if one is not None and one.text not in taking:
                self._refuse(f"{one} is not one of the models that are merged", one.line)
        source = asked.source.text if asked.model is None else taking[asked.model.text]
        return Vocabulary(
            source=source,
            tokens={
                one.token.text: TokenRow(
                    model=None if one.model is None else self._models[one.model.text],
                    token=one.other,
                    force=one.force,
                )
                for one in asked.tokens
            },
            pad_to=asked.pad_to,
            # Rows after the tokens of a base whose tokens stay do no harm.
            keep_padding=source == BASE and asked.pad_to is None,
            base_first=self._names_base,
            chat_template=chat_template,
        )

    def _remark_layers(self) -> None:
        """Say how layers are counted, if that is no matter of course and the recipe counts them."""
        gradients = [
            one.line
            for settings, _ in self._scopes()
            for setting in settings.values()
            for one in setting.conditions
            if isinstance(one.value, tuple) and len(one.value) > 1
        ]
        if self._layout is None or not (gradients or self._recipe.slices):
            return
        remark = self._layout.remark(has_gradients=bool(gradients))
        if remark is not None:
            self._remark(remark, (gradients or [self._slices[0].line])[0])

    def _remark(self, what: str, line: int) -> None:
        self._remarks.setdefault(f"{at(self._recipe.where, line)}: {what}")

    def _refuse(self, what: str, line: int) -> NoReturn:
        raise BadRequest(what, where=at(self._recipe.where, line))


def _place_in(layer: int, count: int) -> float:
    return layer / (count - 1) if count > 1 else 1.0
