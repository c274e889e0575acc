"""Packs that no row names: condemned ones in packs/, and what lies in lost+found/.

Garbage collection and repair *condemn* packs in the transaction that removes their last rows. A
holder of a lease at that moment may have looked up a block before and read it now. So the file
stays until all those leases have ended; later leases see only the new rows. Readers without a lease
look the block up again when a pack is gone. The file is removed before its row; the next sweep
removes a row without a file.

    lost+found/<UTC time>/<PackId>.pack    a pack that no row names
    lost+found/<UTC time>/index/           an index that was replaced although it had other content

A pack that the index does not name at all is either garbage of a killed writer, or data that an
outdated index has lost track of; the index alone cannot tell. So garbage collection moves it here,
and only `empty_aside` removes it. `reindex` takes packs back. The time is for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.pack_files import ScatteredPacks
from mstore.blocks.pack_store import Packs, Places
from mstore.blocks.packs import Footer, SealedPack
from mstore.blocks.schema import Condemned
from mstore.store import leases
from mstore.store.layout import Layout
from mstore.terms.errors import Corrupt, Incompatible, StorageFailed
from mstore.terms.ids import PackId


def condemn(index: Index, transaction: IndexTransaction, pack: PackId) -> None:
    """Condemn a pack that no row names any more, and note which leases protect its file."""
    index.condemn(transaction, pack, leases.names(index, transaction))


def listed(index: Index) -> list[Condemned]:
    """Return every condemned pack. Its file is garbage, whether it still exists or not."""
    with index.env.read() as transaction:
        return index.condemned(transaction)


def holders(layout: Layout, packs: list[Condemned]) -> set[str]:
    """Return the leases that still protect files of these packs."""
    names = {name for pack in packs for name in pack.leases}
    return {name for name in names if leases.is_live(layout, name)}


def sweep(layout: Layout, index: Index, places: Places) -> list[Condemned]:
    """Remove the files that no lease protects any more; return those packs.

    Call with the writer lock held. Skips files that cannot be removed (another user's, for
    example).
    """
    waiting = listed(index)
    if not waiting:
        return []
    held = holders(layout, waiting)
    gone = []
    for pack in waiting:
        if held.isdisjoint(pack.leases):
            with suppress(StorageFailed):
                places[pack.place].remove(pack.pack)
                gone.append(pack)
    if gone:
        with index.env.write() as transaction:
            index.forget_condemned(transaction, gone)
    return gone


def put_aside(layout: Layout, packs: Packs, unknown: Sequence[PackId]) -> Sequence[PackId]:
    """Move packs out of packs/, durably; return those that could be moved.

    Call with the lock of garbage collection held.
    """
    return packs.move_out(unknown, _directory(layout)) if unknown else ()


def keep_index(layout: Layout, index: Path) -> Path:
    """Keep an index that was replaced; return its new path."""
    directory = _directory(layout)
    fs.rename(index, directory / "index")
    fs.sync_directory(directory)
    fs.sync_directory(layout.lost_found)
    return directory / "index"


def _directory(layout: Layout) -> Path:
    if fs.make_directory(layout.lost_found, exist_ok=True):
        fs.sync_directory(layout.root)
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for number in range(1000):
        path = layout.lost_found / (f"{name}-{number}" if number else name)
        if not path.exists():
            break
    fs.make_directory(path, exist_ok=True)
    fs.sync_directory(layout.lost_found)
    return path


def aside_packs(layout: Layout) -> ScatteredPacks:
    """Open the packs in lost+found; the caller closes them.  Raises StorageFailed."""
    return ScatteredPacks(layout.lost_found)


def bring_back(
    layout: Layout, target: Packs, fits: Callable[[Layout, Packs, Footer], bool]
) -> list[PackId]:
    """Move every readable pack that fits back into packs/, durably; return their ids.

    Call with the lock of garbage collection held.
    """
    found = []
    with closing(aside_packs(layout)) as aside:
        for pack in aside.listed():
            try:
                footer = aside.table(pack)
                if not fits(layout, aside, footer):
                    continue
            except (Corrupt, Incompatible):
                continue
            path = Path(aside.where(pack))
            target.put([SealedPack(pack, path, footer.size, footer.entries)])
            fs.sync_directory(path.parent)
            fs.remove_empty(path.parent)
            found.append(pack)
    return found


def aside_bytes(layout: Layout) -> int:
    """Return the bytes of all files in lost+found."""
    total = 0
    for path in layout.lost_found.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def empty_aside(layout: Layout) -> int:
    """Remove everything in lost+found; return the bytes that are freed."""
    freed = aside_bytes(layout)
    fs.remove_tree(layout.lost_found)
    return freed
