"""YAML as a tree of nodes.

Owns how text becomes nodes, with limits: a recipe may come from a stranger.  Values are those of
PyYAML's safe loader, with which mergekit reads recipes: YAML 1.1, so 1e-3 is text and `no` is
false.  Nothing of a document is ever constructed but null, true, false, numbers and text; other
tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import yaml

from mstore.merge.recipes.recipe import DEFAULT_LIMITS, YamlLimits, at
from mstore.terms.errors import BadRequest

_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str")
# A plain scalar that looks like a date or like `=` is text: a recipe has neither.
_READ_AS_TEXT = ("timestamp", "value")
_SHOWN = 60

Value = bool | int | float | str | None


class Scalar(msgspec.Struct, frozen=True):
    """A value and its line, counted from 1."""

    value: Value
    line: int
    size: int = 1


class Items(msgspec.Struct, frozen=True):
    """A list. size: how many nodes it has, itself included."""

    items: tuple[Node, ...]
    line: int
    size: int


class Entries(msgspec.Struct, frozen=True):
    """A mapping; its keys are different texts."""

    entries: tuple[tuple[Scalar, Node], ...]
    line: int
    size: int


Node = Scalar | Items | Entries


def read_documents(
    text: str, where: str, *, limits: YamlLimits = DEFAULT_LIMITS
) -> tuple[Node, ...]:
    """Return the documents of a YAML file.

    where: the file's name, for errors. Raises BadRequest with the line for what is no YAML, for
    duplicate keys, keys that are no text, tags, merge keys, and what exceeds the limits.
    """
    if 4 * len(text) > limits.max_bytes and len(text.encode(errors="replace")) > limits.max_bytes:
        raise BadRequest(f"a recipe has at most {limits.max_bytes} bytes", where=where)
    try:
        return tuple(_Reader(text, where, limits).documents())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else at(where, mark.line + 1)
        raise BadRequest(f"not YAML: {error.problem or error.context}", where=place) from error
    except yaml.YAMLError as error:
        # A character that YAML does not allow; the error has its position alone.
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        raise BadRequest(
            "not YAML: a character that is not printable", where=at(where, line)
        ) from error


class _Reader:
    """Builds the nodes from the events of one text.

    An alias gives the same node again.  A node is known to aliases when it is complete, so there
    are no cycles; its size counts all that it would be if it were written out.
    """

    def __init__(self, text: str, where: str, limits: YamlLimits) -> None:
        # Used for its events, its table of plain scalars, and its scalars; it never loads.
        self._yaml: Any = yaml.SafeLoader(text)
        self._where = where
        self._limits = limits
        self._anchors: dict[str, Node] = {}
        self._nodes = 0

    def documents(self) -> Iterator[Node]:
        count = 0
        while self._yaml.check_event():
            event = self._yaml.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                count += 1
                if count > self._limits.max_documents:
                    self._refuse(f"more than {self._limits.max_documents} documents", event)
                self._anchors = {}
                yield self._node(self._yaml.get_event(), 1)

    def _node(self, event: Any, depth: int) -> Node:
        self._count(1, event)
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(event.anchor)
            if known is None:
                self._refuse(f"no anchor {event.anchor[:_SHOWN]!r} before it", event)
            self._count(known.size - 1, event)
            return known
        if depth > self._limits.max_depth:
            self._refuse(f"nested more than {self._limits.max_depth} deep", event)
        if isinstance(event, yaml.ScalarEvent):
            node: Node = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._items(event, depth)
        else:
            node = self._entries(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _items(self, start: Any, depth: int) -> Items:
        self._require_no_tag(start, "seq")
        items = []
        while not isinstance(event := self._yaml.get_event(), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return Items(tuple(items), _line(start), 1 + sum(one.size for one in items))

    def _entries(self, start: Any, depth: int) -> Entries:
        self._require_no_tag(start, "map")
        entries: list[tuple[Scalar, Node]] = []
        known: set[Value] = set()
        while not isinstance(event := self._yaml.get_event(), yaml.MappingEndEvent):
            if self._is_merge(event):
                self._refuse("merge keys (<<) are not supported", event)
            key = self._node(event, depth + 1)
            if not isinstance(key, Scalar) or not isinstance(key.value, str):
                self._refuse("a key is text", event)
            if key.value in known:
                self._refuse(f"{key.value[:_SHOWN]!r} is given twice", event)
            known.add(key.value)
            entries.append((key, self._node(self._yaml.get_event(), depth + 1)))
        return Entries(tuple(entries), _line(start), 1 + sum(1 + one.size for _, one in entries))

    def _scalar(self, event: Any) -> Scalar:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._yaml.resolve(yaml.ScalarNode, event.value, event.implicit)
        kind = tag.removeprefix(_PREFIX)
        if event.tag is None and kind in _READ_AS_TEXT:
            kind = "str"
        if kind not in _KINDS:
            self._refuse(f"the tag {tag[:_SHOWN]} is not supported", event)
        if kind == "str":
            return Scalar(event.value, _line(event))
        try:
            construct = getattr(self._yaml, f"construct_yaml_{kind}")
            value: Value = construct(yaml.ScalarNode(tag, event.value))
        except (ValueError, KeyError, IndexError, OverflowError):
            # Also a number of more digits than Python converts.
            self._refuse(f"not a value of type {kind}: {event.value[:_SHOWN]!r}", event)
        return Scalar(value, _line(event))

    def _is_merge(self, event: Any) -> bool:
        return (
            isinstance(event, yaml.ScalarEvent)
            and event.implicit[0]
            and event.value == "<<"
            and event.style is None
        )

    def _require_no_tag(self, event: Any, kind: str) -> None:
        if event.tag not in (None, "!", _PREFIX + kind):
            self._refuse(f"the tag {event.tag[:_SHOWN]} is not supported", event)

    def _count(self, nodes: int, event: Any) -> None:
        self._nodes += nodes
        if self._nodes > self._limits.max_nodes:
            self._refuse(f"more than {self._limits.max_nodes} values", event)

    def _refuse(self, what: str, event: Any) -> NoReturn:
        raise BadRequest(what, where=at(self._where, _line(event)))


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1
