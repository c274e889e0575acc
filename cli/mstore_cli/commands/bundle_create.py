"""`mstore bundle create`: models in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.exchange import left_out
from mstore_cli.options import Argument
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import BundleReport


@command(
    decodes=True,
    example="mstore bundle create merged.mbundle llama/merged",
    failure="FILE exists, or another error; no file was made",
)
def bundle_create(
    session: Session,
    file: Annotated[Path, Argument(metavar="FILE", help="A new file.")],
    refs: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Branches and tags, or patterns of them.",
            shell_complete=completion.named,
        ),
    ],
) -> None:
    """Write models into one file, for one person.

    Whoever has the file makes a store of it, or adds it to one: `mstore clone bundle:FILE DIR`,
    `mstore remote add NAME bundle:FILE`. It is a zip that is not compressed: models are in it as
    they lie in the store.

    The file has what the refs need, with statistics, notes and signatures. Of ancestors it has only
    records; to add their contents, name a ref of theirs, too. It has no reflogs and no settings.
    """
    with session.open() as store, session.progress() as tick:
        report = store.bundle(file, refs, progress=tick)
        session.settled()
    session.output.emit(report, ids=[report.path], human=lambda screen: _show(screen, report))


def _show(screen: Screen, report: BundleReport) -> None:
    screen.line(f"{report.path} has {', '.join(report.refs)}", style="green")
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("left out", left_out(report.without_contents)),
            ("blocks", report.blocks),
            ("size", format_size(report.bytes)),
            ("time", format_seconds(report.seconds)),
        ]
    )
    screen.command("to make a store of it", f"mstore clone bundle:{report.path} DIR")
