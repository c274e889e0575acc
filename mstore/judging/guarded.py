"""A guarded move: a branch moves to its candidate once that has passed, or stays where it is.

One commit moves the branch and removes the candidate. Before it, the branch is where it was; what a
crash leaves is the candidate, which keeps its snapshot for `reflog_days` and can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.judging.gate import VerdictReport
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, choose_moves, drop_ref
from mstore.terms.errors import Conflict, WrongCommand
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import Report


class GateReport(Report, frozen=True):
    """What became of a candidate and its branch."""

    name: str
    """the branch"""
    candidate: str
    """the candidate's name; it is gone unless it was kept"""
    snapshot: SnapshotId
    """the candidate's snapshot"""
    was: SnapshotId | None
    """where the branch was; None: there was none"""
    moved: bool
    """whether the branch is there now"""
    kept: bool
    """whether the candidate that did not pass is still a ref"""
    verdicts: tuple[VerdictReport, ...]
    """the verdicts, in order; the last one may be the one that said no"""


def move_if_passed(
    catalog: Catalog,
    candidate: str,
    was: SnapshotId | None,
    judge: Callable[[], tuple[VerdictReport, ...]],
    *,
    keep_failed: bool,
) -> GateReport:
    """Judge a candidate, and move its branch there if it passes; else the branch stays.

    was: where the branch must be when it moves; None: it must not exist. However this ends, the
    candidate goes, unless it did not pass and `keep_failed` says to keep it. Raises Conflict if the
    branch moved meanwhile, GateFailed (a required gate that was not run), and what `judge` raises.
    """
    name = refs.branch_of(candidate)
    keeps = False
    try:
        snapshot = catalog.resolve(candidate)
        verdicts = judge()
        passed = all(one.passed for one in verdicts)
        if passed:
            gates = ", ".join(one.gate for one in verdicts)
            _promote(catalog, candidate, name, was, snapshot, f"passed {gates}")
        keeps = keep_failed and not passed
    except WrongCommand:
        keeps = keep_failed
        raise
    finally:
        if not keeps:
            drop_ref(catalog, candidate, "gate")
    return GateReport(
        name=name,
        candidate=candidate,
        snapshot=snapshot,
        was=was,
        moved=passed,
        kept=keeps,
        verdicts=verdicts,
    )


def _promote(
    catalog: Catalog,
    candidate: str,
    name: str,
    was: SnapshotId | None,
    snapshot: SnapshotId,
    passed: str,
) -> None:
    """Point a branch at its candidate's snapshot, and remove the candidate, in one commit.

    passed: what the reflog says beside what made the candidate.
    """

    def choose(transaction: IndexTransaction) -> list[RefMove]:
        known = refs_in(catalog.index, transaction)
        mine, current = known.require(candidate), known.get(name)
        now = None if current is None else current.snapshot_id()
        is_branch = current is None or current.kind == refs.BRANCH
        if now != was or mine.snapshot_id() != snapshot or not is_branch:
            raise Conflict(
                "the branch moved while its candidate was judged",
                where=name,
                hint=phrase("{reflog}, then run it again", reflog=call("reflog", name)),
            )
        new = refs.Ref(refs.BRANCH, bytes(snapshot))
        action = f"{known.reflog(candidate)[-1].action}, {passed}"
        moves = [] if new == current else [RefMove(name, current, new, action)]
        return [*moves, RefMove(candidate, mine, None, "gate")]

    choose_moves(catalog, choose)
