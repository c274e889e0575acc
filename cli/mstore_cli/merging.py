"""What `plan` and `merge` share: their options, the request these make, and how a plan reads.

Parses words only.  Which methods and parameters exist, and which budgets make sense, is for the
library to say.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mstore_cli.output import Screen
from mstore_cli.sizes import format_seconds, format_share, format_size, parse_budget

if TYPE_CHECKING:
    from mstore import Store
    from mstore.reports import PlanReport, Progress

EXPERT_HINT = "--expert llama/math=0.5"
PARAMETER_HINT = "--param density=0.2"

_BASE = typer.Option("--base", metavar="REF", help="The model that is merged into.")
_EXPERT = typer.Option(
    "--expert",
    metavar="REF[=WEIGHT]",
    help="A model whose difference from the base is merged; weight 1 unless given. Repeat.",
)
_METHOD = typer.Option(
    "--method", metavar="NAME", help="linear, task_arithmetic, ties, dare_linear or dare_ties."
)
Base = Annotated[str, _BASE]
Experts = Annotated[list[str], _EXPERT]
Method = Annotated[str, _METHOD]
MaybeBase = Annotated[str | None, _BASE]
MaybeExperts = Annotated[list[str] | None, _EXPERT]
MaybeMethod = Annotated[str | None, _METHOD]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="KEY=VALUE", help="A parameter of the method. Repeat."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE|SHARE",
        help="Most bytes to read from experts: 2GiB, 512MB, or 30% of the full cost.",
    ),
]
MaxError = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        metavar="E",
        help="Cheapest plan whose error bound (relative to the base's norm) is at most E.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Output dtype [default: the base's]."),
]
NoAnalyze = Annotated[
    bool,
    typer.Option(
        "--no-analyze",
        help="Do not read experts to make missing statistics; choose whole tensors instead.",
    ),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What to merge, as words were given."""

    base: str
    experts: tuple[tuple[str, float], ...]
    method: str
    parameters: dict[str, object] = field(default_factory=dict)
    budget: int | float | None = None
    max_error: float | None = None
    dtype: str | None = None
    analyze: bool = True

    def plan(
        self,
        store: Store,
        *,
        threads: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> PlanReport:
        """Let the store make and keep the plan."""
        return store.plan(
            base=self.base,
            experts=self.experts,
            method=self.method,
            parameters=self.parameters,
            budget=self.budget,
            max_error=self.max_error,
            dtype=self.dtype,
            analyze=self.analyze,
            threads=threads,
            progress=progress,
        )


def parse_expert(text: str) -> tuple[str, float]:
    """`REF` or `REF=WEIGHT`.  Raises BadRequest."""
    name, equals, weight = text.partition("=")
    if not name:
        _refuse(f"no ref in {text!r}", "--expert", EXPERT_HINT)
    if not equals:
        return name, 1.0
    try:
        number = float(weight)
    except ValueError:
        _refuse(f"the weight of {name} is not a number: {weight!r}", "--expert", EXPERT_HINT)
    if not math.isfinite(number):
        _refuse(f"the weight of {name} is not finite: {weight!r}", "--expert", EXPERT_HINT)
    return name, number


def parse_parameters(texts: list[str]) -> dict[str, object]:
    """`k=v` pairs; whole numbers, numbers, `true` and `false` become what they say.

    Raises BadRequest for a missing `=` and for a key given twice.
    """
    parameters: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            _refuse(f"not KEY=VALUE: {text!r}", "--param", PARAMETER_HINT)
        if key in parameters:
            _refuse(f"{key} is given twice", "--param", PARAMETER_HINT)
        parameters[key] = _value(value)
    return parameters


def make_request(
    *,
    base: str,
    experts: list[str],
    method: str,
    parameters: list[str],
    budget: str | None,
    max_error: float | None,
    dtype: str | None,
    no_analyze: bool,
) -> Request:
    """The request behind the options of `plan` and `merge`.  Raises BadRequest."""
    return Request(
        base=base,
        experts=tuple(parse_expert(text) for text in experts),
        method=method,
        parameters=parse_parameters(parameters),
        budget=None if budget is None else parse_budget(budget),
        max_error=max_error,
        dtype=dtype,
        analyze=not no_analyze,
    )


def _value(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _refuse(what: str, option: str, hint: str) -> NoReturn:
    # Imported here because `mstore --help` must not pay for the library.
    from mstore.errors import BadRequest

    raise BadRequest(what, where=option, hint=hint)


def plan_document(report: PlanReport, file: Path | None) -> dict[str, object]:
    """A plan as JSON: its report, and the keys of a merge that has not happened yet."""
    own = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    return own | {
        "snapshot": None,
        "manifest": None,
        "expert_bytes_read": 0,
        "base_bytes_read": 0,
        "bytes_written": 0,
        "blocks_reused": None,
        "file": None if file is None else str(file),
    }


def draw_plan(screen: Screen, report: PlanReport) -> None:
    """A plan for people: what goes in, what is read, what is left out, how far off it can be."""
    experts = ", ".join(f"{name}={weight:g}" for name, weight in report.experts)
    parameters = " ".join(f"{key}={json.dumps(value)}" for key, value in report.parameters.items())
    budget = "none" if report.budget_bytes is None else format_size(report.budget_bytes)
    share = format_share(report.planned_expert_bytes, report.full_expert_bytes)
    full = format_size(report.full_expert_bytes)
    screen.fields(
        [
            ("method", f"{report.method} {parameters}".rstrip()),
            ("base", report.base),
            ("experts", experts),
            ("budget", budget),
            ("experts to read", f"{format_size(report.planned_expert_bytes)} ({share} of {full})"),
            ("analysis read", format_size(report.analyze_bytes_read)),
            ("blocks", report.blocks_total),
            ("  equal to base", report.blocks_equal_base),
            ("  shared", report.blocks_shared),
            ("  below threshold", report.blocks_below_threshold),
            ("  selected", report.blocks_selected),
            ("  omitted", report.blocks_omitted),
            ("error bound", format_bound(report.error_bound)),
            ("error estimate", format_bound(report.error_estimate)),
            # A plan that is only looked at took no time.
            ("time", format_seconds(report.seconds) if report.seconds else None),
        ]
    )
    draw_notes(screen, report.notes)


def draw_notes(screen: Screen, notes: Iterable[str]) -> None:
    """What the planner wants known."""
    for note in notes:
        screen.line(f"note: {note}")


def format_bound(value: float | None) -> str:
    """An error relative to the base's norm; `none` where there is none."""
    return "none" if value is None else f"{value:.3g}"
