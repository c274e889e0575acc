"""`mstore ls`: the files or the tensors of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.options import OneModel, Option
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.api.reports import TensorReport

COLUMNS = (Column("SIZE", right=True), Column("TENSORS", right=True), Column("FILE"))
TENSOR_COLUMNS = (
    Column("SIZE", right=True),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("TENSOR"),
    Column("FILE"),
)


@command(example="mstore ls llama/merged")
def ls(
    session: Session,
    revision: OneModel,
    tensors: Annotated[
        bool, Option("--tensors", help="The tensors in the files, not the files.")
    ] = False,
) -> None:
    """List files or tensors of a snapshot or of one model."""
    with session.open_to_look() as store:
        if tensors:
            _emit_tensors(session, store.tensors(revision))
            return
        files = store.files(revision)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            ((format_size(one.size), str(one.tensors or "-"), one.path) for one in files),
        )

    session.output.emit(
        {"files": files, "tensors": None}, ids=[one.path for one in files], human=human
    )


def _emit_tensors(session: Session, tensors: list[TensorReport]) -> None:
    def human(screen: Screen) -> None:
        screen.table(
            TENSOR_COLUMNS,
            (
                (
                    format_size(one.nbytes),
                    one.dtype,
                    "x".join(map(str, one.shape)) or "scalar",
                    one.name,
                    one.file,
                )
                for one in tensors
            ),
        )

    document = {"files": None, "tensors": tensors}
    session.output.emit(document, ids=[one.name for one in tensors], human=human)
