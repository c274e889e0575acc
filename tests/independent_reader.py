"""Reads a whole store, and shares no line with the library: written from docs/format.md alone.

Whoever wants to know what the page means may read it here.  It checks all that the page tells a
reader to check and says what is wrong in a `FormatError`.  Ids are 64 hex digits.  A record is a
namespace with the page's fields; `FIELDS` has them in the page's order.
"""

from __future__ import annotations

import json
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from types import SimpleNamespace as Record
from typing import Any

import lmdb
import msgpack
import numpy as np
import zstandard
from blake3 import blake3

PAGE = 4096
KINDS = ("block", "tensor", "manifest", "snapshot", "plan", "coverage", "virtual", "note")
BLOCK, TENSOR, MANIFEST, SNAPSHOT, PLAN, COVERAGE, VIRTUAL, NOTE = range(8)
RAW, CONSTANT, ZSTD, FLOATS, DELTA = range(5)
ALONE, OF_FLOATS, OF_INTEGERS = range(3)


class FormatError(Exception):
    """Bytes that are not as the page says."""


def need(condition: object, why: str) -> None:
    if not condition:
        raise FormatError(why)


def id_of(kind: int, data: bytes) -> str:
    if kind == BLOCK:
        return blake3(data).hexdigest()
    what = {TENSOR: "tensor record", VIRTUAL: "virtual tensor"}.get(kind, KINDS[kind])
    return blake3(data, derive_key_context=f"mstore 1 {what}").hexdigest()


# --- coded elements ------------------------------------------------------------------------------


