"""`mstore convert-adapter`: a LoRA adapter in the format of another program."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Message, Option, Revision
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_size


@command(
    example="mstore convert-adapter loras/detail --base sdxl --format kohya --name loras/detail-k",
    failure="an error; nothing was published",
)
def convert_adapter(
    session: Session,
    revision: Revision,
    base: Annotated[
        str,
        Option(
            "--base",
            metavar="REF",
            help="The model that it is of, whose layers the format names.",
            shell_complete=completion.refs,
        ),
    ],
    format: Annotated[
        str,
        Option(
            "--format",
            metavar="peft|kohya|diffusers",
            help="kohya's (for A1111, Forge and ComfyUI) and that of diffusers are one file each; "
            "PEFT's has a config.",
        ),
    ],
    name: Annotated[
        str, Option("--name", metavar="REF", help="The branch that will point at the adapter.")
    ],
    dtype: Annotated[
        str | None,
        Option("--dtype", metavar="DTYPE", help="The dtype of the factors [default: its own]."),
    ] = None,
    message: Message = "",
) -> None:
    """Store a LoRA adapter in the format of another program.

    Factors of LoRA stay as they are, block for block. LoHa, LoKr and others become products of
    their own rank.
    """
    with session.open() as store:
        report = store.convert_adapter(
            revision, base, name=name, format=format, dtype=dtype, message=message
        )

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"converted {report.name} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.name} is this adapter already")
        screen.fields(
            [
                ("format", report.format),
                ("products", f"{report.products}, the largest rank {report.rank}"),
                ("dtype", report.dtype),
                ("size", format_size(report.plain_bytes)),
                ("written", format_size(report.bytes_written)),
                ("left out", f"{len(report.left_out)} tensors" if report.left_out else None),
            ]
        )
        screen.command("next", f"mstore checkout {report.name} DIRECTORY")

    session.output.emit(report, ids=[report.snapshot], human=human)
