"""What a lazy copy has of remotes: what its source keeps of them, to find what it leans on.

    root, lists/    as they are: a reader checks them, and reads them again at the remote
    places/         the tables of the remote's packs, as of one moment of their list, checked

Nothing else goes along: the copy has no statistics, so it must not say that it took those of the
remote; and what an unfinished push or fetch left is not its own.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from mstore import fs
from mstore.blocks.segments import LIST, Segments
from mstore.store import refs
from mstore.store.config import Config
from mstore.store.layout import KEPT_LISTS, KEPT_ROOT, Layout, tables_of
from mstore.terms.errors import StorageFailed

_MOST_BYTES: Final = 32 << 20
"""No root and no list is so long; of a damaged one the rest does not matter."""


def copy_kept(source: Layout, config: Config, target: Path, before: Path) -> None:
    """Make a directory `target` with what a store keeps of its lazy remotes, durably.

    before: what an earlier copy has, on the same disk: tables that lie there are linked. Raises
    Corrupt for damaged tables, BadName for a remote that cannot be called so, StorageFailed.
    """
    fs.make_directory(target)
    for one in config.lazy_remotes:
        # It becomes a path, and the settings may be a stranger's.
        refs.directory_of(refs.REMOTE, one.name)
        _copy(source.remotes / one.name, target / one.name, before / one.name)
    fs.sync_directory(target)


def _copy(source: Path, target: Path, before: Path) -> None:
    fs.make_directory(target)
    fs.make_directory(target / KEPT_LISTS)
    _copy_file(source / KEPT_ROOT, target / KEPT_ROOT)
    for name in _names(source / KEPT_LISTS):
        _copy_file(source / KEPT_LISTS / name, target / KEPT_LISTS / name)
    # Without them the store can read nothing there, and its copy neither.
    if fs.is_there(tables_of(source) / LIST):
        Segments(tables_of(source)).copy_to(tables_of(target), tables_of(before))
    fs.sync_directory(target)


def _names(directory: Path) -> list[str]:
    if not fs.is_there(directory):
        return []
    with fs.translated(directory):
        # What begins with a dot is being written.
        return [name for name in fs.listed(directory) if not name.startswith(".")]


def _copy_file(source: Path, target: Path) -> None:
    """Copy a small file, unless it is gone meanwhile."""
    try:
        data = fs.read_file(source, _MOST_BYTES)
    except StorageFailed as error:
        if error.errno != errno.ENOENT:
            raise
        return
    fs.replace_file(target, data)
