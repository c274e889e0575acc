"""Recipes with free numbers: `weight: {min: 0, max: 1}` where a recipe of mergekit has a number.

A free number has a name that its place gives it, as a recipe's reader would say it:

    code.weight         of the model `code`
    code.weight[mlp]    where the filter is `mlp`
    code.weight[0]      the first of a list of values over the layers
    code.weight@0-8     of the model's layers 0 to 7, in a slice
    density             of the merge itself

A template is a tree of nodes (`merge.recipes.documents`).  What it fills in is a recipe again, as
JSON, which YAML is, with everything on the line that it is written on: errors name lines.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

import msgspec
from blake3 import blake3

from mstore.merge.recipes.documents import Entries, Items, Node, Scalar
from mstore.merge.recipes.recipe import at
from mstore.terms.errors import BadRequest, did_you_mean

MOST: Final = 16
"""Of more free numbers than this, some become one: no sampler finds good ones in 100 trials."""
WEIGHT: Final = "weight"
_KEYS: Final = ("min", "max", "log", "step")
_MODELS: Final = ("models", "sources")
_COMPANIONS: Final = "companions"
_DIGITS: Final = 4
_Path = tuple[int, ...]
"""Where a node is: the number of the item or entry in each list or mapping above it."""


class Free(msgspec.Struct, frozen=True):
    """A number to search for.

    name: as its place gives it. model: the one that it is a parameter of; None: the merge's own.
    low, high: the least and the greatest value. log: whether values are compared by their ratio.
    step: between values, counted from `low`; None: any. line: of the recipe.
    """

    name: str
    parameter: str
    model: str | None
    low: float
    high: float
    log: bool = False
    step: float | None = None
    line: int = 0

    def rounded(self, value: float) -> float:
        """Return the nearest value that it may have; four digits are enough for any merge."""
        if self.step is not None:
            steps = round((value - self.low) / self.step)
            value = float(f"{self.low + steps * self.step:.12g}")
        else:
            value = float(f"{value:.{_DIGITS}g}")
        return min(max(value, self.low), self.high)

    @property
    def middle(self) -> float:
        """The value in the middle."""
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return self.rounded(middle)

    def place(self, value: float) -> float:
        """Return where in its range a value is, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def start(self, models: int) -> float:
        """Return what it is first: of a weight its share among so many models, else the middle."""
        return self.rounded(1 / max(models, 1)) if self.parameter == WEIGHT else self.middle


class Evaluation(msgspec.Struct, frozen=True):
    """How a config of mergekit-evolve evaluates.

    options: of lm-evaluation-harness, by name; True for a switch. score: where its score is, as
    `FILE:POINTER`.
    """

    options: dict[str, str | bool]
    score: str


class Template(msgspec.Struct, frozen=True):
    """A recipe with free numbers.

    free: the numbers to search for, in the order of the recipe; several places may have one.
    models: the experts, in the order of the recipe. names: of the free number at each place.
    remarks: what a user should know of it. evaluation: what its file says of one, if anything.
    """

    node: Node
    where: str
    free: tuple[Free, ...]
    models: tuple[str, ...]
    names: Mapping[_Path, str]
    remarks: tuple[str, ...] = ()
    evaluation: Evaluation | None = None

    def start(self, experts: Collection[str] | None = None) -> tuple[float, ...]:
        """Return what the numbers are first, with these of the experts; None: all."""
        count = len(self.models if experts is None else experts)
        return tuple(one.start(count) for one in self.free)

    def fill(self, values: Sequence[float], experts: Collection[str] | None = None) -> str:
        """Return the recipe with these numbers, and of its experts these; None: all.

        values: one for each of `free`.
        """
        by_name = {one.name: _number(value) for one, value in zip(self.free, values, strict=True)}
        left_out = () if experts is None else set(self.models) - set(experts)
        return _Writer(lambda path: by_name[self.names[path]], self.names, left_out).text(self.node)

    def digest(self) -> str:
        """Return a digest of the recipe with the ranges of its numbers, however it is written."""
        by_name = {
            one.name: json.dumps([one.name, one.low, one.high, one.log, one.step])
            for one in self.free
        }
        text = _Writer(lambda path: by_name[self.names[path]], self.names, ()).text(self.node)
        return blake3(text.replace("\n", "").encode()).hexdigest(16)

    def grouped(self, most: int = MOST) -> Template:
        """Return it with at most so many numbers, if that can be; a remark tells what became one.

        First one parameter of one model is one number; if these are still too many, one parameter
        of all models.
        """
        found = self
        for level in (_of_model, _of_all):
            if len(found.free) <= most:
                break
            found = found._joined(level)
        if found is self:
            return self
        told = (
            f"{len(self.free)} free numbers are too many to search for, so they became "
            f"{len(found.free)}: {', '.join(one.name for one in found.free)}"
        )
        return msgspec.structs.replace(found, remarks=(*self.remarks, told))

    def _joined(self, name_of: Callable[[Free], str]) -> Template:
        groups: dict[str, list[Free]] = defaultdict(list)
        for one in self.free:
            groups[name_of(one)].append(one)
        renamed = {one.name: name for name, members in groups.items() for one in members}
        return msgspec.structs.replace(
            self,
            free=tuple(_one_of(name, members) for name, members in groups.items()),
            names={path: renamed[name] for path, name in self.names.items()},
        )


