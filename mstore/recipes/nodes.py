"""A recipe as a tree of nodes, each with its line: the values, and the limits of a file.

`documents` reads them from YAML.  Does not own what the keys of a recipe mean (`parse`).
"""

from __future__ import annotations

import msgspec

Value = bool | int | float | str | None


class YamlLimits(msgspec.Struct, frozen=True):
    """How large a file may be. nodes: scalars, lists and mappings, aliases written out."""

    max_bytes: int = 1 << 20
    max_depth: int = 32
    max_nodes: int = 100_000
    max_documents: int = 64


DEFAULT_LIMITS = YamlLimits()


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


def at(where: str, line: int) -> str:
    """Return the place that an error names."""
    return f"{where}, line {line}"
