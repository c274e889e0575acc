"""The pages of a snapshot and of a comparison: what was made of what, what changed, what it cost.

Sections stand in the order in which people ask.  A section that does not apply is left out; one
whose numbers are not known says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from mstore.terms.phrases import Text
from mstore.terms.report import utc
from mstore.terms.sizes import format_size
from mstore_pages import curve, figures, heatmap, lineage
from mstore_pages.curve import BudgetPoint
from mstore_pages.document import Cell, bar, details, page, scroll, section, table, tiles
from mstore_pages.figures import COSINES, SHARES, SIGNED, Levels, growing, number, percent
from mstore_pages.heatmap import SHARE, Packing
from mstore_pages.markup import Child, Markup, data, escaped, join, tag

if TYPE_CHECKING:
    from mstore.api.reports import (
        ComparedPart,
        NoteReport,
        PlanReport,
        ReuseReport,
        SnapshotReport,
        SweepReport,
    )
    from mstore_pages.summary import (
        Ancestor,
        ChangedTensor,
        ComparisonSummary,
        LayerMap,
        SnapshotSummary,
    )

Typed = Callable[[Text], str]
MEASURES = {
    "change": "change",
    "share": "share of what the merge changed",
    "left_out": "left out for the budget",
    "equal": "blocks equal to the base's",
}
EVALUATION, VERDICT = "evaluation", "verdict"
_FILES_SHOWN = 60


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
        tag("p", *_verdict(summary), class_="verdict"),
        tiles(_tiles(summary)),
        _contents(parts),
        heatmap.hatch(),
        *(part for _, _, part in parts),
        foot=join([f"Snapshot {shown.snapshot}. Content {shown.manifest}."]),
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
        tag("p", *_difference(summary), class_="verdict"),
        tiles(_difference_tiles(summary)),
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
        *_lineage(
            summary.lineage, str(summary.snapshot.snapshot), complete=summary.lineage_complete
        ),
    )
    if summary.base is not None and not (plan and plan.layers):
        yield part(
            "change",
            "What changed where",
            f"Change is the norm of the difference from {summary.base}, "
            "relative to the norm of the same weights there.",
            *_maps(summary.maps),
        )
    if summary.experts:
        yield part(
            "experts",
            "Which expert did it",
            "A share is the part of the merge's change that came from an expert. Shares of a layer "
            "add up to 100\u00a0%; an expert that worked against the result has a negative one.",
            *_experts(summary, typed),
            gap="shares",
        )
    if plan is not None and not plan.layers:
        yield part(
            "sweep",
            "Budget and error",
            "The error of the same merge at other budgets: how far it is from the merge that reads "
            "everything. Numbers come from statistics; no weights were read for them.",
            *(_sweep(summary.sweep, plan) if summary.sweep else ()),
        )
    if summary.base is not None and not (plan and plan.layers):
        yield part(
            "tensors",
            "Tensors that changed most",
            f"The {len(summary.tensors)} tensors with the largest change, relative to the base."
            if summary.tensors
            else "No tensor changed."
            if "tensors" not in summary.gaps and "change" not in summary.gaps
            else None,
            *([_tensors(summary.tensors)] if summary.tensors else []),
            gap="tensors" if "tensors" in summary.gaps else "change",
        )
    if summary.similarity is not None:
        yield part(
            "similarity",
            "How alike the changes are",
            "The cosine of two changes: 1 in the same direction, 0 nothing in common, "
            f"{figures.MINUS}1 opposite.",
            *_similarity(summary.similarity),
        )
    yield part(
        "blocks",
        "Blocks",
        "What the store keeps for this snapshot. A block that is in several models is stored once.",
        *(_blocks(summary.blocks, summary.snapshot) if summary.blocks else ()),
    )
    yield part(
        "notes",
        "Notes and evaluations",
        None if summary.snapshot.notes else "Nothing was noted about this snapshot.",
        *_notes(summary.snapshot),
    )
    if plan is not None:
        yield part(
            "recipe",
            "Recipe",
            "The same merge, as mergekit and mstore read it.",
            *(_recipe(summary.recipe) if summary.recipe else ()),
        )
    if summary.warnings:
        items = (tag("li", typed(one)) for one in summary.warnings)
        yield part("warnings", "Warnings", None, tag("ul", *items, class_="warnings"))


# -- the verdict ---------------------------------------------------------------------------------


def _verdict(summary: SnapshotSummary) -> Iterator[Child]:
    """Yield what was made, at which cost, and how good it is, in sentences."""
    shown, plan = summary.snapshot, summary.plan
    if plan is None:
        yield _told_made(summary)
    elif plan.layers:
        yield f"A stack of layers of {_count(len(plan.experts) + 1, 'model')}, as they are."
    else:
        kind = "A virtual merge" if shown.virtual else "A merge"
        yield f"{kind} of {_count(len(plan.experts), 'expert')} into {plan.base} by {plan.method}"
        if plan.budget_bytes is None and plan.max_error is None:
            yield ", without a budget."
        else:
            full = plan.full_expert_bytes
            yield (
                f" that read {percent(plan.planned_expert_bytes / full if full else 0)} of the "
                f"experts: {_unbroken(plan.planned_expert_bytes)} of {_unbroken(full)}."
            )
        yield f" {_error(plan)}"
    evaluations = [one for one in shown.notes if one.kind == EVALUATION]
    verdicts = [one for one in shown.notes if one.kind == VERDICT]
    for one in verdicts:
        yield f" Verdict {one.key}: {_brief(one.value)}."
    if evaluations:
        yield f" {_count(len(evaluations), 'evaluation')} noted."
    elif not verdicts:
        yield " No evaluation is noted."
    if summary.warnings:
        yield " "
        yield tag("a", _count(len(summary.warnings), "warning"), href="#warnings", class_="flag")
        yield "."


def _unbroken(size: int) -> str:
    """Return a size that no line of a sentence breaks."""
    return format_size(size).replace(" ", figures.NO_BREAK)


def _told_made(summary: SnapshotSummary) -> str:
    shown = summary.snapshot
    size = f"{format_size(shown.plain_bytes)} in {_count(shown.tensors, 'tensor')}"
    made = {"add": "A checkpoint that was added"}.get(shown.made, f"Made by {shown.made}")
    if summary.base is None:
        return f"{made}: {size}. Its lineage names no base."
    change = ""
    if summary.change is not None:
        change = f" It differs from its base by {percent(summary.change)} of the base's norm."
    return f"{made}, with the base {summary.base}: {size}.{change}"


def _error(plan: PlanReport) -> str:
    if plan.error_bound == 0 or plan.error_estimate == 0:
        return "Nothing that matters was left out: it is the full merge."
    if plan.error_bound is not None:
        return (
            f"It is at most {percent(plan.error_bound)} of the base's norm away from the full "
            "merge: a certified bound."
        )
    if plan.error_estimate is not None:
        return (
            f"It is about {percent(plan.error_estimate)} of the base's norm away from the full "
            "merge: an estimate, no bound."
        )
    return "How far it is from the full merge is not known."


def _tiles(summary: SnapshotSummary) -> Iterator[tuple[str, Child, Child]]:
    plan, shown = summary.plan, summary.snapshot
    if plan is not None:
        yield "Method", _breaking(plan.method), _parameters(plan)
        if not plan.layers:
            budget = "none" if plan.budget_bytes is None else format_size(plan.budget_bytes)
            if plan.budget_bytes is None and plan.max_error is not None:
                budget = f"error ≤ {percent(plan.max_error)}"
            yield "Budget", budget, f"read {format_size(plan.planned_expert_bytes)} of experts"
            kind, error = (
                ("certified bound", plan.error_bound)
                if plan.error_bound is not None
                else ("estimate", plan.error_estimate)
            )
            about = "≤" if kind == "certified bound" else "~"
            told = "not known" if error is None else f"{about} {percent(error)}"
            if error == 0:
                told = "none"
            yield "Error", told, None if error is None else f"{kind}, of the base's norm"
    else:
        yield "Size", format_size(shown.plain_bytes), _count(shown.files, "file")
    if summary.change is not None:
        yield "Change", percent(summary.change), "of the base's norm"
    if summary.experts and any(one.share is not None for one in summary.experts):
        first = max(summary.experts, key=lambda one: one.share or 0.0)
        yield "Largest share", percent(first.share), first.expert
    if summary.blocks is not None and summary.blocks.blocks:
        blocks = summary.blocks
        yield (
            "New on the disk",
            format_size(blocks.new_bytes),
            f"{blocks.blocks - blocks.new_blocks} of {_count(blocks.blocks, 'block')} reused",
        )
    signatures = lineage.signed(shown.signatures) if shown.signatures else "none"
    yield "Signed", signatures, f"by {shown.author}" if shown.author else None


def _breaking(name: str) -> Markup:
    """Return a name that may break behind its underscores."""
    return Markup("_<wbr>".join(map(escaped, name.split("_"))))


def _parameters(plan: PlanReport) -> str:
    return ", ".join(f"{name} {_brief(value)}" for name, value in plan.parameters.items())


# -- lineage -------------------------------------------------------------------------------------


def _lineage(found: Sequence[Ancestor], *chosen: str, complete: bool) -> Iterator[Markup]:
    nodes = [
        lineage.node_of(one.snapshot, one.licence, is_chosen=str(one.snapshot.snapshot) in chosen)
        for one in found
    ]
    yield scroll("Lineage", lineage.draw(nodes))
    if not complete:
        yield tag("p", f"Older snapshots than these {len(found)} are not shown.", class_="caption")
    names = {str(one.snapshot.snapshot): _named(one.snapshot) for one in found}
    rows = []
    for one in found:
        shown = one.snapshot
        parents = [
            f"{parent.role} {names.get(str(parent.snapshot), parent.snapshot.short)}"
            for parent in shown.parents
        ]
        rows.append(
            (
                _named(shown),
                Cell(shown.snapshot.short, "name"),
                lineage.how(shown),
                "; ".join(parents) or figures.DASH,
                one.licence or figures.DASH,
                shown.author or figures.DASH,
                lineage.signed(shown.signatures) or figures.DASH,
                utc(shown.time_ns) if shown.time_ns else figures.DASH,
            )
        )
    columns = [
        ("Name", "name"),
        ("Snapshot", ""),
        ("How", ""),
        ("Made from", ""),
        ("Licence", ""),
        ("Author", ""),
        ("Signed", ""),
        ("Made (UTC)", ""),
    ]
    yield details("The lineage as a table", table("Snapshots, the newest first", columns, rows))


def _named(shown: SnapshotReport) -> str:
    return ", ".join(shown.refs) or shown.snapshot.short


# -- maps ----------------------------------------------------------------------------------------


def _maps(maps: Sequence[LayerMap]) -> Iterator[Markup]:
    """Yield the selector, the strips of the first model, and small images of all others."""
    if not maps:
        return
    changes = [v for one in maps for model in one.models for row in model.change for v in row]
    levels = {
        "change": growing(changes),
        "share": SIGNED,
        "left_out": SHARES,
        "equal": SHARES,
    }
    models = [model.model for model in maps[0].models]
    yield _selector(models, [one for one in MEASURES if _is_told(maps, one)])
    title = f"{models[0]}: {MEASURES['change']}"
    yield tag("h3", title, class_="map-title")
    for one in maps:
        yield tag(
            "div",
            heatmap.rows_of(one.parts, one.models[0].change, levels["change"]),
            _feet(one),
            class_="map",
        )
    yield tag("output", "", class_="readout", id="map-readout", aria_live="polite")
    for name, scale in levels.items():
        yield tag(
            "div",
            heatmap.swatches(scale, unknown="not there, or not known"),
            class_="map-legend",
            id=f"legend-{name}",
            hidden=name != "change",
        )
    yield tag(
        "p",
        "Each row is a part of the layers, each cell a layer. The stronger the colour, the larger "
        "the number.",
        class_="caption",
    )
    for n, one in enumerate(maps):
        yield details(f"{one.kind}: the numbers as a table", _map_table(n, one, levels["change"]))
    if len(models) > 1:
        # Of a virtual merge all are experts, else the first is the result.
        yield from _gallery(max(maps, key=_cells), levels)
    yield _map_data(maps, models, levels, changes)


def _cells(one: LayerMap) -> int:
    return len(one.layers) * len(one.parts)


def _is_told(maps: Sequence[LayerMap], measure: str) -> bool:
    return any(getattr(model, measure) is not None for one in maps for model in one.models)


def _selector(models: Sequence[str], measures: Sequence[str]) -> Markup:
    return tag(
        "form",
        tag(
            "label",
            "Model",
            tag(
                "select",
                *(tag("option", one, value=n) for n, one in enumerate(models)),
                name="model",
            ),
        ),
        tag(
            "label",
            "What is shown",
            tag(
                "select",
                *(tag("option", MEASURES[one], value=one) for one in measures),
                name="measure",
            ),
        ),
        class_="selector",
        id="map-selector",
        hidden=True,
    )


def _feet(one: LayerMap) -> Markup | None:
    if one.layers == ("",):
        return None
    return tag(
        "div", tag("span", one.kind, class_="name"), heatmap.axis(one.layers), class_="row feet"
    )


def _map_table(number: int, one: LayerMap, levels: Levels) -> Markup:
    rows = one.models[0].change
    lines = []
    for at, layer in enumerate(one.layers):
        cells = [tag("td", percent(row[at]), class_=levels.class_of(row[at]) or "") for row in rows]
        lines.append(tag("tr", tag("th", layer or "all", scope="row"), *cells))
    heads = (tag("th", part, scope="col") for part in ("layer", *one.parts))
    inside = tag(
        "table",
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        id=f"map-table-{number}",
        class_="grid-table",
    )
    return scroll(f"{one.kind}: numbers by layer and part", inside, is_long=True)


def _gallery(one: LayerMap, levels: dict[str, Levels]) -> Iterator[Markup]:
    """Yield a small image for each expert, so that all are seen at once, and without a script."""
    experts = [model for model in one.models if model.left_out is not None] or one.models[1:]
    has_shares = all(model.share is not None for model in experts)
    measure = "share" if has_shares else "change"
    yield tag("h3", f"Each expert: {MEASURES[measure]}")
    items = []
    for model in experts:
        rows = (model.share if has_shares else model.change) or ()
        size = f"{len(one.parts)} parts by {len(one.layers)} layers"
        told = f"{model.model}: {MEASURES[measure]}, {size}"
        image = heatmap.pixels(rows, levels[measure], told)
        items.append(tag("li", tag("figure", tag("figcaption", model.model), image)))
    yield tag("ul", *items, class_="gallery")
    yield tag(
        "p",
        f"Rows are the parts and columns the layers of {one.kind}, as above."
        + (" Orange: against the result." if has_shares else ""),
        class_="caption",
    )
    if has_shares:
        yield heatmap.swatches(levels[measure])


def _map_data(
    maps: Sequence[LayerMap],
    models: Sequence[str],
    levels: dict[str, Levels],
    changes: Sequence[float | None],
) -> Markup:
    """Return all numbers for the page's script, packed."""
    shares = [v for m in maps for model in m.models for row in model.share or () for v in row]
    packings = {
        "change": Packing.of(changes, is_log=True),
        "share": Packing.of(shares),
        "left_out": SHARE,
        "equal": SHARE,
    }
    kinds = []
    for one in maps:
        kind: dict[str, Any] = {"kind": one.kind, "layers": one.layers, "parts": one.parts}
        for name, packing in packings.items():
            rows = [getattr(model, name) for model in one.models]
            kind[name] = [None if own is None else packing.packed(own) for own in rows]
        kinds.append(kind)
    measures = {
        name: {
            "edges": scale.edges,
            "classes": scale.classes,
            "packing": asdict(p),
        }
        for (name, scale), p in zip(levels.items(), packings.values(), strict=True)
    }
    return data(
        "map-data",
        {"models": models, "measures": measures, "kinds": kinds, "least": heatmap.LEAST_COLUMNS},
    )


