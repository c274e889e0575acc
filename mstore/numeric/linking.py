"""Linking: an object file of one function and its constants becomes an image.

Owns the relocations that LLVM emits for position-independent code of x86-64 and AArch64 (ELF, the
psABI and the AArch64 ELF ABI).  Anything else in an object is refused, never guessed.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from mstore.numeric.images import IMPORTS, Image

_X86, _ARM = 62, 183
_PROGBITS, _SYMBOLS, _RELOCATIONS, _NOBITS = 1, 2, 4, 8
_WRITABLE, _ALLOCATED = 1, 2
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION: Final = struct.Struct("<QQq")
# For unwinding, which compiled passes never do, or left writable only until absolute addresses are
# filled in, which an image has behind it when it runs.
_LEFT_OUT: Final = (".eh_frame", ".ARM.exidx")
_FILLED_IN: Final = (".data.rel.ro",)
_ALIGNED: Final = 64

_JUMPS: Final = {
    # jmp *distance(%rip)
    _X86: (b"\xff\x25", b"\x90\x90"),
    # adrp x16, slot; ldr x16, [x16, slot]; br x16
    _ARM: (struct.pack("<3I", 0x90000010, 0xF9400210, 0xD61F0200), b""),
}


class Refused(Exception):
    """An object has something in it that an image cannot have."""


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int


def linked(data: bytes, symbol: str, made_by: str) -> Image:
    """Return the image of an ELF object whose function is `symbol`.  Raises Refused."""
    machine = struct.unpack_from("<H", data, 18)[0]
    if data[:6] != b"\x7fELF\x02\x01" or machine not in _JUMPS:
        raise Refused(f"an object of machine {machine} cannot become an image")
    return _Linker(data, machine).image(symbol, made_by)


class _Linker:
    """One object on its way."""

    def __init__(self, data: bytes, machine: int) -> None:
        self._data = data
        self._machine = machine
        self._sections = _sections(data)
        self._symbols = _symbols(data, self._sections)
        self._places: dict[int, int] = {}
        self._code = bytearray()
        self._bases: list[int] = []
        self._imports: list[tuple[int, int]] = []
        self._stubs: dict[str, int] = {}

    def image(self, symbol: str, made_by: str) -> Image:
        for index, section in enumerate(self._sections):
            if section.flags & _ALLOCATED and section.name not in _LEFT_OUT:
                self._place(index, section)
        for section in self._sections:
            if section.kind == _RELOCATIONS and section.info in self._places:
                for at in range(section.offset, section.offset + section.size, _RELOCATION.size):
                    self._relocate(
                        self._places[section.info], *_RELOCATION.unpack_from(self._data, at)
                    )
        [entry] = [self._where(one) for one in self._symbols if one.name == symbol]
        return Image(bytes(self._code), entry, tuple(self._bases), tuple(self._imports), made_by)

    def _place(self, index: int, section: _Section) -> None:
        if section.flags & _WRITABLE and section.name not in _FILLED_IN:
            raise Refused(f"{section.name} is written to: code may keep no state")
        if section.kind not in (_PROGBITS, _NOBITS) or section.align > 4096:
            raise Refused(f"{section.name} is of kind {section.kind}")
        self._align(max(section.align, _ALIGNED))
        self._places[index] = len(self._code)
        empty = section.kind == _NOBITS
        self._code += (
            bytes(section.size)
            if empty
            else self._data[section.offset : section.offset + section.size]
        )

    def _align(self, to: int) -> None:
        self._code += bytes(-len(self._code) % to)

    def _where(self, symbol: _Symbol) -> int:
        if symbol.section == 0:
            return self._stub(symbol.name)
        if symbol.section not in self._places:
            raise Refused(f"{symbol.name} lies outside the code")
        return self._places[symbol.section] + symbol.value

    def _stub(self, name: str) -> int:
        """Return the place of a jump to a function of the C library."""
        if name not in IMPORTS:
            raise Refused(f"the code calls {name}")
        if name not in self._stubs:
            self._align(_ALIGNED)
            slot = len(self._code)
            self._code += bytes(8)
            self._imports.append((slot, IMPORTS.index(name)))
            self._stubs[name] = at = len(self._code)
            before, after = _JUMPS[self._machine]
            if self._machine == _X86:
                self._code += before + struct.pack("<i", slot - (at + 6)) + after
            else:
                self._code += before
                self._page(at, slot)
                self._low(at + 4, slot, 3)
        return self._stubs[name]

    def _relocate(self, start: int, offset: int, info: int, addend: int) -> None:
        kind, symbol = info & 0xFFFFFFFF, self._symbols[info >> 32]
        at, to = start + offset, self._where(symbol) + addend
        known = _X86_KINDS if self._machine == _X86 else _ARM_KINDS
        what, shift = known.get(kind, ("unknown", 0))
        if what == "absolute":
            if symbol.section == 0:
                raise Refused(f"{symbol.name} is used as an address")
            struct.pack_into("<Q", self._code, at, to)
            self._bases.append(at)
        elif what == "distance":
            struct.pack_into("<i", self._code, at, to - at)
        elif what == "wide distance":
            struct.pack_into("<q", self._code, at, to - at)
        elif what == "page":
            self._page(at, to)
        elif what == "low":
            self._low(at, to, shift)
        elif what == "call":
            self._insert(at, 0x03FFFFFF, (to - at) >> 2)
        else:
            raise Refused(f"a relocation is of kind {kind}")

    # An image starts on a page, so pages of 4 KiB are where they are in memory.

    def _page(self, at: int, to: int) -> None:
        pages = (to >> 12) - (at >> 12)
        self._insert(at, 0x60FFFFE0, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)

    def _low(self, at: int, to: int, shift: int) -> None:
        self._insert(at, 0x003FFC00, ((to & 0xFFF) >> shift) << 10)

    def _insert(self, at: int, mask: int, bits: int) -> None:
        (word,) = struct.unpack_from("<I", self._code, at)
        struct.pack_into("<I", self._code, at, word & ~mask | bits & mask)


_X86_KINDS: Final = {
    1: ("absolute", 0),  # R_X86_64_64
    2: ("distance", 0),  # R_X86_64_PC32
    4: ("distance", 0),  # R_X86_64_PLT32
    24: ("wide distance", 0),  # R_X86_64_PC64
}
_ARM_KINDS: Final = {
    257: ("absolute", 0),  # R_AARCH64_ABS64
    260: ("wide distance", 0),  # R_AARCH64_PREL64
    261: ("distance", 0),  # R_AARCH64_PREL32
    275: ("page", 0),  # R_AARCH64_ADR_PREL_PG_HI21
    277: ("low", 0),  # R_AARCH64_ADD_ABS_LO12_NC
    278: ("low", 0),  # R_AARCH64_LDST8_ABS_LO12_NC
    282: ("call", 0),  # R_AARCH64_JUMP26
    283: ("call", 0),  # R_AARCH64_CALL26
    284: ("low", 1),  # R_AARCH64_LDST16_ABS_LO12_NC
    285: ("low", 2),  # R_AARCH64_LDST32_ABS_LO12_NC
    286: ("low", 3),  # R_AARCH64_LDST64_ABS_LO12_NC
    299: ("low", 4),  # R_AARCH64_LDST128_ABS_LO12_NC
}


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _sections(data: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    rows = [_SECTION.unpack_from(data, table + index * _SECTION.size) for index in range(count)]
    text = rows[names][4]
    return [
        _Section(_text(data, text + name), kind, flags, offset, size, link, info, align)
        for name, kind, flags, _, offset, size, link, info, align, _ in rows
    ]


def _symbols(data: bytes, sections: list[_Section]) -> list[_Symbol]:
    [table] = [section for section in sections if section.kind == _SYMBOLS]
    text = sections[table.link].offset
    rows = _SYMBOL.iter_unpack(data[table.offset : table.offset + table.size])
    return [_Symbol(_text(data, text + name), at, value) for name, _, _, at, value, _ in rows]
