"""A FUSE mount: made, connected to the kernel, and answered by threads of this process.

Owns the device, the threads, open directories, and which node of the kernel is which path. What a
path is, a `Filesystem` says. Speaks to the kernel itself (`protocol`), not through libfuse: that
interface for paths has one time for which names and attributes last, of all paths, cannot give
attributes with a listing, and takes each answer in memory of its own (docs/design/031).

A node is a path as long as the kernel remembers it. Each request has a thread until it is answered.
"""

from __future__ import annotations

import array
import errno
import itertools
import logging
import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mstore.terms.errors import Unavailable
from mstore.terms.ids import Buffer
from mstore_fuse import mount_table, protocol
from mstore_fuse.protocol import Opcode, Room, Status

DEVICE: Final = Path("/dev/fuse")
BACKGROUND: Final = 64
"""Reads of the page cache that may wait for a disk while others are answered."""

# As many again as wait for the page cache, and more, stay for readers that wait for one page each
# and for names and attributes. Threads are made when they are needed.
_THREADS: Final = 4 * BACKGROUND
_IDLE_THREADS: Final = 10
_MOST_PIECES: Final = 1000
_READ_ONLY, _NO_SET_USER_ID, _NO_DEVICES = 1, 2, 4
_ENDED: Final = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)

log = logging.getLogger("mstore_fuse")

Parts = Sequence[Buffer]


class Opened(NamedTuple):
    """An open file. keep_cache: the page cache of its path is right. direct: it has none."""

    handle: int
    keep_cache: bool
    direct: bool


class Filesystem(Protocol):
    """What a mount shows, by path: relative, '' for the root. Methods raise OSError."""

    def status(self, path: str) -> Status: ...

    def absent_for(self, path: str) -> float:
        """Return for how many seconds a name that is not there may be taken to stay away."""
        ...

    def listing(self, path: str) -> list[tuple[str, Status | None, int, int]]:
        """Return the names of a directory: each with its status, inode number and mode.

        Without a status the kernel asks for it if it needs it.
        """
        ...

    def open(self, path: str, flags: int) -> Opened: ...

    def read(self, path: str, handle: int, offset: int, size: int) -> Parts:
        """Return the bytes in pieces; fewer only at the end of the file."""
        ...

    def release(self, path: str, handle: int) -> None: ...

    def room(self, path: str) -> Room: ...

    def label(self, path: str, name: str) -> bytes:
        """Return the value of an extended attribute."""
        ...

    def labels(self, path: str) -> list[str]: ...


def mount(mountpoint: Path, source: str, *, subtype: str, allow_other: bool = False) -> int:
    """Mount a directory, read-only; return the descriptor that `serve` takes.

    source: what mountinfo shows as the mounted device, without commas. Raises Unavailable.
    """
    options = ["default_permissions", *(["allow_other"] if allow_other else [])]
    if os.geteuid() == 0:
        return _mount(mountpoint, source, subtype, options)
    # It opens the device, mounts, and sends the descriptor.
    program = shutil.which("fusermount3")
    if program is None:
        raise _refused("fusermount3 is not installed", mountpoint)
    ours, its = socket.socketpair()
    with ours, its:
        words = ["ro", "nosuid", "nodev", *options, f"subtype={subtype}", f"fsname={source}"]
        done = subprocess.run(
            [program, "-o", ",".join(words), "--", str(mountpoint)],
            check=False,
            env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise _refused(done.stderr.strip() or "fusermount3 failed", mountpoint)
        room = array.array("i", [-1])
        _, sent, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(room.itemsize))
        room = array.array("i", sent[0][2][: room.itemsize])
        os.set_inheritable(room[0], False)
        return room[0]