# -- experts, budget, tensors --------------------------------------------------------------------


def _experts(summary: SnapshotSummary, typed: Typed) -> Iterator[Markup]:
    columns = [
        ("Expert", "name"),
        ("Weight", "n"),
        ("Change", "n"),
        ("Share", "n"),
        ("Used", "n"),
        ("", ""),
        ("Left out for limits", "n"),
        ("Equal to base", "n"),
    ]
    rows: list[Sequence[Child | Cell]] = []
    for n, one in enumerate(summary.experts, 1):
        every = one.chunks or 1
        used, out = one.chunks_used / every, one.chunks_left_out / every
        equal = one.chunks_equal_base / ((one.chunks + one.chunks_equal_base) or 1)
        rows.append(
            (
                Cell(f"{n} {one.expert}", "name", n),
                Cell(number(one.weight), "", one.weight),
                Cell(percent(one.change), "", one.change),
                Cell(percent(one.share), "", one.share),
                Cell(f"{one.chunks_used} of {one.chunks}", "", used),
                bar(used, out),
                Cell(percent(out), "", out),
                Cell(percent(equal), "", equal),
            )
        )
    yield table(
        "Experts: blocks that differ from the base's, and how many the merge used",
        columns,
        rows,
        sortable=True,
    )
    why = summary.gaps.get("shares")
    if why is not None:
        yield tag("p", f"Shares are not known: {typed(why)}.", class_="gap")
    if any(share is not None for one in summary.layers for share in one.shares):
        yield tag("h3", "Share of each expert, by layer")
        yield _layer_table(summary)


