"""Compiled passes: found among the files that the build made, checked, and loaded.

Owns how the machine code of a pass lies on disk (a shared library with a trailer) and how it comes
into memory: as the code of Python's own extension modules does, through the dynamic loader.  Does
not own how it is made (`scripts/kernels.py`), nor the kinds of processors (`levels`).

Code is used only if it was made from exactly the same sources, is complete, and is for a level that
this machine runs; the best such level counts.  Mode and owner of its file do not matter, as they do
not for the Python files beside it.

A pass takes integers and addresses, releases the GIL while it runs, and may run in any thread.  It
checks nothing: its caller guarantees that addresses and lengths are right.

File: an ELF shared library with a function SYMBOL; then BLAKE3 of what the code was made from (32
bytes), BLAKE3 of what made it (32), and BLAKE3 of all before (32).  Loaders ignore what follows the
library.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import msgspec
from blake3 import blake3

from mstore.numeric.levels import Level, runnable
from mstore.terms.errors import Unavailable

KERNELS: Final = Path(__file__).with_name("kernels")
"""Where the code lies that the build made: a directory for each level."""
SYMBOL: Final = "mstore_pass"
ENDING: Final = ".pass"
DIGEST: Final = 32
_TYPES: Final[dict[str, Any]] = {"i": ctypes.c_int64, "p": ctypes.c_void_p}
_PACKAGE: Final = Path(__file__).parents[1]
_MAKERS: Final = ("numeric/compiling.py", "numeric/levels.py")
"""What makes the code of every pass."""
_BUILD: Final = ("scripts", "kernels.py")
"""What makes the kernels, in a checkout."""


class Trailer(msgspec.Struct, frozen=True):
    """What a file says of its code: digests of what it was made from, and of what made it."""

    stamp: bytes
    maker: bytes


def sealed(library: bytes, made: Trailer) -> bytes:
    """Return the bytes of a file with this shared library."""
    body = library + made.stamp + made.maker
    return body + blake3(body).digest()


def trailer(data: bytes) -> Trailer | None:
    """Return what a file says of its code; None if it is incomplete or damaged."""
    body = memoryview(data)[:-DIGEST]
    if len(body) < 2 * DIGEST or blake3(body).digest() != data[-DIGEST:]:
        return None
    return Trailer(bytes(body[-2 * DIGEST : -DIGEST]), bytes(body[-DIGEST:]))


class Pass:
    """One compiled pass: `name` of `module`, where `compiling.entry` made it.

    takes: one letter per argument, "i" for an int64 and "p" for an address. sources: the files that
    its code comes from, besides `numeric/compiling.py`; as paths in the package `mstore`.
    """

    def __init__(self, module: str, name: str, takes: str, sources: Iterable[str | Path]) -> None:
        self.module = module
        self.name = name
        self.sources = tuple(_PACKAGE / source for source in sources)
        self._called = f"{module.removeprefix('mstore.')}.{name}"
        self._takes = takes
        self._lock = Lock()
        self._function: Callable[..., int] | None = None
        # Compiled functions write their result and exception here: nothing, both.
        self._returned = ctypes.c_void_p()
        self._raised = ctypes.c_void_p()

    def __call__(self, *arguments: int) -> None:
        """Run the pass."""
        function = self._function or self.load()
        status = function(ctypes.byref(self._returned), ctypes.byref(self._raised), *arguments)
        assert status == 0, f"{self.name} was given arguments that contradict each other"

    def load(self) -> Callable[..., int]:
        """Prepare to run: load the code.

        Raises Unavailable if there is no code for this processor and these sources, or if the
        system lets this program load none.
        """
        with self._lock:
            if self._function is None:
                self._function = self._loaded(self._found())
            return self._function

    def level(self) -> str:
        """Return the level of the code that runs here.  Raises as `load` does."""
        self.load()
        return self._found().parent.name

    def stamp(self) -> bytes:
        """Return the digest of the sources that its code depends on (32 bytes).

        The compiler's version is no part of it: code is used where no compiler is installed, and
        every version makes the same arithmetic.
        """
        makers = [_PACKAGE / maker for maker in _MAKERS]
        return blake3(b"".join(_digest(path) for path in (*makers, *self.sources))).digest()

    def path(self, level: Level) -> Path:
        """Return where the build puts the code for a level."""
        return KERNELS / level.name / f"{self._called}{ENDING}"

    def _found(self) -> Path:
        """Return the file of the best level that this machine runs.  Raises Unavailable."""
        if not runnable():
            raise Unavailable(f"kernels run on x86-64 and aarch64, not on {os.uname().machine}")
        stamp = self.stamp()
        whys = []
        for level in runnable():
            path = self.path(level)
            try:
                made = trailer(path.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as error:
                whys.append(f"cannot be read: {error.strerror or error}")
                continue
            if made is not None and made.stamp == stamp:
                return path
            whys.append("was compiled from other sources" if made else "is damaged")
        # The reason of the best level tells most.
        why = whys[0] if whys else "was not compiled for this processor"
        is_checkout = KERNELS.parents[2].joinpath(*_BUILD).is_file()
        raise Unavailable(
            f"the kernel {self._called} {why}",
            where=str(KERNELS),
            hint=f"compile the kernels: {'/'.join(_BUILD)}"
            if is_checkout
            else "install mstore again: kernels are compiled when it is built",
        )

    def _loaded(self, path: Path) -> Callable[..., int]:
        try:
            function = ctypes.CDLL(str(path))[SYMBOL]
        except OSError as error:
            raise Unavailable(
                f"compiled kernels cannot run here: {error}",
                hint="let this program run code from that file: a mount option (noexec), SELinux "
                "or a seccomp filter may forbid it",
            ) from error
        function.restype = ctypes.c_int32
        function.argtypes = [_TYPES[letter] for letter in f"pp{self._takes}"]
        return function


@cache
def _digest(source: Path) -> bytes:
    return blake3(source.read_bytes()).digest()
