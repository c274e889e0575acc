"""Declared bases: the models that a checkpoint says it was made from, as search hints only.

    config.json          "base_model", "_name_or_path"
    README.md            the card's front matter: base_model, a name or a list of names
    mergekit_config.yml  base_model

All of it is untrusted. A file that is too long, malformed or silent declares nothing; none of this
is ever an error, because the files themselves are stored unchanged. Of YAML, this reads only what
cards contain: a key at the start of a line, a plain or quoted scalar, a list in brackets or of
lines with a dash. Anything written otherwise declares nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from mstore.checkpoint.paths import CONTROL
from mstore.checkpoint.strict_json import parse_object
from mstore.terms.errors import BadCheckpoint

CONFIG = "config.json"
CARD = "README.md"
MERGEKIT = "mergekit_config.yml"
MERGEKIT_MOE = "mergekit_moe_config.yml"

_KEY = "base_model"
# Where the weights were loaded from: the base, or an earlier version of the same model.
_LOADED_KEY = "_name_or_path"
# Their tensors differ from the base's: an adapter has others, a quantized model smaller ones.
_OTHER_TENSORS = {"adapter", "quantized"}
_FENCE = "---"
_ITEM = re.compile(r"\s*-\s+(?P<item>.*)")
_PLAIN = re.compile(r"[^\s'\"\[\]{}&*!|>%@`#,][^\[\]{}#,]*")


class DeclaredLimits(msgspec.Struct, frozen=True):
    """How much of these files is read. What lies beyond declares nothing."""

    max_config_bytes: int = 1 << 20
    max_card_bytes: int = 1 << 18
    max_containers: int = 65_536
    max_names: int = 16
    max_name_bytes: int = 512


DEFAULT_LIMITS = DeclaredLimits()


class Declared(msgspec.Struct, frozen=True):
    """A model's name, and the file that names it.

    is_base: the file calls it the base; otherwise only the source of the loaded weights.
    """

    name: str
    source: str
    is_base: bool


def declared_bases(
    read: Callable[[str, int], bytes | None], *, limits: DeclaredLimits = DEFAULT_LIMITS
) -> tuple[Declared, ...]:
    """Return the names that a checkpoint declares, each once, explicit bases first.

    `read(path, length)` returns at most the first `length` bytes of a file, None if it is missing.
    """
    config = _config(read(CONFIG, limits.max_config_bytes + 1), limits)
    card = _of_card(read(CARD, limits.max_card_bytes), limits)
    recipe = values(_lines(read(MERGEKIT, limits.max_card_bytes)), _KEY, limits)
    found: dict[str, Declared] = {}
    for names, source, is_base in (
        ([config.get(_KEY)], CONFIG, True),
        (card, CARD, True),
        (recipe, MERGEKIT, True),
        ([config.get(_LOADED_KEY)], CONFIG, False),
    ):
        for name in names:
            if isinstance(name, str) and _is_name(name, limits) and len(found) < limits.max_names:
                found.setdefault(name, Declared(name, source, is_base))
    return tuple(found.values())


def _is_name(name: str, limits: DeclaredLimits) -> bool:
    return bool(name) and len(name) <= limits.max_name_bytes and not CONTROL.search(name)


def _config(raw: bytes | None, limits: DeclaredLimits) -> dict[str, object]:
    if raw is None or len(raw) > limits.max_config_bytes:
        return {}
    try:
        return parse_object(raw, what=CONFIG, where=CONFIG, max_containers=limits.max_containers)
    except BadCheckpoint:
        return {}


def _of_card(raw: bytes | None, limits: DeclaredLimits) -> list[str]:
    matter = front_matter(raw)
    if _OTHER_TENSORS & set(values(matter, f"{_KEY}_relation", limits)):
        return []
    return values(matter, _KEY, limits)


def front_matter(raw: bytes | None) -> list[str]:
    """Return the lines of a card's front matter; none if it is missing or unterminated."""
    lines = _lines(raw)
    if not lines or lines[0].rstrip() != _FENCE:
        return []
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    return [] if end is None else lines[1:end]


def _lines(raw: bytes | None) -> list[str]:
    return [] if raw is None else raw.decode(errors="replace").splitlines()


def values(lines: list[str], key: str, limits: DeclaredLimits = DEFAULT_LIMITS) -> list[str]:
    """Return the scalar or scalars at the first occurrence of a top-level key."""
    head = f"{key}:"
    for number, line in enumerate(lines):
        if not line.startswith(head):
            continue
        value = line[len(head) :].strip()
        if value.startswith("["):
            inside = value[1:].partition("]")[0]
            return _scalars(inside.split(","), limits)
        if value and not value.startswith("#"):
            return _scalars([value], limits)
        return _scalars(_items(lines[number + 1 :]), limits)
    return []


def _items(lines: list[str]) -> list[str]:
    """Return the items of a list that starts here; the first other line ends it."""
    items: list[str] = []
    for line in lines:
        found = _ITEM.fullmatch(line)
        if found is None and line.strip() and not line.lstrip().startswith("#"):
            break
        if found is not None:
            items.append(found["item"])
    return items


def _scalars(texts: list[str], limits: DeclaredLimits) -> list[str]:
    found = (_scalar(text.strip()) for text in texts[: limits.max_names])
    return [text for text in found if text is not None]


def _scalar(text: str) -> str | None:
    """Parse a quoted scalar without escapes, or a plain one; ignores a trailing comment."""
    quote = text[:1]
    if quote in ("'", '"'):
        inside, closing, rest = text[1:].partition(quote)
        is_whole = closing and (not rest.strip() or rest.lstrip().startswith("#"))
        return inside if is_whole and "\\" not in inside else None
    text = re.split(r"\s#", text, maxsplit=1)[0].rstrip()
    if ": " in text or text.endswith(":") or not _PLAIN.fullmatch(text):
        return None
    return text.strip()
