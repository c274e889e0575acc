"""The page of `mstore du`: what refs take, what they share, and what would come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore.terms.sizes import format_size
from mstore_pages import treemap
from mstore_pages.document import Cell, bar, page, scroll, section, table, tiles
from mstore_pages.figures import DASH, percent
from mstore_pages.markup import Markup, tag
from mstore_pages.treemap import Share

if TYPE_CHECKING:
    from mstore.api.reports import CodecUsage, RefUsage, UsageReport


def usage_page(report: UsageReport, title: str) -> str:
    """Return the page.  title: the store, as its user calls it."""
    refs = sorted(report.refs, key=lambda ref: (-ref.portion_bytes, ref.name))
    count = f"{len(refs)} ref{'' if len(refs) == 1 else 's'}"
    parts = [_share(number, ref, report) for number, ref in enumerate(refs, 1)]
    return page(
        f"{title} - mstore du",
        tag("p", "mstore du", class_="kicker"),
        tag("h1", title),
        tag(
            "p",
            f"{count} take {format_size(report.stored_bytes)} together. Removing them all would "
            f"free {format_size(report.freed_bytes)}.",
            class_="verdict",
        ),
        tiles(
            [
                ("Together", format_size(report.stored_bytes), "stored blocks of these refs"),
                ("Freed together", format_size(report.freed_bytes), "by rm, and gc later"),
                ("Kept in all", format_size(report.live_bytes), "in the whole store"),
                ("Unreachable", format_size(report.unreachable_bytes), "gc may drop it"),
            ]
        ),
        section(
            "refs",
            "What each ref takes",
            "Areas are stored bytes. Hatched areas are shared with other refs.",
            scroll("Treemap of refs", treemap.draw(parts, "What each ref takes")),
            _refs(refs),
        ),
        section("codecs", "How blocks are stored", None, _codecs(report)),
        section("held", "Why blocks are kept", None, _held(report)),
    )


def _share(number: int, ref: RefUsage, report: UsageReport) -> Share:
    size = format_size(round(ref.portion_bytes))
    whole = report.stored_bytes or 1
    return Share(
        number=number,
        name=ref.name,
        size=size,
        only=float(ref.unique_bytes),
        shared=max(0.0, float(ref.portion_bytes - ref.unique_bytes)),
        told=f"{ref.name}: {size} ({percent(ref.portion_bytes / whole)}), of it "
        f"{format_size(ref.unique_bytes)} in this ref only",
    )


def _refs(refs: list[RefUsage]) -> Markup:
    columns = [
        ("Ref", "name"),
        ("Plain", "n"),
        ("Stored", "n"),
        ("Only here", "n"),
        ("Shared", "n"),
        ("Freed by rm", "n"),
    ]
    rows = [
        [
            Cell(f"{number} {ref.name}", "name", number),
            *(
                Cell(format_size(size), "n", size)
                for size in (
                    ref.plain_bytes,
                    ref.stored_bytes,
                    ref.unique_bytes,
                    ref.shared_bytes,
                    ref.freed_bytes,
                )
            ),
        ]
        for number, ref in enumerate(refs, 1)
    ]
    return table(
        "Refs by what they take; numbers are those of the picture.", columns, rows, sortable=True
    )


def _codecs(report: UsageReport) -> Markup:
    whole = sum(one.stored_bytes for one in report.codecs) or 1

    def row(one: CodecUsage) -> list[object]:
        ratio = percent(one.stored_bytes / one.plain_bytes) if one.plain_bytes else DASH
        sizes = format_size(one.plain_bytes), format_size(one.stored_bytes)
        return [one.codec, one.blocks, *sizes, ratio, bar(one.stored_bytes / whole)]

    columns = [
        ("Codec", ""),
        ("Blocks", "n"),
        ("Plain", "n"),
        ("Stored", "n"),
        ("Ratio", "n"),
        ("Part of all", ""),
    ]
    return table("Blocks of these refs by codec", columns, map(row, report.codecs))


def _held(report: UsageReport) -> Markup:
    held = report.held
    rows = (
        ("refs", held.refs),
        ("virtual merges: their inputs", held.virtual_inputs),
        ("lineage: what refs came from", held.lineage),
        (f"reflogs: moves of the last {report.reflog_days} days", held.reflog),
        ("operations that run now", held.running),
    )
    columns = [("Held by", ""), ("Stored", "n")]
    told = [(name, format_size(size)) for name, size in rows if size]
    return table("Each block counts once, for the first reason that applies", columns, told)
