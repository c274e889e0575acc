"""`mstore checkout`: a byte-exact copy of a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mstore_cli.command import command
from mstore_cli.options import Argument, OneModel, Option, Threads
from mstore_cli.output import Screen, near, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_seconds, format_size


@command(
    decodes=True,
    example="mstore checkout llama/merged ./llama-merged",
    failure="an error; no directory was made",
)
def checkout(
    session: Session,
    revision: OneModel,
    directory: Annotated[
        Path,
        Argument(
            metavar="DIR", help="A directory that is new or empty, or a new FILE.safetensors."
        ),
    ],
    patterns: Annotated[
        tuple[str, ...],
        Argument(metavar="PATTERN", help="Only files that match, as '*.json' [else all]."),
    ] = (),
    no_weights: Annotated[
        bool,
        Option(
            "--no-weights",
            help="Leave out safetensors files and their indexes: for engines that read tensors "
            "from the store.",
        ),
    ] = False,
    shared: Annotated[
        bool,
        Option(
            "--shared",
            help="Go on where others may rename and remove what is in the directory above DIR.",
        ),
    ] = False,
    reflink: Annotated[
        str,
        Option(
            "--reflink",
            metavar="WHEN",
            help="Share space on the disk with the store, on XFS and btrfs, where blocks lie raw: "
            "auto, always or never.",
        ),
    ] = "auto",
    card: Annotated[
        bool,
        Option(
            "--card",
            help="Write README.md as `mstore export` sends it, completed with what the store knows "
            "of the model; of a FILE.safetensors, complete its header.",
        ),
    ] = False,
    threads: Threads = None,
) -> None:
    """Write the files of a snapshot, or one model of it.

    Paths of REF:MODEL begin in the model's directory. FILE.safetensors is the one file of weights
    of a model, under this name, as the folders of image tools have it. A PATTERN must match a
    whole path; `*` also matches `/`.
    """
    with session.open() as store, session.progress() as tick:
        report = store.checkout(
            revision,
            directory,
            threads=threads,
            shared=shared,
            only=patterns,
            weights=not no_weights,
            reflink=reflink,
            card=card,
            progress=tick,
        )
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(
            f"checked out {short(report.snapshot)} to {near(report.directory)}: "
            f"{counted(report.files, 'file')}, "
            f"{format_size(report.bytes_written)} in {format_seconds(report.seconds)}",
            style="green",
        )
        if report.bytes_shared:
            screen.line(
                f"{format_size(report.bytes_shared)} of it share their space with the store"
            )

    session.output.emit(report, ids=[report.snapshot], human=human)
