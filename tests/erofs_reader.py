"""A reader of EROFS images, written from the format's description, not from mstore's writer.

Reads what mstore writes: extended inodes with labels, plain directories, chunk maps with devices.
Looks names up as the kernel does, by binary search over the entries of a directory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Inode:
    """One inode, and where its index begins."""

    nid: int
    layout: int
    mode: int
    size: int
    where: int
    mtime: tuple[int, int]
    links: int
    index_at: int
    labels: dict[str, str]


class Reader:
    """An image and its devices; device 0 is the image."""

    def __init__(self, image: bytes, packs: Sequence[bytes]) -> None:
        self._devices = [image, *packs]
        block = image[1024 : 1024 + 128]
        assert block[:4] == bytes.fromhex("e2e1f5e0")
        assert block[12] == 12  # pages of 4096
        self.root, self.inodes = struct.unpack_from("<HQ", block, 14)
        self._meta = struct.unpack_from("<I", block, 40)[0] * PAGE
        self.blocks = struct.unpack_from("<I", block, 36)[0]
        count, slot = struct.unpack_from("<HH", block, 86)
        assert count == len(packs)
        for number, pack in enumerate(packs):
            (blocks,) = struct.unpack_from("<I", image, (slot + number) * 128 + 64)
            assert blocks * PAGE == len(pack)

    def inode(self, nid: int) -> Inode:
        image = self._devices[0]
        at = self._meta + nid * 32
        form, xattrs, mode, _, size, where = struct.unpack_from("<HHHHQI", image, at)
        seconds, nanoseconds, links = struct.unpack_from("<QII", image, at + 32)
        assert form & 1
        labels = {}
        end = at + 64
        if xattrs:
            end += 12 + 4 * (xattrs - 1)
            here = at + 64 + 12
            while here < end:
                name, kind, value = struct.unpack_from("<BBH", image, here)
                assert kind == 1
                key, data = image[here + 4 :][:name], image[here + 4 + name :][:value]
                labels[key.decode()] = data.decode()
                here += (4 + name + value + 3) // 4 * 4
            assert here == end
        end = (end + 7) // 8 * 8
        time = (seconds, nanoseconds)
        return Inode(nid, form >> 1, mode, size, where, time, links, end, labels)

    def names(self, nid: int) -> list[tuple[bytes, int, int]]:
        """Return (name, nid, type) of all entries, in their order."""
        inode = self.inode(nid)
        assert inode.layout == 0
        found = []
        for block in range(0, inode.size, PAGE):
            data = self._plain(inode, block, min(PAGE, inode.size - block))
            (first,) = struct.unpack_from("<H", data, 8)
            assert first % 12 == 0
            heads = [struct.unpack_from("<QHBB", data, at) for at in range(0, first, 12)]
            for number, (child, at, kind, _) in enumerate(heads):
                stop = heads[number + 1][1] if number + 1 < len(heads) else len(data)
                found.append((data[at:stop].rstrip(b"\0"), child, kind))
        return found

    def _plain(self, inode: Inode, offset: int, length: int) -> bytes:
        at = inode.where * PAGE + offset
        return self._devices[0][at : at + length]

    def find(self, path: str) -> Inode:
        nid = self.root
        for part in path.encode(errors="surrogateescape").split(b"/"):
            entries = self.names(nid)
            low, high = 0, len(entries)
            while low < high:
                middle = (low + high) // 2
                if entries[middle][0] < part:
                    low = middle + 1
                else:
                    high = middle
            assert entries[low][0] == part
            nid = entries[low][1]
        return self.inode(nid)

    def read(self, inode: Inode) -> bytes:
        """Return a file's pages, with what lies in the last one behind its end."""
        if not inode.size:
            return b""
        assert inode.layout == 4
        assert inode.where == 0x20  # chunks of one page, with devices
        pages = []
        for page in range(-(-inode.size // PAGE)):
            entry = struct.unpack_from("<HHI", self._devices[0], inode.index_at + page * 8)
            if entry[2] == 0xFFFFFFFF:
                pages.append(bytes(PAGE))
            else:
                data = self._devices[entry[1]][entry[2] * PAGE : (entry[2] + 1) * PAGE]
                assert len(data) == PAGE
                pages.append(data)
        return b"".join(pages)
