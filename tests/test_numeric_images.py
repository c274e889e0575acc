"""Images: code that refers to itself by distance, checked before it runs."""

from __future__ import annotations

import ctypes
import struct

import pytest
from llvmlite import binding as llvm

from mstore.numeric import images, levels
from mstore.numeric.images import Image
from mstore.numeric.linking import Refused, linked

STAMP = b"s" * 32
# A table of addresses, constants, a call of the C library and one of its own.
CODE = """
@one = internal constant [4 x i32] [i32 1, i32 2, i32 3, i32 5]
@two = internal constant [4 x i32] [i32 7, i32 11, i32 13, i32 17]
@tables = internal constant [2 x ptr] [ptr @one, ptr @two]
declare ptr @memset(ptr, i32, i64)
define internal i32 @looked_up(i64 %which, i64 %at) noinline {
  %slot = getelementptr [2 x ptr], ptr @tables, i64 0, i64 %which
  %table = load ptr, ptr %slot
  %place = getelementptr [4 x i32], ptr %table, i64 0, i64 %at
  %value = load i32, ptr %place
  ret i32 %value
}
define i32 @mstore_pass(ptr %nothing, ptr %none, i64 %which, i64 %at, ptr %out) {
  %filled = call ptr @memset(ptr %out, i32 9, i64 8)
  %value = call i32 @looked_up(i64 %which, i64 %at)
  ret i32 %value
}
"""


def _object(level: levels.Level, text: str = CODE) -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(level.triple).create_target_machine(
        cpu=level.cpu, features=level.features, opt=2, reloc="pic", codemodel="small"
    )
    made: bytes = machine.emit_object(llvm.parse_assembly(text))
    return made


def test_an_image_runs_anywhere() -> None:
    """Tables of addresses, calls and functions of the C library work wherever an image lies."""
    for level in levels.runnable():
        image = linked(_object(level), "mstore_pass", "by hand")
        assert image.bases
        assert [images.IMPORTS[which] for _, which in image.imports] == ["memset"]
        kept = []
        for _ in range(2):
            address, alive = images.mapped(image)
            kept.append(alive)
            kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
            function = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)
            out = ctypes.create_string_buffer(10)
            found = [
                function(None, None, which, at, ctypes.addressof(out))
                for which in (0, 1)
                for at in range(4)
            ]
            assert found == [1, 2, 3, 5, 7, 11, 13, 17]
            assert out.raw == b"\x09" * 8 + bytes(2)


def test_a_damaged_image_is_none() -> None:
    """A file is read whole or not at all, and only for the sources that it was made from."""
    image = linked(_object(levels.runnable()[0]), "mstore_pass", "by hand")
    data = images.encoded(image, STAMP)
    assert images.decoded(data, STAMP) == image
    assert images.decoded(data, b"t" * 32) is None
    for cut in (b"", data[:40], data[:-1], data[:70] + b"\xff" + data[71:], data + b"x"):
        assert images.decoded(cut, STAMP) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CODE.replace("memset", "getenv"), "getenv"),
        (CODE.replace("@one = internal constant", "@one = internal global"), "written to"),
        (
            CODE.replace("[ptr @one, ptr @two]", "[ptr @one, ptr @memset]"),
            "used as an address",
        ),
    ],
)
def test_what_an_image_cannot_have(text: str, why: str) -> None:
    """Calls of other functions, state, and addresses of functions are refused."""
    # A table that is written to is not replaced by what it holds at first.
    for level in levels.LEVELS:
        text = text.replace("internal global", "global")
        with pytest.raises(Refused, match=why):
            linked(_object(level, text), "mstore_pass", "by hand")


def test_an_image_is_read_only_when_it_runs() -> None:
    """Nothing can be written where code may run."""
    image = linked(_object(levels.runnable()[0]), "mstore_pass", "by hand")
    address, _alive = images.mapped(image)
    with open("/proc/self/maps") as file:
        for line in file:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                assert line.split()[1] == "r-xp"
                return
    raise AssertionError("the image is not in memory")


def test_pages_and_distances_of_aarch64() -> None:
    """The instructions of an AArch64 image reach what they name."""
    level = levels.named("aarch64")
    image = linked(_object(level), "mstore_pass", "by hand")
    reached = set()
    words = struct.unpack(f"<{len(image.code) // 4}I", image.code[: len(image.code) // 4 * 4])
    for index, word in enumerate(words[:-1]):
        following = words[index + 1]
        is_page = word & 0x9F000000 == 0x90000000
        is_low = following & 0xFFC00000 in (0x91000000, 0xF9400000)
        if is_page and is_low and following >> 5 & 31 == word & 31:
            pages = (word >> 29 & 3) | (word >> 5 & 0x7FFFF) << 2
            scale = 8 if following & 0xFFC00000 == 0xF9400000 else 1
            reached.add((index * 4 & ~0xFFF) + pages * 4096 + (following >> 10 & 0xFFF) * scale)
    [(slot, _)] = image.imports
    assert slot in reached
    assert min(image.bases) in reached


def test_image_of_nothing_else() -> None:
    """What is no object of these processors is refused."""
    with pytest.raises(Refused):
        linked(b"\x7fELF\x02\x01" + bytes(100), "mstore_pass", "")


def test_an_import_that_is_missing() -> None:
    """A C library without the function is an error that names it."""
    with pytest.raises(OSError, match="no_such_thing"):
        images._address("no_such_thing")
    assert images._address("fmaf")
    assert Image(b"", 0, (), (), "").made_by == ""
