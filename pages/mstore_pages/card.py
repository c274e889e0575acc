"""A model card as markup: a part of Markdown, in which nothing of the card becomes active.

    blocks    headings, paragraphs, lists, tables, quotes, fenced code
    in them   `code`, **bold**, *italic*, [links](https://...), <https://...>

All else is text, as it was written: HTML, images (of which the description is shown), links of
other schemes.  The front matter is shown as it is.  Cards are untrusted: every pattern here has a
limit, so that no card takes long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from mstore_pages.document import details, scroll
from mstore_pages.markup import Child, Markup, join, tag

MAX_CHARS: Final = 1 << 16
"""What is longer is cut."""

_FENCE = re.compile(r" {0,3}(`{3,16}|~{3,16})")
_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(.*)")
_ITEM = re.compile(r"\s{0,12}([-*+]|\d{1,9}[.)])[ \t]+(.*)")
_RULE = re.compile(r" {0,3}([-*_])(?:[ \t]*\1){2,80}[ \t]*")
_DASHES = re.compile(
    r"[ \t]*\|?(?:[ \t]*:?-{1,100}:?[ \t]*\|){0,100}[ \t]*(?::?-{1,100}:?)?[ \t]*\|?[ \t]*"
)
_URL = re.compile(r"https?://[!-~]{1,2000}")
_INLINE = re.compile(
    r"(?P<code>``?)(?P<coded>[^`\n]{1,1000})(?P=code)"
    r"|!\[(?P<image>[^\[\]]{0,300})\]\([^()\n]{0,2000}\)"
    r"|\[(?P<text>[^\[\]]{1,500})\]\((?P<to>[^()\s]{1,2000})[^()\n]{0,300}\)"
    r"|<(?P<plain>https?://[^<>\s]{1,2000})>"
    r"|\*\*(?P<bold>[^*\n]{1,1000})\*\*"
    r"|(?<![\w*])\*(?P<italic>[^*\s][^*\n]{0,500})\*(?!\w)"
    r"|(?<!\w)_(?P<slanted>[^_\s][^_\n]{0,500})_(?!\w)"
)


def card(text: str) -> Markup:
    """Return a card as markup; what is beyond `MAX_CHARS` is left out, with a line that says so."""
    lines = text[:MAX_CHARS].splitlines()
    matter, rest = _split(lines)
    parts: list[Child] = list(_blocks(rest))
    if len(text) > MAX_CHARS:
        parts.append(tag("p", "The card goes on: read the file.", class_="gap"))
    if matter:
        shown = tag("pre", tag("code", "\n".join(matter)), tabindex="0", aria_label="Front matter")
        parts.append(details("Front matter", shown))
    return tag("div", *parts, class_="card")


def _split(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the lines of the front matter, and those after it."""
    if lines and lines[0].rstrip() == "---":
        for number, line in enumerate(lines[1:], 1):
            if line.rstrip() == "---":
                return lines[1:number], lines[number + 1 :]
    return (), lines


def _blocks(lines: Sequence[str]) -> Iterator[Markup]:
    at = 0
    while at < len(lines):
        if not lines[at].strip() or _RULE.fullmatch(lines[at]):
            at += 1
            continue
        for begin in (_code, _heading, _table, _list, _quote, _paragraph):
            found = begin(lines, at)
            if found is not None:
                drawn, at = found
                yield drawn
                break


Found = tuple[Markup, int] | None
"""What begins at a line, and the line after it; None if it does not begin there."""


def _code(lines: Sequence[str], at: int) -> Found:
    fence = _FENCE.match(lines[at])
    if fence is None:
        return None
    end = at + 1
    while end < len(lines) and not lines[end].lstrip().startswith(fence[1]):
        end += 1
    inside = tag("code", "\n".join(lines[at + 1 : end]))
    return tag("pre", inside, tabindex="0", aria_label="Code"), end + 1


def _heading(lines: Sequence[str], at: int) -> Found:
    found = _HEADING.fullmatch(lines[at])
    # A page has its own h1, and each of its sections an h2.
    return found and (
        tag(f"h{min(6, len(found[1]) + 2)}", _inline(found[2].rstrip(" \t#"))),
        at + 1,
    )


def _table(lines: Sequence[str], at: int) -> Found:
    if "|" not in lines[at] or at + 1 == len(lines):
        return None
    if "-" not in lines[at + 1] or not _DASHES.fullmatch(lines[at + 1]):
        return None
    end = at + 2
    while end < len(lines) and "|" in lines[end]:
        end += 1
    heads = (tag("th", _inline(one), scope="col") for one in _cells(lines[at]))
    rows = (
        tag("tr", *(tag("td", _inline(one)) for one in _cells(line)))
        for line in lines[at + 2 : end]
    )
    inside = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return scroll("Table of the card", inside), end


def _cells(line: str) -> list[str]:
    return [one.strip() for one in line.strip().strip("|").split("|")]


def _list(lines: Sequence[str], at: int) -> Found:
    first = _ITEM.fullmatch(lines[at])
    if first is None:
        return None
    items: list[list[str]] = []
    while at < len(lines) and lines[at].strip():
        found = _ITEM.fullmatch(lines[at])
        if found is not None:
            items.append([found[2]])
        elif lines[at][0] in " \t":
            items[-1].append(lines[at].strip())
        else:
            break
        at += 1
    kind = "ol" if first[1][0].isdigit() else "ul"
    return tag(kind, *(tag("li", _inline(" ".join(one))) for one in items)), at


def _quote(lines: Sequence[str], at: int) -> Found:
    said = []
    while at < len(lines) and lines[at].lstrip().startswith(">"):
        said.append(lines[at].lstrip()[1:].strip())
        at += 1
    return (tag("blockquote", _inline(" ".join(said))), at) if said else None


def _paragraph(lines: Sequence[str], at: int) -> Found:
    end = at + 1
    starts: tuple[Callable[[Sequence[str], int], Found], ...] = (_code, _heading, _list, _quote)
    while end < len(lines) and lines[end].strip() and not any(one(lines, end) for one in starts):
        end += 1
    return tag("p", _inline(" ".join(line.strip() for line in lines[at:end]))), end


def _inline(text: str) -> Markup:
    parts: list[Child] = []
    at = 0
    for found in _INLINE.finditer(text):
        parts.append(text[at : found.start()])
        parts.append(_mark(found))
        at = found.end()
    return join([*parts, text[at:]])


def _mark(found: re.Match[str]) -> Child:
    named = found.groupdict()
    if named["coded"] is not None:
        return tag("code", named["coded"])
    if named["image"] is not None:
        return f"[image: {named['image']}]" if named["image"] else "[image]"
    if named["bold"] is not None:
        return tag("strong", named["bold"])
    if named["italic"] is not None or named["slanted"] is not None:
        return tag("em", named["italic"] or named["slanted"])
    said, to = named["text"] or named["plain"], named["to"] or named["plain"]
    if not _URL.fullmatch(to):
        return found[0]
    return tag("a", said, href=to, rel="noopener noreferrer nofollow")
