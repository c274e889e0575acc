"""From LLVM's language, or C, to the machine code of one pass: a shared library for a level.

Owns the passes of LLVM, in numba's order; the compiler of C, clang, and the linking, by LLD, both
from the wheel of ziglang.  What a library of kernels may not have is refused here: state, and calls
of anything but the functions of the C library that give the same bits everywhere.
"""

from __future__ import annotations

import importlib
import os
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from llvmlite import binding as llvm  # type: ignore[import-untyped]

from mstore.numeric.levels import Level
from mstore.numeric.passes import SYMBOL

IMPORTS: Final = {"libc.so.6": ("memset", "memcpy", "memmove"), "libm.so.6": ("fmaf",)}
"""What code may call, by the name that the dynamic loader knows the library by."""
PAGES: Final = 65536
"""The largest pages of a processor: segments of the library lie on different ones."""
_NOTHING_TO_FREE: Final = "define void @NRT_MemInfo_call_dtor(ptr %info) {\n ret void\n}"
# numba defines, beside each function, one of the same name after `cfunc.` for callers in C.
_NAMED: Final = re.compile(r'^define [^@\n]*@"?cfunc\.([^"(\n]+)"?\(', re.MULTILINE)
_TARGET: Final = re.compile(r"^target (triple|datalayout) = .*$", re.MULTILINE)
_COMPILING: Final = (
    *("-std=c11", "-O3", "-ffreestanding", "-fPIC", "-g0"),
    *("-Werror", "-Wall", "-Wno-unused-function"),
    # What zig adds: code that stops where C leaves a result open.
    "-fno-sanitize=all",
    *("-fno-stack-protector", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"),
)
_LINKING: Final = (
    *("-shared", "-s", "--build-id=none", "--hash-style=gnu", "--no-rosegment"),
    # No library is needed whose functions are not called, none is found later.
    *("--as-needed", "-z", "defs", "-z", "now", "-z", "text", "-z", "noexecstack"),
    *("-z", f"max-page-size={PAGES}", "-z", f"common-page-size={PAGES}"),
)
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_LOADED, _RELOCATED, _WRITABLE = 1, 0x6474E552, 2


class Refused(Exception):
    """Code has something in it that a kernel cannot have."""


def made(assembly: str, level: Level) -> bytes:
    """Return the shared library of `Entry.assembly` for processors of a level.  Raises Refused."""
    machine = _machine(level)
    words = {"triple": level.triple, "datalayout": str(machine.target_data)}
    text = _TARGET.sub(lambda found: f'target {found[1]} = "{words[found[1]]}"', assembly)
    [name] = _NAMED.findall(text)
    module = llvm.parse_assembly(text)
    # Arrays made from addresses own nothing, so nothing needs to be freed.
    module.link_in(llvm.parse_assembly(_NOTHING_TO_FREE))
    # What is not called, and numba's place for each function's environment, is left out.
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name != name:
            one.linkage = "internal"
    _optimise(module, machine)
    module.get_function(name).name = SYMBOL
    return linked(machine.emit_object(module), level)


def made_of_c(source: Path, name: str, level: Level) -> bytes:
    """Return the shared library of the pass of this name in C.  Raises Refused."""
    features = level.features.replace(",", "").replace("-prefer-256-bit", "-prefer_256_bit")
    cpu = level.cpu.replace("-", "_") + features
    with TemporaryDirectory(prefix="mstore-kernels-") as place:
        code = Path(place, "code.o")
        words = ("-target", f"{level.machine}-linux-gnu", f"-mcpu={cpu}", f"-D{name.upper()}")
        _run("cc", *words, *_COMPILING, "-c", str(source), "-o", str(code), folder=Path(place))
        return linked(code.read_bytes(), level)


def linked(code: bytes, level: Level) -> bytes:
    """Return an object as a shared library.  Raises Refused."""
    with TemporaryDirectory(prefix="mstore-kernels-") as place:
        folder = Path(place)
        folder.joinpath("code.o").write_bytes(code)
        for name, library in _libraries(level):
            folder.joinpath(name).write_bytes(library)
        _link(folder, *_LINKING, "code.o", *IMPORTS, "-o", "code.so")
        library = folder.joinpath("code.so").read_bytes()
    _check(library)
    return library


@cache
def _libraries(level: Level) -> tuple[tuple[str, bytes], ...]:
    """Return libraries that have nothing but IMPORTS, by their names: to be linked with."""
    found = []
    with TemporaryDirectory(prefix="mstore-kernels-") as place:
        folder = Path(place)
        for name, functions in IMPORTS.items():
            text = "\n".join(f"define void @{one}() {{\n ret void\n}}" for one in functions)
            module = llvm.parse_assembly(f'target triple = "{level.triple}"\n{text}')
            folder.joinpath("code.o").write_bytes(_machine(level).emit_object(module))
            _link(folder, "code.o", "-shared", "-soname", name, "-o", name)
            found.append((name, folder.joinpath(name).read_bytes()))
    return tuple(found)


def _link(folder: Path, *words: str) -> None:
    _run("ld.lld", *words, folder=folder)


def _run(*words: str, folder: Path) -> None:
    program = Path(str(importlib.import_module("ziglang").__file__)).with_name("zig")
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [program, *words],
        cwd=folder,
        env={**os.environ, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        step = "compiled" if words[0] == "cc" else "linked"
        raise Refused(f"the code cannot be {step}: {done.stderr.strip()}")


def _check(library: bytes) -> None:
    """Raise Refused if anything can be written, or lies closer than the largest pages.

    What the dynamic loader fills in is written once, and read-only before code runs.
    """
    (table,) = struct.unpack_from("<Q", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    # Kind, flags, offset, address, physical address, size in the file, size in memory, alignment.
    rows = [_SEGMENT.unpack_from(library, table + index * size) for index in range(count)]
    filled_in = [(row[3], row[3] + row[6]) for row in rows if row[0] == _RELOCATED]
    for kind, flags, _, start, _, _, length, align in rows:
        if kind != _LOADED:
            continue
        if align < PAGES:
            raise Refused(f"a segment lies on pages of {align} bytes")
        is_filled_in = any(low <= start and start + length <= high for low, high in filled_in)
        if flags & _WRITABLE and not is_filled_in:
            raise Refused("the code keeps state: it has data that can be written")


def _machine(level: Level) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(level.triple).create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small"
    )


def _optimise(module: Any, machine: Any) -> None:
    """Run LLVM's passes in the order that numba runs them: cheap ones first, then all."""
    without = _builder(machine, 0, vectorises=False)
    only = llvm.create_new_module_pass_manager()
    only.add_global_dead_code_eliminate_pass()
    only.run(module, without)
    # Loops in rotated form are vectorised more often.
    cheap = without.getModulePassManager()
    cheap.add_loop_rotate_pass()
    cheap.add_instruction_combine_pass()
    cheap.add_jump_threading_pass()
    cheap.add_refprune_pass()
    cheap.run(module, without)
    fully = _builder(machine, 3, vectorises=True)
    every = fully.getModulePassManager()
    every.add_refprune_pass()
    every.add_global_dead_code_eliminate_pass()
    every.run(module, fully)


def _builder(machine: Any, speed: int, *, vectorises: bool) -> Any:
    options = llvm.create_pipeline_tuning_options(speed_level=speed)
    options.loop_vectorization = vectorises
    options.slp_vectorization = vectorises
    return llvm.create_pass_builder(machine, options)
