"""Compiled passes that start without the compiler.

Owns how a pass that was compiled once is found again as machine code.  Does not own how code is
made (`compiling`), its form (`images`), nor the kinds of processors (`levels`).

Code comes with the installation (`shipped`), made when that was built.  It is used only if it was
made from exactly the same sources, is complete, and is for a level that this machine runs; the best
such level counts.  Otherwise the compiler runs, once, and its code lies beside the source in
`__pycache__`, like the interpreter's own and with the same trust: anyone who may write there may
run code.  Or it lies in a directory that `use_cache` names, where only the owner may write.  A file
of code that others may write, or that is another user's, is not run, wherever it lies.

A pass takes integers and addresses, releases the GIL while it runs, and may run in any thread.  It
checks nothing: its caller guarantees that addresses and lengths are right.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

from blake3 import blake3

from mstore.errors import Unavailable
from mstore.numeric import images
from mstore.numeric.levels import Level, runnable

LOGGER: Final = "mstore.numeric"
COMPILING: Final = "compiling kernels that are needed for the first time: up to 15 s or so"
"""The message of the logger LOGGER, at level INFO, before a process compiles its first pass."""
SHIPPED: Final = Path(__file__).with_name("kernels")
"""Where the code lies that the build made: a directory for each level."""
_TYPES: Final = {"i": ctypes.c_int64, "p": ctypes.c_void_p}
_HERE: Final = Path(__file__)
_MAKERS: Final = tuple(
    _HERE.with_name(f"{name}.py") for name in ("compiling", "images", "levels", "linking")
)
_PACKAGE: Final = "mstore."
_MODE: Final = 0o644
"""Of a file of code, whatever the umask leaves of it."""
_OTHERS_WRITE: Final = 0o022
_OTHERS: Final = "others may write in it"


_caches: list[Path] = []
"""The directory of `use_cache`, if set."""
_told = Event()


def use_cache(directory: Path) -> None:
    """Store code in this directory from now on, and not beside the sources.

    Raises Unavailable if it is not a directory, or if others than its owner may write there: their
    code would run.
    """
    why = _distrusted(directory)
    if why is not None:
        hint = f"chmod go-w {shlex.quote(str(directory))}" if why == _OTHERS else None
        what = f"compiled kernels cannot be kept here: {why}"
        raise Unavailable(what, where=str(directory), hint=hint)
    _caches[:] = [directory]


def _distrusted(directory: Path) -> str | None:
    """Return why code in this directory must not run, or None."""
    try:
        found = directory.stat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    if found.st_uid not in (os.geteuid(), 0):
        return "it is another user's"
    return _OTHERS if found.st_mode & _OTHERS_WRITE else None


def cache_directory() -> Path | None:
    """Return the directory of `use_cache`, if set."""
    return _caches[0] if _caches else None


class Pass:
    """One compiled pass: `name` of `module`, where `compiling.entry` made it.

    takes: one letter per argument, "i" for an int64 and "p" for an address. sources: the files that
    its code comes from, besides this package's `compiling`; the last is the module's own.
    """

    def __init__(self, module: str, name: str, takes: str, sources: tuple[Path, ...]) -> None:
        self.module = module
        self.name = name
        self.sources = sources
        self._takes = takes
        self._lock = Lock()
        self._function: Callable[..., int] | None = None
        # Must live as long as the code may run.
        self._kept: Any = None
        # Compiled functions write their result and exception here: nothing, both.
        self._returned = ctypes.c_void_p()
        self._raised = ctypes.c_void_p()

    def __call__(self, *arguments: int) -> None:
        """Run the pass."""
        function = self._function or self.load()
        status = function(ctypes.byref(self._returned), ctypes.byref(self._raised), *arguments)
        assert status == 0, f"{self.name} was given arguments that contradict each other"

    def load(self) -> Callable[..., int]:
        """Prepare to run: load the code, or compile.

        Raises Unavailable if there is no code for this processor and it cannot be compiled, or if
        the system lets no program make code executable.
        """
        with self._lock:
            if self._function is None:
                address, self._kept = _mapped(self._stored() or self._compiled())
                self._function = self._callable(address)
            return self._function

    def stamp(self) -> bytes:
        """Return the digest of the sources that its code depends on (32 bytes)."""
        return made_from(self.sources)

    def _callable(self, address: int) -> Callable[..., int]:
        kinds = [ctypes.c_void_p] * 2 + [_TYPES[letter] for letter in self._takes]
        return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)

    def _stored(self) -> images.Image | None:
        stamp = self.stamp()
        for level in runnable():
            for path in self._paths(level):
                data = _read(path, self.sources[-1])
                found = None if data is None else images.decoded(data, stamp)
                if found is not None:
                    return found
        return None

    def _paths(self, level: Level) -> Iterator[Path]:
        """Yield where code of a level may lie, in the order in which it is looked for."""
        if self.module.startswith(_PACKAGE):
            yield shipped(self.module, self.name, level)
        yield code_path(self.sources[-1], self.name, level)

    def _compiled(self) -> images.Image:
        from mstore.numeric import making

        if not runnable():
            raise Unavailable(f"kernels run on x86-64 and aarch64, not on {os.uname().machine}")
        making.require_compiler()
        _tell()
        level = runnable()[0]
        wanted = making.Wanted(self.module, self.name, self.stamp())
        [(_, _, data)] = making.files([wanted], [level])
        # The interpreter writes its own so: atomically, or not at all.
        path = code_path(self.sources[-1], self.name, level)
        SourceFileLoader("", "").set_data(str(path), data, _mode=_MODE)
        found = images.decoded(data, wanted.stamp)
        assert found is not None
        return found


def _mapped(image: images.Image) -> tuple[int, Any]:
    try:
        return images.mapped(image)
    except OSError as error:
        raise Unavailable(
            f"compiled kernels cannot run here: {error.strerror or error}",
            hint="let this program make memory executable (SELinux: execmem, systemd: "
            "MemoryDenyWriteExecute)",
        ) from error


def _read(path: Path, source: Path) -> bytes | None:
    """Return the bytes of a file of code; None if it is not there, or others could have made it.

    source: its owner may give code to whoever runs the source.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            owners = (os.geteuid(), 0, source.stat().st_uid)
            is_trusted = found.st_uid in owners and not found.st_mode & _OTHERS_WRITE
            return file.read() if is_trusted else None
    except OSError:
        return None


def shipped(module: str, name: str, level: Level) -> Path:
    """Return where the build puts the code of a pass of the library."""
    return SHIPPED / level.name / f"{module.removeprefix(_PACKAGE)}.{name}.pass"


def code_path(source: Path, name: str, level: Level | None = None) -> Path:
    """Return where code is kept that this machine compiled for itself.

    It is that of pass `name`, of a module at `source`; level: if None, the best that runs here.
    """
    directory = cache_directory() or source.parent / "__pycache__"
    return directory / f"{source.stem}.{name}-{(level or runnable()[0]).name}.pass"


def _tell() -> None:
    """Log once that the compiler is running: it may take a while."""
    if not _told.is_set():
        _told.set()
        # Almost no process needs it.
        import logging

        logging.getLogger(LOGGER).info(COMPILING)


def made_from(sources: tuple[Path, ...]) -> bytes:
    """Return a digest of the sources that code depends on (32 bytes).

    The compiler's version is no part of it: code is used where no compiler is installed, and every
    version makes the same arithmetic. Who builds compares it (`Image.made_by`).
    """
    return blake3(b"".join(_digest(path) for path in (*_MAKERS, *sources))).digest()


@cache
def _digest(source: Path) -> bytes:
    return blake3(source.read_bytes()).digest()