def _mount(mountpoint: Path, source: str, subtype: str, options: list[str]) -> int:
    try:
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(f"{DEVICE}: {error.strerror}", mountpoint) from error
    try:
        mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
        words = [f"fd={device}", f"rootmode={mode:o}", "user_id=0", f"group_id={os.getgid()}"]
        flags = _READ_ONLY | _NO_SET_USER_ID | _NO_DEVICES
        mount_table.attach(mountpoint, source, f"fuse.{subtype}", flags, [*words, *options])
    except OSError as error:
        os.close(device)
        raise _refused(str(error.strerror), mountpoint) from error
    return device


def _refused(why: str, mountpoint: Path) -> Unavailable:
    return Unavailable(f"the mount could not be made: {why}", where=str(mountpoint))


def serve(device: int, operations: Filesystem) -> None:
    """Answer requests until the mount has ended. Closes the descriptor."""
    connection = _Connection(device, operations)
    try:
        connection.serve()
    finally:
        os.close(device)


class _Nodes:
    """Which node is which path, and how many answers with it the kernel remembers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = itertools.count(protocol.ROOT + 1)
        self._paths = {protocol.ROOT: ""}
        self._nodes = {"": protocol.ROOT}
        self._known = {protocol.ROOT: 1}

    def path(self, node: int) -> str:
        """Raises OSError (ESTALE)."""
        path = self._paths.get(node)
        if path is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return path

    def told(self, path: str) -> int:
        """Return the node of a path, for one answer more."""
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._nodes[path] = next(self._free)
                self._paths[node] = path
                self._known[node] = 0
            self._known[node] += 1
            return node

    def forget(self, nodes: Sequence[tuple[int, int]]) -> None:
        """Take back so many answers with each of these nodes."""
        with self._lock:
            for node, count in nodes:
                if node == protocol.ROOT or node not in self._known:
                    continue
                self._known[node] -= count
                if self._known[node] <= 0:
                    del self._known[node], self._nodes[self._paths.pop(node)]


class _Connection:
    """The requests of one mount."""

    def __init__(self, device: int, operations: Filesystem) -> None:
        self._device = device
        self._operations = operations
        self._nodes = _Nodes()
        self._directories: dict[int, list[tuple[str, Status | None, int, int]]] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._threads = self._idle = 0
        self._answers: dict[int, Callable[[int, str, memoryview], tuple[Parts, list[int]]]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._attributes,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.STATFS: self._room,
            Opcode.RELEASE: self._release,
            Opcode.GETXATTR: self._label,
            Opcode.LISTXATTR: self._labels,
            Opcode.INIT: self._init,
            Opcode.OPENDIR: self._open_directory,
            Opcode.READDIR: self._list,
            Opcode.RELEASEDIR: self._close_directory,
            Opcode.READDIRPLUS: self._list,
        }

    # -- threads -----------------------------------------------------------------------------

    def serve(self) -> None:
        with self._changed:
            self._add_thread()
            self._changed.wait_for(lambda: not self._threads)

    def _add_thread(self) -> None:
        self._threads += 1
        self._idle += 1
        try:
            threading.Thread(target=self._work, name="fuse").start()
        except RuntimeError:
            # The system has no more: those that are there go on.
            self._threads -= 1
            self._idle -= 1
            if not self._threads:
                raise

    def _work(self) -> None:
        room = memoryview(bytearray(protocol.SMALLEST_BUFFER))
        try:
            while (length := self._next(room)) is not None:
                with self._changed:
                    self._idle -= 1
                    if not self._idle and self._threads < _THREADS:
                        self._add_thread()
                self._answer(room[:length])
                with self._changed:
                    self._idle += 1
                    if self._idle > _IDLE_THREADS:
                        return
        finally:
            with self._changed:
                self._threads -= 1
                self._idle -= 1
                self._changed.notify_all()

    def _next(self, room: memoryview) -> int | None:
        """Wait for a request; None if the mount has ended."""
        while True:
            try:
                return os.readv(self._device, [room])
            except OSError as error:
                if error.errno in _ENDED:
                    return None
                # ENOENT: who asked has given up.
                if error.errno not in (errno.ENOENT, errno.EAGAIN):
                    raise

    # -- requests ----------------------------------------------------------------------------

    def _answer(self, request: memoryview) -> None:
        _, opcode, unique, node, *_ = protocol.REQUEST.unpack_from(request)
        body = request[protocol.REQUEST.size :]
        if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET):
            forgotten = [(node, protocol.number(body))]
            if opcode == Opcode.BATCH_FORGET:
                forgotten = protocol.forgotten(body)
            self._nodes.forget(forgotten)
            return
        error = 0
        parts: Parts = ()
        told: list[int] = []
        try:
            asked = self._answers.get(opcode)
            if asked is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            path = "" if opcode == Opcode.INIT else self._nodes.path(node)
            parts, told = asked(opcode, path, body)
        except OSError as failure:
            error = failure.errno or errno.EIO
        except Exception:
            # Whoever asked would wait for ever.
            log.exception("a request of kind %d failed", opcode)
            error = errno.EIO
        if len(parts) > _MOST_PIECES:
            parts = (b"".join(parts),)
        head = protocol.answer(unique, error, sum(map(len, parts)))
        try:
            os.writev(self._device, (head, *parts))
        except OSError:
            # Nobody waits for it any more, or the mount has ended.
            self._nodes.forget([(one, 1) for one in told])

    def _init(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        return (protocol.init(body, BACKGROUND),), []

    def _lookup(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        below = f"{path}/{protocol.text(body)}" if path else protocol.text(body)
        try:
            status = self._operations.status(below)
        except FileNotFoundError:
            lasts = self._operations.absent_for(below)
            if not lasts:
                raise
            return (protocol.absent(lasts),), []
        node = self._nodes.told(below)
        return (protocol.entry(node, status),), [node]

    def _attributes(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        return (protocol.attributes(self._operations.status(path)),), []

    def _open(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        found = self._operations.open(path, protocol.flags(body))
        flags = protocol.KEEP_CACHE * found.keep_cache | protocol.DIRECT_IO * found.direct
        return (protocol.opened(found.handle, flags),), []

    def _read(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        return self._operations.read(path, *protocol.read(body)), []

    def _release(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        self._operations.release(path, protocol.number(body))
        return (), []

    def _room(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        return (protocol.room(self._operations.room(path)),), []

    def _label(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        room, name = protocol.value(body)
        return _fitting(self._operations.label(path, protocol.text(name)), room), []

    def _labels(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        room, _ = protocol.value(body)
        names = "".join(f"{name}\0" for name in self._operations.labels(path))
        return _fitting(names.encode(), room), []

    # -- directories -------------------------------------------------------------------------

    def _open_directory(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        # Whoever reads it sees it as it is now, however many requests that takes.
        listed = self._operations.listing(path)
        handle = next(self._numbers)
        self._directories[handle] = listed
        return (protocol.opened(handle, 0),), []

    def _close_directory(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        del self._directories[protocol.number(body)]
        return (), []

    def _list(self, opcode: int, path: str, body: memoryview) -> tuple[Parts, list[int]]:
        handle, start, room = protocol.read(body)
        is_plus = opcode == Opcode.READDIRPLUS
        prefix = f"{path}/" if path else ""
        parts: list[bytes] = []
        told: list[int] = []
        listed = self._directories[handle]
        for place in range(start, len(listed)):
            name, status, inode, mode = listed[place]
            line = protocol.named(
                name.encode(errors="surrogateescape"), inode, mode, following=place + 1
            )
            room -= len(line) + is_plus * len(protocol.NO_NODE)
            if room < 0:
                break
            if is_plus and status is not None:
                told.append(self._nodes.told(prefix + name))
                parts.append(protocol.entry(told[-1], status))
            elif is_plus:
                parts.append(protocol.NO_NODE)
            parts.append(line)
        return (b"".join(parts),), told


def _fitting(value: bytes, room: int) -> Parts:
    """Return a value, or its size if there is no room. Raises OSError (ERANGE)."""
    if not room:
        return (protocol.size(len(value)),)
    if len(value) > room:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return (value,)
