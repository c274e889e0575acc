"""What push, fetch and pull share: how a transfer is limited, and how its report looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from mstore_cli.errors import Interrupted
from mstore_cli.output import Column, Screen, short
from mstore_cli.signers import states_of, trusted_signers
from mstore_cli.sizes import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from mstore import SnapshotId, Store
    from mstore.api.reports import FetchReport, MovedRef

COLUMNS = (Column("REF", style="green"), Column("SNAPSHOT", style="yellow"))
SIGNED = Column("SIGNED", sentence=True)

Signed = Mapping["SnapshotId", str]
"""What the signatures of snapshots are worth, in words; nothing of those without."""


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


def signers_for(store: Store, path: Path | None) -> Mapping[bytes, str] | None:
    """Return the trusted keys for a transfer that may need them; None where it does not.

    path: what --signers names. Raises as `trusted_signers`.
    """
    is_needed = path is not None or store.config["require_signed"]
    return trusted_signers(path) if is_needed else None


def signed(store: Store, moved: Sequence[MovedRef], path: Path | None) -> Signed:
    """Return what the signatures of snapshots to which refs moved are worth.

    path: what --signers names.
    """
    ids = dict.fromkeys(one.new for one in moved if one.new is not None)
    found = [id for id in ids if store.signatures_of(id)]
    # Most have none, and it takes longer to find the user's list of signers.
    signers = trusted_signers(path) if found else {}
    return {id: states_of(store.signatures_of(id, signers=signers)) or "" for id in found}


def show_fetched(screen: Screen, report: FetchReport, signatures: Signed) -> None:
    """Print what a fetch or a pull brought."""
    if not (report.fetched or report.moved or report.snapshots):
        screen.line(f"nothing new at {report.remote}", style="green")
        return
    screen.line(f"fetched from {report.remote}, {report.url}", style="green")
    show_moved(screen, report.fetched, f"{report.remote}/", signatures)
    if report.moved:
        screen.line("moved here", style="green")
        show_moved(screen, report.moved, signatures=signatures)
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("blocks", report.blocks),
            ("size", format_size(report.bytes_received)),
            ("time", format_seconds(report.seconds)),
        ]
    )


def show_moved(
    screen: Screen,
    moved: Sequence[MovedRef],
    begin: str = "",
    signatures: Signed = MappingProxyType({}),
) -> None:
    """Print a table of refs that moved; begin: what stands before their names."""
    rows = [
        (f"{begin}{one.name}", _move(one), signatures.get(one.new, "-") if one.new else "-")
        for one in moved
    ]
    if signatures:
        screen.table((*COLUMNS, SIGNED), rows)
    else:
        screen.table(COLUMNS, (row[:2] for row in rows))


def _move(one: MovedRef) -> str:
    if one.old is None:
        return f"{short(one.new)} (new)"
    return (
        f"{short(one.old)} (removed)" if one.new is None else f"{short(one.old)}..{short(one.new)}"
    )
