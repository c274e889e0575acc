"""`mstore log`: snapshots, newest first, and the graph of their parents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.graph import draw, how, subject
from mstore_cli.options import Argument, Option, drawing
from mstore_cli.output import Column, Screen, named, noted, short, when
from mstore_cli.session import Session
from mstore_cli.signers import lines_on_unknown_keys, signatures_of, states_of, trusted_signers
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.api.reports import SnapshotReport

COLUMNS = (
    Column("SNAPSHOT", style="yellow"),
    Column("MADE"),
    Column("HOW"),
    Column("SIZE", right=True),
    Column("REFS", style="green", sentence=True),
    Column("SIGNED", sentence=True),
    Column("MESSAGE", sentence=True),
)
BY = Column("BY", sentence=True)
NOTES = Column("NOTES", sentence=True)


@command(example="mstore log llama/merged --graph")
def log(
    session: Session,
    revision: Annotated[
        str | None,
        Argument(
            metavar="REF",
            help="Start here [default: all branches and tags].",
            shell_complete=completion.refs,
        ),
    ] = None,
    graph: Annotated[
        bool, Option("--graph", help="Draw parents and their roles: base, expert, previous.")
    ] = False,
    limit: Annotated[
        int | None, Option("--limit", "-n", metavar="N", min=1, help="At most N snapshots.")
    ] = None,
    every: Annotated[
        bool, Option("--all", help="Every stored snapshot, also those that no ref reaches.")
    ] = False,
    notes: Annotated[bool, Option("--notes", help="Also what was noted about each.")] = False,
    svg: Annotated[Path | None, drawing(help="With --graph: also draw it to FILE, as SVG.")] = None,
) -> None:
    """List snapshots and what each was made from, newest first."""
    if every and revision is not None:
        raise UsageError("--all goes without REF", hint="mstore log --all")
    if svg is not None and not graph:
        raise UsageError("--svg belongs to --graph", hint="mstore log --graph --svg FILE")
    with session.open_to_look() as store:
        snapshots = store.log(revision, limit, every=every)
        # Most stores hold no signature, and it takes longer to find the user's list of signers.
        if any(any(signatures_of(one)) for one in snapshots):
            snapshots = store.log(revision, limit, every=every, signers=trusted_signers(None))
        stored = 0 if snapshots else len(store.snapshot_ids())
    if svg is not None:
        from mstore_cli import pictures
        from mstore_pages import lineage

        nodes = [
            lineage.node_of(one, is_chosen=number == 0) for number, one in enumerate(snapshots)
        ]
        pictures.write_svg(svg, lineage.draw(nodes))

    def human(screen: Screen) -> None:
        if not snapshots and stored:
            plural = "s" if stored > 1 else ""
            screen.command(f"{stored} snapshot{plural} that no ref reaches", "mstore log --all")
        elif not snapshots:
            screen.command("no snapshots yet; next", "mstore add PATH --name REF")
        elif graph:
            for line in draw(snapshots, screen.width, notes=notes):
                screen.line(line)
        else:
            # Of one author's snapshots, all say the same.
            by = len({one.author for one in snapshots}) > 1
            more = (NOTES,) if notes else ()
            columns = (*COLUMNS[:-1], *((BY,) if by else ()), COLUMNS[-1], *more)
            rows = (_row(snapshot, by=by, notes=notes) for snapshot in snapshots)
            screen.table(columns, rows)
            for line in lines_on_unknown_keys(one for each in snapshots for one in each.signatures):
                screen.line(line)
        if svg is not None:
            screen.line(f"drawn in {svg}")

    session.output.emit(
        {"snapshots": snapshots}, ids=[one.snapshot for one in snapshots], human=human
    )


def _row(snapshot: SnapshotReport, *, by: bool, notes: bool) -> Sequence[str]:
    return (
        short(snapshot.snapshot),
        when(snapshot.time_ns) if snapshot.time_ns else "-",
        how(snapshot),
        format_size(snapshot.plain_bytes),
        named(snapshot.refs),
        states_of(snapshot.signatures) or "-",
        *((snapshot.author or "-",) if by else ()),
        subject(snapshot),
        *(["; ".join(map(noted, snapshot.notes)) or "-"] if notes else []),
    )
