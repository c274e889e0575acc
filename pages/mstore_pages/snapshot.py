"""Pages of one snapshot that a server shows: the snapshot, its tensors, the plan of its merge.

Takes what was gathered already, and asks no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from mstore.terms.report import utc
from mstore.terms.sizes import counted, format_size
from mstore_pages import figures
from mstore_pages.browse import compare_form, parents
from mstore_pages.card import card
from mstore_pages.document import page, section, tiles
from mstore_pages.figures import number, percent
from mstore_pages.gather import differing, experts_in, left_out
from mstore_pages.lineage import how, signed, told_assembly
from mstore_pages.markup import Child, Markup, tag
from mstore_pages.sections import ancestry, notes, shape_of
from mstore_pages.site import (
    Column,
    Links,
    Paged,
    SnapshotPath,
    below,
    linked,
    listing,
    more,
    search,
    shortened,
    top,
    turning,
)
from mstore_pages.summary import Ancestor

if TYPE_CHECKING:
    from mstore.api.reports import (
        ExpertShare,
        Explanation,
        FileReport,
        SnapshotReport,
        TensorExplanation,
        TensorReport,
    )

FILES_SHOWN = 200


class ShownSnapshot(msgspec.Struct, frozen=True):
    """What the page of a snapshot shows."""

    snapshot: SnapshotReport
    """the snapshot, its notes and signatures"""
    lineage: tuple[Ancestor, ...]
    """it and what it was made from"""
    lineage_complete: bool
    """whether nothing of the lineage was left out"""
    files: tuple[FileReport, ...]
    """its files, by path"""
    card: str | None
    """its model card; None if it has none, or it cannot be read"""
    names: tuple[str, ...]
    """refs that it may be compared with"""


def snapshot_page(links: Links, place: SnapshotPath, shown: ShownSnapshot) -> str:
    """Return the page of a snapshot."""
    one = shown.snapshot
    return page(
        place.name,
        tag("p", tag("a", "Refs", href=links.at("")), " / ", _kind(one, place), class_="crumbs"),
        tag("h1", place.name),
        tag("p", one.message, class_="message") if one.message else None,
        _pruned() if one.pruned else None,
        tiles(_tiles(one)),
        linked(dict(_ways(links, place, shown))),
        _contents(shown),
        _card(shown),
        _made_from(links, one),
        section(
            "lineage",
            "Where it came from",
            "Time runs from left to right: each snapshot was made from those to its left.",
            *ancestry(shown.lineage, str(one.snapshot), complete=shown.lineage_complete),
        ),
        section(
            "notes",
            "Notes and evaluations",
            None if one.notes else "Nothing was noted about this snapshot.",
            *notes(one, shown.lineage),
        ),
        None if one.pruned else _files(links, place, shown.files),
        section(
            "compare",
            "Compare",
            "With another ref, or the beginning of an id.",
            compare_form(links, place.name, "", shown.names),
        ),
        foot=f"Snapshot {one.snapshot}. Content {one.manifest}.",
        top=top(links),
    )


def _kind(one: SnapshotReport, place: SnapshotPath) -> Child:
    others = [name for name in one.refs if name != place.name]
    return f"also {', '.join(others[:3])}" if others else one.snapshot.short


def _pruned() -> Markup:
    return tag("p", "Its contents were pruned: only records are left.", class_="flag")


def _tiles(one: SnapshotReport) -> Iterator[tuple[str, Child, Child]]:
    yield "How", how(one), f"from {one.origin.url}" if one.origin else None
    yield "Size", format_size(one.plain_bytes), counted(one.files, "file")
    kinds = [name for name in one.models if name]
    yield "Tensors", one.tensors, counted(len(kinds), "named model") if kinds else None
    made = utc(one.time_ns) if one.time_ns else figures.DASH
    yield "Made (UTC)", made, f"by {one.author}" if one.author else None
    yield "Signed", signed(one.signatures) if one.signatures else "none", None


def _ways(links: Links, place: SnapshotPath, shown: ShownSnapshot) -> Iterator[tuple[str, str]]:
    one = shown.snapshot
    if not one.pruned:
        yield "Report", links.at(f"{place.path}/report")
        yield "Quick report (reads no weights)", links.at(f"{place.path}/report", quick="yes")
    if one.plan is not None:
        yield "Plan of the merge", links.at(f"{place.path}/plan")
    if not one.pruned:
        yield f"Tensors ({one.tensors})", links.at(f"{place.path}/tensors/")
        yield f"Files ({one.files})", links.at(f"{place.path}/files/")
    yield "Permanent address", links.snapshot(one.snapshot)


def _contents(shown: ShownSnapshot) -> Markup:
    titles = {
        "card": "Model card" if shown.card is not None else None,
        "lineage": "Where it came from",
        "notes": "Notes and evaluations",
        "files": None if shown.snapshot.pruned else "Files",
        "compare": "Compare",
    }
    items = (tag("li", tag("a", title, href=f"#{id}")) for id, title in titles.items() if title)
    return tag("nav", tag("ul", *items), aria_label="Sections")


def _card(shown: ShownSnapshot) -> Markup | None:
    if shown.card is None:
        return None
    return section("card", "Model card", None, card(shown.card))


def _made_from(links: Links, one: SnapshotReport) -> Markup | None:
    found = parents(links, one, most=len(one.parents))
    return tag("section", tag("h2", "Made from"), tag("p", found)) if found else None


def _files(links: Links, place: SnapshotPath, files: Sequence[FileReport]) -> Markup:
    rows = (
        (
            tag("a", shortened(one.path), href=_file(links, place, one)),
            format_size(one.size),
            one.tensors or None,
        )
        for one in files[:FILES_SHOWN]
    )
    columns = (Column("File", "name"), Column("Size", "n", is_named=False), Column("Tensors", "n"))
    rest = len(files) - FILES_SHOWN
    told = tag("a", f"{rest} more files", href=links.at(f"{place.path}/files/"))
    return section(
        "files",
        "Files",
        "Each name leads to the bytes, as they were added.",
        listing("Files", columns, rows, kind="files"),
        tag("p", told) if rest > 0 else None,
    )


def _file(links: Links, place: SnapshotPath, one: FileReport) -> str:
    return links.at(f"{place.path}/files/{below(*one.path.split('/'))}")


def tensors_page(
    links: Links, place: SnapshotPath, tensors: Sequence[TensorReport], at: Paged, query: str
) -> str:
    """Return a page of the tensors of a snapshot.  query: what was looked for."""
    path = f"{place.path}/tensors/"
    rows = (
        (
            tag("a", shortened(one.name), href=links.at(path + below(one.name))),
            one.dtype,
            shape_of(one.shape),
            format_size(one.nbytes),
            one.file,
        )
        for one in tensors
    )
    columns = (
        Column("Tensor", "name"),
        Column("Type", is_named=False),
        Column("Shape", "n"),
        Column("Size", "n"),
        Column("File", "name"),
    )
    return page(
        f"Tensors of {place.name}",
        tag("p", tag("a", place.name, href=links.at(place.path)), class_="crumbs"),
        tag("h1", "Tensors"),
        search(links.at(path), "Search tensors", query, filters="tensors", is_wide=True),
        tag("p", at.told("tensor", query), class_="caption", id="found", role="status"),
        listing("Each name leads to the bytes of a tensor.", columns, rows, kind="tensors")
        if tensors
        else tag("p", "No tensor matches." if query else "It has no tensors."),
        turning(links, path, at, q=query),
        top=top(links, has_search=False),
    )


# -- the plan ------------------------------------------------------------------------------------


def plan_page(
    links: Links,
    place: SnapshotPath,
    merge: Explanation,
    tensors: Sequence[TensorExplanation],
    at: Paged,
    query: str,
) -> str:
    """Return a page of what a merge reads of each expert, by tensor.

    tensors: those of this page.  query: what was looked for.
    """
    plan = merge.plan
    path = f"{place.path}/plan"
    return page(
        f"Plan of {place.name}",
        tag("p", tag("a", place.name, href=links.at(place.path)), class_="crumbs"),
        tag("h1", "Plan of the merge"),
        tag("p", _read(merge), class_="verdict"),
        _experts(merge) if not plan.assembled else None,
        section(
            "tensors",
            "By tensor",
            "Of the chunks in which an expert differs from the base: how many the merge uses."
            if not plan.assembled
            else "Which model each tensor comes from.",
            search(links.at(path), "Search tensors", query, filters="tensors", is_wide=True),
            tag("p", at.told("tensor", query), class_="caption", id="found", role="status"),
            _by_tensor(merge, tensors) if tensors else tag("p", "No tensor matches."),
            turning(links, path, at, q=query),
        ),
        foot=f"Plan {plan.plan}.",
        top=top(links, has_search=False),
    )


def _read(merge: Explanation) -> str:
    plan = merge.plan
    if plan.assembled:
        return told_assembly(plan)
    full = plan.full_expert_bytes
    share = percent(plan.planned_expert_bytes / full if full else 0)
    limits = []
    if plan.budget_bytes is not None:
        limits.append(f"a budget of {format_size(plan.budget_bytes)}")
    if plan.max_error is not None:
        limits.append(f"an error of at most {percent(plan.max_error)}")
    given = f", with {' and '.join(limits)}" if limits else ", without a limit"
    return (
        f"{plan.method} of {counted(len(plan.experts), 'expert')} into {plan.base}{given}. "
        f"It reads {format_size(plan.planned_expert_bytes)} of experts: {share} of "
        f"{format_size(full)}."
    )


def _experts(merge: Explanation) -> Markup:
    experts = experts_in(merge.experts)
    counts: dict[str, Callable[[ExpertShare], int]] = {
        "Shared with another": lambda one: one.chunks_shared,
        "Not needed": lambda one: one.chunks_not_needed,
        "Left out for limits": left_out,
        "Equal to base": lambda one: one.chunks_equal_base,
    }
    used = {title: of for title, of in counts.items() if any(map(of, experts))}
    rows = (
        (
            f"{n} {one.expert}",
            number(one.weight),
            _used(one),
            *(of(one) for of in used.values()),
        )
        for n, one in enumerate(experts, 1)
    )
    columns = (
        Column("Expert", "name"),
        Column("Weight", "n"),
        Column("Used", "n"),
        *(Column(title, "n") for title in used),
    )
    lead = "Numbers are chunks. If all types are equal, a chunk is a block."
    return section("experts", "By expert", lead, listing("Experts", columns, rows))


def _by_tensor(merge: Explanation, tensors: Sequence[TensorExplanation]) -> Markup:
    if merge.plan.layers:
        columns = [Column("Tensor", "name"), Column("From", "name", is_named=False)]
        origins = [(shortened(one.name), one.treatment) for one in tensors]
        return listing("Tensors", columns, origins, kind="tensors")
    experts = experts_in(merge.experts)
    columns = [
        Column("Tensor", "name"),
        Column("How", "text", is_named=False),
        Column("Base's own blocks", "n"),
        *(Column(f"Expert {n}", "n") for n in range(1, len(experts) + 1)),
    ]
    rows = [
        (
            shortened(one.name),
            _treated(one, merge),
            f"{one.blocks_reused} of {one.blocks_total}",
            *_cells(one, len(experts)),
        )
        for one in tensors
    ]
    return listing("Tensors, with the experts of the table above", columns, rows, kind="tensors")


def _treated(one: TensorExplanation, merge: Explanation) -> str:
    if one.tied_to is not None:
        return f"tied to {one.tied_to}"
    is_other = one.method is not None and one.method != merge.plan.method
    return f"{one.treatment} by {one.method}" if is_other else one.treatment


def _cells(one: TensorExplanation, count: int) -> Iterator[Child]:
    shares = experts_in(one.experts)
    for share in shares:
        out = left_out(share)
        told = _used(share)
        yield tag("span", told, more(f"{out} left out")) if out else told
    for _ in range(count - len(shares)):
        yield None


def _used(share: ExpertShare) -> str | None:
    """Return how many of an expert's own blocks are used; None if it has none."""
    used, differ = share.chunks_read + share.chunks_shared, differing(share)
    return f"{used} of {differ}" if differ else None
