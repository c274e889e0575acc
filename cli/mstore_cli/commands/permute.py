"""`mstore permute`: a model with its neurons in the order of another model's."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Message, Option, Revision
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_size

COLUMNS = (
    Column("OF"),
    Column("NUMBER", right=True),
    Column("MOVED", right=True),
    Column("OTHER SIGN", right=True),
)


@command(
    example="mstore permute other/base --to llama/base --name other/permuted",
    failure="an error; nothing was published",
)
def permute(
    session: Session,
    revision: Revision,
    name: Annotated[
        str, Option("--name", metavar="REF", help="The branch that will point at the result.")
    ],
    to: Annotated[
        str | None,
        Option(
            "--to",
            metavar="REF",
            help="The model whose order it gets (needs mstore[align]).",
            shell_complete=completion.refs,
        ),
    ] = None,
    permutation: Annotated[
        str | None,
        Option(
            "--permutation",
            metavar="REF",
            help="In place of --to: a permutation that was found before, for the fine-tunes of a "
            "model that was permuted.",
            shell_complete=completion.refs,
        ),
    ] = None,
    message: Message = "",
) -> None:
    """Put the neurons of a model in another model's order.

    For models of different pretraining, before they are merged; fine-tunes of one base are aligned
    already. Channels of the residual stream, neurons and heads are moved, and some channels change
    their sign; the model computes what it did. The permutation is stored on a branch below
    prepared/. Merges of such models stay far from either model: measure them.
    """
    if (to is None) == (permutation is None):
        raise UsageError(
            "name a model with --to, or a permutation with --permutation",
            hint="mstore permute --help",
        )
    with session.open() as store, session.progress() as tick:
        report = store.permute(
            revision, name=name, to=to, permutation=permutation, message=message, progress=tick
        )

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"permuted to {report.ref} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.ref} is this model already")
        was = report.previous if report.new_snapshot else None
        cosine = (
            None
            if report.cosine is None or report.cosine_before is None
            else f"{report.cosine:.3f} with {to}, over tensors; before {report.cosine_before:.3f}"
        )
        screen.fields(
            [
                ("was", short(was) if was else None),
                ("permutation", report.permutation),
                ("rounds", str(report.rounds) if report.rounds else None),
                ("cosine", cosine),
                ("written", format_size(report.bytes_written)),
                ("time", format_seconds(report.seconds)),
            ]
        )
        screen.line()
        screen.table(
            COLUMNS,
            ((one.kind, str(one.total), str(one.moved), str(one.flipped)) for one in report.kinds),
        )
        for remark in report.remarks:
            screen.line(f"remark: {screen.typed(remark)}")

    session.output.emit(report, ids=[report.snapshot], human=human)
