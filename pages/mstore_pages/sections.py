"""What stands in the sections of a page: tables, and pictures beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from string import Formatter
from typing import TYPE_CHECKING

from mstore.terms.phrases import Call, Option, Phrase, Text, call
from mstore.terms.report import utc
from mstore.terms.sizes import counted, format_size
from mstore_pages import curve, figures, lineage, scores
from mstore_pages.curve import BudgetPoint
from mstore_pages.document import Cell, bar, details, scroll, table
from mstore_pages.figures import COSINES, SIGNED, number, percent
from mstore_pages.markup import Child, Markup, breaking, join, tag

if TYPE_CHECKING:
    from mstore.api.reports import (
        ComparedPart,
        PlanReport,
        ReuseReport,
        SnapshotReport,
        SweepReport,
    )
    from mstore_pages.summary import (
        Ancestor,
        ChangedTensor,
        ComparisonSummary,
        LayerShare,
        SnapshotSummary,
    )

Typed = Callable[[Text], str]
FILES_SHOWN = 60
NAMES_ACROSS = 6
"""Of more models, columns have numbers in place of names."""
_CODECS = {
    "raw": "as it is",
    "constant": "one value, repeated",
    "zstd": "compressed by zstd",
    "floats": "floats, their bytes by significance",
    "delta": "as the difference from a block of the base",
}
"""How blocks are stored, in a few words."""


def ancestry(found: Sequence[Ancestor], *chosen: str, complete: bool) -> Iterator[Markup]:
    nodes = [
        lineage.node_of(one.snapshot, one.licence, is_chosen=str(one.snapshot.snapshot) in chosen)
        for one in found
    ]
    yield scroll("Lineage", lineage.draw(nodes))
    if not complete:
        yield tag("p", f"Older snapshots than these {len(found)} are not shown.", class_="caption")
    names = {str(one.snapshot.snapshot): _named(one.snapshot) for one in found}
    has_origins = any(one.snapshot.origin for one in found)
    rows: list[Sequence[Child | Cell]] = []
    for one in found:
        shown = one.snapshot
        parents = [
            f"{parent.role} {names.get(str(parent.snapshot), parent.snapshot.short)}"
            for parent in shown.parents
        ]
        rows.append(
            (
                _named(shown),
                Cell(tag("code", shown.snapshot.short), "when"),
                Cell(lineage.how(shown), "when"),
                *([shown.origin.url if shown.origin else figures.DASH] if has_origins else []),
                Cell("; ".join(parents) or figures.DASH, "wide" if parents else ""),
                one.licence or figures.DASH,
                shown.author or figures.DASH,
                lineage.signed(shown.signatures) or figures.DASH,
                Cell(utc(shown.time_ns) if shown.time_ns else figures.DASH, "when"),
            )
        )
    columns = [
        ("Name", "name"),
        ("Snapshot", ""),
        ("How", ""),
        *([("Origin", "")] if has_origins else []),
        ("Made from", ""),
        ("Licence", ""),
        ("Author", ""),
        ("Signed", ""),
        ("Made (UTC)", ""),
    ]
    yield details("The lineage as a table", table("Children before their parents", columns, rows))


def _named(shown: SnapshotReport) -> str:
    return ", ".join(shown.refs) or shown.snapshot.short


def experts(summary: SnapshotSummary, typed: Typed) -> Iterator[Markup]:
    columns = [
        ("Expert", "name"),
        ("Weight", "n"),
        (f"Change from {summary.base or 'the base'}", "n"),
        ("Share of the merge's change", "n"),
        ("Blocks used", "n"),
        ("", ""),
        ("Blocks left out", "n"),
        ("Blocks equal to the base's", "n"),
    ]
    is_many = len(summary.experts) > NAMES_ACROSS
    rows: list[Sequence[Child | Cell]] = []
    for n, one in enumerate(summary.experts, 1):
        every = one.chunks or 1
        used, out = one.chunks_used / every, one.chunks_left_out / every
        equal = one.chunks_equal_base / ((one.chunks + one.chunks_equal_base) or 1)
        rows.append(
            (
                Cell(f"{n} {one.expert}" if is_many else one.expert, "name", n),
                Cell(number(one.weight), "", one.weight),
                Cell(percent(one.change), "", one.change),
                Cell(percent(one.share), "", one.share),
                Cell(f"{one.chunks_used} of {one.chunks}", "", used),
                bar(used, out),
                Cell(percent(out), "", out),
                Cell(percent(equal), "", equal),
            )
        )
    yield table("Experts", columns, rows, sortable=True)
    yield tag(
        "p",
        "A block is a piece of a tensor of at most 1\u00a0MiB, unless the store was made with "
        "another size. Used and left out are parts of the blocks in which an expert differs from "
        f"the base; {_limit_of(summary.plan)} left out what was not used.",
        class_="caption",
    )
    why = summary.gaps.get("shares")
    if why is not None:
        yield tag("p", f"Shares are not known: {typed(why)}.", class_="gap")
    if any(share is not None for one in summary.layers for share in one.shares):
        yield tag("h3", "Share of each expert, by layer")
        yield _layer_table(summary)


def _limit_of(plan: PlanReport | None) -> str:
    """Return what left out blocks of experts."""
    return "the budget" if plan is None or plan.top_p is None else "the budget or top-p"


def _heads(names: Sequence[str]) -> list[Markup]:
    """Return heads of columns of models: names, of many only their numbers."""
    if len(names) <= NAMES_ACROSS:
        return [tag("th", name, scope="col") for name in names]
    return [tag("th", tag("abbr", n, title=name), scope="col") for n, name in enumerate(names, 1)]


def _left_out(layer: LayerShare) -> str:
    """Return how many experts a layer has nothing of, and has not all of."""
    whole = sum(one == 1 for one in layer.left_out)
    partly = sum(one is not None and 0 < one < 1 for one in layer.left_out)
    more = f", {partly} in part" if partly else ""
    return f"{whole} of {len(layer.left_out)}{more}"


def _layer_table(summary: SnapshotSummary) -> Markup:
    names = [one.expert for one in summary.experts]
    heads = [tag("th", "layer", scope="col")]
    heads += [tag("th", one, scope="col") for one in ("largest share", "experts left out")]
    heads += _heads(names)
    kinds = {layer.layer.rpartition(".")[0] for layer in summary.layers}
    # Of layers of one kind, their numbers tell which.
    kind = f"{next(iter(kinds))}." if len(kinds) == 1 else ""
    lines = []
    for layer in summary.layers:
        known = [(one, -n) for n, one in enumerate(layer.shares) if one is not None]
        best = -max(known)[1] if known else None
        number = "" if len(names) <= NAMES_ACROSS else f"{(best or 0) + 1} "
        told = figures.DASH if best is None else f"{number}{names[best]}"
        cells = [
            tag("td", told, class_="largest"),
            tag("td", _left_out(layer), class_="words"),
            *(tag("td", _whole(one), class_=SIGNED.class_of(one)) for one in layer.shares),
        ]
        lines.append(tag("tr", tag("th", layer.layer.removeprefix(kind), scope="row"), *cells))
    return _grid(
        "Experts by layer",
        "Shares are in percent."
        + (f" Layers are those of {kind.removesuffix('.')}." if kind.strip(".") else "")
        + ("" if len(names) <= NAMES_ACROSS else " Columns are the experts by their numbers above.")
        + " An expert is left out of a layer if none of its blocks were used there.",
        heads,
        lines,
    )


def warnings(told: Sequence[Text], typed: Typed) -> Markup:
    """Return what is likely to be a mistake, with the commands that it names as code."""

    def line(one: Text) -> Child:
        if not isinstance(one, Phrase):
            return typed(one)
        pieces: list[Child] = []
        for text, key, _, _ in Formatter().parse(one.template):
            part = one.parts.get(key) if key else None
            pieces.append(text)
            if isinstance(part, Call | Option):
                pieces.append(tag("code", typed(part)))
            elif part is not None:
                pieces.append(typed(part) if isinstance(part, Phrase) else part)
        return join(pieces)

    return tag("ul", *(tag("li", line(one)) for one in told), class_="warnings")


def _grid(label: str, caption: str, heads: Sequence[Markup], lines: Sequence[Markup]) -> Markup:
    """Return a table of coloured numbers; its caption stands above it, as wide as the page."""
    head, body = tag("thead", tag("tr", *heads)), tag("tbody", *lines)
    inside = tag("table", head, body, class_="grid-table")
    return join([tag("p", caption, class_="caption"), scroll(label, inside, is_long=True)])


def _whole(share: float | None) -> str:
    """Return a share as whole percent, without the sign."""
    return figures.DASH if share is None else f"{100 * share:.0f}".replace("-0", "0")


def budgets(sweep: SweepReport, plan: PlanReport) -> Iterator[Markup]:
    points = [
        BudgetPoint(
            one.planned_expert_bytes, one.error_bound, one.error_estimate, one.measured_error
        )
        for one in sweep.points
    ]
    chosen = BudgetPoint(plan.planned_expert_bytes, plan.error_bound, plan.error_estimate)
    title = f"{sweep.method} of {counted(len(sweep.experts), 'expert')} into {sweep.base}"
    yield scroll("Budget and error", curve.draw(points, title, chosen))
    yield tag(
        "p",
        "Further right reads more, lower is nearer to the full merge. The ring is this merge.",
        class_="caption",
    )
    has_bound = any(one.error_bound is not None for one in sweep.points)
    if any(one.error_share_estimate for one in sweep.points):
        yield tag(
            "p",
            "An error of a few percent of the base's norm can be much of the change: where large "
            "tensors that nothing changed, such as embeddings, make up most of the norm, the whole "
            "change is small beside it. The table has both.",
            class_="caption",
        )
    rows = [
        (
            percent(one.share),
            format_size(one.planned_expert_bytes),
            *([percent(one.error_bound)] if has_bound else []),
            percent(one.error_estimate, figures.ESTIMATED),
            percent(one.error_share_estimate, figures.ESTIMATED),
        )
        for one in sweep.points
    ]
    columns = [
        ("Budget", "n"),
        ("Read from experts", "n"),
        *([("Certified bound", "n")] if has_bound else []),
        ("Estimate", "n"),
        ("Lost of the full merge's change", "n"),
    ]
    yield details("The curve as a table", table("Errors by budget", columns, rows))


def tensors(tensors: Sequence[ChangedTensor], base: str | None = None) -> Markup:
    has_expert = any(one.expert is not None for one in tensors)
    columns = [
        ("Tensor", "name"),
        (f"Change from {base}" if base else "Change", "n"),
        ("Type", ""),
        ("Shape", "n"),
        *([("Blocks changed", "n")] if any(one.blocks is not None for one in tensors) else []),
        *([("Largest share", "n"), ("Expert", "name")] if has_expert else []),
    ]
    rows = []
    for one in tensors:
        row: list[Child | Cell] = [
            Cell(breaking(one.name), "name"),
            Cell(percent(one.change), "n", one.change),
            one.dtype or figures.DASH,
            Cell(shape_of(one.shape), "n", None if one.shape is None else math.prod(one.shape)),
        ]
        if one.blocks is not None:
            row.append(Cell(f"{one.blocks_changed} of {one.blocks}", "n", one.blocks_changed))
        elif any(other.blocks is not None for other in tensors):
            row.append(figures.DASH)
        if has_expert:
            row += [Cell(percent(one.share), "n", one.share), one.expert or figures.DASH]
        rows.append(row)
    return table("The largest change first", columns, rows, sortable=True)


def shape_of(shape: Sequence[int] | None) -> str:
    """Return the shape of a tensor; None: a dash."""
    if shape is None:
        return figures.DASH
    return f" {figures.TIMES} ".join(map(str, shape)) or "scalar"


def similarity(part: ComparedPart) -> Iterator[Markup]:
    names = [one.model for one in part.models]
    known = {frozenset((pair.a, pair.b)): pair for pair in part.pairs}
    heads = [tag("th", "model", scope="col")]
    heads += _heads(names)
    deviations = [pair.deviation for pair in part.pairs if pair.cosine is not None]
    is_mixed = any(deviations) and not all(deviations)
    lines = []
    for n, one in enumerate(names):
        cells = []
        for k, other in enumerate(names):
            pair = known.get(frozenset((one, other)))
            cosine = 1.0 if n == k else pair.cosine if pair else None
            deviation = pair.deviation if n != k and pair and pair.deviation else 0.0
            mark = "~" if deviation and is_mixed else ""
            told = figures.DASH if cosine is None else f"{mark}{COSINES.told(cosine)}"
            # What may be chance has no colour.
            is_chance = cosine is not None and abs(cosine) <= deviation
            level = COSINES.class_of(0.0 if is_chance else cosine)
            cells.append(tag("td", told, class_=level))
        label = one if len(names) <= NAMES_ACROSS else f"{n + 1} {one}"
        lines.append(tag("tr", tag("th", label, scope="row"), *cells))
    captions = []
    if len(names) > NAMES_ACROSS:
        captions.append("Columns are the models by their numbers.")
    if any(deviations):
        marked = "Those with ~" if is_mixed else "They"
        captions.append(
            f"{marked} are estimates from statistics, with a standard deviation of at most "
            f"{max(one for one in deviations if one):.1g}; what is within it has no colour."
        )
    yield _grid("Cosines", " ".join(captions), heads, lines)


def blocks(blocks: ReuseReport, shown: SnapshotReport) -> Iterator[Markup]:
    whole = blocks.stored_bytes or 1
    rows: list[Sequence[Child | Cell]] = []
    for one in (one for one in blocks.reused if one.blocks):
        name = ", ".join(one.parent.refs) or one.parent.snapshot.short
        rows.append(
            (
                f"from the {one.parent.role} {name}",
                Cell(one.blocks, "n"),
                Cell(format_size(one.stored_bytes), "n"),
                Cell(percent(one.stored_bytes / whole), "n"),
                bar(one.stored_bytes / whole),
            )
        )
    rows.append(
        (
            "new: in no parent",
            Cell(blocks.new_blocks, "n"),
            Cell(format_size(blocks.new_bytes), "n"),
            Cell(percent(blocks.new_bytes / whole), "n"),
            bar(blocks.new_bytes / whole),
        )
    )
    columns = [("Origin", ""), ("Blocks", "n"), ("Stored", "n"), ("Part of all", "n"), ("", "")]
    yield table(
        f"{counted(blocks.blocks, 'different block')}, {format_size(blocks.stored_bytes)} stored, "
        f"for {format_size(shown.plain_bytes)} of files",
        columns,
        rows,
    )
    if blocks.codecs:
        yield table(
            "How blocks are stored",
            [
                ("Codec", ""),
                ("Which is", ""),
                ("Blocks", "n"),
                ("Plain", "n"),
                ("Stored", "n"),
                ("Ratio", "n"),
            ],
            [
                (
                    one.codec,
                    _CODECS.get(one.codec, figures.DASH),
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
        computed = counted(blocks.tensors_computed, "tensor")
        yield tag("p", f"{computed} of this virtual merge are computed on read.", class_="caption")
    if blocks.blocks_not_here:
        away = counted(blocks.blocks_not_here, "block")
        yield tag("p", f"{away} of it are not stored here.", class_="caption")


def notes(shown: SnapshotReport, lineage_of: tuple[Ancestor, ...]) -> Iterator[Markup]:
    if not shown.notes:
        return
    yield from scores.beside_parents(shown, lineage_of)
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
            Cell(scores.written(one), "wide"),
            one.author or figures.DASH,
            lineage.signed(one.signatures) or figures.DASH,
            Cell(utc(one.time_ns), "when"),
        )
        for one in shown.notes
    ]
    yield table("What was noted about this snapshot since it was made", columns, rows)


def recipe(text: str, plan: PlanReport, typed: Typed) -> Iterator[Markup]:
    yield _copied(text, "recipe-text", "Recipe")
    limits = {
        "its budget": plan.budget_bytes,
        "its limit of the error": plan.max_error,
        "the budget of each expert": plan.expert_budget_bytes,
        "the share of blocks that it writes (top-p)": plan.top_p,
    }
    missing = [name for name, value in limits.items() if value is not None]
    again = call("merge", plan=str(plan.plan), name="REF")
    if missing:
        yield tag(
            "p",
            f"The recipe leaves out {' and '.join(missing)}: by itself it gives the full merge. "
            "In this store, the plan repeats the merge as it was; REF is the branch to write:",
        )
    else:
        yield tag("p", "In this store, the plan repeats the merge; REF is the branch to write:")
    yield _copied(typed(again), "plan-text", "Command")


def _copied(text: str, id: str, label: str) -> Markup:
    """Return text as it is typed, with a button that copies it."""
    return join(
        [
            tag("button", "Copy", type="button", data_of=id, hidden=True),
            tag("pre", tag("code", text, id=id), tabindex="0", aria_label=label),
        ]
    )


def _size(size: int | None) -> str:
    return figures.DASH if size is None else format_size(size)


def files(summary: ComparisonSummary) -> Markup:
    found = summary.diff.files
    rows = [
        (one.path, one.status, _size(one.size_a), _size(one.size_b)) for one in found[:FILES_SHOWN]
    ]
    more = len(found) - FILES_SHOWN
    caption = "Files" if more <= 0 else f"The first {FILES_SHOWN} files; {more} more differ"
    columns = [
        ("File", "name"),
        ("Status", ""),
        (f"Size in {summary.name_a}", "n"),
        (f"Size in {summary.name_b}", "n"),
    ]
    return table(caption, columns, rows)
