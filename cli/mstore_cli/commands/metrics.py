"""`mstore metrics`: the scores of a family's models, with how each was made."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Option, RefNames
from mstore_cli.output import Column, Mode, Screen, printing
from mstore_cli.session import Session
from mstore_cli.sizes import format_size

if TYPE_CHECKING:
    from mstore.api.reports import MetricsRow

COLUMNS = (
    Column("REF", style="green"),
    Column("METHOD"),
    Column("PARAMETERS", sentence=True),
    Column("BUDGET", right=True),
)
FIELDS = ("ref", "snapshot", "method", "parameters", "budget_bytes")


@command(example="mstore metrics 'llama/*' --sort acc")
def metrics(
    session: Session,
    names: RefNames = (),
    sort: Annotated[
        str | None,
        Option("--sort", metavar="NAME", help="Largest values of this score first; -NAME: last."),
    ] = None,
    as_csv: Annotated[
        bool, Option("--csv", help="Print comma-separated values, one row for each ref.")
    ] = False,
) -> None:
    """Show how models were made, and their scores.

    Without REF, all branches and tags that have a score.
    """
    with session.open_to_look() as store:
        rows = store.metrics(*names)
    scores = sorted({name for row in rows for name in row.scores})
    if sort is not None:
        rows = _sorted(rows, sort, scores)
    if as_csv and session.output.mode is Mode.HUMAN:
        with printing():
            session.output.stream.write(_csv(rows, scores))
            session.output.stream.flush()
        return

    def human(screen: Screen) -> None:
        if not rows:
            screen.command("no evaluations yet; next", "mstore eval REF -- COMMAND {}")
            return
        columns = (*COLUMNS, *(Column(name, right=True) for name in scores))
        screen.table(columns, (_cells(row, scores) for row in rows))
        for row in rows:
            if row.culprit is not None:
                screen.line(f"{row.name}: a bisection found to blame: {row.culprit}", style="red")

    session.output.emit({"metrics": rows}, ids=[row.name for row in rows], human=human)


def _sorted(rows: Sequence[MetricsRow], sort: str, known: Sequence[str]) -> list[MetricsRow]:
    name = sort if sort in known else sort.removeprefix("-")
    if name not in known:
        from mstore.terms.errors import did_you_mean

        keyed = [one for one in known if one.endswith(f":{name}")]
        if keyed:
            raise UsageError(
                f"a snapshot has several values of {name}: {', '.join(keyed)}",
                hint=f"mstore metrics --sort {shlex.quote(keyed[0])}",
            )
        hint = did_you_mean(name, known, f"the scores are {', '.join(known)}" if known else None)
        raise UsageError(f"no evaluation has the score {name}", hint=str(hint) if hint else None)
    sign = -1 if name == sort else 1
    rated = sorted((row for row in rows if name in row.scores), key=lambda r: sign * r.scores[name])
    return [*rated, *(row for row in rows if name not in row.scores)]


def _cells(row: MetricsRow, scores: Sequence[str]) -> Sequence[str]:
    return (
        row.name,
        row.method or "-",
        _parameters(row) or "-",
        "-" if row.budget_bytes is None else format_size(row.budget_bytes),
        *(f"{row.scores[name]:.6g}" if name in row.scores else "-" for name in scores),
    )


def _parameters(row: MetricsRow) -> str:
    told = [f"{name}={_value(value)}" for name, value in row.parameters.items()]
    if any(weight != 1 for weight in row.weights):
        told.append(f"weights={_value(row.weights)}")
    return " ".join(told)


def _value(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_value, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _csv(rows: Sequence[MetricsRow], scores: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*FIELDS, *scores])
    for row in rows:
        budget = "" if row.budget_bytes is None else row.budget_bytes
        own = [row.name, row.snapshot.hex(), row.method or "", _parameters(row), budget]
        writer.writerow([*own, *(row.scores.get(name, "") for name in scores)])
    return text.getvalue()
