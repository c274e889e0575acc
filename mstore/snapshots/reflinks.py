"""Reflinks: pieces of packs that files of a checkout share instead of copying them.

A file's page and a pack's page can be one extent of the disk where a block lies raw, and its offset
in the pack is congruent to its offset in the file modulo the filesystem's block size: then
ioctl_ficlonerange(2) makes them one, on XFS and btrfs.  A later write to the file gets pages of its
own.  Does not own what is read and checked afterwards (`checkout`), nor how blocks come to lie so
(`mstore.upkeep.pins`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE, PackGone
from mstore.store.block_cache import Extent
from mstore.store.catalog import Catalog
from mstore.store.view import SnapshotView
from mstore.terms.errors import BadRequest, Incompatible, StorageFailed
from mstore.terms.ids import BlockId
from mstore.terms.phrases import Option, Text, call, phrase

LEAST_BYTES: Final = 64 << 10
"""What is shared unless everything is to be: smaller pieces would make a file of many extents."""

_BATCH: Final = 1024
_NEVER_HERE: Final = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EACCES}
    | {errno.EINVAL}
)
"""Refusals that a second attempt in the same tree gets, too."""


class Reflink(StrEnum):
    """Whether a checkout shares extents, in the words of cp(1).

    auto: where the filesystem can and pieces are worth it; always: or fail; never: copy.
    """

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def parse(word: str) -> Reflink:
    """Return the choice of this name.  Raises BadRequest."""
    try:
        return Reflink(word)
    except ValueError:
        words = ", ".join(Reflink)
        raise BadRequest(f"reflink is one of {words}, not {word!r}") from None


class ClonedPiece(msgspec.Struct, frozen=True):
    """Neighbouring blocks of a file from `offset` on, one location for each.

    shared: the bytes of the file that can be an extent of the pack; empty if there are none.
    """

    offset: int
    extents: Sequence[Extent]
    places: Sequence[Location]
    shared: range

    @property
    def length(self) -> int:
        return sum(extent.length for extent in self.extents)

    def in_pack(self, offset: int) -> int:
        """Return the offset in the pack of an offset in the file, of a piece that lies raw."""
        return self.places[0].offset + offset - self.offset


class Reflinks:
    """Shares extents for one checkout.  Used by one thread.

    shared_bytes: what was shared until now.
    """

    def __init__(self, catalog: Catalog, reflink: Reflink, target: Path) -> None:
        self._catalog = catalog
        self._target = target
        self._is_always = reflink is Reflink.ALWAYS
        self._align = max(PAGE, fs.block_bytes(target.parent))
        self._least = self._align if self._is_always else LEAST_BYTES
        self.goes_on = reflink is not Reflink.NEVER
        self.shared_bytes = 0

    def require_any(self, view: SnapshotView, files: Sequence[str], called: str) -> None:
        """Raise BadRequest if sharing is required, and no file has anything to share."""
        if not self._is_always or not files:
            return
        if view.is_virtual:
            raise BadRequest(
                "is a virtual merge: its bytes are computed, and no pack has them",
                where=called,
                hint=call("materialize", "REF"),
            )
        if not any(piece.shared for path in files for piece in self.pieces(view, path)):
            raise BadRequest(
                "no block of it lies raw and page by page, as sharing needs it",
                where=called,
                hint=phrase(
                    "{pin} rewrites it so; or {auto} copies what cannot be shared",
                    pin=call("pin", called, raw=True),
                    auto=Option("reflink", str(Reflink.AUTO)),
                ),
            )

    def pieces(self, view: SnapshotView, path: str) -> Iterator[ClonedPiece]:
        """Yield the blocks of a stored file in order, each run of shareable ones as one piece."""
        extents = view.extents(path, 0, view.files[path])
        offset = begin = 0
        run: list[Extent] = []
        places: list[Location] = []
        while batch := list(islice(extents, _BATCH)):
            blocks = [extent.block for extent in batch if isinstance(extent.block, BlockId)]
            for extent, place in zip(batch, self._catalog.locate(blocks), strict=True):
                if run and not self._goes_on(begin, places, place, offset):
                    yield self._piece(begin, run, places)
                    begin, run, places = offset, [], []
                run.append(extent)
                places.append(place)
                offset += extent.length
        if run:
            yield self._piece(begin, run, places)

    def _is_raw(self, place: Location, offset: int) -> bool:
        return place.codec == Codec.RAW and (place.offset - offset) % self._align == 0

    def _goes_on(
        self, begin: int, places: Sequence[Location], place: Location, offset: int
    ) -> bool:
        if not self._is_raw(places[0], begin):
            return not self._is_raw(place, offset)
        return place.codec == Codec.RAW and place.follows(places[-1])

    def _piece(self, begin: int, run: Sequence[Extent], places: Sequence[Location]) -> ClonedPiece:
        shared = range(0)
        if self._is_raw(places[0], begin):
            end = begin + sum(extent.length for extent in run)
            first = -(-begin // self._align) * self._align
            shared = range(first, end // self._align * self._align)
        return ClonedPiece(begin, run, places, shared if len(shared) >= self._least else range(0))

    def share(self, file: fs.NewFile, piece: ClonedPiece) -> bool:
        """Make a piece of a file extents of its pack, and copy what of it is less than a page.

        Nothing is checked yet.  Returns False where that cannot be, and the piece is to be written.
        Raises Incompatible or StorageFailed instead if sharing is required.
        """
        if not piece.shared or not self.goes_on:
            return False
        shared, packs, pack = piece.shared, self._catalog.packs, piece.places[0].pack
        end = piece.offset + piece.length
        try:
            start = piece.in_pack(shared.start)
            if not packs.clone(pack, start, len(shared), file, shared.start):
                raise StorageFailed("packs are no files here", errno=errno.EOPNOTSUPP)
            for start, stop in ((piece.offset, shared.start), (shared.stop, end)):
                if start < stop:
                    file.write_at(start, packs.read(pack, piece.in_pack(start), stop - start))
        except PackGone:
            # It was collected meanwhile: what is written is looked up again.
            return False
        except StorageFailed as error:
            if self._is_always:
                raise self._refused(error) from error
            if error.errno == errno.EIO:
                raise
            # XFS may lack room for the records of a share where it has room for a copy.
            self.goes_on = error.errno not in _NEVER_HERE
            return False
        self.shared_bytes += len(shared)
        return True

    def _refused(self, error: StorageFailed) -> StorageFailed | Incompatible:
        auto = Option("reflink", str(Reflink.AUTO))
        root = self._catalog.layout.root
        copies: Text = phrase("{auto} copies what cannot be shared", auto=auto)
        if error.errno == errno.EXDEV:
            what = f"files share extents within one filesystem, and the store is on another: {root}"
            hint: Text = phrase(
                "name a directory on the filesystem of the store; or {copies}", copies=copies
            )
        elif error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL):
            kind = fs.filesystem_type(self._target.parent) or "unknown"
            what = f"this filesystem ({kind}) cannot share extents between files"
            hint = phrase(
                "XFS (made with reflink=1) and btrfs can, with blocks of 4 KiB; {copies}",
                copies=copies,
            )
        else:
            return error
        return Incompatible(what, where=str(self._target), hint=hint)
