"""Checks blocks in open packs: the very files that will be mounted.

The kernel reads packs without a hash. So every raw block is read and hashed here first, on all
processors, from the descriptors that become the devices of the mount.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from mstore import fs
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE
from mstore.blocks.reader import BlockReader
from mstore.terms.errors import Corrupt
from mstore.terms.ids import BlockId, Buffer, PackId
from mstore.terms.phrases import call

_AT_ONCE = 64
_DONTCACHE = 0x80


class OpenPacks:
    """Packs by descriptor, as a `PackSource`: reads what these descriptors lead to."""

    def __init__(self, descriptors: Mapping[PackId, int]) -> None:
        self._descriptors = descriptors

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Return these bytes. Raises as `PackFiles.read`."""
        try:
            with fs.reading(f"pack {pack.short}", call("fsck", read_data=True)):
                data = _read(self._descriptors[pack], length, offset)
        except OverflowError as error:
            raise _too_short(pack) from error
        if len(data) != length:
            raise _too_short(pack)
        return data

    def read_scattered(self, pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets, one after another."""
        for target in targets:
            target[:] = self.read(pack, offset, len(target))
            offset += len(target)

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        """Do nothing."""


def _read(descriptor: int, length: int, offset: int) -> Buffer:
    """Read, and keep nothing in memory where the kernel can (Linux 6.14): mounts read past it."""
    data = bytearray(length)
    try:
        return data[: os.preadv(descriptor, [data], offset, _DONTCACHE)]
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return os.pread(descriptor, length, offset)


def _too_short(pack: PackId) -> Corrupt:
    return Corrupt("the pack ends too early", where=f"pack {pack.short}", hint=call("fsck"))


def check(
    blocks: Collection[tuple[BlockId, Location]],
    descriptors: Mapping[PackId, int],
    block_size: int,
) -> None:
    """Read and hash each of these blocks at its place, on all processors.

    Raises Corrupt naming a block that does not match its id, Unreadable, StorageFailed.
    """
    reader = BlockReader(OpenPacks(descriptors), block_size)
    in_order = sorted(blocks, key=lambda item: (item[1].pack, item[1].offset))

    def check_some(some: Sequence[tuple[BlockId, Location]]) -> None:
        for block, location in some:
            reader.block(block, location)

    waiting = iter(in_order)
    groups = iter(lambda: list(islice(waiting, _AT_ONCE)), [])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "check") as pool:
        try:
            for _ in pool.map(check_some, list(groups)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def require_whole_pages(sizes: Mapping[PackId, int]) -> None:
    """Raise Corrupt unless each pack is a whole number of pages, as the kernel reads them."""
    for pack, size in sizes.items():
        if size % PAGE:
            raise Corrupt("truncated pack", where=f"pack {pack.short}", hint=call("fsck"))
