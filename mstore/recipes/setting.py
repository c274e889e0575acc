"""Settings: what a recipe says of one parameter, and its value for one tensor.

A setting is a scalar, a gradient (a list of scalars over the layers), or conditions, each a scalar
or a gradient for the tensors whose names its filter matches.  As in mergekit 0.1.5:

    filter      absent, "*", or a part of the tensor's name; the first condition that matches counts
    gradient    at t in [0, 1], the place of a layer: linear between neighbours; of values that are
                no numbers, the one at or before t
    no value    no condition matches, or a list is empty: the next scope says
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

import msgspec

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
