"""The only module that uses mfusepy: its types as seen from here, and the call that serves.

mfusepy has no annotations and loads libfuse when it is imported, version 2 if it finds both; so it
is imported late, and with `FUSE_LIBRARY_NAME` set.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol

from mstore.terms.errors import Unavailable
from mstore.terms.phrases import call, joined, phrase

WITHOUT_FUSE = phrase(
    "{checkout} writes the same files without FUSE, and in Python store[REF].load() reads a model "
    "and store[REF].tensor(NAME) a single tensor",
    checkout=call("checkout", "REF", "DIR"),
)
"""The hint of every error about missing FUSE."""

REQUESTS_AT_ONCE = 64
"""Reads of the page cache that may wait for a disk while others are answered."""

# Each request has a thread until it is answered. libfuse 3.12 and later stop at 10 unless told
# otherwise, so ten reads that are stuck would stop everything; earlier versions have no limit. As
# many again as wait for the page cache, and more, stay for readers that wait for one page each and
# for names and attributes. Threads are made when they are needed.
_THREADS = 4 * REQUESTS_AT_ONCE
# Threads that stay when they are idle; without a number, libfuse 3.12 to 3.16 warn on stderr.
_IDLE_THREADS = 10


class FileInfo(Protocol):
    """struct fuse_file_info: `open` sets all but `flags`."""

    flags: int
    fh: int
    keep_cache: int
    direct_io: int


class FuseConnection(Protocol):
    """struct fuse_conn_info.

    want: the set of capabilities to switch on. max_background: how many reads of the page cache the
    kernel sends before it waits for an answer, whatever files they are of. congestion_threshold:
    from how many on it reads less ahead.
    """

    want: int
    max_background: int
    congestion_threshold: int


class FuseConfig(Protocol):
    """struct fuse_config: how long the kernel may cache names and attributes, in seconds."""

    entry_timeout: float
    negative_timeout: float
    attr_timeout: float
    use_ino: int


class _Buffers(ctypes.Structure):
    """struct fuse_bufvec with one struct fuse_buf (fuse_common.h).

    libfuse 3.17 has one more field at the end, which it sets itself.
    """

    _fields_ = (
        ("count", ctypes.c_size_t),
        ("idx", ctypes.c_size_t),
        ("off", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("mem", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("pos", ctypes.c_int64),
        ("later_versions", ctypes.c_size_t * 4),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.calloc.restype = ctypes.c_void_p
_libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def answer(out: Any, size: int, fill: Callable[[memoryview], None]) -> None:
    """Answer a read with `size` bytes, which `fill` writes into the memory that it is given.

    `out` is the `struct fuse_bufvec **` of `read_buf`. libfuse sends the memory and frees it: the
    bytes are copied once on their way to the kernel, not three times as an object of Python would
    be. Raises OSError (ENOMEM) and what `fill` raises; then nothing is answered.
    """
    memory = _libc.malloc(max(size, 1))
    vector = _libc.calloc(1, ctypes.sizeof(_Buffers))
    try:
        if not memory or not vector:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if size:
            fill(memoryview((ctypes.c_ubyte * size).from_address(memory)).cast("B"))
    except BaseException:
        _libc.free(memory)
        _libc.free(vector)
        raise
    buffers = _Buffers.from_address(vector)
    buffers.count, buffers.size, buffers.mem, buffers.fd = 1, size, memory, -1
    ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = vector


def load() -> Any:
    """Import mfusepy with libfuse 3 and return the module. Raises Unavailable."""
    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
    try:
        module = importlib.import_module("mfusepy")
    except ImportError as error:
        raise Unavailable(
            "the Python package mfusepy is missing",
            hint=joined("pip install mfusepy, or without FUSE", WITHOUT_FUSE, between=": "),
        ) from error
    except (OSError, AttributeError) as error:
        raise Unavailable(
            f"libfuse 3 could not be loaded: {error}",
            hint=joined("apt install fuse3, or without FUSE", WITHOUT_FUSE, between=": "),
        ) from error
    if module.fuse_version_major != 3:
        raise Unavailable(
            f"libfuse {module.fuse_version_major} was loaded instead of libfuse 3",
            hint=joined("apt install fuse3, or without FUSE", WITHOUT_FUSE, between=": "),
        )
    return module


def _most_threads(module: Any) -> dict[str, int]:
    """Return the option that raises libfuse's limit of 10 threads; before 3.12 there is none."""
    return {"max_threads": _THREADS} if module.fuse_version_minor >= 12 else {}


def serve(
    module: Any, operations: object, mountpoint: str, *, source: str, allow_other: bool = False
) -> None:
    """Mount and answer requests until the mount has ended.

    `source` is what mountinfo shows as the mounted device; `allow_other` lets other users in.
    Raises RuntimeError, with libfuse's reason already on stderr, if the mount was refused.

    Does not use `auto_unmount`: it would leave a second process per mount, and a crashed mount
    would turn into an empty directory instead of an error.
    """
    module.FUSE(
        operations,
        mountpoint,
        raw_fi=True,
        foreground=True,
        nothreads=False,
        ro=True,
        nosuid=True,
        nodev=True,
        default_permissions=True,
        fsname=source,
        subtype="mstore",
        max_idle_threads=_IDLE_THREADS,
        allow_other=allow_other,
        **_most_threads(module),
    )
