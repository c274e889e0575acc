"""`mstore cast`: a model with elements of another type."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.merging import AllowNonfinite
from mstore_cli.options import Message, Option, Revision, Threads
from mstore_cli.output import Screen, short
from mstore_cli.session import Session, replaced
from mstore_cli.sizes import counted, format_seconds, format_size


@command(
    example="mstore cast deepseek/tuned --dtype bfloat16",
    failure="an error; nothing was published",
)
def cast(
    session: Session,
    revision: Revision,
    dtype: Annotated[
        str,
        Option(
            "--dtype",
            metavar="DTYPE",
            help="bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2.",
        ),
    ],
    name: Annotated[
        str | None,
        Option(
            "--name",
            metavar="REF",
            help="The branch that will point at the model; by default cast/REF-DTYPE.",
        ),
    ] = None,
    only: Annotated[
        tuple[str, ...],
        Option(
            "--only", metavar="PATTERN", help="Cast only tensors whose names match. Repeatable."
        ),
    ] = (),
    skip: Annotated[
        tuple[str, ...],
        Option("--skip", metavar="PATTERN", help="Leave tensors whose names match. Repeatable."),
    ] = (),
    allow_nonfinite: AllowNonfinite = False,
    message: Message = "",
    threads: Threads = None,
) -> None:
    """Store a model again in another floating-point dtype.

    Merges compute with bfloat16, float16 and float32; models in float64 or float8 are cast first.
    Weights in float8 with scales, as in DeepSeek-V3 or of compressed-tensors, are multiplied by
    them, and the scales are dropped. Each element is rounded once. Tensors that have the dtype
    already are shared. A cast to float8 makes no scales: to quantize a model well, use a program
    for that.
    """
    with session.open() as store, session.progress() as tick:
        report = store.cast(
            revision,
            dtype=dtype,
            name=name,
            only=only,
            skip=skip,
            message=message,
            allow_nonfinite=allow_nonfinite,
            threads=threads,
            progress=tick,
        )
        before = replaced(store, report.snapshot)

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"cast to {report.name} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.name} is this model already")
        scaled = f", {report.scaled} with scales" if report.scaled else ""
        screen.fields(
            [
                ("was", short(before) if before and report.new_snapshot else None),
                ("cast", f"{counted(report.cast, 'tensor')}{scaled}"),
                ("as they were", counted(report.shared, "tensor")),
                ("dropped", f"{report.scales_dropped} scales" if report.scales_dropped else None),
                ("dtype", report.dtype),
                ("size", format_size(report.plain_bytes)),
                ("written", format_size(report.bytes_written)),
                ("time", format_seconds(report.seconds)),
            ]
        )
        for text in report.warnings:
            screen.line(f"warning: {text}", style="yellow")
        for remark in report.remarks:
            screen.line(f"remark: {screen.typed(remark)}")

    session.output.emit(report, ids=[report.snapshot], human=human)
    session.warn_if_quiet(report.warnings)
