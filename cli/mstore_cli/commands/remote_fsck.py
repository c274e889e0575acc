"""`mstore remote fsck`: check a remote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.options import JOBS, Jobs, Option, Remote
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import RemoteCheckReport

COLUMNS = (Column("WHERE"), Column("WHAT", sentence=True), Column("REFS", sentence=True))


@command(
    decodes=True,
    example="mstore remote fsck origin --read-data",
    failure="the remote lacks something or is damaged, or another error",
)
def remote_fsck(
    session: Session,
    name: Remote,
    read_data: Annotated[
        bool, Option("--read-data", help="Also read every block, and compare it with its hash.")
    ] = False,
    jobs: Jobs = JOBS,
) -> None:
    """Check that a remote has what its refs need, whole.

    Without --read-data it asks for records and sizes only. Nothing changes there.
    """
    with session.open_to_exchange() as store, session.progress() as tick:
        report = store.remote_fsck(name, read_data=read_data, jobs=jobs, progress=tick)
    session.output.emit(
        report,
        ids=[one.where for one in report.problems],
        human=lambda screen: _show(screen, report, is_read=read_data),
    )
    if report.problems:
        raise Ended(FAILURE)


def _show(screen: Screen, report: RemoteCheckReport, *, is_read: bool) -> None:
    if report.problems:
        found = counted(len(report.problems), "problem")
        screen.line(f"{found} at {report.remote}, {report.url}", style="red")
    else:
        screen.line(f"no problems at {report.remote}, {report.url}", style="green")
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("packs", report.packs),
            ("blocks", report.blocks),
            ("read", format_size(report.bytes_read) if is_read else None),
            ("time", format_seconds(report.seconds)),
        ]
    )
    screen.table(
        COLUMNS, ((one.where, one.what, ", ".join(one.refs) or "-") for one in report.problems)
    )
    if report.hint is not None:
        screen.line(f"next: {screen.typed(report.hint)}")
    elif not is_read:
        command = f"mstore remote fsck {report.remote} --read-data"
        screen.command("the bytes of blocks were not read; to read them", command)
