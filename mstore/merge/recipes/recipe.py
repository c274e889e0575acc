"""A recipe as it is written: models, slices and settings, each with its line.

Owns the values that `parse` makes, and what must be known of a method to read and write recipes of
it.  Does not own what they mean for the tensors of a model (`resolve`).

A setting is what a recipe says of one parameter: a scalar, a gradient (a list of scalars over the
layers), or conditions, each a scalar or a gradient for the tensors whose names its filter matches.
As in mergekit 0.1.5:

    filter      absent, "*", or a part of the tensor's name; the first condition that matches counts
    gradient    at t in [0, 1], the place of a layer: linear between neighbours; of values that are
                no numbers, the one at or before t
    no value    no condition matches, or a list is empty: the next scope says
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final, Literal

import msgspec

from mstore.terms.errors import BadRequest
from mstore.terms.requests import BASE, UNION


class YamlLimits(msgspec.Struct, frozen=True):
    """How large a file may be. nodes: scalars, lists and mappings, aliases written out."""

    max_bytes: int = 1 << 20
    max_depth: int = 32
    max_nodes: int = 100_000
    max_documents: int = 64


DEFAULT_LIMITS = YamlLimits()


def at(where: str, line: int) -> str:
    """Return the place that an error names."""
    return f"{where}, line {line}"


Given = bool | int | float | str
Kind = Literal["float", "int", "bool", "choice"]
"""A choice is true, false, or a word."""
ANY = "*"

_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}


class NotThatKind(ValueError):
    """A value is not of the parameter's kind; `args[0]` is the value."""


class Parts:
    """Which of many texts are parts of a name; each is told by the number of its first place."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._by_length: dict[int, dict[str, int]] = {}
        for number, text in enumerate(texts):
            self._by_length.setdefault(len(text), {}).setdefault(text, number)

    def within(self, name: str) -> Iterator[int]:
        """Yield the numbers of the texts that the name contains."""
        for length, texts in self._by_length.items():
            places = len(name) - length + 1
            if len(texts) < places:
                yield from (number for text, number in texts.items() if text in name)
                continue
            # There may be thousands: what the name has at each place is looked up.
            for start in range(places):
                number = texts.get(name[start : start + length])
                if number is not None:
                    yield number


class Condition(msgspec.Struct, frozen=True):
    """A scalar or a gradient for some tensors. filter: None for all."""

    value: Given | tuple[Given, ...]
    filter: str | None
    line: int

    @property
    def for_all(self) -> bool:
        """Return whether it holds for every tensor."""
        return self.filter is None or self.filter == ANY


class Setting(msgspec.Struct, frozen=True, dict=True):
    """The conditions of one parameter, in order; a plain value is a condition without a filter."""

    conditions: tuple[Condition, ...]
    line: int

    @cached_property
    def _rest(self) -> int:
        """The number of the first condition that holds for every tensor."""
        every = (number for number, one in enumerate(self.conditions) if one.for_all)
        return next(every, len(self.conditions))

    @cached_property
    def _filters(self) -> Parts:
        return Parts(one.filter or "" for one in self.conditions[: self._rest])

    def values(self) -> Iterator[tuple[Given, int]]:
        """Yield every value that is written, and its line."""
        for one in self.conditions:
            for value in one.value if isinstance(one.value, tuple) else (one.value,):
                yield value, one.line

    def condition(self, tensor: str) -> Condition | None:
        """Return the first condition that holds for a tensor of this name; None if none does.

        "" is a tensor that no filter names: so its value is what is left for tensors without
        conditions of their own.
        """
        found = min(self._filters.within(tensor), default=self._rest) if tensor else self._rest
        return self.conditions[found] if found < len(self.conditions) else None

    def given(self, tensor: str) -> Given | tuple[Given, ...] | None:
        """Return what is written for a tensor; None if nothing is."""
        found = self.condition(tensor)
        return None if found is None else found.value

    def value(self, tensor: str, t: float, kind: Kind) -> tuple[Given, int] | None:
        """Return the value for a tensor at t, and its line; None if there is none.

        Raises NotThatKind.
        """
        one = self.condition(tensor)
        if one is None:
            return None
        if isinstance(one.value, tuple):
            found = _along(one.value, t, kind)
            return None if found is None else (found, one.line)
        return converted(one.value, kind), one.line


def _along(values: tuple[Given, ...], t: float, kind: Kind) -> Given | None:
    """Return the value of a gradient at t in [0, 1]; None if it is empty."""
    if not values:
        return None
    points = [converted(value, kind) for value in values]
    place = t * (len(points) - 1)
    before = int(place)
    if kind in ("bool", "choice"):
        return points[before]
    after = min(before + 1, len(points) - 1)
    share = place - before
    # In this order: a value must be mergekit's to the last bit.
    return converted((1 - share) * float(points[before]) + share * float(points[after]), kind)


def converted(value: Given, kind: Kind) -> Given:
    """Return a value as a parameter of this kind takes it.  Raises NotThatKind.

    A number may be written as text (YAML reads 1e-3 so); true and false are also 1 and 0.
    """
    if kind == "bool":
        return _as_bool(value)
    if kind == "choice":
        is_word = isinstance(value, str) and value.lower() not in _TRUE | _FALSE
        return value if is_word else _as_bool(value)
    try:
        number = float(value)
        if kind == "float":
            return number
        whole = int(value)
    except (ValueError, OverflowError):
        raise NotThatKind(value) from None
    if isinstance(value, float) and whole != number:
        raise NotThatKind(value)
    return whole


def _as_bool(value: Given) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
    elif value in (0, 1):
        return value == 1
    raise NotThatKind(value)


_PLUS: Final = "+"
"""Joins a model and an adapter."""

Settings = Mapping[str, Setting]


class Text(msgspec.Struct, frozen=True):
    """A text and its line."""

    text: str
    line: int

    def __str__(self) -> str:
        return self.text

    def model(self) -> Text:
        """Return the model of MODEL+ADAPTER, or this text."""
        return Text(self.text.partition(_PLUS)[0], self.line)

    def adapter(self) -> Text | None:
        """Return the adapter of MODEL+ADAPTER; None for a model alone."""
        _, plus, name = self.text.partition(_PLUS)
        return Text(name, self.line) if plus else None


def models_and_adapters(names: Iterable[Text]) -> tuple[Text, ...]:
    """Return every model and adapter of names, MODEL+ADAPTER too, once and in their order."""
    found: dict[str, Text] = {}
    for one in names:
        for part in (one.model(), one.adapter()):
            if part is not None:
                found.setdefault(part.text, part)
    return tuple(found.values())


class Ignored(msgspec.Struct, frozen=True):
    """What a recipe says and mergekit ignores. meant: a hint about what it may have meant."""

    what: str
    line: int
    meant: str | None = None

    def warning(self) -> str:
        """Return a sentence for a user."""
        more = "" if self.meant is None else f" ({self.meant})"
        return f"{self.what}, and it is ignored, as in mergekit{more}"


class Source(msgspec.Struct, frozen=True):
    """A model that takes part. layers: from which to before which, None for all."""

    model: Text
    settings: Settings
    layers: tuple[int, int] | None
    line: int


class RecipeSlice(msgspec.Struct, frozen=True):
    """A run of layers, made of the sources. base: None for the recipe's."""

    sources: tuple[Source, ...]
    settings: Settings
    base: Text | None
    line: int


