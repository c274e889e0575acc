"""Which pages of a snapshot's files are pages of packs, and which must be copied into the image.

A page is shown from a pack if all its bytes lie there, raw, side by side, at an offset that is
congruent to the file's modulo 4096. The others are copied: those at the ends of files and runs,
constants (one page each, or none for zeros), and the few blocks that are coded or lie at another
offset. More than a few is refused: that is what pinning raw is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.blocks.codecs import Codec
from mstore.blocks.location import Location
from mstore.store.block_cache import VirtualBlock
from mstore.store.view import SnapshotView
from mstore.terms.errors import Incompatible
from mstore.terms.ids import BlockId, PackId
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.sizes import format_size
from mstore_fuse.erofs.image import PAGE, CopiedPages, PageMap

COPIED_BYTES = 64 << 20
COPIED_SHARE = 32
"""At most 64 MiB, or a 32nd of the snapshot if that is more, is copied into an image."""

_READ_BYTES = 1 << 20

ReadFile = Callable[[str, int, int], bytes]
"""(path, offset, size) -> verified bytes"""


class Piece(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` of a file: those from `start` of a block, which lies at `at`."""

    offset: int
    length: int
    start: int
    block: BlockId
    at: Location


class Run(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` of a file, which lie raw at `address` of a pack."""

    offset: int
    length: int
    pack: PackId
    address: int

    @property
    def pages(self) -> slice:
        """The pages of the file that lie in the run and are pages of the pack."""
        if (self.address - self.offset) % PAGE:
            return slice(0, 0)
        first = -(-self.offset // PAGE)
        return slice(first, max(first, (self.offset + self.length) // PAGE))


class Survey(msgspec.Struct, frozen=True):
    """Where the files of a snapshot lie: the pieces of each file, and the packs of raw ones."""

    files: Mapping[str, list[Piece]]
    packs: list[PackId]

    @classmethod
    def of(cls, view: SnapshotView, called: str) -> Survey:
        """Look up every block of a snapshot, called so. Raises Incompatible (virtual), Corrupt."""
        if view.is_virtual:
            raise Incompatible(
                "a virtual merge has no blocks that the kernel could read",
                where=view.id.short,
                hint=phrase(
                    "{materialize} stores it; {driver} shows it as it is",
                    materialize=call("materialize", called),
                    driver=Option("driver", "fuse"),
                ),
            )
        files = {path: list(_pieces(view, path)) for path in view.files}
        packs: dict[PackId, None] = {}
        for pieces in files.values():
            packs.update((one.at.pack, None) for one in pieces if one.at.codec == Codec.RAW)
        return cls(files, list(packs))

    def raw_blocks(self) -> set[tuple[BlockId, Location]]:
        """Return each raw block once for each place: files may have been looked up apart."""
        return {
            (one.block, one.at)
            for pieces in self.files.values()
            for one in pieces
            if one.at.codec == Codec.RAW
        }

    def require_few_copies(self, called: str) -> None:
        """Raise Incompatible, saying how much it is, if much would have to be copied.

        called: the revision, for the hint.
        """
        total = coded = shifted = 0
        for pieces in self.files.values():
            total += sum(one.length for one in pieces)
            coded += sum(
                one.length for one in pieces if one.at.codec not in (Codec.RAW, Codec.CONSTANT)
            )
            shifted += sum(run.length for run in runs(pieces) if (run.address - run.offset) % PAGE)
        if coded + shifted <= max(COPIED_BYTES, total // COPIED_SHARE):
            return
        of = f"of {format_size(total)}"
        what = []
        if coded:
            what.append(f"{format_size(coded)} {of} are stored compressed or as differences")
        if shifted:
            what.append(f"{format_size(shifted)} {of} lie where no page of their file could")
        raise Incompatible(
            f"the kernel cannot read this snapshot: {', and '.join(what)}",
            hint=phrase(
                "{pin} stores its blocks raw and in file order; {driver} shows it as it is",
                pin=call("pin", called, raw=True),
                driver=Option("driver", "fuse"),
            ),
        )


def _pieces(view: SnapshotView, path: str) -> Iterator[Piece]:
    for one in view.physical_extents(path):
        assert one.location is not None
        assert not isinstance(one.block, VirtualBlock)
        yield Piece(one.offset, one.length, one.start, one.block, one.location)


def runs(pieces: Iterable[Piece]) -> Iterator[Run]:
    """Yield the runs of a file: neighbours in it that are neighbours in a pack are one."""
    last: Run | None = None
    for piece in pieces:
        if piece.at.codec != Codec.RAW:
            continue
        run = Run(piece.offset, piece.length, piece.at.pack, piece.at.offset + piece.start)
        if last is not None and _follows(run, last):
            last = msgspec.structs.replace(last, length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _follows(run: Run, last: Run) -> bool:
    return (
        run.pack == last.pack
        and run.offset == last.offset + last.length
        and run.address == last.address + last.length
    )


def page_map(
    path: str,
    size: int,
    pieces: list[Piece],
    devices: Mapping[PackId, int],
    copied: CopiedPages,
    read: ReadFile,
) -> PageMap:
    """Return the map of a file; what is in no pack as it must be shown goes to `copied`."""
    found = PageMap.empty(size)
    is_mapped = np.zeros(len(found.pages), np.bool_)
    for run in runs(pieces):
        pages = run.pages
        if pages.stop > pages.start:
            first = (run.address + pages.start * PAGE - run.offset) // PAGE
            found.devices[pages] = devices[run.pack]
            found.pages[pages] = np.arange(first, first + pages.stop - pages.start)
            is_mapped[pages] = True
    for piece in pieces:
        if piece.at.codec == Codec.CONSTANT:
            first, last = -(-piece.offset // PAGE), (piece.offset + piece.length) // PAGE
            if first < last:
                # Elements are 1, 2, 4 or 8 bytes: all whole pages are equal.
                found.pages[first:last] = copied.add(read(path, first * PAGE, PAGE))
                is_mapped[first:last] = True
    for first, last in _gaps(is_mapped):
        _copy(path, size, first, last, found, copied, read)
    return found


def _gaps(is_mapped: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield (first, after the last) of each stretch of False."""
    edges = np.flatnonzero(np.diff(is_mapped.astype(np.int8), prepend=1, append=1))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _copy(
    path: str,
    size: int,
    first: int,
    last: int,
    found: PageMap,
    copied: CopiedPages,
    read: ReadFile,
) -> None:
    step = _READ_BYTES // PAGE
    for start in range(first, last, step):
        stop = min(start + step, last)
        data = read(path, start * PAGE, min(stop * PAGE, size) - start * PAGE)
        for page in range(start, stop):
            at = (page - start) * PAGE
            found.pages[page] = copied.add(data[at : at + PAGE])