def _layer_table(summary: SnapshotSummary) -> Markup:
    names = [one.expert for one in summary.experts]
    heads = [tag("th", "layer", scope="col")]
    heads += [tag("th", one, scope="col") for one in ("largest", "left out")]
    heads += [tag("th", tag("abbr", n, title=name), scope="col") for n, name in enumerate(names, 1)]
    lines = []
    for layer in summary.layers:
        known = [(one, -n) for n, one in enumerate(layer.shares) if one is not None]
        best = -max(known)[1] if known else None
        told = figures.DASH if best is None else f"{best + 1} {names[best]}"
        out = [one for one in layer.left_out if one is not None]
        cells = [
            tag("td", told, class_="largest"),
            tag("td", _whole(sum(out) / len(out) if out else None)),
            *(tag("td", _whole(one), class_=SIGNED.class_of(one)) for one in layer.shares),
        ]
        lines.append(tag("tr", tag("th", layer.layer, scope="row"), *cells))
    return _grid(
        "Experts by layer",
        "In percent; columns are the experts by the numbers of the table above. Left out: the part "
        "of the blocks that differ from the base's, as the mean of the experts.",
        heads,
        lines,
    )


def _grid(label: str, caption: str, heads: Sequence[Markup], lines: Sequence[Markup]) -> Markup:
    """Return a table of coloured numbers; its caption stands above it, as wide as the page."""
    head, body = tag("thead", tag("tr", *heads)), tag("tbody", *lines)
    inside = tag("table", head, body, class_="grid-table")
    return join([tag("p", caption, class_="caption"), scroll(label, inside, is_long=True)])


