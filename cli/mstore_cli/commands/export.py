"""`mstore export`: send a snapshot to a place where others find models."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.exchange import resumable
from mstore_cli.options import Argument, Message, OneModel, Option
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import ExportReport

COLUMNS = (Column(""), Column("FILE"), Column("SIZE", right=True))


@command(
    decodes=True,
    example="mstore export llama/merged hf://org/llama-merged --private",
    failure="an error; nobody sees a part of the files",
)
def export(
    session: Session,
    revision: OneModel,
    address: Annotated[
        str,
        Argument(
            metavar="ADDRESS",
            help="A model of the Hugging Face Hub: hf://ORG/NAME[@BRANCH][/DIRECTORY]; or a tag in "
            "an OCI registry: oci://HOST/REPOSITORY[:TAG].",
        ),
    ],
    private: Annotated[
        bool, Option("--private", help="If the model is made, only those you let in see it.")
    ] = False,
    branch: Annotated[
        str | None,
        Option(
            "--revision",
            metavar="BRANCH",
            help="The branch to write; it is made if it is missing [default: the main one].",
        ),
    ] = None,
    pull_request: Annotated[
        bool, Option("--pr", help="Open a pull request, and leave the branch as it is.")
    ] = False,
    message: Message = "",
    no_card: Annotated[
        bool, Option("--no-card", help="Send README.md as the snapshot has it.")
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", "-n", help="Only print what would be sent, and the card."),
    ] = False,
) -> None:
    """Publish a snapshot where others find models.

    The place has exactly these files afterwards, all in one step: files that the snapshot lacks
    are removed there. What the place has is not sent again, and nothing is copied to this machine's
    disk. An interrupted export goes on when it is run again.

    README.md is completed with what the store knows: bases, method, licences, scores, and the
    snapshot's id. What it says already stays.
    """
    with session.open_to_exchange() as store, session.progress() as tick, resumable():
        report = store.export(
            revision,
            address,
            private=private,
            branch=branch,
            pull_request=pull_request,
            card=not no_card,
            message=message,
            dry_run=dry_run,
            progress=tick,
        )
        session.settled()

    ids = [report.snapshot] if report.commit is None else [report.commit]
    where = f"a pull request to {report.address}" if pull_request else report.address
    new = "yes, private" if private else "yes"

    def human(screen: Screen) -> None:
        _show(screen, report, where, new if report.is_new else None)

    session.output.emit(report, ids=ids, human=human)


def _show(screen: Screen, report: ExportReport, where: str, new: str | None) -> None:
    """Draw a report; where: what was written to. new: set if it was made."""
    moved = [one for one in report.files if one.what != "there"]
    if not moved and not report.is_new:
        screen.line(f"{report.address} has these files already", style="green")
        return
    done = "would be exported" if report.dry_run else "exported"
    screen.line(f"{short(report.snapshot)} {done} to {where}", style="green")
    screen.table(
        COLUMNS,
        ((one.what, one.path, format_size(one.size) if one.size else "-") for one in moved),
    )
    there = Counter(one.what for one in report.files)["there"]
    screen.fields(
        [
            ("new", new),
            ("there already", counted(there, "file") if there else None),
            ("to send", format_size(report.bytes_to_send)),
            ("sent", None if report.dry_run else format_size(report.bytes_sent)),
            ("commit", report.commit),
            ("page", report.url),
            ("time", format_seconds(report.seconds)),
        ]
    )
    if report.dry_run and report.card:
        screen.line()
        screen.line("README.md:")
        for line in report.card.splitlines():
            screen.line(f"  {line}")
