"""`mstore cast`: a model with elements of another type, other tensors or other names."""

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
        str | None,
        Option(
            "--dtype",
            metavar="DTYPE",
            help="bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2.",
        ),
    ] = None,
    scaled: Annotated[
        bool,
        Option(
            "--scaled",
            help="With --dtype float8_e4m3fn: give each matrix of a layer a scale, as ComfyUI "
            "reads them, and leave all other tensors.",
        ),
    ] = False,
    without: Annotated[
        tuple[str, ...],
        Option("--without", metavar="PATTERN", help="Drop tensors whose names match. Repeatable."),
    ] = (),
    take: Annotated[
        str | None,
        Option(
            "--take",
            metavar="REF",
            help="Take the tensors of another model, such as a VAE, in the place of those --below "
            "a prefix.",
        ),
    ] = None,
    below: Annotated[
        str,
        Option(
            "--below",
            metavar="PREFIX",
            help="Where tensors that are taken go, such as first_stage_model.",
        ),
    ] = "",
    channels_of: Annotated[
        str | None,
        Option(
            "--channels-of",
            metavar="REF",
            help="Give tensors as many input channels as this model has, such as one for "
            "inpainting: their own, then the other model's.",
        ),
    ] = None,
    strip_prefix: Annotated[
        str,
        Option(
            "--strip-prefix", metavar="PREFIX", help="Take a prefix off the names that have it."
        ),
    ] = "",
    prefix: Annotated[
        str,
        Option(
            "--prefix",
            metavar="PREFIX",
            help="Put a prefix before all names, such as model.diffusion_model.",
        ),
    ] = "",
    name: Annotated[
        str | None,
        Option(
            "--name",
            metavar="REF",
            help="The branch that will point at the model; by default cast/REF-DTYPE, without a "
            "dtype cast/REF-reshaped.",
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
    """Store a model again, with another dtype, tensors or names.

    Merges compute with bfloat16, float16 and float32; models in float64 or float8 are cast first.
    Weights in float8 with scales, as in DeepSeek-V3 or of compressed-tensors, are multiplied by
    them, and the scales are dropped. Each element is rounded once. Tensors that have the dtype
    already are shared, also under other names. A cast to float8 makes no scales without --scaled:
    to quantize a language model well, use a program for that.
    """
    with session.open() as store, session.progress() as tick:
        report = store.cast(
            revision,
            dtype=dtype,
            scaled=scaled,
            without=without,
            take=take,
            below=below,
            channels_of=channels_of,
            strip_prefix=strip_prefix,
            prefix=prefix,
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
                ("cast", f"{counted(report.cast, 'tensor')}{scaled}" if report.dtype else None),
                *(
                    (label, counted(count, "tensor") if count else None)
                    for label, count in (
                        ("left out", report.left_out),
                        ("taken", report.taken),
                        ("other channels", report.resized),
                        ("renamed", report.renamed),
                    )
                ),
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
