"""The system calls that mount an EROFS image: fsopen, fsconfig, fsmount, move_mount.

Not mount(2): its options end after a page, which is about sixty packs.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

# The same numbers on every architecture but alpha.
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432

_CLOEXEC: Final = 1
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CREATE: Final = 6
_ATTRIBUTES: Final = 1 | 2 | 4  # read-only, no set-user-id, no devices
_AT_FDCWD: Final = -100
_EMPTY_PATH: Final = 4
_MESSAGE_BYTES: Final = 4096

LONGEST_VALUE: Final = 255
"""Of any option, the mount's source too, in bytes."""


def mount(image: Path, packs: Sequence[int], mountpoint: Path, options: Sequence[str] = ()) -> None:
    """Mount the image, whose devices are these open files, at a directory.

    The mount's source is the image's path, which must lead to it. Options that the kernel does not
    know are left out. Raises OSError with the kernel's own words, where it gives any.
    """
    with _opened(b"erofs") as context:
        _configure(context, _SET_STRING, "source", os.fsencode(image))
        for descriptor in packs:
            # By descriptor: it is the file that was checked, whatever has its name by now.
            _configure(context, _SET_STRING, "device", b"/proc/self/fd/%d" % descriptor)
        for option in options:
            try:
                _configure(context, _SET_FLAG, option)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        _configure(context, _CREATE)
        made = _call(_FSMOUNT, context, _CLOEXEC, _ATTRIBUTES, context=context)
        try:
            target = os.fsencode(mountpoint)
            _call(_MOVE_MOUNT, made, b"", _AT_FDCWD, target, _EMPTY_PATH, context=context)
        finally:
            os.close(made)


@contextmanager
def _opened(filesystem: bytes) -> Iterator[int]:
    descriptor = _call(_FSOPEN, filesystem, _CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _configure(context: int, command: int, key: str | None = None, value: bytes = b"") -> None:
    name = None if key is None else key.encode()
    given = value if command == _SET_STRING else None
    _call(_FSCONFIG, context, command, name, given, 0, context=context)


def _call(number: int, *arguments: int | bytes | None, context: int | None = None) -> int:
    """Do a system call. Raises OSError; `context` may hold what the kernel has to say."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *wide)
    if result >= 0:
        return result
    code = ctypes.get_errno()
    said = "; ".join(_messages(context)) if context is not None else ""
    raise OSError(code, said or os.strerror(code))


def _messages(context: int) -> Iterator[str]:
    """Yield what the kernel logged about this mount."""
    with suppress(OSError):
        while True:
            # "e erofs: text": a level and a space come first.
            yield os.read(context, _MESSAGE_BYTES).decode(errors="replace")[2:].strip()