def read_coded(data: bytes, width: int, plain: int, *, is_delta: bool) -> Record:
    """The parts of a payload of codec 3 or 4."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        need(at <= len(data), "the payload ends too early")
        return data[at - size : at]

    need(width in (1, 2, 4), "wide elements that are coded")
    mode, zeros, contexts, shift, lowest_class, lists, zero, count = struct.unpack(
        "<BBBBBBHI", take(12)
    )
    bits = 8 * width - zeros
    need(mode in ((1, 2) if is_delta else (0,)), f"mode {mode}")
    need(zeros <= (24 if width == 4 else 0), f"{zeros} zero bits")
    need(1 <= contexts <= (8 if mode == OF_FLOATS else 1), f"{contexts} contexts")
    need(shift < bits, f"a shift by {shift} bits")
    need(mode == OF_FLOATS or shift == lowest_class == 0, "classes that nothing has")
    need(lists <= (mode != ALONE) and zero == 0, "a header with other flags")
    lanes = 32 if plain // width < 16384 else 128
    rows = -(-plain // (width * lanes))
    empty = np.zeros(rows, bool)
    if lists:
        listed = np.unpackbits(np.frombuffer(take(-(-rows // 8)), np.uint8), bitorder="little")
        need(not listed[rows:].any(), "a row behind the last one")
        empty = listed[:rows].astype(bool)
    raw_bits = list(take(contexts))
    need(max(raw_bits) < bits, "raw bits of a whole element")
    frequencies = np.zeros((contexts, 256), np.uint64)
    for table in frequencies:
        first, last = take(2)
        need(first <= last, "a table of no symbols")
        symbol = first
        while symbol <= last:
            value = take(1)[0]
            if value == 0:
                symbol += take(1)[0] + 1
                continue
            if value >= 128:
                value += 128 * take(1)[0] - 128
                need(value >= 128, "a frequency in two bytes for one")
            table[symbol] = value
            symbol += 1
        need(table[first] and table[last], "a table that begins or ends with frequency 0")
        need(symbol == last + 1 and table.sum() == 1024, "a table with another sum")
    words = np.frombuffer(take(2 * count), "<u2").astype(np.uint64)
    states = np.frombuffer(take(4 * lanes), "<u4").astype(np.uint64)
    need(at == len(data), "something behind the states")
    need(states.min() >= 1 << 16, "a state that is none")
    found = {"mode": mode, "width": width, "zeros": zeros, "bits": bits, "shift": shift}
    found |= {"lowest_class": lowest_class, "lists": bool(lists), "empty": empty}
    found |= {"raw_bits": raw_bits, "frequencies": frequencies, "words": words, "states": states}
    return Record(**found)


def from_coded(data: bytes, width: int, plain: int, base: bytes | None = None) -> bytes:
    """The block of `plain` bytes of a payload of codec 3 or, with a base, of codec 4."""
    read = read_coded(data, width, plain, is_delta=base is not None)
    u = np.uint64
    lanes, rows, bits = len(read.states), len(read.empty), read.bits
    mask, top = u((1 << bits) - 1), u(1 << (bits - 1))
    before = np.zeros((rows, lanes), u)
    if base is not None:
        need(len(base) == plain, "a base of another length")
        elements = np.frombuffer(base, f"<u{width}").astype(u)
        need(not (elements & u((1 << read.zeros) - 1)).any(), "a base with other low bits")
        before.flat[: len(elements)] = elements >> u(read.zeros)
    context = np.zeros(before.shape, np.int64)
    if read.mode == OF_FLOATS:
        classes = ((before & (mask >> u(1))) >> u(read.shift)).astype(np.int64)
        context = np.clip(classes - read.lowest_class, 0, len(read.raw_bits) - 1)
    symbols = np.arange(256)
    slots = np.array([symbols.repeat(table.astype(int)) for table in read.frequencies])
    starts = np.cumsum(read.frequencies, axis=1, dtype=u) - read.frequencies
    raw_bits = np.array(read.raw_bits, u)

    states, used = read.states.copy(), 0

    def refill() -> None:
        nonlocal used
        low = np.flatnonzero(states < 1 << 16)
        words = read.words[used : used + len(low)]
        need(len(words) == len(low), "too few words")
        states[low] = states[low] << u(16) | words
        used += len(low)

    z = np.zeros(before.shape, u)
    for row in np.flatnonzero(~read.empty):
        c = context[row]
        slot = states & u(1023)
        symbol = slots[c, slot.astype(int)]
        states[:] = read.frequencies[c, symbol] * (states >> u(10)) + slot - starts[c, symbol]
        refill()
        escaped = symbol == 255
        left = np.where(escaped, u(bits), np.where(symbol > 0, raw_bits[c], u(0)))
        raw, done = np.zeros(lanes, u), u(0)
        for _ in range(2):
            now = np.minimum(left, u(16))
            raw |= (states & ((u(1) << now) - u(1))) << done
            states >>= now
            refill()
            left, done = left - now, now
        told = (symbol.astype(u) - u(1) << raw_bits[c]) + raw + u(1)
        z[row] = np.where(escaped, raw, np.where(symbol > 0, told, u(0)))
        need((z[row] <= mask).all(), "a number of too many bits")
        own = np.where(raw > 0, (raw - u(1) >> raw_bits[c]) + u(1), u(0))
        own = np.minimum(own, u(255)).astype(int)
        taken = escaped & (own < 255) & (read.frequencies[c, own] > 0)
        need(not taken.any(), "a number that another symbol has")
        need(not read.lists or z[row].any(), "an empty row that is not listed")
    need((states == 1 << 16).all(), "a state at the end that is not 2^16")
    need(used == len(read.words), "words that are left")

    if read.mode == ALONE:
        x = z >> u(1) | (z & u(1)) << u(bits - 1)
    else:
        d = np.where(z & u(1), ~(z >> u(1)), z >> u(1))
        if read.mode == OF_FLOATS:
            y = d + np.where(before & top, ~before, before | top) & mask
            x = np.where(y & top, y ^ top, ~y & mask)
        else:
            x = d + before & mask
    x = x.ravel()
    need(not x[plain // width :].any(), "an element behind the block that is not zero")
    return (x[: plain // width] << u(read.zeros)).astype(f"<u{width}").tobytes()


# --- packs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A row of a pack's table."""

    kind: int
    id: str
    base: str | None
    offset: int
    stored: int
    plain: int
    codec: int
    width: int

    @property
    def is_delta(self) -> bool:
        return self.codec == DELTA

    def check(self) -> None:
        """The rules that an entry must keep by itself."""
        need(self.kind < len(KINDS), f"kind {self.kind}")
        what = f"{KINDS[self.kind]} {self.id}"
        need(self.codec <= DELTA, f"codec {self.codec} of {what}")
        need(self.kind == BLOCK or self.codec == RAW, f"codec {self.codec} for a {what}")
        need(self.width in (1, 2, 4, 8), f"element width {self.width} of {what}")
        need(self.kind == BLOCK or self.width == 1, f"a record with an element width: {what}")
        need(self.stored and self.plain, f"an empty payload: {what}")
        need(self.kind or self.plain <= 1 << 24, f"a long block: {what}")
        need(not self.kind or self.plain <= LIMITS[self.kind], f"a long record: {what}")
        need((self.base is not None) == self.is_delta, f"a base without a delta, or none: {what}")
        need(self.base != self.id, f"a delta to itself: {what}")
        if self.codec == RAW:
            need(self.stored == self.plain, f"raw bytes of another length: {what}")
            return
        need(self.plain % self.width == 0, f"half an element: {what}")
        if self.codec == CONSTANT:
            need(self.stored == self.width, f"a constant of another width: {what}")
            need(self.plain >= 2 * self.width, f"a constant of one element: {what}")
        else:
            need(self.stored < self.plain, f"a payload that saves nothing: {what}")

    def decode(self, payload: bytes, base: bytes | None) -> bytes:
        """The bytes that a payload stands for, proved by the id."""
        data = payload
        if self.codec == CONSTANT:
            data = payload * (self.plain // self.width)
        elif self.codec == ZSTD:
            data = self._unpacked(payload)
        elif self.codec in (FLOATS, DELTA):
            data = from_coded(payload, self.width, self.plain, base)
        need(id_of(self.kind, data) == self.id, f"{KINDS[self.kind]} {self.id} has other bytes")
        return data

    def _unpacked(self, payload: bytes) -> bytes:
        why = f"the frame of block {self.id}"
        try:
            head = zstandard.get_frame_parameters(payload)
            need(head.content_size == self.plain and head.window_size <= 1 << 20, why)
            need(not head.dict_id and not head.has_checksum, why)
            frame = zstandard.ZstdDecompressor().decompressobj()
            data = frame.decompress(payload)
        except zstandard.ZstdError as error:
            raise FormatError(why) from error
        need(frame.eof and not frame.unused_data and len(data) == self.plain, why)
        return data


@dataclass(frozen=True)
class Pack:
    """Header and table of a pack."""

    id: str
    entries: list[Entry]
    table: range


def read_table(data: bytes, path: Path) -> Pack:
    """The table of a pack, after all that it says was checked but for the payloads."""
    size = len(data)
    need(size >= 2 * PAGE and size % PAGE == 0, "a size that is no number of pages")
    magic, version, zero = struct.unpack("<8sII", data[:16])
    need((magic, version) == (b"MSTOREPK", 3), "magic or version of the header")
    need(not zero and not any(data[48:PAGE]), "header with more than zeros")
    start, length, hash, version, zero, magic = struct.unpack("<QQ32sII8s", data[-64:])
    need((magic, version) == (b"KPEROTSM", 3), "magic or version of the tail")
    need(not zero, "tail with more than zeros")
    need(length % 88 == 0, "half an entry")
    need(start >= PAGE and start + length <= size - 64, "table out of bounds")
    table = data[start : start + length]
    need(blake3(table).digest() == hash, "table hash")
    padding = data[start + length : -64]
    need(len(padding) < PAGE and not any(padding), "padding with more than zeros, or too long")
    name = blake3(data[:48] + table, derive_key_context="mstore 1 pack").hexdigest()
    need((path.parent.name, path.name) == (name[:2], f"{name}.pack"), "the name of another pack")
    entries = []
    for row in struct.iter_unpack("<32s32sQIIBBB5s", table):
        id, base, *numbers, kind, codec, width, zeros = row
        need(not any(zeros), "entry with more than zeros")
        entry = Entry(kind, id.hex(), base.hex() if any(base) else None, *numbers, codec, width)
        entry.check()
        need(entry.offset >= PAGE, "a payload in the header")
        need(entry.offset + entry.stored <= start, "a payload in the table")
        entries.append(entry)
    need(all((a.kind, a.id) < (b.kind, b.id) for a, b in pairwise(entries)), "entry order")
    return Pack(name, entries, range(start, start + length))


def verify_pack_bytes(data: bytes, path: Path, bases: Callable[[str], bytes] | None = None) -> Pack:
    """Check every byte of a pack; of deltas to blocks elsewhere only if `bases` gives these."""
    pack = read_table(data, path)
    blocks = {entry.id: entry for entry in pack.entries if entry.kind == BLOCK}
    end = PAGE
    for entry in sorted(pack.entries, key=lambda entry: entry.offset):
        need(entry.offset >= end, f"{entry.id} begins in another payload")
        need(not any(data[end : entry.offset]), "a gap with more than zeros")
        end = entry.offset + entry.stored
    need(not any(data[end : pack.table.start]), "a gap with more than zeros")

    def plain(entry: Entry) -> bytes | None:
        payload, base = data[entry.offset : entry.offset + entry.stored], None
        if entry.base is not None:
            own = blocks.get(entry.base)
            need(own is None or not own.is_delta, "a delta to a delta")
            base = bases(entry.base) if bases else own and plain(own)
            if base is None:
                read_coded(payload, entry.width, entry.plain, is_delta=True)
                return None
        return entry.decode(payload, base)

    for entry in pack.entries:
        found = plain(entry)
        if entry.kind != BLOCK:
            read_record(entry.kind, found or b"")
    return pack


def verify_pack(path: Path, bases: Callable[[str], bytes] | None = None) -> Pack:
    return verify_pack_bytes(path.read_bytes(), path, bases)


# --- records -------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """The one form of a value, the shortest."""
    return msgpack.packb(value)


def decode(data: bytes, *, maps: bool = False) -> Any:
    """A MessagePack value in its one form; maps and extensions are in no record."""

    def a_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        need(maps and all(type(key) is str for key in keys), "a map")
        need(keys == sorted(set(keys)), "keys of a map that are not sorted, or not texts")
        return dict(pairs)

    def an_extension(*_: object) -> None:
        raise FormatError("an extension")

    try:
        value = msgpack.unpackb(data, object_pairs_hook=a_map, ext_hook=an_extension)
    except msgpack.ExtraData as error:
        raise FormatError("bytes after the record's end") from error
    except ValueError as error:
        raise FormatError(f"no MessagePack: {error}") from error
    need(encode(value) == data, "not in canonical form")
    return value


Type = Callable[[Any, str], Any]


def of_type(kind: type, name: str) -> Type:
    def check(value: Any, what: str) -> Any:
        need(type(value) is kind, f"{what} is no {name}")
        return value

    return check


boolean, integer, real = of_type(bool, "boolean"), of_type(int, "integer"), of_type(float, "float")
data_of, array = of_type(bytes, "bytes"), of_type(list, "array")


def count(value: Any, what: str) -> int:
    need(integer(value, what) >= 0, f"{what} is negative")
    need(value < 1 << 63, f"{what} is too large")
    return value


def text(value: Any, what: str, most: int = 4096) -> str:
    need(len(of_type(str, "text")(value, what).encode()) <= most, f"{what} is too long")
    return value


def long_text(value: Any, what: str) -> str:
    return text(value, what, 1 << 20)


def an_id(value: Any, what: str) -> str:
    need(len(data_of(value, what)) == 32, f"{what} is no id")
    return value.hex()


def block_ids(value: Any, what: str) -> list[str]:
    need(len(data_of(value, what)) % 32 == 0, f"{what} is half an id")
    return [value[i : i + 32].hex() for i in range(0, len(value), 32)]


def maybe(kind: Type) -> Type:
    return lambda value, what: None if value is None else kind(value, what)


def many(kind: Type, most: int = 1 << 63) -> Type:
    def check(value: Any, what: str) -> list[Any]:
        need(len(array(value, what)) <= most, f"{what} has too many items")
        return [kind(item, what) for item in value]

    return check


def row(*kinds: Type) -> Type:
    def check(value: Any, what: str) -> tuple[Any, ...]:
        need(len(array(value, what)) == len(kinds), f"{what} has another number of fields")
        return tuple(kind(item, what) for kind, item in zip(kinds, value, strict=True))

    return check


def fields(**kinds: Type) -> Type:
    def check(value: Any, what: str) -> Record:
        need(len(array(value, what)) == len(kinds), f"{what} has another number of fields")
        items = zip(kinds.items(), value, strict=True)
        return Record(**{name: kind(item, name) for (name, kind), item in items})

    return check


def parameter(value: Any, what: str) -> Any:
    if type(value) is list:
        return tuple(real(item, what) for item in value)
    need(type(value) in (bool, int, float, str), f"{what} is no parameter")
    return text(value, what) if type(value) is str else value


MANY_TENSORS, PATTERNS = 1_000_000, many(text, 10_000)
SHAPE = many(count, 64)
LIMITS = [1 << 24, 512 << 20, 256 << 20, 4 << 20, 256 << 20, 256 << 20, 4 << 20, 128 << 10]
FIELDS = {
    TENSOR: fields(dtype=text, shape=SHAPE, length=count, blocks=block_ids),
    MANIFEST: fields(
        files=many(
            fields(
                path=text,
                form=count,
                size=count,
                parts=many(fields(name=maybe(text), tensor=an_id, length=count)),
            ),
            100_000,
        )
    ),
    SNAPSHOT: fields(
        manifest=an_id,
        parents=many(row(text, an_id), 4096),
        made=text,
        origin=maybe(row(text, text, text)),
        author=text,
        plan=maybe(an_id),
        coverage=maybe(an_id),
        message=long_text,
        time_ns=count,
        tool=text,
    ),
    PLAN: fields(
        operations=many(
            fields(method=text, parameters=many(row(text, parameter), 256), weights=many(real)),
            100_000,
        ),
        inputs=many(fields(role=text, of=maybe(count), manifest=an_id, model=maybe(text)), 4097),
        dtype=maybe(text),
        block_size=count,
        budget=maybe(count),
        criteria=fields(
            score=text,
            max_error=maybe(real),
            expert_budget=maybe(count),
            only=PATTERNS,
            skip=PATTERNS,
            top_p=maybe(real),
        ),
        allow_missing=boolean,
        full_expert_bytes=count,
        planned_expert_bytes=count,
        error_bound=maybe(real),
        error_estimate=maybe(real),
        tensors=many(
            fields(
                name=text,
                chunk_elements=count,
                states=many(data_of),
                thresholds=many(row(real, integer)),
                omitted=many(real),
                operation=count,
                sources=many(text),
                dtype=maybe(text),
                mixture=maybe(row(real, many(real), boolean)),
            ),
            MANY_TENSORS,
        ),
        copied=many(row(text, long_text), MANY_TENSORS),
        remarks=many(long_text, 10_000),
        layers=many(row(count, count)),
        taken=many(row(text, count, text), MANY_TENSORS),
        dropped=many(text, MANY_TENSORS),
        without=many(text),
        config=long_text,
    ),
    COVERAGE: fields(
        plan=an_id,
        tensors=many(
            fields(name=text, blocks=count, reused=data_of, contributed=many(data_of)),
            MANY_TENSORS,
        ),
        not_finite=many(row(text, count), MANY_TENSORS),
    ),
    VIRTUAL: fields(dtype=text, shape=SHAPE, length=count, plan=an_id, tensor=text),
    NOTE: fields(
        snapshot=an_id,
        notes=many(an_id, 1000),
        kind=text,
        key=text,
        value=data_of,
        author=text,
        time_ns=count,
    ),
}


def read_record(kind: int, data: bytes) -> Record:
    """A record of one of the kinds, after all that can be checked of it alone was checked."""
    what = KINDS[kind]
    need(len(data) <= LIMITS[kind], f"a long {what}")
    values = array(decode(data), what)
    need(values[:1] == [f"{what}/1"], f"the tag of another record than a {what}")
    record: Record = FIELDS[kind](values[1:], what)
    RULES[kind](record)
    return record


BITS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "BYTES"), 8)
BITS |= dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}


