"""`mstore combine-adapters`: several adapters of one base as one adapter."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import Mistakes, command
from mstore_cli.commands.extract_lora import show_worst
from mstore_cli.merging import MISTAKEN, experts_of, parse_parameters, with_patterns
from mstore_cli.options import Message, Option
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import format_percent, format_seconds, format_size

OTHER_WORDS = {
    "--weights": MISTAKEN["--weight"],
    "--adapters": "--expert REF=0.5, once for each adapter",
    "--combination-type": "--method svd",
    "--svd-rank": "--rank VALUE",
    "--svd-clamp": "--param clamp=VALUE",
    "--majority-sign-method": "--param majority_sign_method=VALUE",
    "--merge-strategy": "--method ties",
}
"""What PEFT and LoRAX call the options."""


@command(
    example="mstore combine-adapters --expert math/lora --expert code/lora=0.5 --method svd "
    "--name both/lora",
    failure="an error; nothing was published",
    mistakes=Mistakes({**MISTAKEN, **OTHER_WORDS}),
)
def combine_adapters(
    session: Session,
    expert: Annotated[
        tuple[str, ...],
        Option(
            "--expert",
            metavar="REF[=WEIGHT]",
            help="A LoRA adapter [default weight: 1]. Repeatable; 'loras/*' are all refs of this "
            "pattern but the result.",
            shell_complete=completion.refs,
        ),
    ],
    method: Annotated[
        str,
        Option(
            "--method",
            metavar="NAME",
            help="How they are combined: cat, linear, ties, dare_linear, dare_ties or "
            "magnitude_prune combine factors; svd, ties_svd, dare_linear_svd, dare_ties_svd or "
            "magnitude_prune_svd combine products and truncate the result; with _core in place of "
            "_svd they combine products in the space of the factors; tsv, svc, iso_c, iso_cts or "
            "wudi_ridge combine singular values and vectors.",
            shell_complete=completion.combinations,
        ),
    ],
    name: Annotated[
        str, Option("--name", metavar="REF", help="The branch that will point at the result.")
    ],
    param: Annotated[
        tuple[str, ...],
        Option(
            "--param",
            metavar="KEY=VALUE",
            help="A parameter of the method: density, majority_sign_method (total or frequency), "
            "clamp, seed, alpha (svc), common_space_fraction (iso_cts), ridge (wudi_ridge). "
            "Repeatable.",
        ),
    ] = (),
    rank: Annotated[
        int | None,
        Option(
            "--rank",
            metavar="R",
            help="The rank of each product, for methods that truncate [default: the largest of "
            "the adapters' for svd and its like; for others their sum, which leaves nothing out].",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            "--dtype",
            metavar="DTYPE",
            help="The dtype of the factors [default: the adapters' own].",
        ),
    ] = None,
    base: Annotated[
        str | None,
        Option(
            "--base",
            metavar="REF",
            help="The model that the adapters are of [default: the one that they were added with]. "
            "Norms and biases that adapters have whole are combined by their differences to it.",
            shell_complete=completion.refs,
        ),
    ] = None,
    message: Message = "",
) -> None:
    """Combine several LoRA adapters of one base into one.

    It does what PEFT's add_weighted_adapter does, and more. The result is an adapter like any
    other: a merge takes it as an expert, and PEFT loads its checkout. cat keeps the weighted sum of
    the products as it is, with the sum of the ranks; svd truncates that sum to a rank, and the
    report says how much that leaves out. tsv and its like keep adapters from disturbing each other;
    fine-tunes become adapters by extract-lora.
    """
    with session.open() as store, session.progress() as tick:
        report = store.combine_adapters(
            with_patterns(store, experts_of(expert), name),
            method,
            name=name,
            parameters=parse_parameters(param),
            rank=rank,
            dtype=dtype,
            base=base,
            message=message,
            progress=tick,
        )
        parents = store.show(str(report.snapshot)).parents
        bases = [ref for one in parents if one.role == "base" for ref in one.refs]
        applied_to = bases[0] if bases else "BASE"

    def human(screen: Screen) -> None:
        if report.new_snapshot:
            screen.line(f"combined {report.name} {short(report.snapshot)}", style="green")
        else:
            screen.line(f"nothing new: {report.name} is this adapter already")
        some = f", {report.of_some} from only some of the adapters" if report.of_some else ""
        left_out = report.relative_error
        screen.fields(
            [
                ("method", report.method),
                ("products", f"{report.products} of rank {report.rank}{some}"),
                ("stored whole", report.whole or None),
                ("dtype", report.dtype),
                ("size", format_size(report.plain_bytes)),
                (
                    "left out",
                    None if left_out is None else f"{format_percent(left_out)} of the products",
                ),
                ("made with", report.linear_algebra),
                ("time", format_seconds(report.seconds)),
            ]
        )
        for remark in report.remarks:
            screen.line(f"remark: {remark}")
        show_worst(screen, report.tensors)
        screen.line()
        screen.command(
            "to apply it",
            f"mstore merge --base {applied_to} --expert {report.name} --method task_arithmetic "
            "--name REF --virtual",
        )
        screen.command("for PEFT", f"mstore checkout {report.name} DIR")

    session.output.emit(report, ids=[report.snapshot], human=human)