def _of_model(one: Free) -> str:
    return one.parameter if one.model is None else f"{one.model}.{one.parameter}"


def _of_all(one: Free) -> str:
    return one.parameter


def _one_of(name: str, members: Sequence[Free]) -> Free:
    """Return one number for several, with every value that one of them may have."""
    first = members[0]
    return msgspec.structs.replace(
        first,
        name=name,
        model=first.model if all(one.model == first.model for one in members) else None,
        low=min(one.low for one in members),
        high=max(one.high for one in members),
        log=all(one.log for one in members),
        step=first.step if all(one.step == first.step for one in members) else None,
    )


# -- reading -----------------------------------------------------------------------------------


def template_of(node: Node, where: str) -> Template:
    """Return the template of a recipe's document."""
    finder = _Finder(where)
    finder.look(node, (), _Context())
    base = _text_at(node, "base_model")
    models = tuple(name for name in dict.fromkeys(finder.models) if name != base)
    return Template(node, where, tuple(finder.free), models, finder.names)


class _Context(msgspec.Struct, frozen=True):
    """What is above a node: the model and layers, the parameter, and which of its values."""

    model: str | None = None
    layers: str = ""
    parameter: str | None = None
    which: str = ""
    is_parameters: bool = False
    is_models: bool = False


class _Finder:
    """Finds the free numbers of a document, and the models that it merges."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.free: list[Free] = []
        self.names: dict[_Path, str] = {}
        self.models: list[str] = []

    def look(self, node: Node, path: _Path, context: _Context) -> None:
        if isinstance(node, Items):
            is_list = context.parameter is not None and not context.which
            for number, one in enumerate(node.items):
                inside = context
                if is_list and not _is_condition(one):
                    inside = msgspec.structs.replace(context, which=f"[{number}]")
                self.look(one, (*path, number), inside)
        elif isinstance(node, Entries):
            if context.parameter is not None and _is_range(node):
                self._found(node, path, context)
                return
            context = self._inside(node, context)
            for number, (key, one) in enumerate(node.entries):
                self.look(one, (*path, number), self._below(str(key.value), one, context))

    def _inside(self, node: Entries, context: _Context) -> _Context:
        """Return the context of what is in a mapping: an item of models, a slice, a condition."""
        if context.parameter is not None:
            pattern = _text_at(node, "filter")
            if pattern in (None, "*"):
                return context
            return msgspec.structs.replace(context, which=f"{context.which}[{pattern}]")
        model = _text_at(node, "model")
        if context.is_models and model is not None and context.model is None:
            self.models.append(model)
            return msgspec.structs.replace(context, model=model, layers=_layers(node))
        sources = next((one for key, one in node.entries if key.value == "sources"), None)
        if isinstance(sources, Items) and sources.items and isinstance(sources.items[0], Entries):
            return msgspec.structs.replace(context, layers=_layers(sources.items[0]))
        return context

    def _below(self, key: str, node: Node, context: _Context) -> _Context:
        """Return the context of what a key has."""
        if context.is_parameters:
            return msgspec.structs.replace(context, parameter=key, is_parameters=False)
        if context.parameter is None and key == "parameters":
            return msgspec.structs.replace(context, is_parameters=True)
        if key in _MODELS:
            return msgspec.structs.replace(context, is_models=True)
        return context

    def _found(self, node: Entries, path: _Path, context: _Context) -> None:
        assert context.parameter is not None
        owner = "" if context.model is None else f"{short(context.model)}."
        name = f"{owner}{context.parameter}{context.which}{context.layers}"
        taken = set(self.names.values())
        number = 2
        while name in taken:
            name = f"{name.partition('#')[0]}#{number}"
            number += 1
        self.free.append(self._range(node, name, context.parameter, context.model))
        self.names[path] = name

    def _range(self, node: Entries, name: str, parameter: str, model: str | None) -> Free:
        given = {str(key.value): value for key, value in node.entries}
        for key in given:
            if key not in _KEYS:
                hint = did_you_mean(key, _KEYS, f"a range has {', '.join(_KEYS)}")
                raise self._refused(f"a range has no {key!r}", node, str(hint))
        for key in ("min", "max"):
            if key not in given:
                raise self._refused(f"the range of {name} lacks {key}", node)
        low, high = (self._number(given[key], key) for key in ("min", "max"))
        log = given.get("log")
        is_log = isinstance(log, Scalar) and log.value is True
        if log is not None and not is_log and not (isinstance(log, Scalar) and log.value is False):
            raise self._refused(f"log of {name} is true or false", node)
        step = self._number(given["step"], "step") if "step" in given else None
        if not low < high:
            raise self._refused(f"min of {name} must be less than its max", node)
        if is_log and (low <= 0 or step is not None):
            raise self._refused(
                f"with log, min of {name} must be more than 0, and there is no step", node
            )
        if step is not None:
            if not 0 < step <= high - low:
                raise self._refused(f"step of {name} is more than 0 and at most max - min", node)
            high = float(f"{low + math.floor((high - low) / step + 1e-9) * step:.12g}")
        return Free(name, parameter, _short_or_none(model), low, high, is_log, step, node.line)

    def _number(self, node: Node, key: str) -> float:
        value = node.value if isinstance(node, Scalar) else None
        try:
            number = math.nan if isinstance(value, bool | None) else float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self._refused(f"{key} is a number", node)
        return number

    def _refused(self, what: str, node: Node, hint: str = "weight: {min: 0, max: 1}") -> BadRequest:
        return BadRequest(what, where=at(self._where, node.line), hint=hint)


def _is_range(node: Entries) -> bool:
    return any(key.value in ("min", "max") for key, _ in node.entries)


def _is_condition(node: Node) -> bool:
    return isinstance(node, Entries) and not _is_range(node)


def _text_at(node: Node, key: str) -> str | None:
    """Return a text of a mapping; of a model that is a mapping itself, its name."""
    for own, value in node.entries if isinstance(node, Entries) else ():
        if own.value == key:
            if isinstance(value, Scalar):
                return None if value.value is None else str(value.value)
            return _text_at(value, "model") or _text_at(value, "path")
    return None


def _layers(node: Entries) -> str:
    """Return how a source's name tells its layers."""
    for key, value in node.entries:
        if key.value == "layer_range" and isinstance(value, Items):
            ends = [str(one.value) for one in value.items if isinstance(one, Scalar)]
            return f"@{'-'.join(ends)}"
    return ""


