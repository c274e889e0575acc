"""`mstore emr`: one model of many experts, and a virtual model of each."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.merging import (
    AllowMissing,
    Base,
    Only,
    Skip,
    experts_of,
    hinting_at_directories,
    with_patterns,
)
from mstore_cli.options import WHAT, Message, Option, Threads
from mstore_cli.output import Column, Screen, short
from mstore_cli.plan_output import draw_remarks
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

COLUMNS = (
    Column("EXPERT", style="yellow"),
    Column("MODEL", style="yellow"),
    Column("SNAPSHOT"),
    Column("RESCALE", right=True),
    Column("KEPT", right=True),
    Column("WRITTEN", right=True),
)


@command(
    example="mstore emr --base llama/base --expert llama/math --expert llama/code --name family",
    failure="an error; what was published before it stays",
)
def emr(
    session: Session,
    *,
    base: Base,
    expert: Annotated[
        tuple[str, ...],
        Option(
            "--expert",
            metavar="REF[:MODEL]",
            shell_complete=completion.refs,
            help="A model, or a LoRA adapter of the base, that gets a mask and a virtual model. "
            "Repeatable; 'runs/*' are all refs of this pattern but the base.",
            group=WHAT,
        ),
    ],
    name: Annotated[
        str,
        Option(
            "--name",
            metavar="NAME",
            help="Branches: NAME/shared is the model of all, NAME/EXPERT that of an expert, "
            "NAME/masks/EXPERT its mask.",
        ),
    ],
    only: Only = (),
    skip: Skip = (),
    allow_missing: AllowMissing = False,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Store experts as one model and masks (EMR-Merging).

    Each element of the one model is that of the expert that moves it furthest, where most of all
    deltas go. The model of an expert is virtual: the elements whose direction it shares, times one
    number; computed when they are read. It is near the expert, not equal to it. Masks take a bit an
    element at most; the experts themselves may be removed afterwards.
    """
    from mstore import MergeRequest

    experts = experts_of(expert)
    with session.open() as store, session.progress() as tick:
        request = MergeRequest(
            base=base,
            experts=with_patterns(store, experts, base),
            method="emr",
            only=only,
            skip=skip,
            allow_missing=allow_missing,
        )
        with hinting_at_directories(request):
            report = store.emr(request, name=name, message=message, threads=threads, progress=tick)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            (
                (
                    *(one.expert, one.name, short(one.snapshot), f"{one.rescale:.3f}"),
                    *(f"{one.share:.0%}", format_size(one.bytes_written)),
                )
                for one in report.models
            ),
        )
        screen.line()
        screen.line(
            f"{report.name} {short(report.snapshot)}; written {format_size(report.bytes_written)} "
            "in all"
        )
        draw_remarks(screen, report.remarks, report.warnings)

    session.output.emit(
        report, ids=[report.snapshot, *(one.snapshot for one in report.models)], human=human
    )
