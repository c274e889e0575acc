"""`mstore fsck`: check a store, and repair it."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended, UsageError
from mstore_cli.merging import parse_share
from mstore_cli.options import Option, Threads
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_share, format_size, not_here

if TYPE_CHECKING:
    from mstore.api.reports import Affected, CheckReport, Problem, RepairReport
    from mstore.terms.phrases import Phrase, Text

    Typed = Callable[[Text], str]
    """Formats a text of the library, with its commands as this user types them."""

PROBLEMS = (Column("PROBLEM", style="red"), Column("WHERE"), Column("WHAT", sentence=True))
AFFECTED = (
    Column("AFFECTED", style="red", sentence=True),
    Column("FILE"),
    Column("TENSOR"),
    Column("BLOCKS LOST"),
)


@command(
    decodes=True,
    example="mstore fsck --read-data --repair --from /backup/store",
    failure="problems were found (with --repair: remain), or another error",
)
def fsck(
    session: Session,
    read_data: Annotated[
        bool, Option("--read-data", help="Also read and verify every block.")
    ] = False,
    sample: Annotated[
        str | None,
        Option(
            "--sample",
            metavar="SHARE",
            help="Read and verify a random share of the blocks, such as 5%.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        Option(
            "--seed", metavar="N", min=0, help="Seed of the sample, to read the same blocks again."
        ),
    ] = None,
    repair: Annotated[
        bool,
        Option("--repair", help="Replace damaged blocks by good copies."),
    ] = False,
    places: Annotated[
        tuple[Path, ...],
        Option(
            "--from",
            metavar="PLACE",
            help="Another store or a checkpoint that may have good copies. Repeatable.",
        ),
    ] = (),
    threads: Threads = None,
) -> None:
    """Check the store; repair it with --repair.

    Checks packs, index, records and refs; with --read-data every byte. Nothing changes without
    --repair. Garbage is what interrupted commands left behind; it does no
    harm. --repair takes good copies from the store's own packs and from each --from, checks every
    byte, and drops blocks without a good copy. It lists what that affects. Add the original files
    again to restore it.
    """
    if places and not repair:
        raise UsageError("--from goes with --repair", hint="mstore fsck --repair --from PLACE")
    if seed is not None and sample is None:
        raise UsageError("--seed goes with --sample", hint="mstore fsck --sample 5% --seed N")
    if sample is not None and (repair or read_data):
        raise UsageError("--sample stands alone", hint="mstore fsck --sample 5%")
    if repair:
        _repair(session, places, read_data=read_data, threads=threads)
        return
    share = None if sample is None else parse_share(sample, "--sample")
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    with session.open_checked() as store, session.progress() as tick:
        report = store.fsck(
            read_data=read_data, sample=share, seed=seed, threads=threads, progress=tick
        )
    session.output.emit(
        report,
        ids=[one.where for one in report.problems],
        human=lambda screen: _show(screen, report, session.typed),
    )
    if report.problems:
        raise Ended(FAILURE)


def _repair(
    session: Session, places: Sequence[Path], *, read_data: bool, threads: int | None
) -> None:
    with session.open_checked() as store, session.progress() as tick:
        report = store.repair(sources=places, read_data=read_data, threads=threads, progress=tick)
        session.settled()
    session.output.emit(
        report,
        ids=[one.where for one in report.after.problems],
        human=lambda screen: _show_repair(screen, report, places, session.typed),
    )
    if report.after.problems:
        raise Ended(FAILURE)


def _show(screen: Screen, report: CheckReport, typed: Typed) -> None:
    _headline(screen, len(report.problems), "found", is_partial=_is_unread(report))
    if report.index_only:
        screen.line("only the index was checked: without a sound one, nothing else can be judged")
        screen.line("models are in the packs, and the index can be rebuilt from these")
        _damage(screen, report, typed)
        return
    read = format_size(report.bytes_read)
    if report.bytes_read:
        read += f" ({format_share(report.bytes_read, report.bytes_total)} of the blocks)"
    screen.fields(
        [
            ("packs", report.packs),
            ("blocks", report.blocks),
            ("records", report.records),
            ("snapshots", report.snapshots),
            ("refs", report.refs),
            ("read", f"{read} in {format_seconds(report.seconds)}"),
            ("seed", report.seed),
            *(("not here", not_here(one)) for one in report.leans_on),
            ("garbage", ", ".join(report.garbage) or None),
        ]
    )
    if report.garbage:
        screen.advice(
            "garbage is harmless: the next command that writes removes what is in tmp, and mstore "
            "gc what it condemned; packs that the index does not know gc moves to lost+found"
        )
    if _is_unread(report):
        _not_read(screen, typed("mstore fsck --read-data"))
    _damage(screen, report, typed)


def _show_repair(
    screen: Screen, report: RepairReport, places: Sequence[Path], typed: Typed
) -> None:
    _headline(screen, len(report.before.problems), "found", is_partial=_is_unread(report.before))
    screen.fields(
        [
            ("healed", len(report.healed)),
            ("dropped", len(report.dropped) or None),
            ("written", format_size(report.bytes_written)),
            ("condemned", ", ".join(short(pack) for pack in report.condemned) or None),
            ("kept", ", ".join(short(pack) for pack in report.kept) or None),
            ("time", format_seconds(report.seconds)),
        ]
    )
    if report.condemned:
        screen.advice("condemned packs hold nothing that is used: the next mstore gc removes them")
    if _is_unread(report.before):
        given = "".join(f" --from {shlex.quote(str(place))}" for place in places)
        _not_read(screen, typed(f"mstore fsck --repair --read-data{given}"))
    if report.before.problems:
        screen.line()
        _headline(screen, len(report.after.problems), "left")
        _damage(screen, report.after, typed)


def _not_read(screen: Screen, command: str) -> None:
    """Note that the blocks were not read: only reading them finds bit rot."""
    screen.line(f"the bytes of blocks were not read; to read them: {command}")


def _is_unread(report: CheckReport) -> bool:
    return report.blocks > 0 and not report.bytes_read


def _headline(screen: Screen, count: int, word: str, *, is_partial: bool = False) -> None:
    if count:
        screen.line(f"{counted(count, 'problem')} {word}", style="red")
    else:
        where = " outside the blocks" if is_partial else ""
        screen.line(f"no problems {word}{where}", style="green")


def _damage(screen: Screen, report: CheckReport, typed: Typed) -> None:
    show_damage(screen, report.problems, report.affected, report.hint, typed)


def show_damage(
    screen: Screen,
    problems: Sequence[Problem],
    affected: Sequence[Affected],
    hint: Phrase | None,
    typed: Typed,
) -> None:
    """Show tables of problems and what they affect, and the next command; nothing if sound."""
    if problems:
        screen.line()
    screen.table(PROBLEMS, ((one.kind, one.where, one.what) for one in problems))
    if affected:
        screen.line()
    # If only whole snapshots are affected, their names suffice.
    columns = len(AFFECTED) if any(one.path is not None for one in affected) else 1
    screen.table(AFFECTED[:columns], (_affected(one)[:columns] for one in affected))
    if hint:
        screen.line()
        screen.line(f"next: {typed(hint)}")


def _affected(one: Affected) -> tuple[str, str, str, str]:
    lost = "" if one.path is None else str(one.blocks or "its record")
    names = ", ".join(one.refs) or short(one.snapshot)
    return names, one.path or "", one.tensor or "", lost
