r"""Patterns: which entry of a rank_pattern or an alpha_pattern holds for a module.

PEFT matches `(.*\.)?(PATTERN)$` against a module's path, and the first entry that matches counts.
Most patterns are paths, one for each module: they are looked up.  In a path, a dot stands for any
character, so paths with dots at the same places share one table, and a module is looked up once in
each.  Other patterns are regular expressions.  A stranger wrote them: only simple ones are matched,
by the set of places that a match has reached, so nothing is tried twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

from mstore.terms.errors import Incompatible

_Value = TypeVar("_Value")

MAX_PATH: Final = 256
"""Characters of a module's path; no pattern matches a longer one."""

MAX_STEPS: Final = 1 << 14
"""Steps that comparing a module takes at most: runs of tables, characters of expressions."""

_REPEATED: Final = 8
"""Steps that following a repeated character takes."""

_EXPRESSION: Final = re.compile(
    r"\^?(?P<body>(?:[\w-]|\\?\.|\.\*|\\d\+?|\[[\w-]+\]\+?|\([\w|]+\))+)\$?"
)
# Names, dots and wildcards; groups are alternatives of names and are never repeated.
_STEP: Final = re.compile(
    r"\((?P<words>[\w|]+)\)|(?P<one>\\?\.|\\d|\[[\w-]+\]|[\w-])(?P<repeat>[*+])?"
)
_ANY: Final = "."
_DOT: Final = r"\."


class _Step(NamedTuple):
    """A part of an expression: one of several words, or one character, repeated or not."""

    words: tuple[str, ...]
    one: str
    repeat: str


class _Form(NamedTuple):
    """Where the paths of a table have no wildcard: runs of places, and how long they are.

    whole: they match from the first character of a module's path on.
    """

    length: int
    runs: tuple[tuple[int, int], ...]
    whole: bool

    def key(self, path: str) -> tuple[str, ...] | None:
        """Return what a table has for the end of a path, None if that does not begin at a dot."""
        start = len(path) - self.length
        if start < 0 or (start and (self.whole or path[start - 1] != ".")):
            return None
        return tuple(path[start + first : start + end] for first, end in self.runs)


class Patterns(Generic[_Value]):
    """The entries of one mapping of a config, by their patterns, in order.

    Raises Incompatible for patterns that cannot be matched, or that are of too many forms.
    """

    def __init__(self, entries: Mapping[str, _Value], where: str) -> None:
        self._values = tuple(entries.values())
        self._tables: dict[_Form, dict[tuple[str, ...], int]] = {}
        self._expressions: list[tuple[int, bool, tuple[_Step, ...]]] = []
        for number, pattern in enumerate(entries):
            found = _EXPRESSION.fullmatch(pattern)
            if found is None:
                raise _unknown(pattern, where)
            steps = tuple(_steps(found["body"]))
            whole = pattern.startswith("^")
            if all(_is_plain(step) for step in steps):
                form, key = _form(steps, whole=whole)
                self._tables.setdefault(form, {}).setdefault(key, number)
                continue
            _require_classes(steps, pattern, where)
            self._expressions.append((number, whole, steps))
        if self._steps() > MAX_STEPS:
            raise Incompatible(
                "its config has patterns of too many different forms, such as "
                f"{next(iter(entries))[:60]!r}",
                where=where,
            )

    def _steps(self) -> int:
        """Return how much a module is compared with."""
        tables = sum(1 + len(form.runs) for form in self._tables)
        every = (step for _, _, steps in self._expressions for step in steps)
        return tables + sum(
            _REPEATED if one.repeat else 1 + len("".join(one.words)) for one in every
        )

    def value(self, module: str, default: _Value) -> _Value:
        """Return the value of the first pattern that a module's path ends with."""
        if not self._values or len(module) > MAX_PATH:
            return default
        found = len(self._values)
        for form, table in self._tables.items():
            key = form.key(module)
            if key is not None:
                found = min(found, table.get(key, found))
        for number, whole, steps in self._expressions:
            if number > found:
                break
            if _matches(steps, module, whole=whole):
                found = number
                break
        return self._values[found] if found < len(self._values) else default


def _unknown(pattern: str, where: str) -> Incompatible:
    return Incompatible(
        f"its config has a pattern that cannot be matched: {pattern[:60]!r}", where=where
    )


def _steps(body: str) -> Iterator[_Step]:
    for found in _STEP.finditer(body):
        words = found["words"]
        yield _Step(
            () if words is None else tuple(words.split("|")),
            found["one"] or "",
            found["repeat"] or "",
        )


def _is_plain(step: _Step) -> bool:
    return not step.repeat and (step.one in (_ANY, _DOT) or len(step.one) == 1)


def _form(steps: tuple[_Step, ...], *, whole: bool) -> tuple[_Form, tuple[str, ...]]:
    """Return the form of a path, and its own key."""
    text = "".join("." if step.one == _DOT else step.one for step in steps)
    runs = []
    first = 0
    for place, step in enumerate(steps):
        if step.one == _ANY:
            runs.append((first, place))
            first = place + 1
    runs.append((first, len(steps)))
    form = _Form(len(steps), tuple(run for run in runs if run[0] < run[1]), whole)
    return form, tuple(text[first:end] for first, end in form.runs)


def _require_classes(steps: tuple[_Step, ...], pattern: str, where: str) -> None:
    """Raise Incompatible for a class of characters that is none, such as [9-0]."""
    try:
        for step in steps:
            if step.one:
                _is_of(step.one, "0")
    except re.error:
        raise _unknown(pattern, where) from None


@lru_cache(1 << 16)
def _is_of(one: str, character: str) -> bool:
    """Return whether an expression for one character matches this one."""
    return re.fullmatch(one, character) is not None


def _matches(steps: tuple[_Step, ...], path: str, *, whole: bool) -> bool:
    """Return whether steps lead from a place after a dot, or from the first, to a path's end.

    Bit i of `reached` stands for the place before character i.
    """
    at: dict[str, int] = {}
    for place, character in enumerate(path):
        at[character] = at.get(character, 0) | 1 << place
    reached = 1
    if not whole:
        reached |= at.get(".", 0) << 1
    for step in steps:
        if step.words:
            reached = _after_words(step.words, at, reached)
        else:
            fitting = sum(places for character, places in at.items() if _is_of(step.one, character))
            reached = _after(step.repeat, fitting, reached)
        if not reached:
            return False
    return bool(reached >> len(path) & 1)


def _after_words(words: tuple[str, ...], at: Mapping[str, int], before: int) -> int:
    reached = 0
    for word in words:
        here = before
        for character in word:
            here = (here & at.get(character, 0)) << 1
        reached |= here
    return reached


def _after(repeat: str, fitting: int, before: int) -> int:
    """Return the places after one character of those that fit, or after any run of them."""
    reached = before & fitting
    if repeat:
        # Each round doubles how far a run is followed.
        step, through = 1, fitting
        while step <= MAX_PATH:
            reached |= through & (reached << step)
            through &= through << step
            step *= 2
    reached <<= 1
    return reached | before if repeat == "*" else reached
