"""`mstore add`: store a checkpoint under a name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mstore_cli.command import command
from mstore_cli.options import Message, Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_seconds, format_share, format_size


@command(
    example="mstore add ./llama-math --name llama/math --base llama/base",
    failure="an error; nothing was stored under the name",
)
def add(
    session: Session,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A checkpoint directory, or one .safetensors file.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", metavar="REF", help="The branch that will point at it.")
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="REF",
            help="What it was fine-tuned from: compare block by block, keep delta statistics.",
        ),
    ] = None,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Store a checkpoint, byte for byte, and name it.

    Blocks that the store has already cost nothing. Adding the same bytes again changes nothing.
    """
    with session.open() as store, session.progress() as tick:
        report = store.add(
            path, name=name, base=base, message=message, threads=threads, progress=tick
        )

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"added {report.name} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.name} holds these bytes already")
        known = report.blocks_total - report.blocks_new
        equal = report.blocks_equal_base
        share = format_share(report.bytes_written, report.plain_bytes)
        screen.fields(
            [
                ("manifest", short(report.manifest)),
                ("checkpoint", f"{report.files} files, {report.tensors} tensors"),
                ("size", format_size(report.plain_bytes)),
                ("written", f"{format_size(report.bytes_written)} ({share})"),
                ("blocks", f"{report.blocks_total}: {report.blocks_new} new, {known} known"),
                (
                    "equal to base",
                    None if equal is None else f"{equal} of {report.blocks_total} blocks",
                ),
                ("time", format_seconds(report.seconds)),
            ]
        )

    session.output.emit(report, ids=[report.snapshot], human=human)
