"""Markup: text that is markup, by its type, and the one place that escapes all other text.

`tag` takes children: a `Markup` is inserted as it is, everything else is text and escaped.  Only
`tag` and `join` make markup of what they are given; `Markup(...)` elsewhere holds literals of this
package.  Names from checkpoints are text: control characters and marks that change the direction of
writing are shown as escapes, so that no name can hide what it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape

Child = object
"""What stands inside of an element: Markup, text or a number; None is nothing."""

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_VOID = frozenset({"meta", "link", "br", "img", "input", "source"})
_SHAPES = frozenset({"rect", "path", "circle", "line", "use"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def visible(value: object) -> str:
    """Return text in which characters that nobody sees are escapes, such as `\\u202e`."""
    return _UNSEEN.sub(lambda found: _written(ord(found[0])), str(value))


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def escaped(value: object) -> Markup:
    """Return a value as markup: Markup as it is, other text escaped; None as nothing."""
    if value is None:
        return Markup()
    return value if isinstance(value, Markup) else Markup(escape(visible(value)))


def join(children: Iterable[Child]) -> Markup:
    """Return several children as one piece of markup."""
    return Markup("".join(map(escaped, children)))


def breaking(name: str) -> Markup:
    """Return a name that may break behind its dots and underscores."""
    return Markup(re.sub(r"(?<=[._])(?=[^._])", "<wbr>", escaped(name)))


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element of HTML or SVG.

    attributes: `_` in a name stands for `-`, and one at its end is dropped (`class_`).  True gives
    an attribute without a value; None and False give none.
    """
    head = [name]
    for key, value in attributes.items():
        called = key.rstrip("_").replace("_", "-")
        if value is True:
            head.append(called)
        elif value is not None and value is not False:
            head.append(f'{called}="{escape(visible(value))}"')
    opening = " ".join(head)
    if name in _VOID:
        return Markup(f"<{opening}>")
    inside = join(children)
    if name in _SHAPES and not inside:
        return Markup(f"<{opening}/>")
    return Markup(f"<{opening}>{inside}</{name}>")


def data(id: str, value: object) -> Markup:
    """Return JSON for the page's script, in which nothing can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json" id="{id}">{text}</script>')
