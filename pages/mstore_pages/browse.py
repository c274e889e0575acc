"""Pages of a store that a server shows: its refs, snapshots and reflog, a comparison, errors.

Takes what was gathered already, and asks no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from mstore.terms.report import utc
from mstore.terms.sizes import format_size
from mstore_pages import figures
from mstore_pages.document import page
from mstore_pages.lineage import how
from mstore_pages.markup import Child, Markup, tag
from mstore_pages.site import (
    Column,
    Links,
    Paged,
    SnapshotPath,
    cut,
    linked,
    listing,
    more,
    search,
    shortened,
    top,
    turning,
)

if TYPE_CHECKING:
    from mstore.api.reports import ReflogReport, RefReport, SnapshotReport

REFS = (
    Column("Ref", "name"),
    Column("How", is_named=False),
    Column("Size", "n"),
    Column("Made (UTC)", "when"),
    Column("Message", "text", is_named=False),
)


class RefRow(msgspec.Struct, frozen=True):
    """A ref, and the snapshot that it names; None if that is lost."""

    ref: RefReport
    snapshot: SnapshotReport | None


class MoveRow(msgspec.Struct, frozen=True):
    """A move of a ref, and the author of the snapshot to which it moved; empty if unknown."""

    move: ReflogReport
    author: str


def refs_page(links: Links, rows: Sequence[RefRow], at: Paged, query: str) -> str:
    """Return the page of refs, with a search field.  query: what was looked for."""
    lines, texts = [], []
    for row in rows:
        ref, shown = row.ref, row.snapshot
        name = (
            tag("a", shortened(ref.name), href=links.ref(ref.name)),
            more(f"{ref.kind} {ref.snapshot.short}{', pinned' if ref.pinned else ''}", is_id=True),
        )
        facts: Sequence[Child] = ("missing", None, None, None)
        if shown is not None:
            facts = (
                (how(shown), more(f"by {shown.author}")) if shown.author else how(shown),
                format_size(shown.plain_bytes),
                utc(shown.time_ns),
                cut(shown.message),
            )
        told, size, made, message = facts
        lines.append((_both(name), _both(told), size, made, message))
        texts.append(searched(ref))
    empty = "No ref matches." if query else "This store has no refs yet: mstore add PATH --name REF"
    return page(
        f"{query} - refs" if query else "Refs",
        tag("h1", "Branches, tags and candidates"),
        search(links.at(""), "Search refs", query, filters="refs", is_wide=True),
        tag("p", at.told("ref", query), class_="caption", id="found", role="status"),
        listing("Refs", REFS, lines, kind="refs", texts=texts) if lines else tag("p", empty),
        turning(links, "", at, q=query),
        top=top(links, "Refs", has_search=False),
    )


def searched(ref: RefReport) -> str:
    """Return what a search finds a ref by: its name, kind and snapshot."""
    return f"{ref.name} {ref.kind} {ref.snapshot}".lower()


def snapshots_page(
    links: Links, shown: Sequence[SnapshotReport], number: int, *, has_more: bool
) -> str:
    """Return the page of the snapshots that refs reach, newest first.

    number: of the page, from 1.
    """
    columns = (
        Column("Snapshot", "name"),
        Column("How", is_named=False),
        Column("Made from", "text"),
        Column("Size", "n"),
        Column("Made (UTC)", "when"),
        Column("Message", "text", is_named=False),
    )
    rows = (
        (
            _both((snapshot_link(links, one), more(", ".join(one.refs[:3])) if one.refs else None)),
            _both((how(one), more(f"by {one.author}") if one.author else None)),
            parents(links, one),
            format_size(one.plain_bytes),
            utc(one.time_ns) if one.time_ns else None,
            cut(one.message),
        )
        for one in shown
    )
    steps = []
    if number > 1:
        steps.append(tag("a", "Newer", href=links.at("snapshots", page=number - 1), rel="prev"))
    if has_more:
        steps.append(tag("a", "Older", href=links.at("snapshots", page=number + 1), rel="next"))
    return page(
        "Snapshots",
        tag("h1", "Snapshots"),
        tag("p", "Those that refs reach, the newest first.", class_="quiet"),
        listing("Snapshots", columns, rows) if shown else tag("p", "There is none."),
        tag("nav", *steps, class_="paging", aria_label="Pages of this list") if steps else None,
        top=top(links, "Snapshots"),
    )


def snapshot_link(links: Links, one: SnapshotReport) -> Markup:
    """Return a link to a snapshot that says the beginning of its id."""
    return tag("a", one.snapshot.short, href=links.snapshot(one.snapshot))


def parents(links: Links, one: SnapshotReport, most: int = 4) -> Markup | None:
    """Return links to what a snapshot was made from, with roles; None if it has no parents."""
    if not one.parents:
        return None
    said: list[Child] = []
    for parent in one.parents[:most]:
        name = parent.refs[0] if parent.refs else parent.snapshot.short
        said += ["; " if said else "", f"{parent.role} "]
        said.append(tag("a", name, href=links.snapshot(parent.snapshot)))
    if len(one.parents) > most:
        said.append(f"; and {len(one.parents) - most} more")
    return tag("span", *said)


def reflog_page(links: Links, rows: Sequence[MoveRow], at: Paged, name: str) -> str:
    """Return the page of moves of refs.  name: of the one ref; empty for all."""
    columns = (
        Column("Ref", "name"),
        Column("From", "id"),
        Column("To", "id"),
        Column("What moved it", "text", is_named=False),
        Column("Author"),
        Column("When (UTC)", "when"),
    )
    lines = (
        (
            tag("a", f"{one.name}@{{{one.position}}}", href=links.at("reflog", ref=one.name)),
            _end(links, one.old, is_there=True),
            _end(links, one.new, is_there=not one.is_collected),
            cut(one.action),
            row.author or None,
            utc(one.time_ns),
        )
        for row in rows
        for one in (row.move,)
    )
    whose = tag("a", "Moves of all refs", href=links.at("reflog")) if name else None
    return page(
        f"Reflog of {name}" if name else "Reflog",
        tag("h1", f"Reflog of {name}" if name else "Reflog"),
        tag(
            "p",
            "Where refs have pointed, the newest move first. The author is that of the snapshot to "
            "which a ref moved. ",
            whose,
            class_="quiet",
        ),
        tag("p", at.told("move", ""), class_="caption"),
        listing("Moves", columns, lines) if rows else tag("p", "No ref has moved yet."),
        turning(links, "reflog", at, ref=name),
        top=top(links, "Reflog"),
    )


def _end(links: Links, id: object, *, is_there: bool) -> Child:
    if id is None:
        return figures.DASH
    short = str(id)[:12]
    return tag("a", short, href=links.snapshot(id)) if is_there else f"{short} (collected)"


def compare_form(links: Links, a: str = "", b: str = "", names: Iterable[str] = ()) -> Markup:
    """Return the form that asks for the comparison of two snapshots.  names: to choose from."""
    fields = (
        tag(
            "label",
            title,
            tag(
                "input",
                name=key,
                value=value,
                list="names",
                required=True,
                autocomplete="off",
                spellcheck="false",
            ),
        )
        for key, title, value in (("a", "First snapshot", a), ("b", "Second snapshot", b))
    )
    return tag(
        "form",
        *fields,
        tag("datalist", *(tag("option", value=name) for name in names), id="names"),
        tag("button", "Compare"),
        action=links.at("compare"),
        method="get",
        class_="pair",
    )


def compare_page(links: Links, a: str, b: str, names: Sequence[str], why: Child = None) -> str:
    """Return the page that asks what to compare.  why: what was wrong with what was asked."""
    return page(
        "Compare",
        tag("h1", "Compare two snapshots"),
        tag("p", why, class_="flag", role="alert") if why else None,
        tag(
            "p",
            "Names of refs, beginnings of ids, or revisions such as llama/merged~1. What has no "
            "statistics yet is read whole, which takes time for large models.",
            class_="quiet",
        ),
        compare_form(links, a, b, names),
        top=top(links, "Compare"),
    )


class DirectoryEntry(msgspec.Struct, frozen=True):
    """A file or directory: its name (that of a directory ends in a slash), bytes, and address."""

    name: str
    size: int | None
    link: str


def directory_page(
    links: Links, place: SnapshotPath, path: str, entries: Iterable[DirectoryEntry]
) -> str:
    """Return the page of a directory; path: empty for the top."""
    lines: list[Sequence[Child]] = [] if not path else [(tag("a", "../", href="../"), None)]
    lines += [
        (
            tag("a", shortened(one.name), href=one.link),
            None if one.size is None else format_size(one.size),
        )
        for one in entries
    ]
    columns = (Column("Name", "name"), Column("Size", "n", is_named=False))
    return page(
        f"{place.name}: /{path}",
        tag("p", tag("a", place.name, href=links.at(place.path)), class_="crumbs"),
        tag("h1", f"/{path}"),
        listing("Files and directories", columns, lines, kind="files"),
        top=top(links),
    )


def error_page(links: Links, status: int, what: str, where: str | None, asked: str) -> str:
    """Return the page of a request that failed.  asked: what to offer for a search."""
    title = "Not found" if status == 404 else "This did not work"
    return page(
        title,
        tag("p", f"Status {status}", class_="kicker"),
        tag("h1", title),
        tag("p", f"{what}{'.' if where is None else ': '}", _named(where), class_="verdict"),
        search(links.at(""), "Search refs", asked, is_wide=True),
        linked({"All refs": links.at(""), "Snapshots": links.at("snapshots")}),
        top=top(links, has_search=False),
    )


def _named(where: str | None) -> Markup | None:
    return None if where is None else tag("span", where, class_="name")


def _both(parts: Child) -> Child:
    return tag("span", *parts) if isinstance(parts, tuple) else parts
