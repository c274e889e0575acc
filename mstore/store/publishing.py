"""New packs: filled one after the other, sealed, and given their final names.

Owns when a pack is full, where it lies until it is published, and taking it back where the commit
that was to publish it did not come about.  Does not own what goes into a pack, nor the index
transaction that makes it visible (`transaction`, `gc`, `check.repair`).

    tmp/ -> footer, fsync -> rename into packs/ -> fsync of the directories -> index commit

Before the index commit a crash leaves garbage and nothing else.  Belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstore import fs
from mstore.blocks.packs import PackWriter, SealedPack, pack_path
from mstore.errors import StorageFailed
from mstore.store.catalog import Catalog

MAX_PACK_BYTES: Final = 512 << 20
"""A pack that has grown to this is sealed, and another begun."""


def give_names(root: Path, packs: Sequence[SealedPack], given: list[Path]) -> None:
    """Rename sealed packs to their final names below `root`, durably.

    `given` grows by each name before it is given, so that whoever fails later knows what to take
    back.  Raises StorageFailed.
    """
    # Also where no directory is new: another writer may have made it and not synced it yet.
    touched = {root} if packs else set()
    for pack in packs:
        target = pack_path(root, pack.id)
        fs.make_directory(target.parent, exist_ok=True)
        touched.add(target.parent)
        given.append(target)
        fs.rename(pack.path, target)
    for directory in sorted(touched, reverse=True):
        fs.sync_directory(directory)


class NewPacks:
    """Packs on their way into a store.

    directory: where they lie until then, a lease's.  prefix: of their names there.  sealing: is
    called with each pack that was sealed here.
    """

    def __init__(
        self,
        catalog: Catalog,
        directory: Path,
        *,
        prefix: str,
        max_pack: int = MAX_PACK_BYTES,
        sealing: Callable[[SealedPack], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._prefix = prefix
        self._max_pack = max_pack
        self._sealing = sealing
        self._writer: PackWriter | None = None
        self._named: list[Path] = []
        self.sealed: list[SealedPack] = []

    @property
    def writer(self) -> PackWriter:
        """The pack to append to: a new one where the last is full.  Raises StorageFailed."""
        if self._writer is not None and self._writer.size >= self._max_pack:
            self.seal()
        if self._writer is None:
            path = self._directory / f"{self._prefix}{len(self.sealed)}.pack"
            self._writer = self._catalog.new_pack(path)
        return self._writer

    def go_on_with(self, writer: PackWriter) -> None:
        """Seal the pack that was begun, and go on with this one."""
        self.seal()
        self._writer = writer

    def adopt(self, pack: SealedPack) -> None:
        """Publish this one, which somebody else sealed in the same directory, as well."""
        self.sealed.append(pack)

    def seal(self) -> None:
        """Sync the pack that was begun, if there is one, and end it.  Raises StorageFailed."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            pack = writer.seal()
            self.sealed.append(pack)
            if self._sealing is not None:
                self._sealing(pack)

    def abandon(self) -> None:
        """Remove the pack that was begun, if there is one."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def publish(self) -> None:
        """Seal, and give every sealed pack its final name: the step before an index commit."""
        self.seal()
        give_names(self._catalog.layout.packs, self.sealed, self._named)

    def keep(self) -> None:
        """The index commit began: where it fails half way it may still be on disk, so the packs
        stay whatever comes."""
        self._named.clear()

    def take_back(self) -> None:
        """Remove what was published and is not kept.  What cannot be removed is garbage."""
        for path in self._named:
            with suppress(StorageFailed):
                fs.unlink(path, missing_ok=True)
        self._named.clear()
