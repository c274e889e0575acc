"""Compiled passes that start without the compiler.

Owns how a pass that was compiled once is found again as machine code.  Importing the compiler and
letting it load its own cache takes a third of a second per process, longer than many commands run;
loading the code alone takes a twentieth.  Does not own how code is made (`compiling.entry`).

Code lies beside the source in `__pycache__`, like the interpreter's own and with the same trust:
anyone who may write there may run code.  Or it lies in a directory that `use_cache` names, where
only the owner may write.  It is used only if it was made from exactly the same sources by the same
compiler for the same processor, and is complete; otherwise the compiler runs.

A pass takes integers and addresses, releases the GIL while it runs, and may run in any thread.  It
checks nothing: its caller guarantees that addresses and lengths are right.

File: SHA-256 of the inputs of the code (32), SHA-256 of the code (32), an ELF object with the one
function `mstore_pass`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import shlex
import stat
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

from llvmlite import binding as llvm  # type: ignore[import-untyped]

from mstore.errors import Unavailable

SYMBOL: Final = "mstore_pass"
LOGGER: Final = "mstore.numeric"
COMPILING: Final = "compiling kernels that are needed for the first time: up to 15 s or so"
"""The message of the logger LOGGER, at level INFO, before a process compiles its first pass."""
_TYPES: Final = {"i": ctypes.c_int64, "p": ctypes.c_void_p}
_DIGEST: Final = 32
_HERE: Final = Path(__file__)


_caches: list[Path] = []
"""The directory of `use_cache`, if set."""
_told = Event()


def use_cache(directory: Path) -> None:
    """Store code in this directory from now on, and not beside the sources.

    Raises Unavailable if it is not a directory, or if others than its owner may write there: their
    code would run.
    """
    try:
        found = directory.stat()
    except OSError as error:
        raise Unavailable(
            f"compiled kernels cannot be kept here: {error.strerror}", where=str(directory)
        ) from error
    why, hint = None, None
    if not stat.S_ISDIR(found.st_mode):
        why = "not a directory"
    elif found.st_uid not in (os.geteuid(), 0):
        why = "it is another user's"
    elif found.st_mode & 0o022:
        why, hint = "others may write in it", f"chmod go-w {shlex.quote(str(directory))}"
    if why is not None:
        what = f"compiled kernels cannot be kept here: {why}"
        raise Unavailable(what, where=str(directory), hint=hint)
    _caches[:] = [directory]


def cache_directory() -> Path | None:
    """Return the directory of `use_cache`, if set."""
    return _caches[0] if _caches else None


class Pass:
    """One compiled pass: `name` of `module`, where `compiling.entry` made it.

    takes: one letter per argument, "i" for an int64 and "p" for an address. sources: the files that
    its code comes from, besides this package's `compiling`.
    """

    def __init__(self, module: str, name: str, takes: str, sources: tuple[Path, ...]) -> None:
        self._module = module
        self._name = name
        self._takes = takes
        self._sources = (_HERE, _HERE.with_name("compiling.py"), *sources)
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
        assert status == 0, f"{self._name} was given arguments that contradict each other"

    def load(self) -> Callable[..., int]:
        """Prepare to run: load the file, or compile."""
        with self._lock:
            if self._function is None:
                address, self._kept = self._stored() or self._compiled()
                kinds = [ctypes.c_void_p] * 2 + [_TYPES[letter] for letter in self._takes]
                self._function = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)
            return self._function

    def _stored(self) -> tuple[int, Any] | None:
        try:
            data = code_path(self._sources[-1], self._name).read_bytes()
        except OSError:
            return None
        stamp, digest, code = data[:_DIGEST], data[_DIGEST : 2 * _DIGEST], data[2 * _DIGEST :]
        if stamp != made_from(self._sources) or digest != hashlib.sha256(code).digest():
            return None
        return _loaded(code)

    def _compiled(self) -> tuple[int, Any]:
        _tell()
        made = getattr(importlib.import_module(self._module), self._name)
        found: tuple[int, Any] = made.compiled(
            code_path(self._sources[-1], self._name), made_from(self._sources)
        )
        return found


def code_path(source: Path, name: str) -> Path:
    """Return the path of the code of pass `name`, of a module at `source`, for this processor."""
    processor = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    directory = cache_directory() or source.parent / "__pycache__"
    return directory / f"{source.stem}.{name}-{processor}.pass"


def _tell() -> None:
    """Log once that the compiler is running: it may take a while."""
    if not _told.is_set():
        _told.set()
        # Almost no process needs it.
        import logging

        logging.getLogger(LOGGER).info(COMPILING)


def made_from(sources: tuple[Path, ...]) -> bytes:
    """Return a digest of what code depends on: sources, compiler, interpreter, processor."""
    digest = hashlib.sha256()
    for part in (metadata.version("numba"), llvm.llvm_version_info, sys.version, _processor()):
        digest.update(f"{part}\0".encode())
    for source in sources:
        text = source.read_bytes()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def stored(code: bytes, stamp: bytes) -> bytes:
    """Return the bytes of a file."""
    return stamp + hashlib.sha256(code).digest() + code


def _loaded(code: bytes) -> tuple[int, Any]:
    """Return the address of SYMBOL, and the object that must live as long as it is used."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(SYMBOL), engine


def target_machine() -> Any:
    """Return the target of compilation: this processor with all its features."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=_features(), opt=3, jit=True
    )


def _features() -> str:
    features: str = llvm.get_host_cpu_features().flatten()
    return features


def _processor() -> str:
    return f"{llvm.get_default_triple()} {llvm.get_host_cpu_name()} {_features()}"