def _whole(share: float | None) -> str:
    """Return a share as whole percent, without the sign."""
    return figures.DASH if share is None else f"{100 * share:.0f}".replace("-0", "0")


def _sweep(sweep: SweepReport, plan: PlanReport) -> Iterator[Markup]:
    points = [
        BudgetPoint(
            one.planned_expert_bytes, one.error_bound, one.error_estimate, one.measured_error
        )
        for one in sweep.points
    ]
    chosen = BudgetPoint(plan.planned_expert_bytes, plan.error_bound, plan.error_estimate)
    title = f"{sweep.method} of {_count(len(sweep.experts), 'expert')} into {sweep.base}"
    yield scroll("Budget and error", curve.draw(points, title, chosen))
    yield tag(
        "p",
        "Further right reads more, lower is nearer to the full merge. The ring is this merge.",
        class_="caption",
    )
    rows = [
        (
            percent(one.share),
            format_size(one.planned_expert_bytes),
            percent(one.error_bound),
            percent(one.error_estimate),
            percent(one.error_share_estimate),
        )
        for one in sweep.points
    ]
    columns = [
        ("Budget", "n"),
        ("Read from experts", "n"),
        ("Certified bound", "n"),
        ("Estimate", "n"),
        ("Part of the change that is lost", "n"),
    ]
    yield details("The curve as a table", table("Errors by budget", columns, rows))


