"""lost+found: packs that no row names, and replaced indexes, kept instead of deleted.

    lost+found/<UTC time>/<PackId>.pack    a pack that no row names
    lost+found/<UTC time>/index/           an index that was replaced although it had other content

A pack that the index does not name is either garbage of a killed writer, or data that an outdated
index has lost track of; the index alone cannot tell. So garbage collection moves it here, and only
`empty` removes it. `reindex` takes packs back. The time is for people.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mstore import fs
from mstore.blocks.packs import Footer, listed, pack_path, read_footer
from mstore.errors import Corrupt, Incompatible, StorageFailed
from mstore.ids import PackId
from mstore.store.layout import Layout


def put_aside(layout: Layout, packs: Sequence[Path]) -> list[Path]:
    """Move packs out of packs/, durably; return the new paths of those that were moved.

    Call with the lock of garbage collection held. Packs that cannot be moved stay.
    """
    if not packs:
        return []
    directory = _directory(layout)
    moved = []
    for path in packs:
        with suppress(StorageFailed):
            fs.rename(path, directory / path.name)
            moved.append(directory / path.name)
    # Sync the new name first: a crash may leave two names, never none.
    for changed in (directory, layout.lost_found, *{path.parent for path in packs}):
        fs.sync_directory(changed)
    return moved


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


def packs(layout: Layout) -> Iterator[Path]:
    """Yield every pack in lost+found.  Raises StorageFailed."""
    if fs.is_there(layout.lost_found):
        yield from map(Path, listed(layout.lost_found))


def bring_back(layout: Layout, fits: Callable[[Layout, Path, Footer], bool]) -> list[PackId]:
    """Move every readable pack that fits back into packs/, durably; return their ids.

    Call with the lock of garbage collection held.
    """
    found = []
    for path in list(packs(layout)):
        try:
            footer = read_footer(path)
            if not fits(layout, path, footer):
                continue
        except (Corrupt, Incompatible):
            continue
        target = pack_path(layout.packs, footer.id)
        fs.make_directory(target.parent, exist_ok=True)
        fs.rename(path, target)
        for directory in (target.parent, layout.packs, path.parent):
            fs.sync_directory(directory)
        fs.remove_empty(path.parent)
        found.append(footer.id)
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
