"""Snapshots that a transaction publishes, each on a branch: of all that is added or made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstore.store import refs
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.coverage import Coverage
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import PREVIOUS, Origin, Parent, SnapshotRecord
from mstore.store.transaction import RefMove, Transaction, tip_of
from mstore.terms.errors import BadName, BadRequest
from mstore.terms.phrases import Option
from mstore.terms.version import TOOL


class Publication:
    """Snapshots of one transaction, and the moves of their branches, or of candidates for them.

    A branch that is there already keeps its snapshot. Whatever a repair dropped of its blocks and
    records is stored again all the same, because the transaction has it as news.
    """

    def __init__(self, catalog: Catalog, transaction: Transaction) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._snapshots: list[SnapshotRecord] = []
        self._moves: list[RefMove] = []

    def put(
        self,
        branch: str,
        current: refs.Ref | None,
        content: Manifest,
        made: str,
        parents: Sequence[Parent],
        *,
        message: str,
        action: str,
        plan: Plan | None = None,
        coverage: Coverage | None = None,
        origin: Origin | None = None,
        keeps: Callable[[SnapshotRecord], bool] | None = None,
        relies: bool = True,
        candidate: str | None = None,
    ) -> tuple[SnapshotRecord, bool]:
        """Put a content on a branch; return its snapshot, and whether it is a new one.

        current: what the branch is now. parents: what it was made of, without the previous one.
        action: for the reflog. keeps: whether what is on the branch, of the same content, stays; by
        default, if it was made of the same by the same plan. relies: false if the transaction put
        every block and tensor of the content. candidate: a run whose candidate for the branch moves
        in its place.
        """
        _require_text(message)
        transaction = self._transaction
        if relies:
            transaction.rely_on_manifest(content)
        if plan is not None and coverage is None:
            transaction.rely_on_inputs(plan)
        tip, previous = tip_of(self._catalog, current)
        record = SnapshotRecord(
            manifest=transaction.put_record(content),
            parents=(*previous, *parents),
            made=made,
            origin=origin,
            author=self._catalog.author(),
            plan=None if plan is None else transaction.put_record(plan),
            coverage=None if coverage is None else transaction.put_record(coverage),
            message=message,
            time_ns=now_ns(),
            tool=TOOL,
        )
        name, kind, now, tips = branch, refs.BRANCH, current, [tip]
        if candidate is not None:
            name, kind = refs.below(refs.CANDIDATE, candidate, branch), refs.CANDIDATE
            now = self._catalog.ref(name)
            mine, _ = tip_of(self._catalog, now)
            # One that follows another state of the branch is not the one that was asked for.
            tips += [mine] if mine is not None and mine.parents == record.parents else []
        there = next((one for one in tips if one is not None and _stays(one, record, keeps)), None)
        new = refs.Ref(kind, (there or record).id())
        if there is None:
            self._snapshots.append(record)
        if new != now:
            self._moves.append(RefMove(name, now, new, action))
        return there or record, there is None

    def commit(self) -> None:
        """Publish what was put, and what a repair had dropped.  Raises Conflict, StorageFailed."""
        if self._moves or self._transaction.has_news:
            self._transaction.commit(snapshots=self._snapshots, moves=self._moves)


def _require_text(message: str) -> None:
    try:
        message.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise BadRequest(
            f"a message is text that UTF-8 can spell, not {message!r}", where=Option("message")
        ) from error


def made_of(record: SnapshotRecord) -> tuple[Parent, ...]:
    """Return the parents that a snapshot was made of: all but the branch's previous snapshot."""
    return tuple(parent for parent in record.parents if parent.role != PREVIOUS)


def _stays(
    one: SnapshotRecord, new: SnapshotRecord, keeps: Callable[[SnapshotRecord], bool] | None
) -> bool:
    """Return whether a ref's snapshot stays, in place of a new one."""
    if one.manifest != new.manifest:
        return False
    if keeps is None:
        return _is_made_alike(one, new)
    # What is computed on read may have the content of what was added, and is not it.
    return not one.is_virtual and keeps(one)


def _is_made_alike(one: SnapshotRecord, other: SnapshotRecord) -> bool:
    same_plan = one.plan == other.plan and one.is_virtual == other.is_virtual
    return same_plan and made_of(one) == made_of(other)


def branch_below(prefix: str, name: str) -> str:
    """Return the branch below `prefix` for what is made of a model, which the user calls `name`."""
    own = "".join(c if c.isascii() and (c.isalnum() or c in "._-/") else "-" for c in name)
    ref = f"{prefix}/{own.strip('-./')}"
    try:
        refs.check_name(ref)
    except BadName:
        return f"{prefix}/model"
    return ref
