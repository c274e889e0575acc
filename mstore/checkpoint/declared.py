"""What a checkpoint says that it was made from: names of models, for a search and nothing more.

    config.json          "base_model", "_name_or_path"
    README.md            the card's front matter: base_model, a name or a list of names
    mergekit_config.yml  base_model

All of it is a stranger's word.  A file that is too long, not of its kind or silent declares
nothing; none is ever an error, because the files themselves are stored as they are.

Of YAML only as much is read as cards hold: a key at the start of a line, a plain or quoted
scalar, a list in brackets or of lines with a dash.  What is written otherwise declares nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mstore.checkpoint.paths import CONTROL
from mstore.checkpoint.strict_json import parse_object
from mstore.errors import BadCheckpoint

CONFIG = "config.json"
CARD = "README.md"
MERGEKIT = "mergekit_config.yml"

_KEY = "base_model"
# Where the weights were loaded from: the base, or an earlier version of the same model.
_LOADED_KEY = "_name_or_path"
# Their tensors are not those of the base: an adapter's are others, a quantized model's smaller.
_OTHER_TENSORS = {"adapter", "quantized"}
_FENCE = "---"
_ITEM = re.compile(r"\s*-\s+(?P<item>.*)")
_PLAIN = re.compile(r"[^\s'\"\[\]{}&*!|>%@`#,][^\[\]{}#,]*")


@dataclass(frozen=True, slots=True)
class DeclaredLimits:
    """How much of these files is looked at.  What lies beyond declares nothing."""

    max_config_bytes: int = 1 << 20
    max_card_bytes: int = 1 << 18
    max_containers: int = 65_536
    max_names: int = 16
    max_name_bytes: int = 512


DEFAULT_LIMITS = DeclaredLimits()


@dataclass(frozen=True, slots=True)
class Declared:
    """A model's name, and the file that gives it.

    `is_base` where the file calls it the base, and not only what was loaded.
    """

    name: str
    source: str
    is_base: bool


def declared_bases(
    read: Callable[[str, int], bytes | None], *, limits: DeclaredLimits = DEFAULT_LIMITS
) -> tuple[Declared, ...]:
    """The names that a checkpoint gives, each once; those that it calls its base come first.

    `read(path, length)` gives at most `length` first bytes of a file, None where there is none.
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
    """The lines of a card's front matter; none where there is none, or its end is missing."""
    lines = _lines(raw)
    if not lines or lines[0].rstrip() != _FENCE:
        return []
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    return [] if end is None else lines[1:end]


def _lines(raw: bytes | None) -> list[str]:
    return [] if raw is None else raw.decode(errors="replace").splitlines()


def values(lines: list[str], key: str, limits: DeclaredLimits = DEFAULT_LIMITS) -> list[str]:
    """The scalar or the scalars at a key of the outermost mapping; the first such key counts."""
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
    """The items of a list that begins here; it ends at the first line that is none."""
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
    """A quoted scalar without escapes, or a plain one; a comment behind it is left out."""
    quote = text[:1]
    if quote in ("'", '"'):
        inside, closing, rest = text[1:].partition(quote)
        is_whole = closing and (not rest.strip() or rest.lstrip().startswith("#"))
        return inside if is_whole and "\\" not in inside else None
    text = re.split(r"\s#", text, maxsplit=1)[0].rstrip()
    if ": " in text or text.endswith(":") or not _PLAIN.fullmatch(text):
        return None
    return text.strip()
