"""An EROFS image of a snapshot: the format, as far as mstore writes it. Pure: no files, no packs.

    block 0        superblock at 1024
    blocks         device table: one slot of 128 bytes a pack
    meta_blkaddr   inodes (64 bytes) at nid * 32, behind each its labels, then a file's index
    ...            directories, a multiple of 4096 each
    data_block     copied pages, 4096 each

    index of a file, one entry of 8 bytes a page: 2 zero bytes, u16 device, u32 page number there.
    Device 0 is the image, device k the k-th pack; page number 2^32 - 1 is a page of zeros.

    labels (extended attributes `user.NAME`): 12 zero bytes, then one entry each, a multiple of 4:
    u8 length of the name, u8 1, u16 length of the value, name, value

All integers are little-endian. The room of an index follows from the file's size alone, and nothing
before it depends on packs: so inode numbers are a function of names, sizes and labels, the same in
every mount of a snapshot. The format: the kernel's fs/erofs/erofs_fs.h, Linux 6.12 and later.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mstore.terms.errors import Corrupt, Unavailable
from mstore_fuse.tree import no_directory_holds

PAGE = 4096
HOLE = 0xFFFFFFFF
"""The page number of a page of zeros."""
MAX_DEVICES = 65534

_MAGIC = 0xE0F5E1E2
_CHUNKED_FILE = 0x4
_DEVICE_TABLE = 0x8
_HAS_MTIME = 0x2
_SUPERBLOCK_AT = 1024
_SLOT_BYTES = 128
_INODE_BYTES = 64
_NID_BYTES = 32
_EXTENDED = 1
_FLAT_PLAIN = 0 << 1
_CHUNK_BASED = 4 << 1
_WITH_DEVICES = 0x20
_NAME_MAX = 255
_LABELS_HEAD = bytes(12)
_USER = 1
_ZEROS = bytes(PAGE)
_GATHERED = 1 << 20
_DIRECTORY_TYPE = 2
_FILE_TYPE = 1

_SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
_SLOT = struct.Struct("<64sII56x")
_INODE = struct.Struct("<HHHHQIIIIQII16x")
_DIRENT = struct.Struct("<QHBB")
_INDEX = np.dtype([("zero", "<u2"), ("device", "<u2"), ("page", "<u4")])


class PageMap(msgspec.Struct, frozen=True):
    """Where each page of a file lies: device (0: the image) and number of the page there."""

    devices: npt.NDArray[np.uint16]
    pages: npt.NDArray[np.uint32]

    @classmethod
    def empty(cls, size: int) -> PageMap:
        """Return the map of a file of zeros."""
        count = -(-size // PAGE)
        return cls(np.zeros(count, np.uint16), np.full(count, HOLE, np.uint32))

    def index(self) -> bytes:
        """Return the map as it stands behind an inode."""
        entries = np.zeros(len(self.pages), _INDEX)
        entries["device"] = self.devices
        entries["page"] = self.pages
        return entries.tobytes()


@dataclass(slots=True)
class _Node:
    """A directory (`children` by name) or a file; the root has no parent."""

    size: int = 0
    children: dict[bytes, _Node] | None = None
    parent: _Node | None = None
    nid: int = 0
    block: int = 0
    """of a directory: where its names begin"""
    names: bytes = b""
    labels: bytes = b""
    inode_at: int = 0


class Image:
    """The image of one tree of files. The layout is fixed when it is made; maps come later.

    `files` maps relative POSIX paths to sizes, and `packs` are the sizes of the devices. everyone:
    all users may read them, and not only their owner, root. labels: by path of a file, and '' for
    directories, what else to say: `user.NAME`. Raises Corrupt if the paths form no
    tree, Unavailable if there are more packs or pages than the format has numbers for.
    """

    def __init__(
        self,
        files: Mapping[str, int],
        packs: Sequence[int],
        time_ns: int,
        *,
        everyone: bool = True,
        labels: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        if len(packs) > MAX_DEVICES or any(size // PAGE >= HOLE for size in packs):
            raise Unavailable(f"{len(packs)} packs are more than a kernel mount can have")
        self._packs = packs
        self._who = 0o444 if everyone else 0o400
        self._seconds, self._nanoseconds = divmod(time_ns, 1_000_000_000)
        self._root = _Node(children={})
        self._files: dict[str, _Node] = {}
        for path, size in files.items():
            self._files[path] = _insert(self._root, path, size)
        self._nodes = list(_walk(self._root))
        directories = [node for node in self._nodes if node.children is not None]
        for path, given in (labels or {}).items():
            for node in [self._files[path]] if path else directories:
                node.labels = _encoded(given)
        self._meta_block = 1 + -(-len(packs) * _SLOT_BYTES // PAGE)
        end = self._meta_block * PAGE
        for node in self._nodes:
            # Aligned to its size, so that no inode crosses a page.
            end += -end % _INODE_BYTES
            node.inode_at = end
            node.nid = (end - self._meta_block * PAGE) // _NID_BYTES
            end += _INODE_BYTES + len(node.labels)
            if node.children is None:
                end += -end % _INDEX.itemsize + -(-node.size // PAGE) * _INDEX.itemsize
        block = -(-end // PAGE)
        for node in directories:
            node.names = _directory(node)
            node.size = len(node.names)
            node.block = block
            block += -(-node.size // PAGE)
        self.data_block = block
        """the number of the first page that is free for copied data"""

    def inode(self, path: str) -> int:
        """Return the inode number of a file."""
        return self._files[path].nid

    def head(self, copied_pages: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of all but the files' inodes and indexes, and the copied pages."""
        blocks = self.data_block + copied_pages
        yield _SUPERBLOCK_AT, self._superblock(blocks)
        slots = b"".join(_SLOT.pack(b"", size // PAGE, 0) for size in self._packs)
        yield PAGE, slots
        for node in self._nodes:
            if node.children is not None:
                yield node.inode_at, self._inode(node, _FLAT_PLAIN, node.block)
                yield node.block * PAGE, node.names + bytes(-len(node.names) % PAGE)

    def file(self, path: str, map: PageMap) -> tuple[int, bytes]:
        """Return (offset, bytes) of a file's inode and index."""
        node = self._files[path]
        if not node.size:
            return node.inode_at, self._inode(node, _FLAT_PLAIN, 0)
        inode = self._inode(node, _CHUNK_BASED, _WITH_DEVICES)
        return node.inode_at, inode + bytes(-len(inode) % _INDEX.itemsize) + map.index()

    def _superblock(self, blocks: int) -> bytes:
        return _SUPERBLOCK.pack(
            _MAGIC,
            0,  # no checksum
            _HAS_MTIME,
            PAGE.bit_length() - 1,
            0,
            self._root.nid,
            len(self._nodes),
            self._seconds,
            self._nanoseconds,
            blocks,
            self._meta_block,
            0,
            b"",
            b"mstore",
            _CHUNKED_FILE | (_DEVICE_TABLE if self._packs else 0),
            0,
            len(self._packs),
            PAGE // _SLOT_BYTES,
            0,
            0,
            0,
            0,
            0,
        )

    def _inode(self, node: _Node, layout: int, where: int) -> bytes:
        mode = stat.S_IFREG | self._who
        if node.children is not None:
            # Whoever may read a directory may enter it.
            mode = stat.S_IFDIR | self._who | self._who >> 2
        labels = 0
        if node.labels:
            labels = 1 + (len(node.labels) - len(_LABELS_HEAD)) // 4
        fields = _INODE.pack(
            _EXTENDED | layout,
            labels,
            mode,
            0,
            node.size,
            where,
            node.nid & 0xFFFFFFFF,
            0,
            0,
            self._seconds,
            self._nanoseconds,
            1,  # also for directories, as in the FUSE mount
        )
        return fields + node.labels


def _encoded(labels: Mapping[str, str]) -> bytes:
    """Return labels as they stand behind an inode; nothing for none."""
    entries = []
    for name, value in labels.items():
        key, data = name.encode(), value.encode()
        entry = struct.pack("<BBH", len(key), _USER, len(data)) + key + data
        entries.append(entry + bytes(-len(entry) % 4))
    return _LABELS_HEAD + b"".join(entries) if entries else b""


def _insert(root: _Node, path: str, size: int) -> _Node:
    *above, name = path.encode(errors="surrogateescape").split(b"/")
    at = root
    for part in above:
        at = _children(at, part, path).setdefault(part, _Node(children={}, parent=at))
    siblings = _children(at, name, path)
    if name in siblings:
        raise no_directory_holds(path)
    node = siblings[name] = _Node(size)
    return node


def _children(node: _Node, name: bytes, path: str) -> dict[bytes, _Node]:
    if node.children is None or name in (b"", b".", b"..") or b"\0" in name:
        raise no_directory_holds(path)
    if len(name) > _NAME_MAX:
        raise Corrupt(f"a name of {len(name)} bytes", where=repr(path))
    return node.children


def _walk(node: _Node) -> Iterator[_Node]:
    """Yield the node and all below it, directories before what they hold, names sorted."""
    yield node
    for _, child in sorted((node.children or {}).items()):
        yield from _walk(child)


def _directory(node: _Node) -> bytes:
    """Return a directory's blocks: entries in the order of their names, then these names.

    Binary search in the kernel wants one order over `.`, `..` and all names.
    """
    assert node.children is not None
    entries = [
        (b".", node.nid, _DIRECTORY_TYPE),
        (b"..", (node.parent or node).nid, _DIRECTORY_TYPE),
    ]
    for name, child in node.children.items():
        kind = _FILE_TYPE if child.children is None else _DIRECTORY_TYPE
        entries.append((name, child.nid, kind))
    blocks: list[bytes] = []
    group: list[tuple[bytes, int, int]] = []
    room = PAGE
    for entry in sorted(entries):
        need = _DIRENT.size + len(entry[0])
        if need > room:
            blocks.append(_directory_block(group).ljust(PAGE, b"\0"))
            group, room = [], PAGE
        group.append(entry)
        room -= need
    return b"".join(blocks) + _directory_block(group)


def _directory_block(group: list[tuple[bytes, int, int]]) -> bytes:
    at = len(group) * _DIRENT.size
    entries = []
    for name, nid, kind in group:
        entries.append(_DIRENT.pack(nid, at, kind, 0))
        at += len(name)
    return b"".join(entries) + b"".join(name for name, _, _ in group)


class CopiedPages:
    """Pages that lie in the image: equal ones once, pages of zeros not at all.

    first: the number of the first. write: called with (offset in the image, bytes), in order.
    """

    def __init__(self, first: int, write: Callable[[int, bytes], object]) -> None:
        self._first = first
        self._write = write
        self._known: dict[bytes, int] = {}
        self._gathered = bytearray()

    @property
    def count(self) -> int:
        """How many pages there are."""
        return len(self._known)

    def add(self, page: bytes) -> int:
        """Return the number of a page of these bytes; a short one is filled with zeros."""
        page = page.ljust(PAGE, b"\0")
        if page == _ZEROS:
            return HOLE
        # Not the page itself: this remembers all of them.
        digest = blake3(page).digest()
        number = self._known.get(digest)
        if number is None:
            number = self._known[digest] = self._first + len(self._known)
            self._gathered += page
            if len(self._gathered) >= _GATHERED:
                self.flush()
        return number

    def flush(self) -> None:
        """Write what was gathered."""
        if self._gathered:
            end = (self._first + len(self._known)) * PAGE
            self._write(end - len(self._gathered), bytes(self._gathered))
            self._gathered.clear()
