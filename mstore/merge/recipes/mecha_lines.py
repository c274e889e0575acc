"""The text of a recipe of sd-mecha (`.mecha`, format 0.1.0), as nodes.

    version 0.1.0
    model "a.safetensors" model_config="sdxl-sgm" merge_space="weight"      &0
    model "b.safetensors" model_config="sdxl-sgm" merge_space="weight"      &1
    dict IN00=0.3 IN01=0.5 ...                                              &2
    literal &2 model_config="sdxl-supermerger_blocks" merge_space="param"   &3
    merge "convert_sdxl_blocks_to_sgm" &3                                   &4
    merge "weighted_sum" &0 &1 &4                                           the result

Each line is a node, which later ones name by its number (`&0`); a line that begins with # is none.
A value is null, true, false, a number, text in quotes, or a node.  Anybody may have written it, so
there are limits, and each error names the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from mstore.merge.recipes.recipe import DEFAULT_LIMITS, at
from mstore.terms.errors import BadRequest, did_you_mean
from mstore.terms.phrases import few

VERSION: Final = "version 0.1.0"
_MARK: Final = "version "
MAX_NODES: Final = 4096
SHOWN: Final = 60
_TOKEN: Final = re.compile(r'(?:([^\s="&]+)=)?("(?:[^"\\]|\\.)*"|[^\s"]+)(?:\s+|$)')
_NUMBER: Final = re.compile(r"[+-]?(\d{1,18}|(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)", re.ASCII)
_WORDS: Final = MappingProxyType({"null": None, "true": True, "false": False})


class NodeRef(NamedTuple):
    """The number of an earlier node, as `&0` names it."""

    number: int


Word = None | bool | int | float | str
Written = Word | NodeRef


class MechaLine(msgspec.Struct, frozen=True):
    """One node as it is written."""

    command: str
    given: tuple[Written, ...]
    options: Mapping[str, Written]
    line: int

    @property
    def title(self) -> str:
        """The name of its model, or of its method."""
        return str(self.given[0])

    def bound(
        self, models: Sequence[str] | None, others: Sequence[str] = ()
    ) -> tuple[list[Written], dict[str, Written]]:
        """Return the models of a merge and its other arguments, as a call of Python binds them.

        models: their names, None for any number of them.  Raises BadRequest.
        """
        given = self.given[1:]
        names = [f"*{k}" for k in range(len(given) or 1)] if models is None else [*models]
        places = names if models is None else [*names, *others]
        told = dict(zip(places, given, strict=False)) | dict(self.options)
        for name in self.options:
            if name not in (*(models or ()), *others):
                hint = did_you_mean(name, others)
                raise BadRequest(f"{self.title} has no parameter {name[:SHOWN]!r}", hint=hint)
        if len(given) > len(places) or not told.keys() >= set(names):
            wanted = "one model or more" if models is None else few(places, len(places))
            raise BadRequest(f"{self.title} takes {wanted}, and here are {len(given)}")
        return [told.pop(one) for one in names], told

    def nodes(self) -> list[int]:
        """Return the nodes that it names."""
        every = (*self.given, *self.options.values())
        return [one.number for one in every if isinstance(one, NodeRef)]


def is_mecha(text: str) -> bool:
    """Return whether a recipe is one of sd-mecha, by its first line."""
    return text.startswith(_MARK)


def mecha_lines(text: str, where: str) -> tuple[MechaLine, ...]:
    """Return the nodes of a recipe.

    where: the file's name, for errors.  Raises BadRequest that names the line.
    """
    if 4 * len(text) > DEFAULT_LIMITS.max_bytes < len(text.encode(errors="replace")):
        raise BadRequest(f"a recipe has at most {DEFAULT_LIMITS.max_bytes} bytes", where=where)
    first, *rest = map(str.strip, text.split("\n"))
    if first != VERSION:
        told = f"{first[:SHOWN]!r} of sd-mecha's format; mstore reads {VERSION}"
        raise BadRequest(told, where=at(where, 1))
    lines: list[MechaLine] = []
    for number, line in enumerate(rest, 2):
        if line and not line.startswith("#"):
            if len(lines) == MAX_NODES:
                raise BadRequest(f"more than {MAX_NODES} nodes", where=at(where, number))
            try:
                lines.append(_line(line, number, len(lines)))
            except BadRequest as error:
                error.locate(at(where, number))
                raise
    if not lines:
        raise BadRequest("there is no recipe in it: it has no nodes", where=where)
    return tuple(lines)


def _line(text: str, number: int, before: int) -> MechaLine:
    """Return the node of a line, of which so many are before.  Raises BadRequest."""
    command, _, rest = text.partition(" ")
    if command not in ("model", "dict", "literal", "merge"):
        raise BadRequest(f"no command {command[:SHOWN]!r}: they are model, dict, literal, merge")
    rest = rest.strip()
    given: list[Written] = []
    options: dict[str, Written] = {}
    place = 0
    while place < len(rest):
        found = _TOKEN.match(rest, place)
        if found is None:
            raise BadRequest(f"not a value: {rest[place:][:SHOWN]!r}")
        place = found.end()
        value = _written(found[2], before)
        if found[1] is None:
            given.append(value)
        elif found[1] in options:
            raise BadRequest(f"{found[1][:SHOWN]!r} is given twice")
        else:
            options[found[1]] = value
    first = given[0] if given else None
    if command in ("model", "merge") and not (isinstance(first, str) and first):
        raise BadRequest(f"a {command} has a name, in quotes, first")
    if command == "literal" and not isinstance(first, NodeRef):
        raise BadRequest("a literal names a dict")
    return MechaLine(command, tuple(given), options, number)


def _written(text: str, before: int) -> Written:
    if text.startswith('"'):
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("&") and text[1:].isdecimal() and text.isascii() and len(text) <= 9:
        if int(text[1:]) >= before:
            raise BadRequest(f"{text} is no earlier node")
        return NodeRef(int(text[1:]))
    if _NUMBER.fullmatch(text):
        number = int(text) if text.lstrip("+-").isdecimal() else float(text)
        if math.isfinite(number):
            return number
    raise BadRequest(f"not a value: {text[:SHOWN]!r}")
