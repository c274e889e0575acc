"""`mstore plans`: the plans that the store keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.output import Column, Screen, short
from mstore_cli.plan_output import format_bound, format_loss
from mstore_cli.session import Session
from mstore_cli.sizes import format_share, format_size

if TYPE_CHECKING:
    from mstore.api.reports import PlanReport

COLUMNS = (
    Column("PLAN", style="yellow"),
    Column("METHOD"),
    Column("BASE"),
    Column("EXPERTS", sentence=True),
    Column("BUDGET", right=True),
    Column("READS", right=True),
    Column("LOST", right=True),
    Column("BOUND", right=True),
)


@command(example="mstore plans --json")
def plans(session: Session) -> None:
    """List the plans that the store keeps.

    They are sorted by base, method and cost. To run one: `mstore merge --plan ID`. LOST estimates
    which share of the full merge's change is lost. BOUND is the certified bound on the error,
    relative to the base's norm.
    """
    with session.open() as store:
        found = store.plans()

    def human(screen: Screen) -> None:
        if not found:
            screen.command(
                "no plans yet; next", "mstore plan --base REF --expert REF --method NAME"
            )
        screen.table(
            COLUMNS,
            (
                (
                    short(one.plan),
                    one.method,
                    one.base,
                    ", ".join(f"{name}={weight:g}" for name, weight in one.experts),
                    "none" if one.budget_bytes is None else format_size(one.budget_bytes),
                    _reads(one),
                    format_loss(one.error_share_estimate),
                    format_bound(one.error_bound),
                )
                for one in found
            ),
        )

    session.output.emit({"plans": found}, ids=[one.plan for one in found], human=human)


def _reads(one: PlanReport) -> str:
    share = format_share(one.planned_expert_bytes, one.full_expert_bytes)
    return f"{format_size(one.planned_expert_bytes)} ({share})"
