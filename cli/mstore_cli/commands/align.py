"""`mstore align`: give models one vocabulary."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.merging import Base, Experts, experts_of, with_patterns
from mstore_cli.options import Option
from mstore_cli.output import Column, Screen
from mstore_cli.recipes import told_change
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

COLUMNS = (
    Column("MODEL", style="yellow"),
    Column("ALIGNED", style="yellow"),
    Column("ROWS BEFORE", right=True),
    Column("CHANGE", sentence=True),
)


@command(
    example="mstore align --base llama/base --expert llama/chat --expert llama/code",
    failure="an error; nothing was published",
)
def align(
    session: Session,
    base: Base,
    expert: Experts,
    vocab: Annotated[
        str,
        Option(
            "--vocab",
            metavar="union|base|common|REF",
            help="Whose tokens all models get: union adds those that only experts have to the "
            "base's; common drops those of the base that an expert lacks; REF is the base or an "
            "expert.",
            shell_complete=completion.refs,
        ),
    ] = "union",
    pad_to: Annotated[
        int | None,
        Option(
            "--pad-to",
            metavar="N",
            help="Round the number of rows up to a multiple of N; the new rows are the mean of the "
            "others.",
        ),
    ] = None,
    drop_padding: Annotated[
        bool, Option("--drop-padding", help="Keep no rows after those of tokens.")
    ] = False,
) -> None:
    """Give models with different tokens one vocabulary.

    Afterwards the same token is in the same row of each model, so that they merge. A model with
    another vocabulary is stored on a branch below aligned/: its embeddings are
    rewritten, its other tensors are shared. A row for a token that a model lacks is that of the
    only model that has it, else the base's, else the mean of all that have it. Models that fit stay
    as they are. Reads tokenizer.json; `mstore merge --vocab union` does all this at once.
    """
    from mstore import MergeRequest, Vocabulary

    experts = experts_of(expert)
    vocabulary = Vocabulary(source=vocab, pad_to=pad_to, keep_padding=not drop_padding)
    with session.open() as store, session.progress() as tick:
        experts = with_patterns(store, experts, base)
        request = MergeRequest(base=base, experts=experts, method="linear")
        report = store.align(request, vocabulary, progress=tick)
    models = (report.base, *report.experts)

    def human(screen: Screen) -> None:
        screen.table(
            COLUMNS,
            (
                (one.name, one.ref or "-", str(one.rows_before or "-"), told_change(one, report))
                for one in models
            ),
        )
        screen.line()
        screen.line(
            f"{report.tokens} tokens, {report.rows} rows; written "
            f"{format_size(report.bytes_written)}"
        )
        for remark in report.remarks:
            screen.line(f"remark: {remark}")
        told = "".join(
            f" --expert {one.aligned() or one.name}" + ("" if weight == 1 else f"={weight:g}")
            for one, (_, weight) in zip(report.experts, experts, strict=True)
        )
        base_ref = report.base.aligned() or report.base.name
        screen.command("next", f"mstore plan --base {base_ref}{told} --method NAME")

    session.output.emit(report, ids=[one.snapshot for one in models], human=human)