class Module(msgspec.Struct, frozen=True):
    """A part of the model, made of models or slices; one of the two is not empty."""

    name: Text
    models: tuple[Source, ...]
    slices: tuple[RecipeSlice, ...]
    settings: Settings


class TokenSource(msgspec.Struct, frozen=True):
    """Where the embedding of one token is from, in models that lack it.

    model: None for zeros. other: the token there, or its id, if it is not the same token. force:
    also in models that have the token.
    """

    token: Text
    model: Text | None
    other: str | int | None
    force: bool


class TokenizerSource(msgspec.Struct, frozen=True):
    """The tokenizer of the result.

    source: the model whose it is, BASE or UNION. pad_to: rows of embeddings are rounded up to a
    multiple of this.
    """

    source: Text
    tokens: tuple[TokenSource, ...] = ()
    pad_to: int | None = None

    @property
    def model(self) -> Text | None:
        """Return the model whose tokenizer it is, None for a word."""
        return None if self.source.text in (BASE, UNION) else self.source


class Recipe(msgspec.Struct, frozen=True):
    """One document.

    where: the name of its file. One of `models`, `slices` and `modules` is not empty. tokenizer,
    template (of chats): None if the recipe does not say. ignored: keys that mergekit ignores;
    strict: such are refused, so there are none. companions: what a further input is (ROLE:MODEL,
    ROLE:base or ROLE) and its name.
    """

    where: str
    line: int
    method: Text
    base: Text | None
    models: tuple[Source, ...]
    slices: tuple[RecipeSlice, ...]
    modules: tuple[Module, ...]
    settings: Settings
    dtype: Text | None
    out_dtype: Text | None
    tokenizer: TokenizerSource | None
    template: Text | None
    name: Text | None
    ignored: tuple[Ignored, ...] = ()
    strict: bool = False
    companions: tuple[tuple[Text, Text], ...] = ()

    def named(self) -> tuple[Text, ...]:
        """Return every model, adapter and companion that it names, once, the base first."""
        found = {one.text: one for one in self.models_named()}
        return (*found.values(), *(one for _, one in self.companions if one.text not in found))

    def models_named(self) -> tuple[Text, ...]:
        """Return every model and adapter that the recipe names, once, the base first."""
        return models_and_adapters(self.names())

    def every_slice(self) -> tuple[RecipeSlice, ...]:
        """Return the slices, of all modules."""
        return self.slices + tuple(part for one in self.modules for part in one.slices)

    def every_source(self) -> tuple[Source, ...]:
        """Return the models that take part, in their order, each as often as it does."""
        models = self.models + tuple(model for one in self.modules for model in one.models)
        return (*models, *(one for part in self.every_slice() for one in part.sources))

    def conditions(self) -> Iterator[Condition]:
        """Yield what is written for parameters, in all scopes."""
        scopes = [self.settings, *(module.settings for module in self.modules)]
        scopes += [part.settings for part in self.every_slice()]
        scopes += [source.settings for source in self.every_source()]
        for settings in scopes:
            for setting in settings.values():
                yield from setting.conditions

    def names(self) -> Iterator[Text]:
        """Yield the names of models as they are written, MODEL+ADAPTER too; the base first."""
        if self.base is not None:
            yield self.base
        for part in self.every_slice():
            if part.base is not None:
                yield part.base
        if self.tokenizer is not None and self.tokenizer.model is not None:
            yield self.tokenizer.model
        for source in self.every_source():
            yield source.model


