"""`mstore methods`: the merge methods, and what each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import warn
from mstore_cli.options import Argument
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore.api.reports import MethodReport, ParameterReport

COLUMNS = (Column("METHOD", style="yellow"), Column("RESULT", sentence=True), Column("BOUND"))
PARAMETERS = (
    Column("PARAMETER", style="yellow"),
    Column("DEFAULT"),
    Column("VALUES", sentence=True),
)


@command(example="mstore methods ties")
def methods(
    session: Session,
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="The method to describe.", shell_complete=completion.methods),
    ] = None,
) -> None:
    """List the merge methods, or describe one.

    The description has formula, parameters, facts, bound and source. BOUND says what a plan under a
    budget tells of its error: certified (a proved bound) or estimate. Facts are what a method must
    know of whole tensors; they are measured once, apart from the budget. "with" is what `--with`
    must name beside base and experts. The common symbols are in docs/merge-methods.md.
    """
    from mstore import Store

    found = Store.methods(name)
    usable = [one for one in found if not one.remarks]
    for one in found:
        for remark in one.remarks:
            warn(remark)

    def human(screen: Screen) -> None:
        if name is not None:
            _describe(screen, found[0])
            return
        screen.table(COLUMNS, ((one.name, one.summary, _bound(one)) for one in usable))
        screen.line()
        screen.command("more about one", "mstore methods NAME")

    document = {"methods": found}
    session.output.emit(document, ids=[one.name for one in usable], human=human)


def _describe(screen: Screen, one: MethodReport) -> None:
    least = f", at least {one.least_experts}" if one.least_experts > 1 else ""
    count = f"any number{least}" if one.experts is None else str(one.experts)
    screen.fields(
        [
            ("method", one.name),
            ("makes", one.summary),
            ("formula", one.formula),
            ("experts", count + (", with weights" if one.weighted else ", without weights")),
            *([("with", ", ".join(f"{key}=REF" for key in one.companions))] * bool(one.companions)),
            ("facts", "; ".join(one.facts) or "none"),
            ("bound", _bound(one)),
            ("source", one.source),
        ]
    )
    if one.parameters:
        screen.line()
    screen.table(PARAMETERS, ((own.name, _default(own), _values(own)) for own in one.parameters))


def _bound(one: MethodReport) -> str:
    return "certified" if one.certified else "estimate"


def _default(one: ParameterReport) -> str:
    if one.default is None:
        return "none: give one"
    return str(one.default).lower() if isinstance(one.default, bool) else f"{one.default:g}"


def _values(one: ParameterReport) -> str:
    words = "".join(f", or {word}" for word in one.words)
    limits = "" if one.range is None else f" in {one.range}"
    each = "; with commas, one for each expert" if one.per_expert else ""
    return f"{one.kind}{limits}{words}{each}"
