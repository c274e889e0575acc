"""Generations: how a store detects that its index is outdated.

Each commit that publishes something gives the index the next *generation*. The mirror of the refs
records the generation after which it was written, and a pack the one for which it was begun.  Both
are in other files than the index.  So they reveal an index that was replaced by an older one, or
that fell back to an earlier state because of damage:

    mirror        never has a later generation than the index that it was written from; one that
                  was replaced and kept has an earlier one, also where an older mirror and index
                  were both copied over newer ones
    pack          is published by a commit of its generation or a later one; one that the index
                  does not name may be a writer's that was killed before its commit, but then the
                  index is at most one generation behind it

An outdated index can only be read: writers refuse it until `reindex` rebuilds it.  Functions change
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mstore.blocks import packs as packfiles
from mstore.blocks.index import Index
from mstore.errors import Corrupt, Incompatible
from mstore.ids import ID_BYTES, PackId
from mstore.phrases import call
from mstore.store import mirror
from mstore.store.layout import BACKUP_MARKER, Layout

_ID_IN_NAME = slice(-len(".pack") - 2 * ID_BYTES, -len(".pack"))


def is_backup(layout: Layout, index: Index) -> bool:
    """Return whether the store is a backup that nobody has written to."""
    if not (layout.root / BACKUP_MARKER).exists():
        return False
    with index.env.read() as transaction:
        row = index.backup(transaction)
        return row is not None and row.generation == index.generation(transaction)


def damaged_when_copied(index: Index) -> frozenset[PackId]:
    """Return the packs of a backup that were already damaged in its store."""
    with index.env.read() as transaction:
        row = index.backup(transaction)
    return frozenset() if row is None else frozenset(row.damaged)


def doubt(layout: Layout, index: Index, *, packs: bool = False) -> str | None:
    """Return why the index is not trusted; None if it is current.

    packs: also check packs that the index does not know, not only the mirror.
    """
    # Read the evidence first: the index then includes anything published in between.
    told = mirror.generation(layout)
    newest = max(told or 0, mirror.replaced_by(layout))
    try:
        # A readable mirror records the last acknowledged commit.
        unknown = unknown_packs(layout, index) if packs or told is None else []
        index.env.refresh()
        with index.env.read() as transaction:
            own = index.generation(transaction)
    except Corrupt as error:
        return error.what
    if newest > own:
        return (
            f"the index is older than the mirror of the refs (it is of generation {own}, refs/ "
            f"tells of {newest}): it was replaced by an older one, or is damaged"
        )
    excused = own if told is None else own + 1
    for path in unknown:
        if (pack := _pack_generation(path)) > excused:
            return (
                f"the index is older than pack {path.stem[:12]} (generation {own}, {pack}): it was "
                "replaced by an older one, or is damaged"
            )
    return None


def require_current(layout: Layout, index: Index, *, packs: bool = False) -> None:
    """Raise Corrupt if the index is not trusted: nothing may be written based on it."""
    why = doubt(layout, index, packs=packs)
    if why is not None:
        raise Corrupt(why, where=str(layout.index), hint=call("reindex"))


def listed_packs(layout: Layout) -> Iterator[Path]:
    """Yield every file in packs/ that has the name of a pack, sorted by name.

    Raises StorageFailed.
    """
    return map(Path, packfiles.listed(layout.packs))


def unknown_packs(layout: Layout, index: Index) -> list[Path]:
    """Return packs that the index does not name.  A running writer's may be among them."""
    # List files first: the index then includes anything published in between.
    return _unknown(list(packfiles.listed(layout.packs)), index)


def unknown_among(listed: Sequence[Path], index: Index) -> list[Path]:
    """Return those of these packs that the index does not name now."""
    return _unknown(list(map(str, listed)), index)


def _unknown(files: Sequence[str], index: Index) -> list[Path]:
    index.env.refresh()
    with index.env.read() as transaction:
        # Reading and checking all rows takes long, and nearly always every pack is named.
        named = set(index.pack_ids(transaction))
        unnamed = [file for file in files if _id(file) not in named]
        if not unnamed:
            return []
        # Ids alone are not proof that a pack is unknown: nothing checks a key.
        known = {pack for pack, _ in index.packs(transaction)}
        known |= {pack.pack for pack in index.condemned(transaction)}
    return [Path(file) for file in unnamed if _id(file) not in known]


def _id(file: str) -> bytes:
    return bytes.fromhex(file[_ID_IN_NAME])


def _pack_generation(path: Path) -> int:
    try:
        return packfiles.generation_of(path)
    except (Corrupt, Incompatible):
        # Damaged, deleted meanwhile, or of a version that no index here names: it proves nothing.
        return 0
