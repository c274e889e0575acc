"""`mstore align`: give models one vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.merging import Base, Experts, experts_of, with_patterns
from mstore_cli.options import Option
from mstore_cli.output import Column, Screen, short
from mstore_cli.recipes import told_change
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore import Transplant

COLUMNS = (
    Column("MODEL", style="yellow"),
    Column("ALIGNED", style="yellow"),
    Column("ROWS BEFORE", right=True),
    Column("CHANGE", sentence=True),
)
CLASSES = (
    Column("NEW TOKENS", sentence=True),
    Column("NUMBER", right=True),
    Column("COSINE", right=True),
    Column("OF THE OUTPUT", right=True),
)


@command(
    example="mstore align --base llama/base --expert llama/chat --expert llama/code",
    failure="an error; nothing was published",
)
def align(
    session: Session,
    *,
    base: Base,
    expert: Experts = (),
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
    transplant: Annotated[
        str | None,
        Option(
            "--transplant",
            metavar="DONOR",
            help="Instead: give the base the tokens of this model, and store it as --name.",
            shell_complete=completion.refs,
        ),
    ] = None,
    name: Annotated[
        str | None,
        Option("--name", metavar="REF", help="With --transplant: the branch of the result."),
    ] = None,
    approximation: Annotated[
        str,
        Option(
            "--approximation",
            metavar="omp|subword|mean|zero",
            help="With --transplant, how rows of new tokens are made: omp of the base's rows as "
            "the donor's row is made of the donor's; subword as the mean of the pieces that the "
            "base writes the token with.",
        ),
    ] = "omp",
    k: Annotated[
        int, Option("--k", metavar="N", min=1, help="Of omp: how many rows one is made of.")
    ] = 64,
    token: Annotated[
        tuple[str, ...],
        Option(
            "--token",
            metavar="NEW=OLD",
            help="With --transplant: the base's token OLD is the donor's token NEW. Repeatable.",
        ),
    ] = (),
    chat_template: Annotated[
        str,
        Option(
            "--chat-template",
            metavar="donor|model",
            help="With --transplant: whose chat template the result has.",
        ),
    ] = "donor",
) -> None:
    """Give models with different tokens one vocabulary.

    Afterwards the same token is in the same row of each model, so that they merge. A model with
    another vocabulary is stored on a branch below aligned/: its embeddings are
    rewritten, its other tensors are shared. A row for a token that a model lacks is that of the
    only model that has it, else the base's, else the mean of all that have it. Models that fit stay
    as they are. Reads tokenizer.json; `mstore merge --vocab union` does all this at once.

    With --transplant, one model gets another's tokenizer instead: to be its draft model, or to be
    merged with it.
    """
    from mstore import MergeRequest, Transplant, Vocabulary

    if transplant is not None:
        if expert or name is None:
            raise UsageError(
                "--transplant takes no experts, and a name for the result",
                hint=f"mstore align --base {base} --transplant {transplant} --name REF",
            )
        asked = Transplant(
            donor=transplant,
            approximation=approximation,
            k=k,
            tokens=dict(map(_pair, token)),
            pad_to=pad_to,
            keep_padding=not drop_padding,
            chat_template=chat_template,
        )
        _transplant(session, base, asked, name)
        return
    if name is not None:
        raise UsageError("--name is of --transplant; aligned models are branches below aligned/")
    if not expert:
        raise UsageError("--expert is missing", hint="mstore align --help")
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


def _pair(told: str) -> tuple[str, str]:
    """Return NEW and OLD.  A token may have `=` in it, so OLD is what follows the last one."""
    new, equals, old = told.rpartition("=")
    if not (equals and new and old):
        raise UsageError(f"{told} is not NEW=OLD", hint="--token '<|eot_id|>=<|im_end|>'")
    return new, old


def _transplant(session: Session, base: str, asked: Transplant, name: str) -> None:
    with session.open() as store, session.progress() as tick:
        report = store.transplant(base, asked, name=name, progress=tick)

    def cosine(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def human(screen: Screen) -> None:
        screen.line(
            f"{report.ref} {short(report.snapshot)}: {report.tokens} tokens, {report.rows} rows; "
            f"written {format_size(report.bytes_written)}"
        )
        screen.line(
            f"{report.shared} tokens have the base's own rows"
            + "".join(f", {one.token} that of {one.row_of}" for one in report.stand_ins)
        )
        if report.classes:
            screen.line()
            screen.table(
                CLASSES,
                (
                    (one.name, str(one.tokens), cosine(one.input), cosine(one.output))
                    for one in report.classes
                ),
            )
        if report.held_out_input is not None:
            screen.line(
                "tokens of both, made as if they were new: cosine "
                f"{cosine(report.held_out_input)}, of the output {cosine(report.held_out_output)}"
            )
        if report.worst:
            told = ", ".join(f"{one.token!r} {one.cosine:.2f}" for one in report.worst)
            screen.line(f"worst: {told}")
        for remark in report.remarks:
            screen.line(f"remark: {remark}")

    session.output.emit(report, ids=[report.snapshot], human=human)
