"""`mstore verify`: does somebody trusted vouch for a snapshot?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.options import Argument, Option
from mstore_cli.output import Column, Screen, noted, short
from mstore_cli.session import Session
from mstore_cli.signers import SignersOption, how_to_trust, signatures_of, state_of, trusted_signers
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.api.reports import VerifyReport

COLUMNS = (
    Column("SNAPSHOT", style="yellow"),
    Column("REF", style="green"),
    Column("SIGNATURE", sentence=True),
    Column("KEY"),
    Column("READ", right=True),
)


@command(
    decodes=True,
    example="mstore verify llama/merged --signers allowed_signers --read-data",
    failure="a snapshot has no good signature of a trusted key, or another error",
)
def verify(
    session: Session,
    revisions: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="What to check [default: all branches and tags].",
            shell_complete=completion.refs,
        ),
    ] = (),
    signers: SignersOption = None,
    read_data: Annotated[
        bool, Option("--read-data", help="Also read every byte that was signed.")
    ] = False,
) -> None:
    """Check signatures against the keys that you trust.

    FILE has the form of OpenSSH's allowed_signers: a name, ssh-ed25519 and the public key, one a
    line; a namespaces option has to include mstore. Signed notes are listed, too; only signatures
    of the snapshots decide.
    """
    from mstore.snapshots.notes import UNKNOWN_KEY

    trusted = trusted_signers(signers)
    with session.open() as store, session.progress() as tick:
        named = revisions or [ref.name for ref in store.refs()]
        reports = [
            store.verify(name, trusted, read_data=read_data, progress=tick) for name in named
        ]

    def human(screen: Screen) -> None:
        if not named:
            screen.command("no snapshots yet; next", "mstore add PATH --name REF")
        rows = zip(named, reports, strict=True)
        screen.table(COLUMNS, (row for name, one in rows for row in _rows(name, one)))
        made = [one for report in reports for one in signatures_of(report)]
        if any(one.state == UNKNOWN_KEY for one in made):
            for line in how_to_trust(signers):
                screen.line(line)

    session.output.emit(
        {"snapshots": reports},
        ids=[one.snapshot for one in reports if one.verified],
        human=human,
    )
    if not all(one.verified for one in reports):
        raise Ended(FAILURE)


def _rows(name: str, report: VerifyReport) -> Iterator[Sequence[str]]:
    from mstore.store.objects.note import COUNTS

    read = format_size(report.bytes_read) if report.bytes_read else "-"
    if not report.signatures:
        yield short(report.snapshot), name, "none", "-", read
    for one in report.signatures:
        yield short(report.snapshot), name, state_of(one), one.key, read
    for note in report.notes:
        state = "" if note.state == COUNTS else f" ({note.state})"
        for one in note.signatures:
            told = f"note {noted(note)}{state}: {state_of(one)}"
            yield short(report.snapshot), name, told, one.key, "-"