def _tensors(tensors: Sequence[ChangedTensor]) -> Markup:
    has_expert = any(one.expert is not None for one in tensors)
    columns = [
        ("Tensor", "name"),
        ("Change", "n"),
        ("Type", ""),
        ("Shape", "n"),
        *([("Blocks changed", "n")] if any(one.blocks is not None for one in tensors) else []),
        *([("Largest share", "n"), ("Expert", "name")] if has_expert else []),
    ]
    rows = []
    for one in tensors:
        row: list[Child | Cell] = [
            Cell(one.name, "name"),
            Cell(percent(one.change), "n", one.change),
            one.dtype or figures.DASH,
            Cell(_shape(one.shape), "n", None if one.shape is None else math.prod(one.shape)),
        ]
        if one.blocks is not None:
            row.append(Cell(f"{one.blocks_changed} of {one.blocks}", "n", one.blocks_changed))
        elif any(other.blocks is not None for other in tensors):
            row.append(figures.DASH)
        if has_expert:
            row += [Cell(percent(one.share), "n", one.share), one.expert or figures.DASH]
        rows.append(row)
    return table("The largest change first", columns, rows, sortable=True)


def _shape(shape: Sequence[int] | None) -> str:
    if shape is None:
        return figures.DASH
    return f" {figures.TIMES} ".join(map(str, shape)) or "scalar"


