"""`mstore reindex`: rebuild the index."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import warn
from mstore_cli.options import Option
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size


@command(
    example="mstore reindex",
    failure="an error (somebody uses the store, say); the old index stays",
)
def reindex(
    session: Session,
    no_old_index: Annotated[
        bool,
        Option(
            "--no-old-index",
            help="Ignore the old index: take refs from the mirror, and no reflogs.",
        ),
    ] = False,
) -> None:
    """Rebuild the index from the packs.

    The refs come from their text mirror. Reflogs and the names of plans' inputs come from the old
    index, if it is readable. If mirror, reflog and old index disagree about a ref, the newest wins,
    and a warning says so. The store must not be in use: stop other commands and unmount it first.
    """
    from mstore import Store

    session.report_waiting()
    with session.progress() as tick:
        report = Store.reindex(session.store_path(), use_old_index=not no_old_index, progress=tick)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line("the index was rebuilt", style="green")
        history = f"{report.reflog_moves} moves taken over" if report.old_index else "starts empty"
        screen.fields(
            [
                ("packs", report.packs),
                ("blocks", report.blocks),
                ("records", report.records),
                ("snapshots", report.snapshots),
                ("refs", report.refs),
                ("recovered", ", ".join(report.recovered) or None),
                ("pruned", report.pruned or None),
                ("reflogs", history),
                ("index", format_size(report.index_bytes)),
                ("time", format_seconds(report.seconds)),
            ]
        )

    session.output.emit(report, ids=[], human=human)
    # Printed even with --quiet: users must see conflicts and unreadable sources.
    for remark in report.remarks:
        warn(session.typed(remark))
    if report.kept_index is not None:
        warn(f"the index that was replaced is kept: {report.kept_index}")
