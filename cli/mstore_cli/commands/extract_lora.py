"""`mstore extract-lora`: a fine-tune's difference to its base as a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from mstore.terms.phrases import few
from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Message, Option, Revision
from mstore_cli.output import Column, Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_percent, format_seconds, format_size

if TYPE_CHECKING:
    from mstore.api.reports import TruncatedTensor


Only = Annotated[
    tuple[str, ...],
    Option("--only", metavar="PATTERN", help="Extract only tensors whose names match. Repeatable."),
]
Skip = Annotated[
    tuple[str, ...],
    Option("--skip", metavar="PATTERN", help="Leave out tensors whose names match. Repeatable."),
]


@command(
    example="mstore extract-lora llama/math --base llama/base --rank 32 --name llama/math-lora",
    failure="an error; nothing was published",
)
def extract_lora(
    session: Session,
    revision: Revision,
    base: Annotated[
        str,
        Option(
            "--base",
            metavar="REF",
            help="The model that it was tuned from.",
            shell_complete=completion.refs,
        ),
    ],
    name: Annotated[
        str, Option("--name", metavar="REF", help="The branch that will point at the adapter.")
    ],
    rank: Annotated[int, Option("--rank", metavar="R", help="The rank of each product.")] = 32,
    dtype: Annotated[
        str, Option("--dtype", metavar="DTYPE", help="The dtype of the factors.")
    ] = "bfloat16",
    format: Annotated[
        str,
        Option(
            "--format",
            metavar="peft|kohya|diffusers",
            help="The format of the files; for image models kohya's or that of diffusers.",
        ),
    ] = "peft",
    only: Only = (),
    skip: Skip = (),
    message: Message = "",
) -> None:
    """Make a LoRA adapter of what a fine-tune changed.

    Each matrix that differs from the base becomes a product of two factors of this rank, the
    nearest there is; norms and biases that differ are stored whole, in PEFT's format. The report
    says how much of the difference is left out, in all and for the worst matrices.
    """
    with session.open() as store, session.progress() as tick:
        report = store.extract_lora(
            revision,
            base,
            name=name,
            rank=rank,
            dtype=dtype,
            format=format,
            only=only,
            skip=skip,
            message=message,
            progress=tick,
        )

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"extracted {report.name} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.name} is this adapter already")
        screen.fields(
            [
                ("products", f"{report.products} of rank {report.rank}"),
                ("stored whole", report.whole),
                ("size", format_size(report.plain_bytes)),
                ("left out", f"{format_percent(report.relative_error)} of the difference"),
                ("made with", report.linear_algebra),
                ("time", format_seconds(report.seconds)),
            ]
        )
        for remark in report.remarks:
            screen.line(f"remark: {screen.typed(remark)}")
        show_worst(screen, report.tensors)
        if report.left_out:
            count = counted(len(report.left_out), "tensor")
            screen.line(f"not in the adapter: {count}: {few(report.left_out, _SHOWN)}")
        screen.line()
        screen.command(
            "to apply it",
            f"mstore merge --base {base} --expert {report.name} --method task_arithmetic "
            "--name REF --virtual",
        )

    session.output.emit(report, ids=[report.snapshot], human=human)


LEFT_OUT = (Column("TENSOR", style="yellow"), Column("LEFT OUT", right=True))
_SHOWN = 5
_LEAST = 0.001
"""A smaller share is not worth a line."""


def show_worst(screen: Screen, tensors: Sequence[TruncatedTensor]) -> None:
    """Print the tensors of which most is left out.  tensors: the largest errors first."""
    worst = [
        (one.tensor, format_percent(one.relative_error))
        for one in tensors[:_SHOWN]
        if one.relative_error >= _LEAST
    ]
    if worst:
        screen.line()
    screen.table(LEFT_OUT, worst)