def tensor_rules(record: Record) -> None:
    need(record.dtype in BITS, f"dtype {record.dtype}")
    bits = BITS[record.dtype]
    need(prod(n or 1 for n in record.shape) * bits < 1 << 63, "a shape that is too large")
    need(prod(record.shape) * bits == 8 * record.length, "a length that the shape has not")
    need(record.dtype != "BYTES" or len(record.shape) == 1, "bytes with a shape")
    blocks = getattr(record, "blocks", None)
    need(blocks is None or bool(blocks) == bool(record.length), "another number of blocks")


def virtual_rules(record: Record) -> None:
    tensor_rules(record)
    need(record.dtype != "BYTES", "virtual bytes")


def manifest_rules(record: Record) -> None:
    paths = [file.path for file in record.files]
    need(paths == sorted(set(paths)), "the order of paths")
    need(sum(len(file.parts) for file in record.files) <= MANY_TENSORS, "too many tensors")
    for file in record.files:
        parts = file.path.split("/")
        need(len(parts) <= 64, f"a deep path: {file.path!r}")
        for part in parts:
            need(part not in ("", ".", "..") and len(part.encode()) <= 255, f"path {file.path!r}")
        need(not re.search("[\0-\x1f\x7f-\x9f]", file.path), f"a control character: {file.path!r}")
        directories = {"/".join(parts[:n]) for n in range(1, len(parts))}
        need(directories.isdisjoint(paths), f"a file that is a directory of {file.path!r}")
        need(file.form == file.path.endswith(WEIGHTS), f"form {file.form} of {file.path!r}")
        names = [part.name for part in file.parts]
        need(names and names[0] is None, f"no first part of {file.path!r}")
        need(all(name is not None for name in names[1:]), f"a part without name in {file.path!r}")
        need(file.form or len(names) == 1, f"parts of {file.path!r}")
        need(len(names) == len(set(names)), f"a name that comes twice in {file.path!r}")
        need(sum(part.length for part in file.parts) == file.size, f"the size of {file.path!r}")


