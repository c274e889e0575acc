"""A recipe as it is written: models, slices and settings, each with its line.

Owns the values that `parse` makes.  Does not own what they mean for the tensors of a model
(`resolve`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from mstore.recipes.setting import Condition, Setting
from mstore.requests import BASE, UNION

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


class Slice(msgspec.Struct, frozen=True):
    """A run of layers, made of the sources. base: None for the recipe's."""

    sources: tuple[Source, ...]
    settings: Settings
    base: Text | None
    line: int


class Module(msgspec.Struct, frozen=True):
    """A part of the model, made of models or slices; one of the two is not empty."""

    name: Text
    models: tuple[Source, ...]
    slices: tuple[Slice, ...]
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
    slices: tuple[Slice, ...]
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
        found: dict[str, Text] = {}
        for one in self.names():
            for part in (one.model(), one.adapter()):
                if part is not None:
                    found.setdefault(part.text, part)
        return tuple(found.values())

    def every_slice(self) -> tuple[Slice, ...]:
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
