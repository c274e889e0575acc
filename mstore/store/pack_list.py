"""The pack list: which packs are the store's, and since which generation.

    mstore packs 1
    generation <decimal>
    store <uuid>                     a second copy of what `format` says
    <generation> <PackId>            a line a pack, sorted by generation, then by id
    blake3 <64 hex digits>           (`mstore.store.sealed_text`)

A pack itself names no store. `refs/packs.<generation>` is written and synced before the packs of
that generation get their names, and so before the index names them. From then on it keeps its name:
whoever restores an older state, list included, leaves the newer name, or packs without a line. The
newest list that is readable counts; KEPT of them stay.

A line is a promise about the past, not about the file: it stays when the commit fails, and goes
with the next list once the index does not know the pack and the file is gone. Call functions that
write with the writer lock held.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.store import sealed_text
from mstore.store.layout import Layout
from mstore.terms.errors import BadName, Corrupt
from mstore.terms.ids import PackId

KEPT: Final = 4
_HEAD: Final = "mstore packs 1"
_STORE: Final = re.compile(rb"store ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\n")


class PackList(msgspec.Struct, frozen=True):
    """One list: the generation that it was written for, and the first one of each pack.

    store: the UUID of the store that wrote it; None for no list.
    """

    generation: int
    since: Mapping[PackId, int]
    store: uuid.UUID | None = None


def newest(layout: Layout) -> int:
    """Return the generation of the newest list, from names only; 0 if there is none.

    Its writer saw the index at the generation before, and may have been killed before its commit.
    """
    return max((number for number, _ in sealed_text.kept(layout.pack_list)), default=0)


def read(layout: Layout) -> PackList:
    """Return the newest list that is readable; an empty one if there is none."""
    for _, path in sealed_text.kept(layout.pack_list):
        with suppress(Corrupt):
            return read_file(path)
    return PackList(0, {})


def read_file(path: Path) -> PackList:
    """Read the list at this path. Raises Corrupt (also if it is missing), StorageFailed."""
    generation, lines = sealed_text.read_lines(path, _HEAD, "pack list")
    match = _STORE.fullmatch(lines[0]) if lines else None
    if match is None:
        raise Corrupt("a pack list of no store", where=str(path))
    since = {}
    for line in lines[1:]:
        told, _, name = line[:-1].decode(errors="replace").partition(" ")
        try:
            if not sealed_text.is_number(told):
                raise BadName(f"{told!r} is no generation")
            since[PackId.parse(name)] = int(told)
        except BadName as error:
            raise Corrupt(f"not a line of a pack list: {line!r}", where=str(path)) from error
    return PackList(generation, since, uuid.UUID(match[1].decode()))


def add(
    layout: Layout, index: Index, new: Collection[PackId], is_there: Callable[[PackId], bool]
) -> None:
    """Write the list of the next commit, which publishes the `new` packs; without any, a fresh one.

    Raises Corrupt if rows of packs are damaged, StorageFailed.
    """
    with index.env.read() as transaction:
        generation = index.generation(transaction)
        count = index.count(transaction, "packs") + index.count(transaction, "condemned")
    since = dict(read(layout).since)
    if not new or len(since) != count:
        with index.env.read() as transaction:
            known = known_packs(index, transaction)
        known |= {pack for pack in since.keys() - known if is_there(pack)}
        since = {pack: since.get(pack, generation) for pack in known}
    write(layout, PackList(generation + 1, since | dict.fromkeys(new, generation + 1)))


def known_packs(index: Index, transaction: IndexTransaction) -> set[PackId]:
    """Return the packs that rows of the index name, condemned ones too.  Raises Corrupt."""
    condemned = {pack.pack for pack in index.condemned(transaction)}
    return condemned | {pack for pack, _ in index.packs(transaction)}


def write(layout: Layout, told: PackList) -> None:
    """Write this list durably, in the place of one of its generation; remove the oldest."""
    ordered = sorted((generation, pack.hex()) for pack, generation in told.since.items())
    lines = [f"store {layout.uuid}\n".encode()]
    lines += [f"{generation} {pack}\n".encode() for generation, pack in ordered]
    if fs.make_directory(layout.pack_list.parent, exist_ok=True):
        fs.sync_directory(layout.root)
    path = layout.pack_list.with_name(f"{layout.pack_list.name}.{told.generation}")
    data = sealed_text.encode(_HEAD, told.generation, lines)
    fs.replace_file(path, data, staging=layout.tmp)
    sealed_text.drop_old(layout.pack_list, KEPT)
