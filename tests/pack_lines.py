"""Lines of the pack list, for tests that put packs into stores by hand."""

from __future__ import annotations

from pathlib import Path

from mstore.store import pack_list
from mstore.store.layout import Layout, locate
from mstore.terms.ids import PackId


def give(root: Path, pack: str) -> None:
    """Give a pack a line, as a writer did that was killed before its commit."""
    layout: Layout = locate(root)
    try:
        told = pack_list.read(layout)
        since = {**told.since, PackId.parse(pack): told.generation}
        pack_list.write(layout, pack_list.PackList(told.generation, since))
    finally:
        layout.close()
