"""Tables: named databases of an LMDB environment whose rows have a declared form.

A `Table` is declared once: its name, the fields of its keys and values, what proves its rows, and
what they say.  From that come the bytes of a row, its check, the lengths that a walk over pages
expects, and the tables of docs/format.md.  `mstore.blocks.schema` declares those of the index,
`mstore.models.stats.store` and `mstore.store.memo` their own.

    check    first 8 bytes of BLAKE3 derive_key("mstore 1 row at rest") of the database's name,
             a zero byte, the key's length as u16, the key, and the value

Packs and hashes prove what `blocks` and `records` say.  A ref, a threshold or a memo entry is just
a value: one flipped bit would silently give another.  So such a row ends with a check, and counts
only while it matches.  The check detects damage; it does not stop an attacker.

Integers are big-endian, so that keys sort by number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, overload

import msgspec
from blake3 import blake3

from mstore.terms.errors import Corrupt
from mstore.terms.ids import ID_BYTES, Buffer, Id, plain_id
from mstore.terms.phrases import call

CHECK_BYTES: Final = 8
CHECK: Final = "check"
"""What proves a row: the check at its end."""
_ZERO: Final = b"\0"

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")
_D = TypeVar("_D")
_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")
_I = TypeVar("_I", bound=Id)
_S = TypeVar("_S", bound=msgspec.Struct)

_Bad = (ValueError, msgspec.MsgspecError, struct.error)


class Field(msgspec.Struct, Generic[_T], frozen=True):
    """A part of a key or value.  text: as docs/format.md has it; size: None if any length."""

    text: str
    size: int | None
    encode: Callable[[_T], bytes]
    decode: Callable[[bytes], _T]


def id_of(kind: type[_I], role: str = "") -> Field[_I]:
    """Return a field of the 32 bytes of an id."""
    return Field(f"{role} {kind.__name__}".lstrip(), ID_BYTES, _same, kind)


def number(size: int, text: str) -> Field[int]:
    """Return a field of an unsigned integer of 1, 4 or 8 bytes."""
    code = struct.Struct({1: ">B", 4: ">I", 8: ">Q"}[size])

    def decode(data: bytes) -> int:
        found: int = code.unpack(data)[0]
        return found

    return Field(f"u{8 * size} {text}", size, code.pack, decode)


def numbers(code: str, text: str) -> Field[tuple[Any, ...]]:
    """Return a field of several numbers, in a form of `struct`."""
    form = struct.Struct(code)
    return Field(text, form.size, lambda values: form.pack(*values), form.unpack)


def raw(text: str, size: int | None = None) -> Field[bytes]:
    """Return a field of bytes whose meaning another module knows."""

    def decode(data: bytes) -> bytes:
        if size is not None and len(data) != size:
            raise ValueError(f"not {size} bytes")
        return data

    return Field(text, size, _same, decode)


def many(one: Field[_T], text: str) -> Field[tuple[_T, ...]]:
    """Return a field of any number of equal fields."""
    size = one.size or 1

    def encode(values: tuple[_T, ...]) -> bytes:
        return b"".join(map(one.encode, values))

    def decode(data: bytes) -> tuple[_T, ...]:
        return tuple(one.decode(data[at : at + size]) for at in range(0, len(data), size))

    return Field(text, None, encode, decode)


def word(text: str) -> Field[str]:
    """Return a field of a text in UTF-8, the last one of its key."""
    return Field(text, None, _encoded, _decoded)


def ended(text: str) -> Field[str]:
    """Return a field of a text in UTF-8, and a zero byte that ends it."""

    def decode(data: bytes) -> str:
        if data[-1:] != _ZERO:
            raise ValueError("the text has no end")
        return _decoded(data[:-1])

    return Field(f"{text}, 0x00", None, lambda value: _encoded(value) + _ZERO, decode)


def packed(kind: type[_S]) -> Field[_S]:
    """Return a field of a struct as a MessagePack array."""
    names = ", ".join(kind.__struct_fields__)
    return Field(f"MessagePack `[{names}]`", None, _pack, msgspec.msgpack.Decoder(kind).decode)


class Form(msgspec.Struct, Generic[_T], frozen=True):
    """The bytes of a key or value: one field's value as it is, or a tuple of several.

    lengths: that it may have; None: any.  begin: what keys with these first fields begin with.
    """

    text: str
    lengths: frozenset[int] | None
    encode: Callable[[_T], bytes]
    decode: Callable[[bytes], _T]
    begin: Callable[[tuple[Any, ...]], bytes]


@overload
def form(a: Field[_A], /) -> Form[_A]: ...
@overload
def form(a: Field[_A], b: Field[_B], /) -> Form[tuple[_A, _B]]: ...
@overload
def form(a: Field[_A], b: Field[_B], c: Field[_C], /) -> Form[tuple[_A, _B, _C]]: ...
@overload
def form(
    a: Field[_A], b: Field[_B], c: Field[_C], d: Field[_D], /
) -> Form[tuple[_A, _B, _C, _D]]: ...


def form(*fields: Field[Any]) -> Form[Any]:
    """Return the form of these fields, one after the other; at most one is of any length."""
    text = ", ".join(field.text for field in fields)
    encoders = tuple(field.encode for field in fields)
    sizes = [field.size for field in fields]
    fixed = sum(size for size in sizes if size is not None)
    lengths = None if None in sizes else frozenset({fixed})

    def begin(values: tuple[Any, ...]) -> bytes:
        return b"".join([one(value) for one, value in zip(encoders, values, strict=False)])

    if len(fields) == 1:
        return Form(text, lengths, fields[0].encode, fields[0].decode, begin)
    parts = []
    at = 0
    for number, field in enumerate(fields):
        rest = fixed - sum(size for size in sizes[:number] if size is not None)
        if field.size is None:
            # What follows is as long as it is: count from the end.
            parts.append((field.decode, slice(at, -rest or None)))
            at = -rest
        else:
            parts.append((field.decode, slice(at, (at + field.size) or None)))
            at += field.size

    def decode(data: bytes) -> tuple[Any, ...]:
        if len(data) < fixed or (lengths is not None and len(data) != fixed):
            raise ValueError("another length")
        return tuple([one(data[part]) for one, part in parts])

    encode: Callable[[Any], bytes] = begin
    if all(one is _same for one in encoders):
        encode = b"".join
    return Form(text, lengths, encode, decode, begin)


def _nothing(data: bytes) -> None:
    if data:
        raise ValueError("not empty")


EMPTY: Final[Form[None]] = Form("empty", frozenset({0}), lambda _: b"", _nothing, b"".join)
"""The form of a value that says nothing: the key says all."""


class Table(Generic[_K, _V]):
    """A named database and the form of its rows.

    proof: what proves a row, CHECK or another thing.  says: what the rows say.  about: what kind of
    thing the first field of a key names, for people.  is_own: the rows are of this environment
    alone, so a copy has none.
    """

    __slots__ = ("_hasher", "about", "has_check", "is_own", "key", "name", "proof", "says", "value")

    def __init__(
        self,
        name: str,
        key: Form[_K],
        value: Form[_V],
        says: str = "",
        *,
        proof: str = CHECK,
        about: str = "",
        is_own: bool = False,
    ) -> None:
        self.name = name
        self.key = key
        self.value = value
        self.says = says
        self.proof = proof
        self.has_check = proof == CHECK
        self.about = about
        self.is_own = is_own
        self._hasher: blake3 | None = None

    # -- bytes -------------------------------------------------------------------------------

    def check(self, key: bytes, value: Buffer) -> bytes:
        """Return the check of a value under a key."""
        if self._hasher is None:
            start = self.name.encode() + _ZERO
            self._hasher = blake3(start, derive_key_context="mstore 1 row at rest")
        hasher = self._hasher.copy()
        # Keys differ in length: without it, a byte could move from a key to its value.
        hasher.update(b"".join((len(key).to_bytes(2, "big"), key, value)))
        return hasher.digest(CHECK_BYTES)

    def sealed(self, key: bytes, value: bytes) -> bytes:
        """Return the row of an encoded value: with its check, if rows of this table have one."""
        return value + self.check(key, value) if self.has_check else value

    def opened(self, key: bytes, row: bytes) -> bytes | None:
        """Return the encoded value of a row; None if it does not match its check."""
        if not self.has_check:
            return row
        value = row[:-CHECK_BYTES]
        is_sound = len(row) >= CHECK_BYTES and row[-CHECK_BYTES:] == self.check(key, value)
        return value if is_sound else None

    def row_lengths(self) -> frozenset[int] | None:
        """Return the lengths that a row may have; None: any."""
        if self.value.lengths is None or not self.has_check:
            return self.value.lengths
        return frozenset(length + CHECK_BYTES for length in self.value.lengths)

    # -- rows --------------------------------------------------------------------------------

    def row(self, key: _K, value: _V) -> tuple[bytes, bytes]:
        """Return the bytes of a key, and those of its row."""
        data = self.key.encode(key)
        return data, self.sealed(data, self.value.encode(value))

    def read(self, key: bytes, row: bytes) -> _V:
        """Return the value of a row.  Raises Corrupt if it is damaged."""
        value = self.opened(key, row)
        if value is None:
            raise self.damaged(key)
        try:
            return self.value.decode(value)
        except _Bad as error:
            raise self.damaged(key, "cannot be read") from error

    def item(self, key: bytes, row: bytes) -> tuple[_K, _V]:
        """Return key and value of a row.  Raises Corrupt if it is damaged."""
        value = self.read(key, row)
        return self.key_of(key), value

    def key_of(self, key: bytes) -> _K:
        """Return the value of a key.  Raises Corrupt if it has another form."""
        try:
            return self.key.decode(key)
        except _Bad as error:
            raise self.damaged(key, "cannot be read") from error

    def found(self, key: bytes, row: bytes | None) -> _V | None:
        """Return the value of a row of which nothing depends; None if it is missing or damaged."""
        value = None if row is None else self.opened(key, row)
        if value is None:
            return None
        try:
            return self.value.decode(value)
        except _Bad:
            return None

    def is_sound(self, key: bytes, row: bytes) -> bool:
        """Return whether a row matches its check and has the form of this table."""
        try:
            self.item(key, row)
        except Corrupt:
            return False
        return True

    # -- people ------------------------------------------------------------------------------

    def subject(self, key: bytes) -> tuple[str, str]:
        """Return what a row is about: a kind and a readable name."""
        if not self.about:
            return "index", f"{self.name} {key.hex()}"
        try:
            found: Any = self.key.decode(key)
        except _Bad:
            return self.about, key.decode(errors="backslashreplace")
        first = found[0] if isinstance(found, tuple) else found
        return self.about, first if isinstance(first, str) else first.hex()

    def damaged(self, key: bytes, what: str = "does not match its check") -> Corrupt:
        """Return the error for a row that is damaged."""
        kind, name = self.subject(key)
        return Corrupt(
            f"the index's row of this {kind} {what}",
            where=f"plan {name}" if kind == "plan" else name,
            hint=call("reindex"),
        )


def _same(value: Any) -> Any:
    return value


def _encoded(text: str) -> bytes:
    # No stored name has a surrogate; one that is asked for may.
    return text.encode(errors="surrogatepass")


def _decoded(data: bytes) -> str:
    return str(data, "utf-8")


_pack = msgspec.msgpack.Encoder(enc_hook=plain_id).encode
