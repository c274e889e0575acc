"""Refs below remotes/NAME/: where this store last saw a remote's branches and tags."""

from __future__ import annotations

from mstore.blocks.lmdb_types import IndexTransaction
from mstore.store import layout as layouts
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, choose_moves
from mstore.terms.errors import StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.report import Report


class MovedRef(Report, frozen=True):
    """A ref that moved; `old` is null for a new one, `new` for a removed one."""

    name: str
    """the branch or tag"""
    old: SnapshotId | None
    """where it pointed before"""
    new: SnapshotId | None
    """where it points now"""


def may_write(catalog: Catalog) -> bool:
    """Return whether this user may write the store."""
    try:
        layouts.require_writable(catalog.layout)
    except StorageFailed:
        return False
    return True


def moved_ref(name: str, old: bytes | None, new: bytes | None) -> MovedRef:
    """Report a move."""
    return MovedRef(name, *(None if one is None else SnapshotId(one) for one in (old, new)))


def follow(
    catalog: Catalog, remote: str, wanted: dict[str, SnapshotId | None], action: str
) -> None:
    """Move refs below remotes/REMOTE/ in one commit; None removes one."""

    def choose(transaction: IndexTransaction) -> list[RefMove]:
        return remote_moves(catalog, transaction, remote, wanted, action)

    choose_moves(catalog, choose)


def remote_moves(
    catalog: Catalog,
    transaction: IndexTransaction,
    remote: str,
    wanted: dict[str, SnapshotId | None],
    action: str,
) -> list[RefMove]:
    """Return the moves of refs below remotes/REMOTE/ that make them so."""
    known = refs_in(catalog.index, transaction)
    moves = []
    for name, id in wanted.items():
        own = refs.below(refs.REMOTE, remote, name)
        new = None if id is None else refs.Ref(refs.REMOTE, bytes(id))
        old = known.get(own)
        if old != new:
            moves.append(RefMove(own, old, new, f"{action} {remote}"))
    # A name that is removed may be above or below a new one.
    return sorted(moves, key=lambda move: move.new is not None)