# -- similarity, blocks, notes -------------------------------------------------------------------


def _similarity(part: ComparedPart) -> Iterator[Markup]:
    names = [one.model for one in part.models]
    known = {frozenset((pair.a, pair.b)): pair for pair in part.pairs}
    heads = [tag("th", "model", scope="col")]
    heads += [tag("th", tag("abbr", n, title=name), scope="col") for n, name in enumerate(names, 1)]
    lines = []
    for n, one in enumerate(names):
        cells = []
        for k, other in enumerate(names):
            pair = known.get(frozenset((one, other)))
            cosine = 1.0 if n == k else pair.cosine if pair else None
            mark = "~" if n != k and pair and pair.deviation else ""
            told = figures.DASH if cosine is None else f"{mark}{COSINES.told(cosine)}"
            cells.append(tag("td", told, class_=COSINES.class_of(cosine)))
        lines.append(tag("tr", tag("th", f"{n + 1} {one}", scope="row"), *cells))
    deviations = [pair.deviation for pair in part.pairs if pair.deviation]
    caption = "Columns are the models by their numbers."
    if deviations:
        caption += (
            " ~ marks an estimate from statistics, whose standard deviation is at most "
            f"{max(deviations):.2g}."
        )
    yield _grid("Cosines", caption, heads, lines)


def _blocks(blocks: ReuseReport, shown: SnapshotReport) -> Iterator[Markup]:
    whole = blocks.stored_bytes or 1
    rows: list[Sequence[Child | Cell]] = []
    for one in (one for one in blocks.reused if one.blocks):
        name = ", ".join(one.parent.refs) or one.parent.snapshot.short
        rows.append(
            (
                f"from the {one.parent.role} {name}",
                Cell(one.blocks, "n"),
                Cell(format_size(one.stored_bytes), "n"),
                bar(one.stored_bytes / whole),
            )
        )
    rows.append(
        (
            "new: in no parent",
            Cell(blocks.new_blocks, "n"),
            Cell(format_size(blocks.new_bytes), "n"),
            bar(blocks.new_bytes / whole),
        )
    )
    columns = [("Origin", ""), ("Blocks", "n"), ("Stored", "n"), ("Part of all", "")]
    yield table(
        f"{_count(blocks.blocks, 'different block')}, {format_size(blocks.stored_bytes)} stored, "
        f"for {format_size(shown.plain_bytes)} of files",
        columns,
        rows,
    )
    if blocks.codecs:
        yield table(
            "How blocks are stored",
            [("Codec", ""), ("Blocks", "n"), ("Plain", "n"), ("Stored", "n"), ("Ratio", "n")],
            [
                (
                    one.codec,
                    one.blocks,
                    format_size(one.plain_bytes),
                    format_size(one.stored_bytes),
                    percent(one.stored_bytes / one.plain_bytes)
                    if one.plain_bytes
                    else figures.DASH,
                )
                for one in blocks.codecs
            ],
        )
    if blocks.tensors_computed:
        computed = _count(blocks.tensors_computed, "tensor")
        yield tag("p", f"{computed} of this virtual merge are computed on read.", class_="caption")
    if blocks.blocks_not_here:
        away = _count(blocks.blocks_not_here, "block")
        yield tag("p", f"{away} of it are not stored here.", class_="caption")


