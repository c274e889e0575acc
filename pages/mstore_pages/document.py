"""The skeleton of a page: title, style, script, and a policy that lets nothing else load or run.

The policy names one style and one script by their SHA-256, and images inside of the page; all else
is refused, so there are no `style` attributes.  A page that a server shows has a bar of links above
it, and its policy allows forms that the same server answers; else it is the page of a file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from mstore_pages import figures
from mstore_pages.markup import Child, Markup, join, tag


def page(title: str, *body: Child, foot: Child = None, top: Markup | None = None) -> str:
    """Return a whole page of HTML.

    title: of the window.  foot: what stands below everything.  top: what stands above everything on
    a page that a server shows.
    """
    style, script = _style_and_script(is_served=top is not None)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta", http_equiv="Content-Security-Policy", content=_policy(is_served=top is not None)
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", style),
    )
    skip = tag("a", "Skip to the content", class_="skip", href="#content")
    inside = tag("main", *body, id="content", tabindex="-1")
    footer = tag("footer", foot) if foot else None
    wrapped = tag("div", top, inside, footer, class_="page")
    content = tag("body", skip, wrapped, tag("script", script))
    return join([Markup("<!DOCTYPE html>\n"), tag("html", head, content, lang="en"), Markup("\n")])


@cache
def _style_and_script(*, is_served: bool) -> tuple[Markup, Markup]:
    style, script = figures.style() + _own("page.css"), _own("script.js")
    if is_served:
        style, script = style + _own("served.css"), script + _own("served.js")
    return Markup(style), Markup(script)


@cache
def _policy(*, is_served: bool) -> str:
    style, script = _style_and_script(is_served=is_served)
    forms = "'self'" if is_served else "'none'"
    return (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        f"img-src data:; base-uri 'none'; form-action {forms}"
    )


def served_policy() -> str:
    """Return the content security policy that a server sends with every page."""
    return f"{_policy(is_served=True)}; frame-ancestors 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _own(name: str) -> str:
    return files("mstore_pages").joinpath(name).read_text()


def section(id: str, title: str, lead: Child, *children: Child, gap: str | None = None) -> Markup:
    """Return a part of a page with a heading.

    lead: what it shows, in a sentence or two.  gap: why numbers are missing.
    """
    return tag(
        "section",
        tag("h2", title, id=f"{id}-title"),
        tag("p", lead, class_="quiet") if lead else None,
        tag("p", f"Not known: {gap}.", class_="gap") if gap else None,
        *children,
        id=id,
        aria_labelledby=f"{id}-title",
    )


def scroll(label: str, *children: Child, is_long: bool = False) -> Markup:
    """Return what may be wider than the page, or longer than a screen; keys scroll it, too."""
    kind = "scroll long" if is_long else "scroll"
    return tag("div", *children, class_=kind, role="region", aria_label=label, tabindex="0")


class Cell:
    """A cell of a table: what is shown, its kind, and the number that it is sorted by.

    kind: `n` for numbers, `name` for names of data, else text.
    """

    __slots__ = ("kind", "shown", "value")

    def __init__(self, shown: Child, kind: str = "", value: float | None = None) -> None:
        self.shown = shown
        self.kind = kind
        self.value = value


def table(
    caption: str,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Child | Cell]],
    *,
    sortable: bool = False,
) -> Markup:
    """Return a table that scrolls where it is wider than the page.

    columns: title and kind of each, as in `Cell`.  The first cell of a row heads it.
    """
    heads = [tag("th", name, scope="col", class_=kind or None) for name, kind in columns]
    lines = []
    for row in rows:
        cells = []
        for number, (content, (_, usual)) in enumerate(zip(row, columns, strict=True)):
            cell = content if isinstance(content, Cell) else Cell(content)
            more = {"scope": "row"} if number == 0 else {}
            value = None if cell.value is None else f"{cell.value:.6g}"
            cells.append(
                tag(
                    "td" if number else "th",
                    cell.shown,
                    class_=cell.kind or usual or None,
                    data_v=value,
                    **more,
                )
            )
        lines.append(tag("tr", *cells))
    inside = scroll(
        caption,
        tag(
            "table",
            tag("thead", tag("tr", *heads)),
            tag("tbody", *lines),
            class_="sortable" if sortable else None,
        ),
    )
    # Not in the table: what is wider than the page scrolls, and its caption would, too.
    return join([tag("p", caption, class_="caption"), inside])


def bar(*parts: float) -> Markup:
    """Return parts of 1 as a bar, beside a number that says the same."""
    drawn, x = [], 0.0
    for part in parts:
        wide = max(0.0, min(1.0 - x, part))
        drawn.append(tag("rect", x=f"{100 * x:.2f}%", width=f"{100 * wide:.2f}%", height="100%"))
        x += wide
    return tag("svg", *drawn, class_="bar", aria_hidden="true")


def tiles(told: Iterable[tuple[str, Child, Child]]) -> Markup:
    """Return figures that stand out: name, value, and what is said below it."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value, tag("small", below) if below else None))
            for name, value, below in told
        ),
        class_="tiles",
    )


def details(summary: str, *children: Child) -> Markup:
    """Return what is shown when it is asked for, and printed where it was."""
    return tag("details", tag("summary", summary), *children)
