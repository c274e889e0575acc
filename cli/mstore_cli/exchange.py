"""What push, fetch and pull share: how a transfer is limited, and how its report looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mstore_cli.errors import Interrupted
from mstore_cli.output import Column, Screen, short
from mstore_cli.sizes import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from mstore.api.reports import FetchReport, MovedRef

COLUMNS = (Column("REF", style="green"), Column("SNAPSHOT", style="yellow"))


def rate_of(text: str | None) -> int | None:
    """Parse the value of --limit-rate.  Raises BadRequest."""
    return None if text is None else parse_size(text, option="--limit-rate")


@contextmanager
def resumable() -> Iterator[None]:
    """Say how to go on, if the transfer is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted("the same command goes on from what was transferred") from stop


def show_fetched(screen: Screen, report: FetchReport) -> None:
    """Print what a fetch or a pull brought."""
    if not (report.fetched or report.moved or report.snapshots):
        screen.line(f"nothing new at {report.remote}", style="green")
        return
    screen.line(f"fetched from {report.remote}, {report.url}", style="green")
    show_moved(screen, report.fetched, f"{report.remote}/")
    if report.moved:
        screen.line("moved here", style="green")
        show_moved(screen, report.moved)
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("blocks", report.blocks),
            ("size", format_size(report.bytes_received)),
            ("time", format_seconds(report.seconds)),
        ]
    )


def show_moved(screen: Screen, moved: Sequence[MovedRef], begin: str = "") -> None:
    """Print a table of refs that moved; begin: what stands before their names."""
    screen.table(COLUMNS, ((f"{begin}{one.name}", _move(one)) for one in moved))


def _move(one: MovedRef) -> str:
    if one.old is None:
        return f"{short(one.new)} (new)"
    return (
        f"{short(one.old)} (removed)" if one.new is None else f"{short(one.old)}..{short(one.new)}"
    )
