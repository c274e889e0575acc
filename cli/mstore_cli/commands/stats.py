"""`mstore stats`: how large a store is, and how much it saves."""

from __future__ import annotations

from mstore_cli.command import command
from mstore_cli.commands.du import CODEC_COLUMNS, codec_rows
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size, not_here


@command(example="mstore stats --json")
def stats(session: Session) -> None:
    """Print sizes and counts of the whole store."""
    with session.open() as store:
        report = store.stats()

    def human(screen: Screen) -> None:
        share = format_share(report.stored_bytes, report.plain_bytes)
        screen.fields(
            [
                ("store", report.path),
                ("uuid", report.uuid),
                ("format", report.format_version),
                ("block size", format_size(report.block_size)),
                ("refs", report.refs),
                ("snapshots", report.snapshots),
                ("packs", report.packs),
                ("blocks", report.blocks),
                ("tensors", report.tensors),
                ("as plain files", format_size(report.plain_bytes)),
                ("without repeats", format_size(report.unique_bytes)),
                ("stored", f"{format_size(report.stored_bytes)} ({share} of plain)"),
                ("unreachable", format_size(report.unreachable_bytes)),
                ("dead in packs", format_size(report.dead_bytes)),
                ("headers, tables", format_size(report.overhead_bytes)),
                ("condemned", format_size(report.condemned_bytes)),
                ("left by interrupted commands", format_size(report.leftover_bytes)),
                ("put aside in lost+found", format_size(report.lost_found_bytes)),
                ("index", format_size(report.index_bytes)),
                ("statistics", format_size(report.statistics_bytes)),
                ("memo table", format_size(report.memo_bytes)),
                ("cache", format_size(report.cache_bytes) if report.cache_bytes else None),
                *(("not here", not_here(one)) for one in report.leans_on),
            ]
        )
        useless = report.unreachable_bytes + report.dead_bytes + report.condemned_bytes
        if useless + report.leftover_bytes:
            screen.line()
            screen.command("what of these comes back, and how", "mstore gc --dry-run")
        if report.lost_found_bytes:
            screen.line()
            screen.command("to delete what lies in lost+found", "mstore gc --empty-lost-found")
        if report.codecs:
            screen.line()
        screen.table(CODEC_COLUMNS, codec_rows(report.codecs))

    session.output.emit(report, ids=[report.uuid], human=human)
