"""`mstore remote show`: what a remote has."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.options import Remote
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_size

if TYPE_CHECKING:
    from mstore.api.reports import RemoteContents, RemoteRef

COLUMNS = (
    Column("NAME", style="green"),
    Column("KIND"),
    Column("SNAPSHOT", style="yellow"),
    Column("HERE"),
    Column("LOCAL", sentence=True),
)


@command(
    example="mstore remote show origin",
    failure="there is no remote at this address, it does not answer, or another error",
)
def remote_show(session: Session, name: Remote) -> None:
    """Ask a remote which refs it has, and how much.

    HERE says whether this store has the snapshot: others come with `mstore fetch`. LOCAL compares
    your branch or tag of the same name: how many snapshots of its history the remote's lacks
    (ahead), and the other way round (behind); no model is read for that. Snapshots without contents
    are ancestors of others.
    """
    with session.open_to_exchange() as store:
        report = store.remote_contents(name)

    def human(screen: Screen) -> None:
        screen.fields(
            [
                ("url", report.url),
                ("uuid", report.uuid),
                ("changes", report.generation),
                ("block size", format_size(report.block_size)),
                ("snapshots", _snapshots(report)),
                ("size", f"{counted(report.packs, 'pack')}, {format_size(report.bytes)}"),
            ]
        )
        if not report.refs:
            screen.command("it has no refs; next", f"mstore push {name} --all")
        screen.table(
            COLUMNS,
            (
                (
                    one.name,
                    one.kind,
                    short(one.snapshot),
                    "yes" if one.is_here else "no",
                    _compared(one),
                )
                for one in report.refs
            ),
        )
        if any(one.snapshot != one.local and one.behind != 0 for one in report.refs):
            screen.command("to get what is new", f"mstore pull {name}")
        ahead = [shlex.quote(one.name) for one in report.refs if one.ahead and not one.behind]
        if ahead:
            screen.command("to send what is new", f"mstore push {name} {' '.join(ahead)}")

    session.output.emit(report, ids=[one.name for one in report.refs], human=human)


def _snapshots(report: RemoteContents) -> str:
    lacking = report.snapshots - report.whole_snapshots
    return f"{report.snapshots}, {lacking} without contents" if lacking else f"{report.snapshots}"


def _compared(one: RemoteRef) -> str:
    if one.local is None:
        return "-"
    if one.local == one.snapshot:
        return "same"
    counts = ((one.ahead, "ahead"), (one.behind, "behind"))
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "other"