def base_of(recipe: Recipe, *, needs_base: bool) -> Text:
    """Return the model that the merge starts from.  Raises BadRequest if there is none.

    needs_base: without base_model the recipe is refused; else the base is the model that the
    tokenizer is from, or the first one: the result's other files are from there.
    """
    own = next((part.base for part in recipe.every_slice() if part.base is not None), recipe.base)
    if own is not None:
        return own
    if not needs_base and recipe.tokenizer is not None and recipe.tokenizer.model is not None:
        return recipe.tokenizer.model
    if needs_base:
        raise BadRequest(
            f"{recipe.method} needs a base_model", where=at(recipe.where, recipe.method.line)
        )
    return recipe.every_source()[0].model.model()


class RecipeParameter(msgspec.Struct, frozen=True):
    """A parameter of a method, as recipes have it.

    default: mergekit's, as the method takes it; None if a recipe must set it. stated: whether the
    method's own default is another, so that requests state the value. each: whether models may have
    values of their own. of_base: whether mergekit has it not, and only its default has a meaning
    without a base model. words: what may stand for a number. check: returns a recipe's
    value as the method takes it, or raises. write: the reverse.
    """

    kind: Kind
    default: object | None
    check: Callable[[object], object]
    stated: bool = False
    each: bool = False
    of_base: bool = False
    words: tuple[str, ...] = ()
    write: Callable[[object], object] = lambda value: value


class RecipeMethod(msgspec.Struct, frozen=True):
    """What resolving must know of a method.

    weighted: whether experts have weights. takes_base: whether the base model, if the recipe lists
    it, is an input like the others. baseless: a parameter that is false for merges without a base
    model; a recipe says that by naming none. is_alone: whether its one expert may state each
    parameter itself. partial: whether an expert of weight 0 is as none. elects: whether an expert
    of which nothing is left has no share in the divisor. refused: parameters of
    mergekit's method that it does not have, with the value that changes nothing and the reason.
    is_ours: whether mergekit has no such method, so that it ignores nothing of such a recipe.
    others: parameters of other methods, which have no effect with this one.
    """

    name: str
    parameters: Mapping[str, RecipeParameter]
    weighted: bool
    takes_base: bool
    baseless: str | None = None
    is_alone: bool = False
    partial: bool = False
    elects: bool = False
    is_ours: bool = False
    refused: Mapping[str, tuple[bool, str]] = msgspec.field(default_factory=dict)
    others: frozenset[str] = frozenset()

    def without_base(self) -> RecipeMethod:
        """Return it as a recipe that names no base model means it."""
        return msgspec.structs.replace(self, takes_base=True)

    @property
    def is_baseless(self) -> bool:
        """Whether it merges without a base model: every model that is listed is an expert."""
        return self.baseless is not None and self.takes_base
