"""`mstore report`: one page about a snapshot, or about two, to be opened in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion, pictures
from mstore_cli.command import command
from mstore_cli.options import Argument, Option, Revision, Threads, file_of
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.signers import trusted_signers
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore_pages.summary import ComparisonSummary, SnapshotSummary


@command(decodes=True, example="mstore report llama/merged -o merged.html")
def report(
    session: Session,
    revision: Revision,
    other: Annotated[
        str | None,
        Argument(
            metavar="OTHER",
            help="Compare REF with this snapshot.",
            shell_complete=completion.refs,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            *("--output", "-o"),
            metavar="FILE",
            help="Write the page to this file [default: mstore-report-REF.html here].",
            type=file_of("html"),
        ),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Read no weights: leave out what no statistics tell.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Write a page about a snapshot, or about two.

    The page is one HTML file that loads nothing from elsewhere. It shows what was merged and at
    which cost, the lineage, what changed in which layer and by which expert, other budgets, the
    tensors that changed most, blocks, notes, the recipe and warnings. Where statistics do not tell
    what changed, weights are read, as `compare` and `blame` read them. With --json, the numbers are
    printed, and the page is written only with -o.
    """
    from mstore_pages import gather
    from mstore_pages import report as pages

    names = [revision] if other is None else [revision, other]
    signers = trusted_signers(None)
    told: SnapshotSummary | ComparisonSummary
    with session.open() as store, session.progress() as tick:
        if other is None:
            told = gather.snapshot_summary(
                store, revision, measure=not quick, signers=signers, threads=threads, progress=tick
            )
            text = pages.snapshot_page(told, session.typed)
        else:
            told = gather.comparison_summary(
                store,
                revision,
                other,
                measure=not quick,
                signers=signers,
                threads=threads,
                progress=tick,
            )
            text = pages.comparison_page(told, session.typed)
    path = output or default_file(names)
    if output is not None or not session.output.is_json:
        pictures.write(path, text)

    def human(screen: Screen) -> None:
        screen.line(f"written to {path} ({format_size(len(text.encode()))})")

    session.output.emit(told, ids=[path], human=human)


def default_file(names: Sequence[str]) -> Path:
    """Return the file that a report of these names is written to, if no other is named."""
    safe = "-".join(
        "".join(one if one.isalnum() or one in "._" else "-" for one in name) for name in names
    )
    return Path(f"mstore-report-{safe[:100]}.html")