def short(model: str) -> str:
    """Return how a number's name tells its model: of a directory, its own name."""
    return PurePosixPath(model).name if model.startswith(("/", "./", "../", "~")) else model


def _short_or_none(model: str | None) -> str | None:
    return None if model is None else short(model)


# -- writing -----------------------------------------------------------------------------------


def _number(value: float) -> str:
    """Return a number as YAML 1.1 reads it: with a point, also where it has an exponent."""
    mantissa, e, exponent = repr(float(value)).partition("e")
    if not e:
        return mantissa
    sign = "" if exponent.startswith(("-", "+")) else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _scalar(value: object) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        return _number(value)
    if isinstance(value, str):
        plain = (
            one if " " <= one <= "~" and one not in '"\\' else f"\\U{ord(one):08x}" for one in value
        )
        return f'"{"".join(plain)}"'
    return json.dumps(value)


class _Writer:
    """Writes a document as JSON, each value on its line."""

    def __init__(
        self, value: Callable[[_Path], str], free: Collection[_Path], left_out: Collection[str]
    ) -> None:
        self._value = value
        self._free = free
        self._left_out = left_out
        self._line = 1

    def text(self, node: Node) -> str:
        return "".join(self._written(node, ())) + "\n"

    def _written(self, node: Node, path: _Path, *, of: str = "") -> Iterator[str]:
        """Write a part of the document; of: the key that it is the value of."""
        yield "\n" * (node.line - self._line)
        self._line = max(self._line, node.line)
        if path in self._free:
            yield self._value(path)
        elif isinstance(node, Scalar):
            yield _scalar(node.value)
        elif isinstance(node, Items):
            kept = [
                (number, one)
                for number, one in enumerate(node.items)
                if not (of in _MODELS and _text_at(one, "model") in self._left_out)
            ]
            inside = (self._written(one, (*path, n)) for n, one in kept)
            yield from _joined("[", inside, "]")
        else:
            own = self._entries(node, path, are_companions=of == _COMPANIONS)
            yield from _joined("{", own, "}")

    def _entries(
        self, node: Entries, path: _Path, *, are_companions: bool
    ) -> Iterator[Iterator[str]]:
        for number, (key, value) in enumerate(node.entries):
            # What belongs to an expert goes with it: ROLE:EXPERT.
            if are_companions and str(key.value).partition(":")[2] in self._left_out:
                continue
            yield self._entry(key, value, (*path, number))

    def _entry(self, key: Scalar, value: Node, path: _Path) -> Iterator[str]:
        yield "\n" * (key.line - self._line)
        self._line = max(self._line, key.line)
        yield f"{_scalar(key.value)}: "
        yield from self._written(value, path, of=str(key.value))


def _joined(begin: str, parts: Iterable[Iterator[str]], end: str) -> Iterator[str]:
    yield begin
    for number, part in enumerate(parts):
        if number:
            yield ", "
        yield from part
    yield end