def _notes(shown: SnapshotReport) -> Iterator[Markup]:
    if not shown.notes:
        return
    columns = [
        ("Key", "name"),
        ("Kind", ""),
        ("Value", ""),
        ("By", ""),
        ("Signed", ""),
        ("When (UTC)", ""),
    ]
    rows = [
        (
            one.key,
            one.kind,
            _value(one),
            one.author or figures.DASH,
            lineage.signed(one.signatures) or figures.DASH,
            utc(one.time_ns),
        )
        for one in shown.notes
    ]
    yield table("What was noted about this snapshot since it was made", columns, rows)


def _value(note: NoteReport) -> Markup:
    return tag("code", _brief(note.value))


def _brief(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _recipe(text: str) -> Iterator[Markup]:
    yield tag("button", "Copy", type="button", data_of="recipe-text", hidden=True)
    yield tag("pre", tag("code", text, id="recipe-text"), tabindex="0", aria_label="Recipe")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- comparisons ---------------------------------------------------------------------------------


def _difference(summary: ComparisonSummary) -> Iterator[Child]:
    diff = summary.diff
    if not diff.files and not diff.tensors:
        yield "They have the same content."
        return
    yield f"{_count(len(diff.tensors), 'tensor')} and {_count(len(diff.files), 'file')} differ."
    if summary.change is not None:
        yield (
            f" In the tensors of both, {summary.name_b} differs from {summary.name_a} by "
            f"{percent(summary.change)} of its norm."
        )
    if summary.similarity is not None and summary.similarity.whole.pairs:
        pair = summary.similarity.whole.pairs[0]
        yield f" Both have one base; the cosine of their changes is {number(pair.cosine)}."


def _difference_tiles(summary: ComparisonSummary) -> Iterator[tuple[str, Child, Child]]:
    diff = summary.diff
    yield "Change", percent(summary.change), f"of the norm of {summary.name_a}"
    yield "Tensors that differ", len(diff.tensors), f"{diff.tensors_equal} are equal"
    yield "Files that differ", len(diff.files), f"{diff.files_equal} are equal"
    share = diff.blocks_changed / diff.blocks_total if diff.blocks_total else None
    yield "Blocks that differ", percent(share), f"{diff.blocks_changed} of {diff.blocks_total}"


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
        *_lineage(summary.lineage, *chosen, complete=summary.lineage_complete),
    )
    yield part(
        "change",
        "What differs where",
        f"Change is the norm of the difference from {summary.name_a}, "
        "relative to the norm of the same weights there.",
        *_maps(summary.maps),
    )
    if summary.tensors:
        yield part(
            "tensors",
            "Tensors that differ most",
            f"The {len(summary.tensors)} tensors with the largest change.",
            _tensors(summary.tensors),
        )
    if summary.similarity is not None:
        yield part(
            "similarity",
            "How alike their changes are",
            f"How far each moved from {summary.similarity.base}, and in which direction.",
            *_similarity(summary.similarity.whole),
        )
    if summary.diff.files:
        yield part("files", "Files that differ", None, _files(summary))


def _size(size: int | None) -> str:
    return figures.DASH if size is None else format_size(size)


def _files(summary: ComparisonSummary) -> Markup:
    found = summary.diff.files
    rows = [
        (one.path, one.status, _size(one.size_a), _size(one.size_b)) for one in found[:_FILES_SHOWN]
    ]
    more = len(found) - _FILES_SHOWN
    caption = "Files" if more <= 0 else f"The first {_FILES_SHOWN} files; {more} more differ"
    columns = [
        ("File", "name"),
        ("Status", ""),
        (f"Size in {summary.name_a}", "n"),
        (f"Size in {summary.name_b}", "n"),
    ]
    return table(caption, columns, rows)


# -- sections of other pages ---------------------------------------------------------------------


def lineage_section(found: Sequence[Ancestor], chosen: str, *, complete: bool) -> Markup:
    """Return what a snapshot was made from, as on its report.  chosen: the snapshot's id."""
    return section(
        "lineage",
        "Where it came from",
        "Time runs from left to right: each snapshot was made from those to its left.",
        *_lineage(found, chosen, complete=complete),
    )


def notes_section(shown: SnapshotReport) -> Markup:
    """Return what was noted about a snapshot, as on its report."""
    lead = None if shown.notes else "Nothing was noted about this snapshot."
    return section("notes", "Notes and evaluations", lead, *_notes(shown))