MADE = ("add", "merge", "prepare", "cast", "align", "extract", "combine")
ROLES = ("previous", "base", "expert", "companion")


def snapshot_rules(record: Record) -> None:
    roles = [role for role, _ in record.parents]
    need(set(roles) <= set(ROLES), "a role that is none")
    need(roles == sorted(roles, key=ROLES.index), "the order of parents")
    need(roles.count("previous") <= 1 and roles.count("base") <= 1, "two of one role")
    need(record.made in MADE, f"made by {record.made}")
    need(record.plan is None or record.made in ("merge", "prepare"), "a plan of no merge")
    need(record.coverage is None or record.plan is not None, "coverage without a plan")


def ascends(items: Sequence[Any]) -> bool:
    return all(a < b for a, b in pairwise(items))


def plan_rules(record: Record) -> None:
    roles = [one.role for one in record.inputs]
    experts = roles.count("expert")
    need(roles[: experts + 1] == ["base", *["expert"] * experts], "the order of inputs")
    for role in roles[experts + 1 :]:
        need(role not in ("base", "expert"), "the order of inputs")
        need(re.fullmatch("[a-z][a-z0-9-]{0,62}", role), "the role of an input")
    need(all(one.of is None for one in record.inputs[: experts + 1]), "a base or expert of another")
    companions = [(one.role, -1 if one.of is None else one.of) for one in record.inputs]
    need(ascends(companions[experts + 1 :]), "the order of companions")
    need(all(of <= experts for _, of in companions), "a companion of no input")

    need(record.operations, "no operation")
    used = {0} | {tensor.operation for tensor in record.tensors}
    need(used == set(range(len(record.operations))), "an operation of no tensor, or none of one")
    for operation in record.operations:
        names = [name for name, _ in operation.parameters]
        need(ascends(names), "the order of parameters")
        need(len(operation.weights) == experts, "another number of weights than of experts")
        operation.parameters = dict(operation.parameters)
        for name, value in operation.parameters.items():
            if type(value) is tuple:
                need(len(value) == experts, f"another number of {name} than of experts")
                need(len(set(value)) > 1, f"a list of {name} for equal values")

    need(record.dtype is None or record.dtype in BITS, f"dtype {record.dtype}")
    criteria = record.criteria
    need(criteria.score in ("norm", "trimmed", "conflict", "random"), f"score {criteria.score}")
    error, share = criteria.max_error, criteria.top_p
    need(error is None or (isfinite(error) and error >= 0), "max error")
    need(share is None or 0 < share <= 1, "top p")
    need(ascends(criteria.only) and ascends(criteria.skip), "the order of patterns")
    need(len(criteria.only) + len(criteria.skip) <= 10_000, "too many patterns")

    others = len(record.inputs) - 1  # "experts" of lists: companions, too
    need(len({one.name for one in record.tensors}) == len(record.tensors), "a tensor twice")
    for tensor in record.tensors:
        what = f"of {tensor.name}"
        need(len(tensor.states) == len(tensor.omitted) == others, f"the number of experts {what}")
        need(len({len(states) for states in tensor.states}) <= 1, f"the number of chunks {what}")
        need(all(max(states, default=0) <= 5 for states in tensor.states), f"a state {what}")
        need(1 not in b"".join(tensor.states[:1]), f"an expert before the first {what}")
        need(tensor.chunk_elements > 0, f"chunks without elements {what}")
        several = len(tensor.thresholds)
        need(several % max(others, 1) == 0, f"thresholds {what}")
        for _, quota in tensor.thresholds:
            need(-1 <= quota < 1 << 63, f"a quota {what}")
        if tensor.sources:
            need(len(tensor.sources) == others + 1, f"the number of sources {what}")
            need(set(tensor.sources) != {tensor.name}, f"sources that are its own name {what}")
        need(tensor.dtype is None or tensor.dtype in BITS, f"the dtype {what}")
        need(tensor.mixture is None or len(tensor.mixture[1]) == experts, f"factors {what}")

    if record.layers or record.taken or record.dropped or record.config:
        need(not record.tensors and len(record.operations) == 1, "an assembly that merges tensors")
    if record.config:
        entries = json.loads(record.config)
        need(isinstance(entries, dict) and len(entries) > 0, "entries of a config")
    members = [member for member, _ in record.layers] + [member for _, member, _ in record.taken]
    need(all(member <= others for member in members), "a member that is none")
    need(ascends([name for name, _, _ in record.taken]), "the order of tensors taken")
    need(all(member or name != source for name, member, source in record.taken), "its own tensor")
    need(ascends(record.dropped) and ascends(record.without), "the order of what is left out")
    taken = {name for name, _, _ in record.taken}
    need(taken.isdisjoint(record.dropped), "a tensor that is taken and dropped")


