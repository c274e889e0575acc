"""`mstore du`: what refs take, who shares it, and what would be freed without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from mstore_cli import pictures
from mstore_cli.command import command
from mstore_cli.options import Option, RefNames, file_of
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mstore.api.reports import CodecUsage, RefUsage, UsageReport

REF_COLUMNS = (
    Column("REF"),
    Column("PLAIN", right=True),
    Column("STORED", right=True),
    Column("UNIQUE", right=True),
    Column("SHARED", right=True),
    Column("FREED BY RM", right=True),
)
SHARED_COLUMNS = (Column("REF"), Column("SHARES WITH"), Column("STORED", right=True))
HELD_COLUMNS = (Column("HELD BY", sentence=True), Column("STORED", right=True))
CODEC_COLUMNS = (
    Column("CODEC"),
    Column("BLOCKS", right=True),
    Column("PLAIN", right=True),
    Column("STORED", right=True),
    Column("RATIO", right=True),
)
SHARED_SHOWN = 10


@command(example="mstore du llama/old llama/older")
def du(
    session: Session,
    names: RefNames = (),
    html: Annotated[
        Path | None,
        Option(
            "--html",
            metavar="FILE",
            help="Also write a page with a treemap, to be opened in a browser.",
            type=file_of("html"),
        ),
    ] = None,
) -> None:
    """Print the space that refs use, share, and would free.

    Sizes are of blocks as stored: those of the ref's snapshot and the bases of its deltas. FREED BY
    RM also counts the ref's history, but not what something else keeps: other refs, their
    histories, reflogs. If you name refs, the command also prints what each shares with whom.
    """
    with session.open() as store:
        report = store.usage(names)
        path = str(store.path)
    # Computing this for all refs takes time quadratic in their number.
    told = (tuple(ref.shared_with) if names else () for ref in report.refs)
    refs = tuple(replace(ref, shared_with=one) for ref, one in zip(report.refs, told, strict=True))
    report = replace(report, refs=refs)
    if html is not None:
        from mstore_pages.usage import usage_page

        pictures.write(html, usage_page(report, path))

    def human(screen: Screen) -> None:
        _draw(screen, report, in_full=bool(names))
        if html is not None:
            screen.line(f"drawn in {html}")

    session.output.emit(report, ids=[ref.name for ref in report.refs], human=human)


def _draw(screen: Screen, report: UsageReport, *, in_full: bool) -> None:
    screen.table(REF_COLUMNS, (_ref_row(ref) for ref in report.refs))
    if in_full and any(ref.shared_with for ref in report.refs):
        screen.line()
        screen.table(SHARED_COLUMNS, (row for ref in report.refs for row in _shared_rows(ref)))
    if report.codecs:
        screen.line()
        screen.table(CODEC_COLUMNS, codec_rows(report.codecs))
    screen.line()
    days = report.reflog_days
    gc = screen.typed(_gc(report))
    later = f"by rm, and gc {days} days later" if days else "by rm and gc"
    screen.fields(
        [
            ("together", format_size(report.stored_bytes)),
            ("freed together", f"{format_size(report.freed_bytes)} {later}"),
            ("kept in all", format_size(report.live_bytes)),
            ("unreachable", f"{format_size(report.unreachable_bytes)}{gc}"),
        ]
    )
    if report.live_bytes:
        screen.line()
        rows = ((screen.typed(name), size) for name, size in _held_rows(report))
        screen.table(HELD_COLUMNS, rows)
    if any(ref.stored_bytes > ref.plain_bytes for ref in report.refs):
        screen.line()
        screen.line(
            "STORED above 100 %: it counts the bases of differences too, which others may share"
        )


def _shared_rows(ref: RefUsage) -> Iterator[tuple[str, str, str]]:
    """Yield the refs with which a ref shares most, and how many others there are."""
    most = ref.shared_with
    for other in most[:SHARED_SHOWN]:
        yield ref.name, other.name, format_size(other.stored_bytes)
    if len(most) > SHARED_SHOWN:
        more = len(most) - SHARED_SHOWN
        yield ref.name, f"{more} more", f"up to {format_size(most[SHARED_SHOWN].stored_bytes)} each"


def _gc(report: UsageReport) -> str:
    return ": mstore gc --dry-run says what comes back" if report.unreachable_bytes else ""


def _held_rows(report: UsageReport) -> list[tuple[str, str]]:
    """Return rows for the nonempty reasons, and the total."""
    held = report.held
    rows = (
        ("refs", held.refs),
        ("virtual merges: their inputs", held.virtual_inputs),
        ("lineage: what refs came from (mstore prune)", held.lineage),
        (
            f"reflogs: moves of the last {report.reflog_days} days (mstore gc --reflog-days 0)",
            held.reflog,
        ),
        ("operations that run now", held.running),
    )
    return [(name, format_size(size)) for name, size in rows if size]


def _ref_row(ref: RefUsage) -> tuple[str, ...]:
    return (
        ref.name,
        format_size(ref.plain_bytes),
        f"{format_size(ref.stored_bytes)} ({format_share(ref.stored_bytes, ref.plain_bytes)})",
        format_size(ref.unique_bytes),
        format_size(ref.shared_bytes),
        format_size(ref.freed_bytes),
    )


def codec_rows(codecs: Sequence[CodecUsage]) -> list[tuple[str, ...]]:
    """Rows for CODEC_COLUMNS."""
    return [
        (
            one.codec,
            str(one.blocks),
            format_size(one.plain_bytes),
            format_size(one.stored_bytes),
            format_share(one.stored_bytes, one.plain_bytes),
        )
        for one in codecs
    ]
