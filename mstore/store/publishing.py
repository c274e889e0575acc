"""New packs: filled one after another, sealed, and renamed to their final names.

Owns when a pack is full, where it lies before it is published, and its removal if the commit fails.
Does not own what goes into a pack, nor the index transaction that makes it visible (`transaction`,
`gc`, `check.repair`, `pins`). A crash before that commit leaves only garbage, and lines of the pack
list. Belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mstore.blocks.codecs import Codec, Encoded
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.location import Key, Location
from mstore.blocks.packs import NO_BASE, Kind, PackWriter, SealedPack
from mstore.store import pack_list
from mstore.store.catalog import Catalog
from mstore.terms.errors import Conflict, StorageFailed
from mstore.terms.ids import BlockId, Buffer

MAX_PACK_BYTES: Final = 512 << 20
"""A pack of this size is sealed, and the next one started."""


class NewPacks:
    """Packs being written: in `directory`, of a lease, with `prefix` in their file names."""

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        prefix: str,
        max_pack: int = MAX_PACK_BYTES,
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._prefix = prefix
        self._max_pack = max_pack
        self._writer: PackWriter | None = None
        self.sealed: list[SealedPack] = []

    @property
    def writer(self) -> PackWriter:
        """The pack to append to: a new one if the last is full. Raises StorageFailed."""
        if self._writer is not None and self._writer.size >= self._max_pack:
            self.seal()
        if self._writer is None:
            path = self._directory / f"{self._prefix}{len(self.sealed)}.pack"
            self._writer = PackWriter(path)
        return self._writer

    @property
    def bytes_written(self) -> int:
        """Bytes of the sealed packs."""
        return sum(pack.size for pack in self.sealed)

    def go_on_with(self, writer: PackWriter) -> None:
        """Seal the current pack, and continue with this one."""
        self.seal()
        self._writer = writer

    def copy(self, key: Key, at: Location, payload: Buffer) -> None:
        """Append a payload in its stored form, which the caller has checked.

        Payloads that lie side by side in their old pack stay so, and keep their place in a page.
        """
        kind, id = key
        codec = Codec(at.codec)
        if kind != Kind.BLOCK:
            self.writer.append_small(id, kind, codec, at.width, bytes(payload), at.stored_length)
            return
        base = None if at.base == NO_BASE else BlockId(at.base)
        encoded = Encoded(codec, at.width, payload, at.raw_length, base)
        self.writer.append_encoded(id, encoded, at.pack.hex(), at.offset)

    def adopt(self, pack: SealedPack) -> None:
        """Also publish this pack, which was sealed elsewhere in the same directory."""
        self.sealed.append(pack)

    def seal(self) -> None:
        """Sync and seal the current pack, if any. Raises StorageFailed."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self.sealed.append(writer.seal())

    def abandon(self) -> None:
        """Discard the current pack, if any."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    @contextmanager
    def committing(self) -> Iterator[IndexTransaction]:
        """Seal, and publish all packs: yield the one index transaction that names them.

        If the block or what comes before it raises, the packs are removed again. A commit that
        fails half way may still be on disk, so they stay from its begin on. Raises Corrupt and
        Unavailable as `Catalog.publishing`, Conflict for a pack that is stored, StorageFailed.
        """
        self.seal()
        has_begun = False
        with self._catalog.publishing():
            self._require_new()
            try:
                self._give_names()
                with self._catalog.advancing() as transaction:
                    yield transaction
                    has_begun = True
            except BaseException:
                if not has_begun:
                    self._take_back()
                raise

    def _require_new(self) -> None:
        """Raise Conflict if a pack from elsewhere came here meanwhile by another way."""
        index = self._catalog.index
        with index.env.read() as transaction:
            taken = index.taken(transaction, (pack.id for pack in self.sealed))
        if taken:
            raise Conflict(
                "the pack was stored by another command meanwhile",
                where=f"pack {min(taken).hex()}",
                hint="run the command again",
            )

    def _give_names(self) -> None:
        if self.sealed:
            catalog = self._catalog
            new = [pack.id for pack in self.sealed]
            pack_list.add(catalog.layout, catalog.index, new, catalog.packs.is_there)
            catalog.packs.put(self.sealed)

    def _take_back(self) -> None:
        """Remove packs that no commit names. Those that cannot be removed are garbage."""
        for pack in self.sealed:
            with suppress(StorageFailed):
                self._catalog.packs.remove(pack.id)
