"""Models that must be made before a recipe can run: adapters applied, layers stacked.

Pure: a recipe becomes one without them, and a list of what to make.  Two things are made:

    applied   MODEL+ADAPTER, where MODEL is not what the merge starts from
    stacked   the sources of the same place in each slice, one model of their layers

A merge of slices is then a merge of stacks, all layers in order, so no method has to know of layers
with different numbers.  A slice with fewer sources than others has weight 0 for those that it
lacks.  A recipe of MODEL+ADAPTER alone needs nothing: it is the merge of the adapter.  Loose
tensors of a stack are from its first and its last slice, as in mergekit 0.1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec
from msgspec.structs import replace

from mstore.merge.recipes.recipe import (
    Condition,
    Module,
    Recipe,
    RecipeMethod,
    RecipeSlice,
    Setting,
    Settings,
    Source,
    Text,
    at,
    base_of,
)
from mstore.merge.recipes.resolve import PREFIX, WEIGHT
from mstore.terms.errors import BadRequest
from mstore.terms.sizes import counted

APPLY: Final = "task_arithmetic"
"""The method that applies an adapter."""
STACK: Final = "passthrough"
"""The method of stacks."""

_UNCHANGED: Final = 1


class Applied(msgspec.Struct, frozen=True):
    """A model with an adapter merged into it."""

    model: Text
    adapter: Text

    @property
    def name(self) -> str:
        """What the recipe calls it from then on."""
        return f"{self.model} with {self.adapter}"


class Stacked(msgspec.Struct, frozen=True):
    """Runs of layers, one after the other: (model, first layer, last layer + 1).

    base: the model that its other files are from.
    """

    runs: tuple[tuple[Text, int, int], ...]
    base: Text

    @property
    def name(self) -> str:
        """What the recipe calls it from then on."""
        return ", ".join(f"{_joined(model)}[{first}:{end}]" for model, first, end in self.runs)


Needed = Applied | Stacked


def prepare(
    recipe: Recipe,
    method: RecipeMethod,
    *,
    same: Callable[[Text, Text], bool],
    layers: Callable[[Text], int | None],
    dtypes: Callable[[Text], Collection[str]],
) -> tuple[Recipe, tuple[Needed, ...]]:
    """Return a recipe without what must be made first, and what this is, in order.

    same: whether two names are one model. layers: how many a model has in its one stack of layers;
    None if that is not known. dtypes: the types of a model's floating-point tensors, as recipes
    name them; none if they are not known. The recipe that is returned may have another method.

    Raises BadRequest that names the line.
    """
    return _Preparation(recipe, method, same, layers, dtypes).prepared()


@dataclass(slots=True)
class _Preparation:
    recipe: Recipe
    method: RecipeMethod
    same: Callable[[Text, Text], bool]
    layers: Callable[[Text], int | None]
    dtypes: Callable[[Text], Collection[str]]
    needed: dict[str, Needed] = field(default_factory=dict)
    renamed: dict[str, Text] = field(default_factory=dict)

    def prepared(self) -> tuple[Recipe, tuple[Needed, ...]]:
        recipe = self.recipe
        self._require_layers()
        is_stack = False
        if self._is_adapted_alone():
            return self._adapter_merged(), ()
        if recipe.slices and not self._keeps_all(recipe.slices, self.layers):
            is_stack = self._is_plain_stack(recipe.slices) and not self._is_cast()
            recipe = recipe if is_stack else self._of_stacks()
        recipe = self._without_adapters(recipe, is_stack=is_stack)
        return self._with_tokenizer(recipe), tuple(self.needed.values())

    def _with_tokenizer(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the tokenizer of a model that takes part, if its own was made."""
        tokenizer = recipe.tokenizer
        if tokenizer is None or tokenizer.model is None:
            # None, or a word: also where a model has that name.
            return recipe
        known = {source.model.text for source in recipe.every_source()}
        name = tokenizer.source
        # An adapter may have been applied to a model whose layers are then stacked.
        while name.text in self.renamed and name.text not in known:
            name = self.renamed[name.text]
        return replace(recipe, tokenizer=replace(tokenizer, source=name))

    def _is_adapted_alone(self) -> bool:
        recipe = self.recipe
        sources = recipe.every_source()
        bases = [one for one in (recipe.base, *(part.base for part in recipe.slices)) if one]
        model = sources[0].model
        if model.adapter() is None or {one.text for one in bases} - {model.text}:
            return False
        if recipe.modules or any(one.model.text != model.text for one in sources):
            return False
        if len(sources) != max(1, len(recipe.slices)):
            return False
        if recipe.slices and not self._keeps_all(recipe.slices, self.layers):
            return False
        # Without another model, a method that adds to its base adds nothing.
        return not self.method.takes_base or self._is_unchanged(self._scopes(recipe.slices))

    def _adapter_merged(self) -> Recipe:
        recipe = self.recipe
        model = recipe.every_source()[0].model
        weight = Setting((Condition(_UNCHANGED, None, model.line),), model.line)
        return replace(
            recipe,
            method=Text(APPLY, recipe.method.line),
            base=model.model(),
            models=(Source(model, {WEIGHT: weight}, None, model.line),),
            slices=(),
            settings={},
        )

    # -- slices --------------------------------------------------------------------------------

    def _require_layers(self) -> None:
        for source in (one for part in self.recipe.slices for one in part.sources):
            count = self.layers(source.model.model())
            if source.layers is not None and count is not None and source.layers[1] > count:
                self._refuse(
                    f"{source.model} has {counted(count, 'layer')}, not {source.layers[1]}",
                    source.line,
                )

    def _is_stack(self, module: Module) -> bool:
        """Return whether a module is a stack; raise BadRequest if it would need stacks first."""
        # How many layers such a part of a model has, resolving knows.
        if not module.slices or self._keeps_all(module.slices, lambda _: None):
            return False
        if not self._is_plain_stack(module.slices, module.settings):
            self._refuse(
                "slices of a module keep all layers of the same models in order, or take them as "
                "they are",
                module.slices[0].line,
            )
        return True

    def _is_plain_stack(self, slices: Sequence[RecipeSlice], *more: Settings) -> bool:
        """Return whether layers are taken as they are: such a recipe needs no other stack."""
        if not self.method.is_alone or any(len(part.sources) != 1 for part in slices):
            return False
        return self._is_unchanged((*self._scopes(slices), *more))

    def _scopes(self, slices: Sequence[RecipeSlice]) -> list[Settings]:
        scopes = [self.recipe.settings, *(one.settings for one in self.recipe.models)]
        for part in slices:
            scopes += [part.settings, *(source.settings for source in part.sources)]
        return scopes

    def _is_unchanged(self, scopes: Sequence[Settings]) -> bool:
        """Return whether one model with these settings stays as it is: scale and weights are 1."""
        return not any(
            value != _UNCHANGED
            for settings in scopes
            for name, setting in settings.items()
            if name in self.method.parameters or name == WEIGHT
            for value, _ in setting.values()
        )

    def _is_cast(self) -> bool:
        """Return whether the recipe asks for another type than that of its models."""
        asked = self.recipe.out_dtype or self.recipe.dtype
        stored = {
            dtype for one in self.recipe.every_source() for dtype in self.dtypes(one.model.model())
        }
        return asked is not None and bool(stored) and stored != {asked.text.removeprefix(PREFIX)}

    def _keeps_all(
        self, slices: Sequence[RecipeSlice], layers: Callable[[Text], int | None]
    ) -> bool:
        """Return whether the slices are all layers in order, of the same models."""
        first = slices[0]
        names = [source.model.text for source in first.sources]
        bases = {self._base_of(part) for part in slices}
        place = 0
        for part in slices:
            ranges = {source.layers for source in part.sources}
            own = [source.model.text for source in part.sources]
            if own != names or len(ranges) != 1:
                return False
            ((start, end),) = [one for one in ranges if one is not None]
            if start != place:
                return False
            place = end
        counts = {layers(source.model.model()) for source in first.sources}
        return len(bases) == 1 and counts <= {place, None}

    def _of_stacks(self) -> Recipe:
        slices = self.recipe.slices
        most = max(slices, key=lambda part: len(part.sources))
        places = [source.model.text for source in self._ordered(most)]
        placed = [
            self._placed(part, places if self._base_of(part) == self._base_of(most) else [])
            for part in slices
        ]
        for part, sources in zip(slices, placed, strict=True):
            if len({_length(source) for source in sources}) > 1:
                told = ", ".join(f"{_length(one)} of {one.model}" for one in sources)
                self._refuse(
                    f"the sources of a slice need the same number of layers, not {told}", part.line
                )
        names = [self._stack(sources) for sources in zip(*placed, strict=True)]
        rewritten = []
        start = 0
        for part, sources in zip(slices, placed, strict=True):
            end = start + _length(sources[0])
            own = tuple(
                Source(name, source.settings, (start, end), source.line)
                for name, source in zip(names, sources, strict=True)
            )
            rewritten.append(RecipeSlice(own, part.settings, None, part.line))
            start = end
        has_base = any(self._base_of(part) is not None for part in slices)
        return replace(self.recipe, slices=tuple(rewritten), base=names[0] if has_base else None)

    def _placed(self, part: RecipeSlice, places: Sequence[str]) -> list[Source]:
        """Return a slice's sources, each in the place of its stack: the base first.

        places: the models of the slice with the most sources. If a slice has none but these, its
        sources are where these are; else in their own order. Where it has none, the layers of its
        first source count with weight 0.
        """
        sources = self._ordered(part)
        known = {source.model.text: source for source in sources}
        if known.keys() <= set(places):
            found = [known.get(name) for name in places]
        else:
            most = max(len(one.sources) for one in self.recipe.slices)
            found = [*sources, *[None] * (most - len(sources))]
        if None in found and not self.method.partial:
            self._refuse(
                f"this slice has {counted(len(sources), 'source')} and another {len(found)}: each "
                f"needs the same number, because {self.recipe.method} has no weights",
                part.line,
            )
        nothing = Setting((Condition(0.0, None, part.line),), part.line)
        filler = replace(sources[0], settings={WEIGHT: nothing})
        return [filler if source is None else source for source in found]

    def _ordered(self, part: RecipeSlice) -> list[Source]:
        sources = list(part.sources)
        base = self._base_of(part)
        if base is None:
            if not self.method.takes_base:
                some = any(self._base_of(one) is not None for one in self.recipe.slices)
                where = " in each slice" if some else ""
                self._refuse(f"{self.recipe.method} needs a base_model{where}", part.line)
        else:
            own = [source for source in sources if source.model.text == base]
            if not own and not self.method.takes_base:
                self._refuse(
                    f"the base model {base} is not among the sources of the slice", part.line
                )
            sources = own + [source for source in sources if source not in own]
        known: set[str] = set()
        for source in sources:
            if source.model.text in known:
                self._refuse(f"{source.model} is given twice in one slice", source.model.line)
            known.add(source.model.text)
        return sources

    def _stack(self, sources: Sequence[Source]) -> Text:
        runs: list[tuple[Text, int, int]] = []
        for source in sources:
            assert source.layers is not None
            start, end = source.layers
            if runs and runs[-1][0].text == source.model.text and runs[-1][2] == start:
                runs[-1] = (runs[-1][0], runs[-1][1], end)
            else:
                runs.append((source.model, start, end))
        model, start, end = runs[0]
        if len(runs) == 1 and start == 0 and self.layers(model.model()) in (end, None):
            return model
        runs = [(self._applied(model), start, end) for model, start, end in runs]
        names = [model.text for model, _, _ in runs]
        base = self.recipe.base
        files = runs[0][0] if base is None or base.text not in names else base
        return self._made(Stacked(tuple(runs), files), files)

    def _base_of(self, part: RecipeSlice) -> str | None:
        base = part.base or self.recipe.base
        return None if base is None else base.text

    # -- adapters ------------------------------------------------------------------------------

    def _without_adapters(self, recipe: Recipe, *, is_stack: bool) -> Recipe:
        """Return the recipe with adapters of its base only: others are applied first.

        A stack takes layers of models, and adds nothing to them.
        """
        base = base_of(recipe, needs_base=not self.method.takes_base)

        def is_expert(model: Text) -> bool:
            return base.adapter() is None and self.same(model.model(), base)

        def applied(sources: Sequence[Source], is_stack: bool = False) -> tuple[Source, ...]:
            return tuple(
                replace(one, model=self._applied(one.model))
                if one.model.adapter() is not None and (is_stack or not is_expert(one.model))
                else one
                for one in sources
            )

        def of_slices(slices: Sequence[RecipeSlice], is_stack: bool) -> tuple[RecipeSlice, ...]:
            return tuple(
                replace(
                    part,
                    sources=applied(part.sources, is_stack),
                    base=None if part.base is None else self._applied(part.base),
                )
                for part in slices
            )

        return replace(
            recipe,
            base=None if recipe.base is None else self._applied(recipe.base),
            models=applied(recipe.models),
            slices=of_slices(recipe.slices, is_stack),
            modules=tuple(
                replace(
                    one,
                    models=applied(one.models),
                    slices=of_slices(one.slices, self._is_stack(one)),
                )
                for one in recipe.modules
            ),
        )

    def _applied(self, model: Text) -> Text:
        adapter = model.adapter()
        if adapter is None:
            return model
        return self._made(Applied(model.model(), adapter), model.model(), model)

    def _made(self, one: Needed, *instead: Text) -> Text:
        """Note what must be made, and return its name; `instead`: whose tokenizer it has."""
        self.needed.setdefault(one.name, one)
        name = Text(one.name, instead[0].line)
        for other in instead:
            self.renamed.setdefault(other.text, name)
        return name

    def _refuse(self, what: str, line: int) -> NoReturn:
        raise BadRequest(what, where=at(self.recipe.where, line))


def _joined(model: Text) -> str:
    return f"({model})" if " " in model.text else model.text


def _length(source: Source) -> int:
    assert source.layers is not None
    return source.layers[1] - source.layers[0]
