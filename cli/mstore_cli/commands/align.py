"""`mstore align`: give models one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.merging import (
    Base,
    Experts,
    experts_of,
    hinting_at_directories,
    with_patterns,
)
from mstore_cli.options import Option, Threads
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
        str | None,
        Option(
            "--vocab",
            metavar="union|base|common|REF",
            help="Whose tokens all models get: union adds those that only experts have to the "
            "base's; common drops those of the base that an expert lacks; REF is the base or an "
            "expert [default: union].",
            shell_complete=completion.refs,
        ),
    ] = None,
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
        str | None,
        Option(
            "--approximation",
            metavar="omp|subword|mean|zero",
            help="With --transplant, how rows of new tokens are made: omp of the base's rows as "
            "the donor's row is made of the donor's; subword as the mean of the pieces that the "
            "base writes the token with [default: omp].",
        ),
    ] = None,
    k: Annotated[
        int | None,
        Option(
            "--k",
            metavar="N",
            min=1,
            help="Of omp: how many rows one is made of [default: a 32nd of the donor's width, from "
            "4 to 64].",
        ),
    ] = None,
    token: Annotated[
        tuple[str, ...],
        Option(
            "--token",
            metavar="NEW=OLD",
            help="With --transplant: the base's token OLD is the donor's token NEW. Repeatable.",
        ),
    ] = (),
    chat_template: Annotated[
        str | None,
        Option(
            "--chat-template",
            metavar="donor|model",
            help="With --transplant: whose chat template the result has [default: donor].",
        ),
    ] = None,
    threads: Threads = None,
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
    from mstore.terms.requests import UNION

    of_transplants = {
        "--name": name,
        "--approximation": approximation,
        "--k": k,
        "--token": token or None,
        "--chat-template": chat_template,
    }
    if transplant is not None:
        if expert or name is None or vocab is not None:
            raise UsageError(
                "--transplant takes a name for the result, and neither experts nor --vocab",
                hint=f"mstore align --base {base} --transplant {transplant} --name REF",
            )
        method = approximation or "omp"
        if k is not None and method != "omp":
            raise UsageError(f"--k is of omp, not of {method}", hint="mstore align --help")
        asked = Transplant(
            donor=transplant,
            approximation=method,
            k=k,
            tokens=_pairs(token),
            pad_to=pad_to,
            keep_padding=not drop_padding,
            chat_template=chat_template or "donor",
        )
        _transplant(session, base, asked, name, threads)
        return
    given = next((one for one, value in of_transplants.items() if value is not None), None)
    if given is not None:
        raise UsageError(
            f"{given} is of --transplant; aligned models are branches below aligned/",
            hint="mstore align --help",
        )
    if not expert:
        raise UsageError("--expert is missing", hint="mstore align --help")
    experts = experts_of(expert)
    vocabulary = Vocabulary(source=vocab or UNION, pad_to=pad_to, keep_padding=not drop_padding)
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


def _pairs(told: Sequence[str]) -> dict[str, str]:
    """Return OLD by NEW.  A token may have `=` in it, so OLD is what follows the last one."""
    found: dict[str, str] = {}
    for one in told:
        new, equals, old = one.rpartition("=")
        if not (equals and new and old):
            raise UsageError(f"{one} is not NEW=OLD", hint="--token '<|eot_id|>=<|im_end|>'")
        if new in found:
            raise UsageError(f"--token says twice what {new} is", hint="mstore align --help")
        found[new] = old
    return found


def _transplant(
    session: Session, base: str, asked: Transplant, name: str, threads: int | None
) -> None:
    from mstore import MergeRequest

    named = MergeRequest(base=base, experts=[asked.donor], method="linear")
    with session.open() as store, session.progress() as tick, hinting_at_directories(named):
        report = store.transplant(base, asked, name=name, threads=threads, progress=tick)

    def cosine(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def human(screen: Screen) -> None:
        was = report.previous if report.new_snapshot else None
        screen.line(
            f"{report.ref} {short(report.snapshot)}: {report.tokens} tokens, {report.rows} rows; "
            f"written {format_size(report.bytes_written)}" + (f"; was {short(was)}" if was else "")
        )
        screen.line(
            f"{report.shared} tokens have the base's own rows"
            + "".join(f", {one.token} that of {one.row_of}" for one in report.stand_ins)
        )
        if report.held_out_input is not None:
            tied = report.held_out_output is None
            parts = f"{cosine(report.held_out_input)} (input and output are tied)"
            if not tied:
                parts = (
                    f"{cosine(report.held_out_output)} of the output, "
                    f"{cosine(report.held_out_input)} of the input"
                )
            screen.line(
                f"judge by this: tokens of both, made as if they were new: cosine {parts}; "
                f"compare other --k than {report.k}"
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
        if report.worst:
            told = ", ".join(f"{one.token!r} {one.cosine:.2f}" for one in report.worst)
            screen.line(f"worst: {told}")
        for remark in report.remarks:
            screen.line(f"remark: {remark}")

    session.output.emit(report, ids=[report.snapshot], human=human)
