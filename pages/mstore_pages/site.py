"""What all pages of a server share: addresses of other pages, the bar above, lists, paging.

Addresses are relative, because a proxy may show the server below a path of its own.  Their grammar
is that of `mstore_serve.addresses`.  Every part of a name is encoded, so none can begin a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, urlencode

import msgspec

from mstore.terms.sizes import counted
from mstore_pages.document import scroll
from mstore_pages.markup import Child, Markup, join, tag

PER_PAGE = 100
"""Rows of a list that are shown at once."""
_NUMBER = re.compile(r"([0-9]{1,18})")


class Links(msgspec.Struct, frozen=True):
    """Addresses, as seen from one page.

    up: the way from the page to the server's root, `./` or `../` and so on.
    """

    up: str

    def at(self, path: str, **query: object) -> str:
        """Return the address of a path below the root; parts of the query that are None or empty
        are left out."""
        given = {key.rstrip("_"): value for key, value in query.items() if value not in (None, "")}
        return f"{self.up}{path}{'?' if given else ''}{urlencode(given)}"

    def ref(self, name: str) -> str:
        """Return the address of the snapshot that a ref names."""
        return self.at(below("refs", *name.split("/"), "-"))

    def snapshot(self, id: object) -> str:
        """Return the address of a snapshot."""
        return self.at(f"snapshots/{id}")


class SnapshotPath(msgspec.Struct, frozen=True):
    """Where a page shows a snapshot: its path below the root, and what it is called there."""

    path: str
    name: str


def below(*parts: str) -> str:
    """Return a path of names, each encoded whole."""
    return "/".join(quote(part, safe="") for part in parts)


def top(
    links: Links,
    current: str = "",
    *,
    has_search: bool = True,
    back: Mapping[str, str] | None = None,
) -> Markup:
    """Return the bar above a page.

    current: which of its links names this page.  back: further links, to what the page is about.
    """
    pages = {
        "Refs": links.at(""),
        "Snapshots": links.at("snapshots"),
        "Compare": links.at("compare"),
        "Reflog": links.at("reflog"),
    }
    items = (
        tag("li", tag("a", name, href=to, aria_current="page" if name == current else None))
        for name, to in pages.items()
    )
    bar = tag(
        "header",
        tag("a", "mstore", class_="home", href=links.at("")),
        tag("nav", tag("ul", *items), aria_label="Pages of this store"),
        search(links.at(""), "Search refs") if has_search else None,
        class_="top",
    )
    return join([bar, linked(back) if back else None])


def search(
    action: str, label: str, value: str = "", *, filters: str = "", is_wide: bool = False
) -> Markup:
    """Return a form with one field, `q`.

    filters: the class of the table whose rows the page's script hides while one types.
    """
    field = tag(
        "input",
        type="search",
        name="q",
        id="q",
        value=value,
        placeholder=label,
        autocomplete="off",
        spellcheck="false",
        data_filters=filters or None,
    )
    return tag(
        "form",
        tag("label", label, for_="q"),
        field,
        tag("button", "Search"),
        action=action,
        method="get",
        role="search",
        class_="wide search" if is_wide else "search",
    )


class Column(msgspec.Struct, frozen=True):
    """A column: its title, the class of its cells, and whether small screens name it."""

    title: str
    kind: str = ""
    is_named: bool = True


def listing(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Child]],
    *,
    kind: str = "",
    texts: Sequence[str] = (),
) -> Markup:
    """Return a table that is a list of its rows on small screens.

    kind: a class of the table.  texts: of each row, in small letters, what a search finds it by.
    The first cell of a row heads it.
    """
    lines = []
    for number, row in enumerate(rows):
        cells = [
            tag(
                "td" if at else "th",
                content,
                class_=column.kind if content not in (None, "") else "no",
                data_head=column.title if at and column.is_named and column.title else None,
                **({} if at else {"scope": "row"}),
            )
            for at, (content, column) in enumerate(zip(row, columns, strict=True))
        ]
        lines.append(tag("tr", *cells, data_text=texts[number] if texts else None))
    heads = (tag("th", one.title, scope="col", class_=one.kind or None) for one in columns)
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        class_=f"list {kind}".strip(),
    )
    return scroll(caption, inside)


class Paged(msgspec.Struct, frozen=True):
    """One page of a long list: where it begins, how many there are, and of how many in all."""

    number: int
    """the page, from 1"""
    shown: int
    """rows on it"""
    found: int
    """rows of all pages"""
    every: int
    """rows without a search"""

    @property
    def start(self) -> int:
        """Return the number of rows before it."""
        return (self.number - 1) * PER_PAGE

    def told(self, noun: str, query: str) -> str:
        """Return which rows are shown, in a sentence."""
        if self.found <= PER_PAGE and self.found == self.every:
            return f"{counted(self.found, noun)}."
        what = (
            f"{self.found} of {counted(self.every, noun)}" if query else counted(self.found, noun)
        )
        if self.found <= PER_PAGE:
            return f"{what} found."
        return f"{self.start + 1} to {self.start + self.shown} of {what}."


def paged(rows: Sequence[object], every: int, page: int) -> tuple[slice, Paged]:
    """Return which rows page `page` has, and what to tell of them; the last page if it is higher.

    rows: those that a search found, of `every`.
    """
    last = max(1, -(-len(rows) // PER_PAGE))
    number = min(max(1, page), last)
    part = slice((number - 1) * PER_PAGE, number * PER_PAGE)
    return part, Paged(number, len(rows[part]), len(rows), every)


def turning(links: Links, path: str, at: Paged, **query: object) -> Markup | None:
    """Return links to the neighbouring pages of a list; None if it has one page."""
    steps = []
    if at.number > 1:
        to = links.at(path, **query, page=at.number - 1 if at.number > 2 else None)
        steps.append(tag("a", "Previous page", href=to, rel="prev"))
    if at.start + at.shown < at.found:
        to = links.at(path, **query, page=at.number + 1)
        steps.append(tag("a", "Next page", href=to, rel="next"))
    return tag("nav", *steps, class_="paging", aria_label="Pages of this list") if steps else None


def linked(items: Mapping[str, str]) -> Markup:
    """Return links in a row, by what they say."""
    inside = (tag("li", tag("a", name, href=to)) for name, to in items.items())
    return tag("ul", *inside, class_="links")


def more(text: Child, *, is_id: bool = False) -> Markup:
    """Return a quieter second line of a cell.  is_id: which does not wrap."""
    return tag("span", text, class_="more id" if is_id else "more")


def shortened(name: str, most: int = 160) -> str:
    """Return a name, or its beginning and its end where it is too long to be shown."""
    return name if len(name) <= most else f"{name[: most - 40]} \u2026 {name[-30:]}"


def cut(text: str, most: int = 400) -> Markup | None:
    """Return the first lines of a long text; None for an empty one."""
    if not text:
        return None
    shown = text if len(text) <= most else f"{text[:most]}\u2026"
    return tag("span", shown, class_="cut")


def in_order(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by so that layer 2 comes before layer 10."""
    parts = _NUMBER.split(name)
    return [(int(one), "") if one.isdigit() else (0, one) for one in parts]


def words(query: str) -> list[str]:
    """Return what a search looks for: all of these, in any order, in small letters."""
    return query.lower().split()


def matches(text: str, wanted: Sequence[str]) -> bool:
    """Return whether a text, in small letters, has all of these words."""
    return all(word in text for word in wanted)
