"""The pages of a snapshot and of a comparison: what was made of what, what changed, what it cost.

Sections stand in the order in which people ask.  A section that does not apply is left out; one
whose numbers are not known says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mstore_pages import figures, heatmap, sections, trials
from mstore_pages.document import page, section, tiles
from mstore_pages.maps import maps_of
from mstore_pages.markup import Child, Markup, tag
from mstore_pages.sections import Typed
from mstore_pages.verdict import difference, difference_tiles, verdict, verdict_tiles

if TYPE_CHECKING:
    from mstore_pages.summary import ComparisonSummary, SnapshotSummary


def snapshot_page(summary: SnapshotSummary, typed: Typed = str, top: Markup | None = None) -> str:
    """Return the page of a snapshot.

    typed: formats a text of the library for its reader.  top: of a page that a server shows.
    """
    parts = list(_parts(summary, typed))
    shown = summary.snapshot
    return page(
        f"{summary.name} - mstore report",
        tag("p", "mstore report", class_="kicker"),
        tag("h1", summary.name),
        tag("p", *verdict(summary), class_="verdict"),
        tiles(verdict_tiles(summary)),
        _contents(parts),
        heatmap.hatch(),
        *(part for _, _, part in parts),
        foot=f"Snapshot {shown.snapshot}. Content {shown.manifest}.",
        top=top,
    )


def comparison_page(
    summary: ComparisonSummary, typed: Typed = str, top: Markup | None = None
) -> str:
    """Return the page of two snapshots; arguments as for `snapshot_page`."""
    parts = list(_comparison_parts(summary, typed))
    return page(
        f"{summary.name_a} and {summary.name_b} - mstore report",
        tag("p", "mstore report", class_="kicker"),
        tag("h1", f"{summary.name_a} and {summary.name_b}"),
        tag("p", *difference(summary), class_="verdict"),
        tiles(difference_tiles(summary)),
        _contents(parts),
        heatmap.hatch(),
        *(part for _, _, part in parts),
        foot=f"Snapshots {summary.a.snapshot} and {summary.b.snapshot}.",
        top=top,
    )


Part = tuple[str, str, Markup]
"""Id, title and the section."""


def _contents(parts: Sequence[Part]) -> Markup:
    links = (tag("li", tag("a", title, href=f"#{id}")) for id, title, _ in parts)
    return tag("nav", tag("ul", *links), aria_label="Sections")


def _parts(summary: SnapshotSummary, typed: Typed) -> Iterator[Part]:
    def part(id: str, title: str, lead: Child, *children: Child, gap: str = "") -> Part:
        why = summary.gaps.get(gap or id)
        told = None if why is None or children else typed(why)
        return id, title, section(id, title, lead, *children, gap=told)

    plan = summary.plan
    yield part(
        "lineage",
        "Where it came from",
        "Time runs from left to right: each snapshot was made from those to its left.",
        *sections.ancestry(
            summary.lineage, str(summary.snapshot.snapshot), complete=summary.lineage_complete
        ),
    )
    if summary.base is not None and not (plan and plan.assembled):
        yield part(
            "change",
            "What changed where",
            f"Change is the norm of the difference from {summary.base}, "
            "relative to the norm of the same weights there.",
            *maps_of(summary.maps),
        )
    if summary.experts:
        yield part(
            "experts",
            "Which expert did it",
            "A share is the part of the merge's change that came from an expert. Shares of a layer "
            "add up to 100\u00a0%; an expert that worked against the result has a negative one.",
            *sections.experts(summary, typed),
            gap="shares",
        )
    if plan is not None and not plan.assembled:
        yield part(
            "sweep",
            "Budget and error",
            "The error of the same merge at other budgets: how far it is from the merge that reads "
            "everything. Numbers come from statistics; no weights were read for them.",
            *(sections.budgets(summary.sweep, plan) if summary.sweep else ()),
        )
    if summary.base is not None and not (plan and plan.assembled):
        yield part(
            "tensors",
            "Tensors that changed most",
            f"The {len(summary.tensors)} tensors with the largest change, relative to the base."
            if summary.tensors
            else "No tensor changed."
            if "tensors" not in summary.gaps and "change" not in summary.gaps
            else None,
            *([sections.tensors(summary.tensors, summary.base)] if summary.tensors else []),
            gap="tensors" if "tensors" in summary.gaps else "change",
        )
    if summary.similarity is not None:
        yield part(
            "similarity",
            "How alike the changes are",
            "The cosine of two changes: 1 in the same direction, 0 nothing in common, "
            f"{figures.MINUS}1 opposite.",
            *sections.similarity(summary.similarity),
        )
    yield part(
        "blocks",
        "Blocks",
        "What the store keeps for this snapshot: blocks of tensors, and of other files, such as "
        "the tokenizer. A block that is in several models, or several times in one, is stored "
        "once, by the hash of its bytes.",
        *(sections.blocks(summary.blocks, summary.snapshot) if summary.blocks else ()),
    )
    if summary.search is not None and summary.search.trials:
        yield part(
            "search",
            "The search that it won",
            trials.lead(summary.search),
            *trials.sections(summary.search),
        )
    yield part(
        "notes",
        "Notes and evaluations",
        None if summary.snapshot.notes else "Nothing was noted about this snapshot.",
        *sections.notes(summary.snapshot, summary.lineage),
    )
    if plan is not None:
        yield part(
            "recipe",
            "Recipe",
            "The models and the method, as mergekit and mstore read them.",
            *(sections.recipe(summary.recipe, plan, typed) if summary.recipe else ()),
        )
    if summary.warnings:
        yield part("warnings", "Warnings", None, sections.warnings(summary.warnings, typed))


def _comparison_parts(summary: ComparisonSummary, typed: Typed) -> Iterator[Part]:
    def part(id: str, title: str, lead: Child, *children: Child) -> Part:
        why = summary.gaps.get(id)
        told = None if why is None or children else typed(why)
        return id, title, section(id, title, lead, *children, gap=told)

    chosen = str(summary.a.snapshot), str(summary.b.snapshot)
    yield part(
        "lineage",
        "Where they came from",
        "Time runs from left to right: each snapshot was made from those to its left.",
        *sections.ancestry(summary.lineage, *chosen, complete=summary.lineage_complete),
    )
    yield part(
        "change",
        "What differs where",
        f"Change is the norm of the difference from {summary.name_a}, "
        "relative to the norm of the same weights there.",
        *maps_of(summary.maps),
    )
    if summary.tensors:
        yield part(
            "tensors",
            "Tensors that differ most",
            f"The {len(summary.tensors)} tensors with the largest change.",
            sections.tensors(summary.tensors, summary.name_a),
        )
    if summary.similarity is not None:
        yield part(
            "similarity",
            "How alike their changes are",
            f"How far each moved from {summary.similarity.base}, and in which direction.",
            *sections.similarity(summary.similarity.whole),
        )
    if summary.diff.files:
        yield part("files", "Files that differ", None, sections.files(summary))
