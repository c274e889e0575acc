"""lost+found: packs that no row names, and replaced indexes, kept instead of deleted.

    lost+found/<UTC time>/<PackId>.pack    a pack that no row names
    lost+found/<UTC time>/index/           an index that was replaced although it had other content

A pack that the index does not name is either garbage of a killed writer, or data that an outdated
index has lost track of; the index alone cannot tell. So garbage collection moves it here, and only
`empty` removes it. `reindex` takes packs back. The time is for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from mstore import fs
from mstore.blocks.pack_files import ScatteredPacks
from mstore.blocks.pack_store import Packs
from mstore.blocks.packs import Footer, SealedPack
from mstore.errors import Corrupt, Incompatible
from mstore.ids import PackId
from mstore.store.layout import Layout


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


def packs(layout: Layout) -> ScatteredPacks:
    """Open the packs in lost+found; the caller closes them.  Raises StorageFailed."""
    return ScatteredPacks(layout.lost_found)


def bring_back(
    layout: Layout, target: Packs, fits: Callable[[Layout, Packs, Footer], bool]
) -> list[PackId]:
    """Move every readable pack that fits back into packs/, durably; return their ids.

    Call with the lock of garbage collection held.
    """
    found = []
    with closing(packs(layout)) as aside:
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


def size(layout: Layout) -> int:
    """Return the bytes of all files in lost+found."""
    total = 0
    for path in layout.lost_found.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def empty(layout: Layout) -> int:
    """Remove everything in lost+found; return the bytes that are freed."""
    freed = size(layout)
    fs.remove_tree(layout.lost_found)
    return freed
