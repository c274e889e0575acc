"""scripts/machine_code.py: libraries that keep no state, call little and can be loaded anywhere."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import pytest
from llvmlite import binding as llvm
from machine_code import _SEGMENT, PAGES, Refused, _machine, linked

from mstore.numeric import levels
from mstore.numeric.levels import LEVELS, Level

# A table of addresses, constants, calls of the C library and one of its own.
CODE = """
@one = internal constant [4 x i32] [i32 1, i32 2, i32 3, i32 5]
@two = internal constant [4 x i32] [i32 7, i32 11, i32 13, i32 17]
@tables = internal constant [2 x ptr] [ptr @one, ptr @two]
declare ptr @memset(ptr, i32, i64)
declare float @fmaf(float, float, float)
define internal i32 @looked_up(i64 %which, i64 %at) noinline {
  %slot = getelementptr [2 x ptr], ptr @tables, i64 0, i64 %which
  %table = load ptr, ptr %slot
  %place = getelementptr [4 x i32], ptr %table, i64 0, i64 %at
  %value = load i32, ptr %place
  ret i32 %value
}
define i32 @mstore_pass(ptr %nothing, ptr %none, i64 %which, i64 %at, ptr %out) {
  %filled = call ptr @memset(ptr %out, i32 9, i64 8)
  %sum = call float @fmaf(float 2.0, float 3.0, float 4.0)
  %behind = getelementptr i8, ptr %out, i64 8
  store float %sum, ptr %behind
  %value = call i32 @looked_up(i64 %which, i64 %at)
  ret i32 %value
}
"""


def _library(level: Level, text: str = CODE) -> bytes:
    machine = _machine(level)
    module = llvm.parse_assembly(f'target triple = "{level.triple}"\n{text}')
    return linked(machine.emit_object(module), level)


def _segments(library: bytes) -> list[tuple[int, ...]]:
    (table,) = (ctypes.c_uint64.from_buffer_copy(library, 32).value,)
    count = ctypes.c_uint16.from_buffer_copy(library, 56).value
    return [_SEGMENT.unpack_from(library, table + at * _SEGMENT.size) for at in range(count)]


@pytest.fixture
def loaded(tmp_path: Path) -> ctypes.CDLL:
    """A library for this machine, in memory."""
    path = tmp_path / "code.so"
    path.write_bytes(_library(levels.runnable()[0]) + b"what follows is ignored")
    return ctypes.CDLL(str(path))


def test_code_runs(loaded: ctypes.CDLL) -> None:
    """Tables of addresses, and functions of the C and the mathematical library, are found."""
    function = loaded["mstore_pass"]
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
    out = ctypes.create_string_buffer(14)
    found = [
        function(None, None, which, at, ctypes.addressof(out))
        for which in (0, 1)
        for at in range(4)
    ]
    assert found == [1, 2, 3, 5, 7, 11, 13, 17]
    assert out.raw == b"\x09" * 8 + bytes(ctypes.c_float(10)) + bytes(2)


def test_nothing_can_be_written_where_code_lies(loaded: ctypes.CDLL) -> None:
    """In memory no part of a library is writable, not even the addresses that were filled in."""
    own = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(loaded._name)
    ]
    assert "r-xp" in {line[1] for line in own}
    assert not [line for line in own if "w" in line[1]]


def test_only_libraries_that_are_called_are_needed() -> None:
    """A library names the C library, or the mathematical one, only if it calls it."""
    level = levels.runnable()[0]
    own = "define i32 @mstore_pass() {\n ret i32 0\n}"
    assert b"libc.so.6" in _library(level)
    assert b"libm.so.6" in _library(level)
    assert b".so." not in _library(level, own)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_segments_lie_on_pages_of_any_size(level: Level) -> None:
    """On processors with pages of 4, 16 and 64 KiB no page has two kinds of access."""
    loads = [row for row in _segments(_library(level)) if row[0] == 1]
    assert len(loads) > 1
    assert all(row[7] == PAGES == 65536 for row in loads)
    # First and last page of each, on the largest pages.
    pages = [(row[3] // PAGES, (row[3] + row[6] - 1) // PAGES) for row in loads]
    assert all(before[1] < after[0] for before, after in pairwise(pages))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CODE.replace("memset", "getenv"), "undefined symbol: getenv"),
        (CODE.replace("@memset", "@expf"), "undefined symbol: expf"),
        (CODE.replace("@one = internal constant", "@one = global"), "keeps state"),
        (
            CODE.replace("@one =", "@kept = global i64 0\n@one =").replace(
                "%sum =", "store i64 %at, ptr @kept\n%sum ="
            ),
            "keeps state",
        ),
    ],
    ids=["call", "inexact", "data", "bss"],
)
def test_what_a_kernel_cannot_have(text: str, why: str, level: Level) -> None:
    """Calls of other functions and data that is written are refused when it is linked."""
    with pytest.raises(Refused, match=why):
        _library(level, text)


def test_no_object_is_no_library() -> None:
    """What the linker does not know is refused in its words."""
    with pytest.raises(Refused, match="cannot be linked"):
        linked(b"\x7fELF\x02\x01" + bytes(100), levels.runnable()[0])