def bitmap(data: bytes, size: int, what: str) -> list[bool]:
    bits = [bool(byte >> i & 1) for byte in data for i in range(8)]
    need(len(data) == -(-size // 8) and not any(bits[size:]), f"a bitmap of {what}")
    return bits[:size]


def coverage_rules(record: Record) -> None:
    names = [tensor.name for tensor in record.tensors]
    need(len(set(names)) == len(names), "a tensor twice")
    for one in record.tensors:
        one.reused = bitmap(one.reused, one.blocks, one.name)
        one.contributed = [bitmap(bits, one.blocks, one.name) for bits in one.contributed]
    need(len({len(one.contributed) for one in record.tensors}) <= 1, "the number of experts")
    order = {name: number for number, name in enumerate(names)}
    need(all(name in order for name, _ in record.not_finite), "elements of another tensor")
    need(ascends([order[name] for name, _ in record.not_finite]), "the order of tensors")
    need(all(elements for _, elements in record.not_finite), "no elements")


def check_value(value: Any, depth: int = 0) -> None:
    """What JSON can say; `depth` arrays and maps are around it."""
    if type(value) in (list, dict):
        need(depth < 16, "a value that is too deep")
        for item in value.values() if type(value) is dict else value:
            check_value(item, depth + 1)
    elif type(value) is float:
        need(isfinite(value), "a number that is not finite")
    else:
        need(value is None or type(value) in (bool, int, str), "a value that JSON cannot say")


def note_rules(record: Record) -> None:
    need(len(record.value) <= 65536, "a long value")
    value = decode(record.value, maps=True)
    check_value(value)
    if record.kind == "removal":
        need(record.notes and ascends(record.notes), "the notes that are removed")
        need(record.key == "" and value is None, "a removal with a value")
    elif record.kind == "signature":
        need(len(record.notes) <= 1 and record.key == "ed25519", "what is signed")
        need(type(value) is dict and list(value) == ["key", "signature"], "a signature")
        for name, size in (("key", 64), ("signature", 128)):
            hex = type(value[name]) is str and re.fullmatch("[0-9a-f]*", value[name])
            need(hex and len(value[name]) == size, f"the {name} of a signature")
    else:
        need(record.kind in ("value", "evaluation", "verdict", "link"), f"kind {record.kind}")
        need(record.key and not record.notes, "a value without key, or of notes")
    record.value = value


RULES = {
    TENSOR: tensor_rules,
    MANIFEST: manifest_rules,
    SNAPSHOT: snapshot_rules,
    PLAN: plan_rules,
    COVERAGE: coverage_rules,
    VIRTUAL: virtual_rules,
    NOTE: note_rules,
}


# --- models --------------------------------------------------------------------------------------

STEMS = ("model", "diffusion_pytorch_model", "adapter_model", "consolidated")
WEIGHTS = (".safetensors", ".sft")
_SUFFIX = r"\.(?:safetensors|sft)"
_VARIANT = "([A-Za-z0-9_-]+)"
_NUMBER = "([0-9]{1,6})"


def _split(stem: str) -> tuple[str, str]:
    """Stem and variant of what may be both."""
    found = re.fullmatch(rf"({'|'.join(STEMS[:3])})\.{_VARIANT}", stem)
    return (found[1], found[2]) if found else (stem, "")


def as_index(name: str) -> tuple[str, str] | None:
    """Stem and variant of an index file."""
    if found := re.fullmatch(r"(.+)\.safetensors\.index\.json", name):
        return _split(found[1])
    ending = rf"(.+)\.safetensors\.(?:{_VARIANT}\.index|index\.{_VARIANT})\.json"
    found = re.fullmatch(ending, name)
    return (_split(found[1])[0], found[2] or found[3]) if found else None


def as_shard(name: str) -> tuple[tuple[str, str], int, int] | None:
    """Stem and variant, N, and I of a numbered shard; N is 0 where the name does not tell it."""
    if found := re.fullmatch(rf"consolidated\.{_NUMBER}{_SUFFIX}", name):
        return ("consolidated", ""), 0, int(found[1])
    numbers = rf"-{_NUMBER}-of-{_NUMBER}"
    if found := re.fullmatch(rf"({'|'.join(STEMS)}){numbers}\.{_VARIANT}{_SUFFIX}", name):
        return (found[1], found[4]), int(found[3]), int(found[2])
    found = re.fullmatch(rf"(.+){numbers}{_SUFFIX}", name)
    return (_split(found[1]), int(found[3]), int(found[2])) if found else None


@dataclass
class Model:
    """Files that a loader loads together, and the map of their index, if they have one."""

    variant: str
    files: list[str]
    map: dict[str, str]


def models_of(paths: Iterable[str], read: Callable[[str], bytes]) -> dict[str, Model]:
    """The models of a manifest with these files, by name; `read` reads an index."""
    every = sorted(paths)
    models: dict[str, Model] = {}
    others: list[tuple[str, Model]] = []
    for directory in {path.rpartition("/")[0] for path in every}:
        groups, beside = _groups(directory, every, read)
        own = min({stem for stem, _ in groups} & set(STEMS), key=STEMS.index, default=None)
        is_alone = len(groups) + len(beside) == 1
        place = _escaped(directory)
        for (stem, _), model in groups.items():
            if is_alone or stem == own:
                models[_with_variant(place, model)] = model
            else:
                others.append((_escaped(_below(directory, stem)), model))
        others += [(_escaped(_below(directory, stem)), model) for stem, model in beside]
    for name, model in others:
        suffix = model.files[0].rpartition(".")[2]
        models[_with_variant(f"{name}.{suffix}" if name in models else name, model)] = model
    return models


def _groups(
    directory: str, every: list[str], read: Callable[[str], bytes]
) -> tuple[dict[tuple[str, str], Model], list[tuple[str, Model]]]:
    """The groups of a directory by stem and variant, and single files beside an index."""
    here = {path.rpartition("/")[2]: path for path in every if path.rpartition("/")[0] == directory}
    groups: dict[tuple[str, str], Model] = {}
    claimed: set[str] = set()
    for name, path in here.items():
        told = as_index(name)
        if told and told not in groups:
            weights = {name: _below(directory, shard) for name, shard in _map(read(path)).items()}
            files = set(weights.values()) - claimed
            if files and set(weights.values()) <= set(every):
                claimed |= files
                groups[told] = Model(told[1], sorted(files), weights)
    beside = []
    numbered: dict[tuple[str, str], dict[int, dict[int, str]]] = {}
    left = {name: path for name, path in here.items() if path not in claimed}
    indexed = set(groups)
    for name, path in left.items():
        if name.endswith(WEIGHTS):
            stem = name.rpartition(".")[0]
            told = _split(stem)
            if shard := as_shard(name):
                of = numbered.setdefault(shard[0], {})
                of.setdefault(shard[1], {})[shard[2]] = path
            elif told in indexed or told in groups:
                beside.append((stem, Model("", [path], {})))
            else:
                groups[told] = Model(told[1], [path], {})
    for told, shards in numbered.items():
        whole = [n for n, of in shards.items() if n in (0, len(of))]
        if told not in groups and whole:
            groups[told] = Model(told[1], sorted(shards[min(whole)].values()), {})
    return groups, beside


def _below(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _escaped(path: str) -> str:
    return path.replace("%", "%25").replace(":", "%3A").replace("@", "%40")


def _with_variant(name: str, model: Model) -> str:
    return f"{name}@{model.variant}" if model.variant else name


def _map(data: bytes) -> dict[str, str]:
    """The `weight_map` of an index, empty if it has none."""
    try:
        found = json.loads(data)["weight_map"]
    except (ValueError, LookupError, TypeError):
        return {}
    is_map = type(found) is dict and all(type(shard) is str for shard in found.values())
    return found if is_map else {}


# --- refs and lists ------------------------------------------------------------------------------


def check_ref(kind: str, name: str) -> None:
    """The name of a ref, and that it is one of its kind."""
    parts = name.split("/")
    own = parts
    if kind in ("remote", "candidate"):
        need(len(parts) > 2 and parts[0] == f"{kind}s", f"{name!r} is no {kind}")
        need(len(parts[1].encode()) <= 64, f"a long part of {name!r}")
        own = parts[2:]
    else:
        need(kind in ("branch", "tag"), f"kind {kind} of {name!r}")
        need(parts[0] not in ("remotes", "candidates"), f"{name!r} is no {kind}")
    need(len("/".join(own).encode()) <= 200, f"a long name {name!r}")
    need(unicodedata.is_normalized("NFC", name), f"{name!r} is not in normal form C")
    for part in parts:
        need(part and part[0] not in ".-" and not part.endswith(".lock"), f"a part of {name!r}")
    bad = set("~^:@{}\\*?[]=\"'<>|$`") & set(name)
    bad |= {c for c in name if unicodedata.category(c) in ("Cc", "Cf", "Zs", "Zl", "Zp")}
    need(not bad and not re.search(r"\s", name), f"a character of {name!r}")
    need(not re.fullmatch("[0-9a-f]{16,64}", "/".join(own)), f"{name!r} looks like an id")


def sealed(data: bytes, head: str) -> tuple[int, list[str]]:
    """The generation of a sealed text, and the lines after it."""
    need(len(data) <= 1 << 28, "a text that is too long")
    found = re.fullmatch(rb"((?:[^\n]*\n)*)blake3 ([0-9a-f]{64})\n", data)
    need(found, "a text without its hash")
    need(blake3(found[1]).hexdigest() == found[2].decode(), "the hash of a text")
    try:
        lines = found[1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise FormatError("a text that is no UTF-8") from error
    need(lines[:1] == [head], f"the head of a text is not {head!r}")
    number = re.fullmatch("generation (0|[1-9][0-9]*)", lines[1] if lines[1:] else "")
    need(number, "the generation of a text")
    return int(number[1]), lines[2:]


def read_mirror(data: bytes) -> tuple[int, dict[str, tuple[str, str]]]:
    """Generation, and kind and snapshot of each ref."""
    generation, lines = sealed(data, "mstore refs 2")
    refs = {}
    for line in lines:
        found = re.fullmatch("([a-z]+) ([0-9a-f]{64}) (.+)", line)
        need(found, f"line {line!r}")
        check_ref(found[1], found[3])
        refs[found[3]] = (found[1], found[2])
    need(len(refs) == len(lines) and ascends([n.encode() for n in refs]), "the order of refs")
    inside = {"/".join(name.split("/")[:n]) for name in refs for n in range(1, name.count("/") + 1)}
    need(inside.isdisjoint(refs), "a ref that is a directory of another")
    return generation, refs


def read_pack_list(data: bytes, uuid: str) -> tuple[int, dict[str, int]]:
    """Generation, and the generation of each pack's line."""
    generation, lines = sealed(data, "mstore packs 1")
    need(lines[:1] == [f"store {uuid}"], "the list of another store")
    packs = {}
    for line in lines[1:]:
        found = re.fullmatch("(0|[1-9][0-9]*) ([0-9a-f]{64})", line)
        need(found, f"line {line!r}")
        packs[found[2]] = int(found[1])
    need(len(packs) == len(lines) - 1, "a pack twice")
    need(ascends([(number, pack) for pack, number in packs.items()]), "the order of packs")
    need(all(number <= generation for number in packs.values()), "a pack of a later generation")
    return generation, packs


# --- the index -----------------------------------------------------------------------------------


def row_check(database: str, key: bytes, value: bytes) -> bytes:
    """The check that ends a row of the index, of statistics, or of the memo table."""
    told = database.encode() + b"\0" + struct.pack(">H", len(key)) + key + value
    return blake3(told, derive_key_context="mstore 1 row at rest").digest()[:8]


UNCHECKED = ("blocks", "records", "leases")
DATABASES = {
    *("blocks", "records", "packs", "pack_ids", "condemned", "snapshots", "contents", "children"),
    *("refs", "reflog", "leases", "counters", "pruned", "pinned", "plans", "notes", "judged"),
    "backup",
}


def read_index(directory: Path) -> dict[str, dict[bytes, bytes]]:
    """The rows of each database, without their checks."""
    found: dict[str, dict[bytes, bytes]] = {}
    options = {"readonly": True, "lock": False, "max_dbs": len(DATABASES) + 1}
    with lmdb.open(str(directory), **options) as env, env.begin() as reading:
        names = {bytes(name).decode() for name, _ in reading.cursor()}
        need(names == DATABASES, "databases of another index")
        for name in DATABASES:
            handle = env.open_db(name.encode(), reading, create=False)
            with reading.cursor(db=handle) as cursor:
                rows = {bytes(key): bytes(value) for key, value in cursor}
            if name not in UNCHECKED:
                for key, value in rows.items():
                    need(row_check(name, key, value[:-8]) == value[-8:], f"a row of {name}")
                    rows[key] = value[:-8]
            found[name] = rows
    return found


# --- stores --------------------------------------------------------------------------------------


class IndependentStore:
    """A store, read by its index; or, without that, by the tables of its packs and the mirror."""

    def __init__(self, path: Path, *, index: bool = True) -> None:
        self.path = path
        line = (path / "format").read_bytes()
        told = re.fullmatch(
            rb"mstore 3 ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}) ([1-9]\d*)\n", line
        )
        need(told, "the line in format")
        self.uuid, self.block_size = told[1].decode(), int(told[2])
        size = self.block_size
        need(1 << 16 <= size <= 1 << 24 and not size & (size - 1), f"block size {size}")
        self.index = read_index(path / "index") if index else {}
        self._places: dict[tuple[int, str], list[tuple[Path, Entry]]] = {}
        for pack, entry in self._indexed() if index else self._listed():
            need(entry.kind or entry.plain <= size, f"a long block: {entry.id}")
            self._places.setdefault((entry.kind, entry.id), []).append((pack, entry))
        self.ref_kinds = self._refs_of_index() if index else self.mirror()[1]

    # --- where things are ---

    def pack_path(self, id: str) -> Path:
        return self.path / "packs" / id[:2] / f"{id}.pack"

    def pack_paths(self) -> list[Path]:
        return sorted((self.path / "packs").glob("*/*.pack"))

    def _listed(self) -> Iterator[tuple[Path, Entry]]:
        for path in self.pack_paths():
            for entry in read_table(path.read_bytes(), path).entries:
                yield path, entry

    def _indexed(self) -> Iterator[tuple[Path, Entry]]:
        packs = {}
        for number, value in self.index["packs"].items():
            id, size, place = struct.unpack(">32sQI", value)
            need(place == 0, f"place {place} of a pack")
            path = self.pack_path(id.hex())
            need(path.is_file() and path.stat().st_size == size, f"pack {id.hex()}")
            need(self.index["pack_ids"].get(id) == number, f"the number of pack {id.hex()}")
            packs[number] = (path, size)
        need(len(packs) == len(self.index["pack_ids"]), "a pack's id without a number")
        for name in ("blocks", "records"):
            for key, value in self.index[name].items():
                kind, id = (0, key) if name == "blocks" else (key[0], key[1:])
                numbers, base = struct.unpack(">IQIIBB", value[:22]), value[22:]
                need(name == "blocks" or kind, "a block among records")
                need(len(id) == 32 and len(base) in (0, 32), f"a row of {name}")
                need(value[:4] in packs, f"a row of {name} in a pack that is none")
                path, size = packs[value[:4]]
                entry = Entry(kind, id.hex(), base.hex() or None, *numbers[1:])
                entry.check()
                inside = entry.offset >= PAGE and entry.offset + entry.stored <= size - 64
                need(inside, f"a row of {name} outside of its pack")
                yield path, entry

    def ids(self, kind: int) -> set[str]:
        return {id for one, id in self._places if one == kind}

    def place(self, kind: int, id: str) -> tuple[Path, Entry]:
        """The first copy whose base is there."""
        for path, entry in self._places.get((kind, id), ()):
            if entry.base is None or self._places.get((BLOCK, entry.base)):
                return path, entry
        raise FormatError(f"no {KINDS[kind]} {id}")

    def _bytes(self, kind: int, id: str) -> bytes:
        path, entry = self.place(kind, id)
        base = None
        if entry.base is not None:
            need(not self.place(BLOCK, entry.base)[1].is_delta, "a delta to a delta")
            base = self.block(entry.base)
        with path.open("rb") as file:
            file.seek(entry.offset)
            return entry.decode(file.read(entry.stored), base)

    # --- what it holds ---

    def block(self, id: str) -> bytes:
        return self._bytes(BLOCK, id)

    def record(self, kind: int, id: str) -> Record:
        return read_record(kind, self._bytes(kind, id))

    def tensor(self, id: str) -> Record:
        """A tensor record, whose blocks are as many as its length takes."""
        record = self.record(TENSOR, id)
        need(len(record.blocks) == -(-record.length // self.block_size), f"blocks of tensor {id}")
        return record

    def tensor_bytes(self, id: str) -> bytes:
        record = self.tensor(id)
        blocks = [self.block(block) for block in record.blocks]
        need({len(block) for block in blocks[:-1]} <= {self.block_size}, f"a short block of {id}")
        need(sum(map(len, blocks)) == record.length, f"the last block of {id}")
        return b"".join(blocks)

    def manifest(self, id: str) -> list[Record]:
        """The files of a manifest."""
        files: list[Record] = self.record(MANIFEST, id).files
        return files

    def snapshot(self, id: str) -> Record:
        return self.record(SNAPSHOT, id)

    def plan(self, id: str) -> Record:
        return self.record(PLAN, id)

    def coverage(self, id: str) -> Record:
        return self.record(COVERAGE, id)

    def virtual(self, id: str) -> Record:
        return self.record(VIRTUAL, id)

    def note(self, id: str) -> Record:
        return self.record(NOTE, id)

    def files(self, snapshot: str) -> dict[str, int]:
        """Path and size of each file."""
        files = self.manifest(self.snapshot(snapshot).manifest)
        return {file.path: file.size for file in files}

    def _file(self, snapshot: str, path: str) -> Record:
        files = self.manifest(self.snapshot(snapshot).manifest)
        (file,) = [file for file in files if file.path == path]
        return file

    def part(self, part: Record) -> Record:
        """The record of a part of a file: a tensor's, or else a virtual one."""
        is_stored = (TENSOR, part.tensor) in self._places
        record = self.tensor(part.tensor) if is_stored else self.virtual(part.tensor)
        need(record.length == part.length, f"the length of part {part.name}")
        need((record.dtype == "BYTES") or part.name is not None, "a part without name or bytes")
        return record

    def file_bytes(self, snapshot: str, path: str) -> bytes:
        file = self._file(snapshot, path)
        self.check_file(file)
        return b"".join(self.tensor_bytes(part.tensor) for part in file.parts)

    def check_file(self, file: Record) -> None:
        """The records of its parts are those that its header lists."""
        records = [self.part(part) for part in file.parts]
        need(records[0].dtype == "BYTES", f"the first part of {file.path}")
        if not file.form:
            return
        head = self.tensor_bytes(file.parts[0].tensor)
        need(len(head) == 8 + int.from_bytes(head[:8], "little"), f"the header of {file.path}")
        try:
            listed = json.loads(head[8:])
        except ValueError as error:
            raise FormatError(f"the header of {file.path} is no JSON") from error
        listed.pop("__metadata__", None)
        listed = sorted(listed.items(), key=lambda item: item[1]["data_offsets"])
        need([name for name, _ in listed] == [p.name for p in file.parts[1:]], "names of tensors")
        at = 0
        for (name, told), record in zip(listed, records[1:], strict=True):
            need(told["data_offsets"] == [at, at + record.length], f"the place of {name}")
            need((told["dtype"], told["shape"]) == (record.dtype, record.shape), f"type of {name}")
            at += record.length

    def models(self, snapshot: str) -> dict[str, Model]:
        return models_of(self.files(snapshot), lambda path: self.file_bytes(snapshot, path))

    def tensors(self, snapshot: str) -> dict[str, tuple[str, str]]:
        """File and id of each tensor of each model, by its name with its model's."""
        files = self.manifest(self.snapshot(snapshot).manifest)
        parts = {file.path: {part.name: part.tensor for part in file.parts[1:]} for file in files}
        found = {}
        for model, of in self.models(snapshot).items():
            for path in of.files:
                for name, id in parts[path].items():
                    full = f"{model}:{name}" if model or ":" in name else name
                    told = of.map.get(name)
                    if full not in found or told not in of.files or told == path:
                        found[full] = (path, id)
        return found

    def noted(self, snapshot: str) -> dict[str, tuple[str, Any]]:
        """Kind and value of each note that counts, by key."""
        notes = {id: self.note(id) for id in self.ids(NOTE)}
        notes = {id: note for id, note in notes.items() if note.snapshot == snapshot}
        removed = {id for note in notes.values() if note.kind == "removal" for id in note.notes}
        values = [
            (note.time_ns, id, note)
            for id, note in notes.items()
            if id not in removed and note.kind not in ("removal", "signature")
        ]
        return {
            note.key: (note.kind, note.value) for _, _, note in sorted(values, key=lambda v: v[:2])
        }

    # --- refs, lists and generations ---

    def _refs_of_index(self) -> dict[str, tuple[str, str]]:
        refs = {}
        for key, value in self.index["refs"].items():
            kind, id = decode(value)
            check_ref(kind, key.decode())
            refs[key.decode()] = (kind, an_id(id, "a ref's snapshot"))
        return refs

    def refs(self) -> dict[str, str]:
        return {name: id for name, (_, id) in self.ref_kinds.items()}

    def mirror(self) -> tuple[int, dict[str, tuple[str, str]]]:
        return read_mirror((self.path / "refs" / "mirror").read_bytes())

    def pack_list(self) -> tuple[int, dict[str, int]]:
        """The latest list that is not damaged."""
        lists = {int(path.suffix[1:]): path for path in (self.path / "refs").glob("packs.*")}
        for number, path in sorted(lists.items(), reverse=True):
            try:
                generation, packs = read_pack_list(path.read_bytes(), self.uuid)
                need(generation == number, "the generation of a list's name")
            except FormatError:
                continue
            return generation, packs
        return 0, {}

    @property
    def generation(self) -> int:
        return int.from_bytes(self.index["counters"].get(b"generation", b""), "big")

    def is_behind(self) -> bool:
        """Whether the index is older than the store."""
        texts = self.path / "refs"
        replaced = [int(p.suffix[1:]) for p in texts.glob("mirror.*") if p.suffix != ".damaged"]
        mirrors = []
        for path in (texts / "mirror", *(texts / f"mirror.{number}" for number in replaced)):
            try:
                mirrors.append(read_mirror(path.read_bytes())[0])
            except (FormatError, FileNotFoundError):
                continue
        generation, lines = self.pack_list()
        known = {id.hex() for id in self.index["pack_ids"]}
        unnamed = [path.stem for path in self.pack_paths() if path.stem not in known]
        latest = self.generation + bool(mirrors)
        return (
            max([*mirrors, *(number + 1 for number in replaced)], default=0) > self.generation
            or generation > self.generation + 1
            or any(id not in lines or lines[id] > latest for id in unnamed)
        )

    # --- all of it ---

    def verify(self) -> None:
        """Check every byte of packs, records, files and rows, and that they agree."""
        packs = {path: verify_pack(path, self.block) for path in self.pack_paths()}
        _, lines = self.pack_list()
        need({path.stem for path in packs} <= lines.keys(), "a pack without a line")
        listed = {(path, entry) for path, pack in packs.items() for entry in pack.entries}
        for places in self._places.values():
            need(listed.issuperset(places), "a row that its pack has not")
        pruned = self.index.get("pruned", {})
        for id in self.ids(SNAPSHOT):
            self.check_snapshot(id, is_pruned=bytes.fromhex(id) in pruned)
        for id in self.ids(NOTE):
            need((SNAPSHOT, self.note(id).snapshot) in self._places, "a note of no snapshot")

    def check_snapshot(self, id: str, *, is_pruned: bool) -> None:
        """Its manifest, plan and coverage, and what they say of each other."""
        snapshot = self.snapshot(id)
        files = self.manifest(snapshot.manifest)
        if not is_pruned:
            for file in files:
                self.check_file(file)
        if snapshot.plan is None:
            return
        plan = self.plan(snapshot.plan)
        parents = [parent for parent in snapshot.parents if parent[0] != "previous"]
        roles = Counter(role for role, _ in parents)
        told = Counter(i.role if i.role in ROLES else "companion" for i in plan.inputs)
        need(roles == told, "parents that are not the plan's inputs")
        for (_, parent), given in zip(parents, plan.inputs, strict=True):
            need(self.snapshot(parent).manifest == given.manifest, "an input of another content")
        if snapshot.coverage is None:
            for name in ((p.tensor, p) for f in files for p in f.parts):
                if (VIRTUAL, name[0]) in self._places:
                    need(self.virtual(name[0]).plan == snapshot.plan, "a tensor of another plan")
            return
        coverage = self.coverage(snapshot.coverage)
        need(coverage.plan == snapshot.plan, "coverage of another plan")
        names = [tensor.name for tensor in coverage.tensors]
        need(names == [tensor.name for tensor in plan.tensors], "tensors of another plan")
        for one, planned in zip(coverage.tensors, plan.tensors, strict=True):
            need(len(one.contributed) == len(planned.states), "another number of experts")
