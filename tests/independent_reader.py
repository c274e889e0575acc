"""A second reader of stores, written from docs/format.md alone; it imports nothing of mstore.

It is for proofs, not for use: it checks everything that the page says and is in no hurry.
`IndependentStore(path)` finds things through the LMDB index, `IndependentStore(path, index=False)`
through `format`, the packs and `refs/mirror` alone.  Ids are hex digits everywhere.  Whatever the
page forbids raises FormatError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import lmdb
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

PAGE = 4096
KINDS = ("block", "tensor", "manifest", "snapshot", "plan", "coverage", "virtual", "note")
BLOCK, TENSOR, MANIFEST, SNAPSHOT, PLAN, COVERAGE, VIRTUAL, NOTE = range(8)
RAW, CONSTANT, ZSTD, FLOATS, DELTA = range(5)
CONTEXTS = {
    TENSOR: "mstore 1 tensor record",
    MANIFEST: "mstore 1 manifest",
    SNAPSHOT: "mstore 1 snapshot",
    PLAN: "mstore 1 plan",
    COVERAGE: "mstore 1 coverage",
    VIRTUAL: "mstore 1 virtual tensor",
    NOTE: "mstore 1 note",
}
PACK_CONTEXT = "mstore 1 pack"
ROLES = ("previous", "base", "expert", "companion")
MADE = ("add", "merge", "prepare", "cast", "align", "extract", "combine")

HEADER = struct.Struct("<8s I 4s 32s")
UNCHECKED = ("blocks", "records", "leases")
TAIL = struct.Struct("<Q Q 32s I 4s 8s")
ENTRY = struct.Struct("<32s 32s Q I I B B B 5s")
LOCATION = struct.Struct(">I Q I I B B")

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ", "BYTES"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class FormatError(Exception):
    """The bytes are not what the page says."""


def require(ok: object, what: str) -> None:
    if not ok:
        raise FormatError(what)


# --- MessagePack, as far as records need it ------------------------------------------------------


def encode(value: object) -> bytes:
    """The one encoding of a value: everything in its shortest form, floats in 64 bits."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _encode_integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return _encode_length(len(text), (0xA0, 32), (0xD9, 0xDA, 0xDB)) + text
    if isinstance(value, bytes):
        return _encode_length(len(value), (0, 0), (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, list):
        head = _encode_length(len(value), (0x90, 16), (None, 0xDC, 0xDD))
        return head + b"".join(map(encode, value))
    if isinstance(value, dict):
        head = _encode_length(len(value), (0x80, 16), (None, 0xDE, 0xDF))
        return head + b"".join(encode(key) + encode(value[key]) for key in sorted(value))
    raise FormatError(f"no record holds a {type(value).__name__}")


def _encode_integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value)
    unsigned = [(0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")]
    signed = [(0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q")]
    for first, form in unsigned if value >= 0 else signed:
        try:
            return bytes([first]) + struct.pack(form, value)
        except struct.error:
            continue
    raise FormatError("an integer of more than 64 bits")


def _encode_length(length: int, fix: tuple[int, int], firsts: tuple[int | None, int, int]) -> bytes:
    if length < fix[1]:
        return bytes([fix[0] | length])
    for first, bits in zip(firsts, (8, 16, 32), strict=True):
        if first is not None and length < 1 << bits:
            return bytes([first]) + length.to_bytes(bits // 8, "big")
    raise FormatError("longer than 32 bits can say")


def decode(data: bytes, *, maps: bool = False) -> Any:
    """The value of one whole MessagePack text, refused unless it encodes back to the same bytes."""
    value, end = _decode(data, 0)
    require(maps or not _has_map(value), "a map, which no record has")
    require(end == len(data), "bytes after the record's end")
    require(encode(value) == data, "not in canonical form")
    return value


def _decode(data: bytes, at: int) -> tuple[Any, int]:
    first, at = _integer(data, at, 1)
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 256, at
    if 0x80 <= first < 0x90:
        return _decode_map(data, at, first & 15)
    if 0x90 <= first < 0xA0:
        return _decode_array(data, at, first & 15)
    if 0xA0 <= first < 0xC0:
        return _decode_text(data, at, first & 31)
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    if first == 0xCB:
        raw, at = _take(data, at, 8)
        return struct.unpack(">d", raw)[0], at
    if 0xCC <= first <= 0xD3:
        return _integer(data, at, 1 << (first & 3), signed=first >= 0xD0)
    if first in (0xC4, 0xC5, 0xC6):
        length, at = _integer(data, at, 1 << (first - 0xC4))
        return _take(data, at, length)
    if first in (0xD9, 0xDA, 0xDB):
        length, at = _integer(data, at, 1 << (first - 0xD9))
        return _decode_text(data, at, length)
    if first in (0xDC, 0xDD):
        length, at = _integer(data, at, 2 << (first - 0xDC))
        return _decode_array(data, at, length)
    if first in (0xDE, 0xDF):
        length, at = _integer(data, at, 2 << (first - 0xDE))
        return _decode_map(data, at, length)
    raise FormatError(f"MessagePack form {first:#x}, which no record uses")


def _take(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    require(at + length <= len(data), "the record ends too early")
    return data[at : at + length], at + length


def _integer(data: bytes, at: int, length: int, *, signed: bool = False) -> tuple[int, int]:
    raw, at = _take(data, at, length)
    return int.from_bytes(raw, "big", signed=signed), at


def _decode_text(data: bytes, at: int, length: int) -> tuple[str, int]:
    raw, at = _take(data, at, length)
    try:
        return raw.decode(), at
    except UnicodeDecodeError as error:
        raise FormatError("text that is not UTF-8") from error


def _decode_array(data: bytes, at: int, length: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(length):
        value, at = _decode(data, at)
        values.append(value)
    return values, at


def _has_map(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_map, value)))


def _decode_map(data: bytes, at: int, length: int) -> tuple[dict[str, Any], int]:
    found = {}
    for _ in range(length):
        key, at = _decode(data, at)
        require(isinstance(key, str), "a key that is no text")
        found[key], at = _decode(data, at)
    return found, at


# --- records -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: list[int]
    size: int
    blocks: list[str]


@dataclass(frozen=True)
class Virtual:
    dtype: str
    shape: list[int]
    size: int
    plan: str
    tensor: str


@dataclass(frozen=True)
class Note:
    snapshot: str
    notes: list[str]
    form: str
    key: str
    value: Any
    author: str
    time_ns: int


@dataclass(frozen=True)
class Part:
    name: str | None
    tensor: str
    size: int


@dataclass(frozen=True)
class File:
    path: str
    form: int
    size: int
    parts: list[Part]


@dataclass(frozen=True)
class Snapshot:
    manifest: str
    parents: list[tuple[str, str]]
    made: str
    origin: tuple[str, str, str] | None
    author: str
    plan: str | None
    coverage: str | None
    message: str
    time_ns: int
    tool: str


@dataclass(frozen=True)
class PlanTensor:
    name: str
    chunk_elements: int
    states: list[bytes]
    thresholds: list[tuple[float, int]]
    omitted: list[float]
    operation: int
    sources: list[str]
    dtype: str | None
    mixture: tuple[float, list[float], bool] | None


@dataclass(frozen=True)
class Operation:
    method: str
    parameters: dict[str, Any]
    weights: list[float]


@dataclass(frozen=True)
class Criteria:
    score: str
    max_error: float | None
    expert_budget: int | None
    only: list[str]
    skip: list[str]
    top_p: float | None


@dataclass(frozen=True)
class Input:
    role: str
    of: int | None
    manifest: str
    model: str | None


@dataclass(frozen=True)
class Plan:
    operations: list[Operation]
    inputs: list[Input]
    dtype: str | None
    block_size: int
    budget: int | None
    criteria: Criteria
    allow_missing: bool
    full_expert_bytes: int
    planned_expert_bytes: int
    error_bound: float | None
    error_estimate: float | None
    tensors: list[PlanTensor]
    copied: dict[str, str]
    remarks: list[str]
    layers: list[tuple[int, int]]
    taken: list[tuple[str, int, str]]
    dropped: list[str]
    without: list[str]


@dataclass(frozen=True)
class CoveredTensor:
    name: str
    blocks: int
    reused: list[bool]
    contributed: list[list[bool]]


@dataclass(frozen=True)
class Coverage:
    plan: str
    tensors: list[CoveredTensor]
    not_finite: dict[str, int]


def _typed(value: Any, kind: type, what: str) -> Any:
    require(type(value) is kind, f"{what} is no {kind.__name__}")
    return value


def _maybe(check: Callable[[Any, str], Any], value: Any, what: str) -> Any:
    return None if value is None else check(value, what)


def _text(value: Any, what: str) -> str:
    return _typed(value, str, what)


def _count(value: Any, what: str) -> int:
    require(_typed(value, int, what) >= 0, f"{what} is negative")
    return value


def _number(value: Any, what: str) -> float:
    return _typed(value, float, what)


def _bin(value: Any, what: str) -> bytes:
    return _typed(value, bytes, what)


def _hex(value: Any, what: str) -> str:
    require(len(_bin(value, what)) == 32, f"{what} is no id")
    return value.hex()


def _items(value: Any, what: str, length: int | None = None) -> list[Any]:
    require(length in (None, len(_typed(value, list, what))), f"{what} has not {length} fields")
    return value


def _fields(data: bytes, tag: str, length: int) -> list[Any]:
    fields = _items(decode(data), tag)
    require(fields and fields[0] == tag, f"the record is no {tag}")
    return _items(fields, tag, length)[1:]


def _read_tensor(data: bytes) -> Tensor:
    dtype, shape, size, blocks = _fields(data, "tensor/1", 5)
    require(_text(dtype, "dtype") in BITS, f"dtype {dtype}")
    elements = math.prod(_count(d, "dimension") for d in _items(shape, "shape"))
    require(elements * BITS[dtype] == 8 * _count(size, "bytes"), "the shape has other bytes")
    require(dtype != "BYTES" or len(shape) == 1, "BYTES with a shape")
    require(len(_bin(blocks, "blocks")) % 32 == 0, "half a BlockId")
    require(bool(blocks) == (size > 0), "blocks of an empty tensor, or none of another")
    return Tensor(dtype, shape, size, [blocks[i : i + 32].hex() for i in range(0, len(blocks), 32)])


def _read_virtual(data: bytes) -> Virtual:
    dtype, shape, size, plan, tensor = _fields(data, "virtual/1", 6)
    require(_text(dtype, "dtype") in BITS and dtype != "BYTES", f"dtype {dtype}")
    elements = math.prod(_count(d, "dimension") for d in _items(shape, "shape"))
    require(elements * BITS[dtype] == 8 * _count(size, "bytes"), "the shape has other bytes")
    return Virtual(dtype, shape, size, _hex(plan, "PlanId"), _text(tensor, "tensor"))


STATING = ("value", "evaluation", "verdict", "link")


def _read_note(data: bytes) -> Note:
    snapshot, notes, form, key, packed, author, time_ns = _fields(data, "note/1", 8)
    names = [_hex(one, "NoteId") for one in _items(notes, "notes")]
    require(len(_bin(packed, "value")) <= 65_536, "a long value")
    value = decode(packed, maps=True)
    _require_value(value, 16)
    note = Note(
        *(_hex(snapshot, "SnapshotId"), names, _text(form, "kind"), _text(key, "key"), value),
        *(_text(author, "author"), _count(time_ns, "time_ns")),
    )
    if form == "removal":
        require(key == "" and value is None, "a removal of a key")
        require(bool(names) and names == sorted(set(names)), "what is removed")
    elif form == "signature":
        _require_signature(note)
    else:
        require(form in STATING, "an unknown kind of note")
        require(key != "" and not names, "a value without a key, or of notes")
    return note


def _require_value(value: Any, depth: int) -> None:
    """What JSON can say: no bytes, no number that is not finite, nothing nested too deeply."""
    require(not isinstance(value, bytes), "bytes in a value")
    require(not isinstance(value, float) or math.isfinite(value), "not a finite number")
    if isinstance(value, list | dict):
        require(depth > 0, "nested too deeply")
        for one in value.values() if isinstance(value, dict) else value:
            _require_value(one, depth - 1)


def _require_signature(note: Note) -> None:
    require(note.key == "ed25519", "an unknown algorithm")
    require(len(note.notes) <= 1, "a signature of two notes")
    require(isinstance(note.value, dict) and sorted(note.value) == ["key", "signature"], "parts")
    key, signature = bytes.fromhex(note.value["key"]), bytes.fromhex(note.value["signature"])
    require(len(key) == 32 and len(signature) == 64, "key lengths")
    require(note.value == {"key": key.hex(), "signature": signature.hex()}, "digits")
    line = "".join(f"mstore 1 note {one}\n" for one in note.notes)
    line = line or f"mstore 1 snapshot {note.snapshot}\n"
    strings = [b"mstore", b"", b"sha512", hashlib.sha512(line.encode()).digest()]
    message = b"SSHSIG" + b"".join(len(s).to_bytes(4, "big") + s for s in strings)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature as error:
        raise FormatError("a signature that its key did not make") from error


def _read_manifest(data: bytes) -> list[File]:
    (rows,) = _fields(data, "manifest/1", 2)
    files = [_read_file(_items(row, "file", 4)) for row in _items(rows, "files")]
    # Python compares strings by code point, as the page does.
    require(all(a.path < b.path for a, b in pairwise(files)), "files out of order")
    return files


def _read_file(row: list[Any]) -> File:
    path, form, size, rows = row
    parts = [
        Part(_maybe(_text, name, "name"), _hex(tensor, "TensorId"), _count(length, "bytes"))
        for name, tensor, length in (_items(part, "part", 3) for part in _items(rows, "parts"))
    ]
    steps = PurePosixPath(_text(path, "path"))
    require(path and not steps.is_absolute() and str(steps) == path, f"path {path!r}")
    require(path != "." and ".." not in steps.parts, f"path {path!r}")
    require(_count(form, "form") in (0, 1), f"form {form}")
    require(sum(part.size for part in parts) == _count(size, "size"), "the parts have other bytes")
    require(parts and parts[0].name is None, "the first part has a name, or there is none")
    require(form == 1 or len(parts) == 1, "an opaque file of many parts")
    require(all(part.name is not None for part in parts[1:]), "a tensor without a name")
    return File(path, form, size, parts)


def _read_snapshot(data: bytes) -> Snapshot:
    manifest, rows, made, origin, author, plan, coverage, message, time_ns, tool = _fields(
        data, "snapshot/1", 11
    )
    parents = [_items(row, "parent", 2) for row in _items(rows, "parents")]
    require(all(role in ROLES for role, _ in parents), "a parent of no known role")
    require([r for r, _ in parents] == sorted((r for r, _ in parents), key=ROLES.index), "roles")
    roles = [role for role, _ in parents]
    require(roles.count("previous") < 2 and roles.count("base") < 2, "two parents of one role")
    require(made in MADE, f"made {made!r}")
    require((plan is not None) == (made in ("merge", "prepare")), f"a plan of {made}")
    require(plan is not None or coverage is None, "coverage without a plan")
    return Snapshot(
        _hex(manifest, "ManifestId"),
        [(role, _hex(parent, "SnapshotId")) for role, parent in parents],
        made,
        None if origin is None else _read_origin(origin),
        _text(author, "author"),
        _maybe(_hex, plan, "PlanId"),
        _maybe(_hex, coverage, "CoverageId"),
        _text(message, "message"),
        _count(time_ns, "time_ns"),
        _text(tool, "tool"),
    )


def _read_origin(row: object) -> tuple[str, str, str]:
    url, revision, commit = _items(row, "origin", 3)
    return _text(url, "URL"), _text(revision, "revision"), _text(commit, "commit")


def _read_plan(data: bytes) -> Plan:
    fields = _fields(data, "plan/1", 19)
    operations, inputs, dtype, block_size, budget, criteria, allow_missing = fields[:7]
    full, planned, bound, estimate, tensors, copied, remarks = fields[7:14]
    layers, taken, dropped, without = fields[14:]
    named = _read_inputs(inputs)
    experts = [one for one in named if one.role == "expert"]
    made = [_read_operation(row, len(experts)) for row in _items(operations, "operations")]
    others = len(named) - 1
    rows = [_read_plan_tensor(row, others, len(experts)) for row in _items(tensors, "tensors")]
    require(made, "no operation of the merge's own")
    used = {0, *(tensor.operation for tensor in rows)}
    require(used == set(range(len(made))), "operations that are not used, or lack")
    why = [_items(pair, "copied", 2) for pair in _items(copied, "copied tensors")]
    plan = Plan(
        made,
        named,
        _maybe(_text, dtype, "dtype"),
        _count(block_size, "block size"),
        _maybe(_count, budget, "budget"),
        _read_criteria(_items(criteria, "criteria", 6)),
        _typed(allow_missing, bool, "allow missing"),
        _count(full, "full expert bytes"),
        _count(planned, "planned expert bytes"),
        _maybe(_number, bound, "error bound"),
        _maybe(_number, estimate, "error estimate"),
        rows,
        {_text(name, "name"): _text(reason, "why") for name, reason in why},
        [_text(remark, "remark") for remark in _items(remarks, "remarks")],
        [_read_layer(pair) for pair in _items(layers, "layers")],
        [_read_taken(row) for row in _items(taken, "all taken")],
        _names(dropped, "dropped tensors"),
        _names(without, "models"),
    )
    _check_stack(plan)
    return plan


INPUTS = ("base", "expert")
ROLE = re.compile(r"[a-z][a-z0-9-]{0,62}")


def _read_inputs(rows: Any) -> list[Input]:
    """The base, the experts, and then the companions, by role and what they are of."""
    inputs = [
        Input(
            _text(role, "role"),
            _maybe(_count, of, "of"),
            _hex(manifest, "ManifestId"),
            _maybe(_text, model, "model"),
        )
        for role, of, manifest, model in (_items(r, "input", 4) for r in _items(rows, "inputs"))
    ]
    roles = [one.role for one in inputs]
    require(all(map(ROLE.fullmatch, roles)), "an input of no role")
    require(roles[:1] == ["base"] and "base" not in roles[1:], "the first input alone is the base")
    experts = roles.count("expert")
    places = []
    for one in inputs:
        is_companion = one.role not in INPUTS
        require(is_companion or one.of is None, "a base or an expert of another input")
        require(one.of is None or one.of <= experts, "a companion of no base or expert")
        # What belongs to the merge comes before what belongs to an input.
        rank = len(INPUTS) if is_companion else INPUTS.index(one.role)
        places.append((rank, one.role, -1 if one.of is None else one.of))
    require(places == sorted(places), "inputs out of order")
    companions = places[1 + experts :]
    require(len(set(companions)) == len(companions), "two companions of one role and input")
    return inputs


def _read_operation(row: Any, experts: int) -> Operation:
    method, parameters, weights = _items(row, "operation", 3)
    pairs = [_parameter(pair, experts) for pair in _items(parameters, "parameters")]
    require(all(a < b for (a, _), (b, _) in pairwise(pairs)), "parameters out of order")
    factors = [_number(w, "weight") for w in _items(weights, "weights", experts)]
    return Operation(_text(method, "method"), dict(pairs), factors)


def _parameter(pair: Any, experts: int) -> tuple[str, Any]:
    name, value = _items(pair, "parameter", 2)
    if isinstance(value, list):
        value = tuple(_number(one, "a value of an expert") for one in value)
        require(len(value) == experts, "a parameter with another number of values")
        require(len(set(value)) > 1, "a parameter whose values are equal")
    require(isinstance(value, bool | int | float | str | tuple), "a parameter without a value")
    return _text(name, "parameter's name"), value


def _read_layer(pair: Any) -> tuple[int, int]:
    member, layer = _items(pair, "layer", 2)
    return _count(member, "member"), _count(layer, "layer")


def _read_taken(row: Any) -> tuple[str, int, str]:
    name, member, source = _items(row, "taken", 3)
    return _text(name, "name"), _count(member, "member"), _text(source, "source")


def _names(value: Any, what: str) -> list[str]:
    names = [_text(name, "name") for name in _items(value, what)]
    require(all(a < b for a, b in pairwise(names)), f"{what} out of order")
    return names


def _check_stack(plan: Plan) -> None:
    """Layers of inputs that exist, in a plan that merges nothing; without layers, no more of it."""
    if not plan.layers:
        require(not plan.taken and not plan.dropped, "tensors of a stack without layers")
        return
    require(not plan.tensors and len(plan.operations) == 1, "a stack that merges")
    names = [name for name, _, _ in plan.taken]
    require(all(a < b for a, b in pairwise(names)), "taken tensors out of order")
    require(not set(names) & set(plan.dropped), "a tensor that is taken and is not there")
    members = [member for member, _ in plan.layers] + [member for _, member, _ in plan.taken]
    require(max(members) < len(plan.inputs), "a layer or a tensor of no input")


def _read_criteria(row: list[Any]) -> Criteria:
    score, max_error, expert_budget, only, skip, top_p = row
    patterns = [
        [_text(name, "pattern") for name in _items(names, "patterns")] for names in (only, skip)
    ]
    require(all(a < b for names in patterns for a, b in pairwise(names)), "patterns out of order")
    return Criteria(
        _text(score, "score"),
        _maybe(_number, max_error, "max error"),
        _maybe(_count, expert_budget, "expert budget"),
        *patterns,
        _maybe(_number, top_p, "top p"),
    )


def _read_plan_tensor(row: Any, others: int, experts: int) -> PlanTensor:
    """One tensor of a plan with so many inputs besides the base, experts among them."""
    fields = _items(row, "tensor", 9)
    name, chunk_elements, rows, pairs, norms, operation, sources, dtype, mixture = fields
    states = [_bin(s, "states") for s in _items(rows, "states", others)]
    require(all(set(s) <= set(range(6)) for s in states), "a chunk in no known state")
    require(len({len(s) for s in states}) <= 1, "experts with different numbers of chunks")
    thresholds = [_items(pair, "threshold", 2) for pair in _items(pairs, "thresholds")]
    require(len(thresholds) % max(1, others) == 0, "thresholds for some experts only")
    require(all(_typed(quota, int, "quota") >= -1 for _, quota in thresholds), "quota")
    named = [_text(one, "source") for one in _items(sources, "sources")]
    require(len(named) in (0, 1 + others), "sources in some inputs only")
    require(set(named) != {name}, "sources that are all its own name")
    return PlanTensor(
        _text(name, "name"),
        _count(chunk_elements, "chunk elements"),
        states,
        [(_number(value, "value"), quota) for value, quota in thresholds],
        [_number(norm, "omitted norm") for norm in _items(norms, "norms", others)],
        _count(operation, "operation"),
        named,
        _maybe(_text, dtype, "dtype"),
        None if mixture is None else _read_mixture(mixture, experts),
    )


def _read_mixture(row: Any, others: int) -> tuple[float, list[float], bool]:
    base, factors, keeps = _items(row, "mixture", 3)
    every = [_number(factor, "factor") for factor in _items(factors, "factors", others)]
    return _number(base, "factor"), every, _typed(keeps, bool, "keeps base")


def _read_coverage(data: bytes) -> Coverage:
    plan, rows, counts = _fields(data, "coverage/1", 4)
    tensors = []
    for row in _items(rows, "tensors"):
        name, blocks, reused, contributed = _items(row, "tensor", 4)
        _count(blocks, "blocks")
        bits = [_bits(bitmap, blocks) for bitmap in _items(contributed, "contributed")]
        tensors.append(CoveredTensor(_text(name, "name"), blocks, _bits(reused, blocks), bits))
    require(len({len(one.contributed) for one in tensors}) <= 1, "different numbers of experts")
    pairs = [_items(pair, "count", 2) for pair in _items(counts, "counts")]
    odd = {_text(name, "name"): _count(count, "count") for name, count in pairs}
    require(all(odd.values()), "a count of no elements")
    named = [one.name for one in tensors if one.name in odd]
    require(named == [name for name, _ in pairs], "counts of no tensor, or out of order")
    return Coverage(_hex(plan, "PlanId"), tensors, odd)


def _bits(bitmap: bytes, count: int) -> list[bool]:
    require(len(_bin(bitmap, "bitmap")) == -(-count // 8), "a bitmap of another length")
    bits = [bool(byte >> i & 1) for byte in bitmap for i in range(8)]
    require(not any(bits[count:]), "a bit behind the last block")
    return bits[:count]


READERS: dict[int, Callable[[bytes], Any]] = {
    TENSOR: _read_tensor,
    MANIFEST: _read_manifest,
    SNAPSHOT: _read_snapshot,
    PLAN: _read_plan,
    COVERAGE: _read_coverage,
    VIRTUAL: _read_virtual,
    NOTE: _read_note,
}


# --- packs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    kind: int
    id: str
    offset: int
    stored: int
    plain: int
    codec: int
    width: int
    base: str | None = None

    @property
    def is_delta(self) -> bool:
        return self.codec == DELTA


@dataclass(frozen=True)
class Pack:
    id: str
    size: int
    entries: list[Entry]


def verify_pack(path: Path) -> Pack:
    """Check all that one pack can tell about itself; the mode of the file is not looked at.

    Header, tail, table hash, PackId against name and directory, order and bounds of the entries,
    every payload against its id, records' canonical form, and zero wherever nothing is said to be.
    Of a delta whose base is in another pack only what stands before its words is looked at.

    Page congruence can be checked for a raw block if a tensor record of this pack lists it and a
    manifest of this pack names that tensor: block sizes are multiples of 4096, so each block of a
    tensor has the tensor's own remainder, whatever the block size.  It cannot be checked where the
    pack has no such manifest.  That the blocks of a run touch each other cannot be checked: a run
    ends where a block was stored before or is constant, and a new one may begin anywhere.
    """
    return verify_pack_bytes(path.read_bytes(), path)


def verify_pack_bytes(data: bytes, path: Path) -> Pack:
    """The same for bytes that would lie at `path`."""
    pack = _read_pack(data)
    require(path.name == f"{pack.id}.pack", "the file has another pack's name")
    require(path.parent.name == pack.id[:2], "the directory is another pack's")
    payloads = {
        (e.kind, e.id): read_payload(e, _slice(data, e)) for e in pack.entries if not e.is_delta
    }
    for entry in pack.entries:
        require((BLOCK, entry.base) != (BLOCK, entry.id), "a block that is its own base")
        if entry.is_delta and (BLOCK, entry.base) in payloads:
            read_payload(entry, _slice(data, entry), payloads[BLOCK, str(entry.base)])
        elif entry.is_delta:
            read_coded(_slice(data, entry), entry.width, entry.plain, is_delta=True)
    records = {
        key: READERS[key[0]](payload) for key, payload in payloads.items() if key[0] in READERS
    }
    offsets = _offsets_in_files(records)
    for entry in pack.entries:
        known = offsets.get(entry.id)
        if entry.kind == BLOCK and entry.codec == RAW and known:
            require(entry.offset % PAGE in known, f"block {entry.id} is off its page")
    return pack


def _read_pack(data: bytes) -> Pack:
    require(len(data) >= PAGE + TAIL.size and len(data) % PAGE == 0, "no pack has this size")
    magic, version, zero, _ = HEADER.unpack_from(data)
    require(magic == b"MSTOREPK" and version == 3, "magic or version of the header")
    require(_blank(zero) and _blank(data[HEADER.size : PAGE]), "header with more than zeros")
    start, length, digest, again, zero, magic = TAIL.unpack(data[-TAIL.size :])
    require((magic, again) == (b"KPEROTSM", version), "magic or version of the tail")
    require(_blank(zero), "tail with more than zeros")
    require(start >= PAGE and start + length <= len(data) - TAIL.size, "table out of bounds")
    require(length % ENTRY.size == 0, "half an entry")
    table = data[start : start + length]
    require(blake3(table).digest() == digest, "table hash")
    require(_blank(data[start + length : -TAIL.size]), "padding with more than zeros")
    pack_id = blake3(data[: HEADER.size] + table, derive_key_context=PACK_CONTEXT).hexdigest()
    entries = [_read_entry(row) for row in ENTRY.iter_unpack(table)]
    require(all((a.kind, a.id) < (b.kind, b.id) for a, b in pairwise(entries)), "entry order")
    require(all(e.offset + e.stored <= start for e in entries), "payload in the table")
    end = PAGE
    for entry in sorted(entries, key=lambda e: e.offset):
        require(entry.offset >= end, "payload in the header or in another payload")
        require(_blank(data[end : entry.offset]), "a gap with more than zeros")
        end = entry.offset + entry.stored
    require(_blank(data[end:start]), "a gap with more than zeros")
    return Pack(pack_id, len(data), entries)


def _read_entry(row: tuple[Any, ...]) -> Entry:
    name, base, offset, stored, plain, kind, codec, width, zero = row
    require(_blank(zero), "entry with more than zeros")
    require(kind < len(KINDS), f"kind {kind}")
    base = None if _blank(base) else base.hex()
    entry = Entry(kind, name.hex(), offset, stored, plain, codec, width, base)
    _check_lengths(entry)
    return entry


def _check_lengths(entry: Entry) -> None:
    """What an entry or a row of the index can say without a payload."""
    require(entry.width in (1, 2, 4, 8), f"element width {entry.width}")
    require(entry.plain > 0, "an empty payload")
    if entry.kind == BLOCK and entry.codec == CONSTANT:
        require(entry.stored == entry.width, "a constant of another width")
        require(entry.plain % entry.width == 0, "half an element")
    elif entry.kind == BLOCK and entry.codec in (ZSTD, FLOATS, DELTA):
        require(entry.stored < entry.plain, "a payload that saves nothing")
        require(entry.plain % entry.width == 0, "half an element")
        require(entry.codec == ZSTD or entry.width <= 4, "wide elements that are coded")
    else:
        require(entry.codec == RAW, f"codec {entry.codec} for a {KINDS[entry.kind]}")
        require(entry.stored == entry.plain, "raw bytes of another length")
    require(entry.kind == BLOCK or entry.width == 1, "a record with an element width")
    require(entry.is_delta == (entry.base is not None), "a base without a delta, or the reverse")


def read_payload(entry: Entry, stored: bytes, base: bytes | None = None) -> bytes:
    """The plain bytes of an entry, checked against its id in the domain of its kind.

    base: the plain bytes of a delta's base block.
    """
    require(len(stored) == entry.stored, "the pack ends in a payload")
    plain = stored
    if entry.codec == CONSTANT:
        plain = stored * (entry.plain // entry.width)
    elif entry.codec == ZSTD:
        plain = read_frame(entry, stored)
    elif entry.codec in (FLOATS, DELTA):
        require((base is not None) == entry.is_delta, "a base that is missing, or none's")
        plain = from_coded(stored, entry.width, entry.plain, base)
    if entry.kind == BLOCK:
        digest = blake3(plain).hexdigest()
    else:
        digest = blake3(plain, derive_key_context=CONTEXTS[entry.kind]).hexdigest()
    require(digest == entry.id, f"{KINDS[entry.kind]} {entry.id} has other bytes")
    return plain


def read_frame(entry: Entry, stored: bytes) -> bytes:
    """The plain bytes in the one frame of a payload."""
    try:
        told = zstandard.get_frame_parameters(stored)
        require(told.content_size == entry.plain, "a frame of another length")
        require(told.window_size <= 1 << 20, "a frame with a wide window")
        require(not told.has_checksum and told.dict_id == 0, "a checksum or a dictionary")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"the frame of block {entry.id}: {error}") from error


# --- coded elements ------------------------------------------------------------------------------

ALONE, OF_FLOATS, OF_INTEGERS = range(3)
CODED_HEADER = struct.Struct("<B B B B B B 2s I")
LEAST_STATE = 1 << 16


@dataclass(frozen=True)
class Coded:
    """A payload of codec 3 or 4, as far as it can be read without the base."""

    mode: int
    width: int
    count: int
    zeros: int
    shift: int
    lowest: int
    lists: bool
    empty: list[bool]
    raw_bits: list[int]
    slots: list[list[tuple[int, int, int]]]
    words: tuple[int, ...]
    states: list[int]

    @property
    def bits(self) -> int:
        """The n of the page."""
        return 8 * self.width - self.zeros

    def elements(self, base: bytes) -> bytes:
        """The plain bytes; base: zeros for codec 3."""
        known = [
            int.from_bytes(base[at : at + self.width], "little")
            for at in range(0, len(base), self.width)
        ]
        require(all(b % (1 << self.zeros) == 0 for b in known), "a base with lower bits")
        known = [b >> self.zeros for b in known]
        lanes = len(self.states)
        known += [0] * (len(self.empty) * lanes - self.count)
        contexts = self._contexts(known)
        found: list[int] = []
        words = iter(self.words)
        states = list(self.states)
        for row, empty in enumerate(self.empty):
            mine = slice(row * lanes, (row + 1) * lanes)
            numbers = [0] * lanes if empty else self._row(states, words, contexts[mine])
            require(empty or not self.lists or any(numbers), "an empty row that is not listed")
            found += map(self._element, numbers, known[mine])
        require(states == [LEAST_STATE] * lanes, "a state at the end that is none")
        require(next(words, None) is None, "words that are left")
        require(not any(found[self.count :]), "an element behind the block")
        return b"".join(
            (x << self.zeros).to_bytes(self.width, "little") for x in found[: self.count]
        )

    def _contexts(self, known: list[int]) -> list[int]:
        """The context of each element."""
        if self.mode != OF_FLOATS:
            return [0] * len(known)
        last, magnitude = len(self.slots) - 1, (1 << (self.bits - 1)) - 1
        return [min(max(((b & magnitude) >> self.shift) - self.lowest, 0), last) for b in known]

    def _row(self, states: list[int], words: Iterator[int], contexts: list[int]) -> list[int]:
        """The numbers of one row, in the steps of the page."""
        symbols = []
        for lane, context in enumerate(contexts):
            s = states[lane]
            symbol, frequency, within = self.slots[context][s % 1024]
            states[lane] = _refilled(frequency * (s // 1024) + within, words)
            symbols.append(symbol)
        widths = [
            0 if symbol == 0 else self.bits if symbol == 255 else self.raw_bits[context]
            for symbol, context in zip(symbols, contexts, strict=True)
        ]
        raw = [0] * len(states)
        for done in (0, 16):
            for lane, width in enumerate(widths):
                now = min(max(width - done, 0), 16)
                if now:
                    s = states[lane]
                    raw[lane] |= s % (1 << now) << done
                    states[lane] = _refilled(s >> now, words)
        return [
            self._number(symbol, bits, context)
            for symbol, bits, context in zip(symbols, raw, contexts, strict=True)
        ]

    def _number(self, symbol: int, raw: int, context: int) -> int:
        if symbol == 0:
            return 0
        raw_bits = self.raw_bits[context]
        if symbol == 255:
            own = ((raw - 1) >> raw_bits) + 1 if raw else 0
            has_own = own < 255 and any(symbol == own for symbol, _, _ in self.slots[context])
            require(not has_own, "a number that another symbol has")
            return raw
        number = ((symbol - 1) << raw_bits) + raw + 1
        require(number < 1 << self.bits, "a number of too many bits")
        return number

    def _element(self, number: int, base: int) -> int:
        n = self.bits
        every = (1 << n) - 1
        if self.mode == ALONE:
            return number >> 1 | (number & 1) << (n - 1)
        difference = number >> 1 ^ (every if number & 1 else 0)
        if self.mode == OF_INTEGERS:
            return base + difference & every
        high = 1 << (n - 1)
        ordered = (base ^ every if base & high else base | high) + difference & every
        return ordered ^ high if ordered & high else ordered ^ every


def _refilled(state: int, words: Iterator[int]) -> int:
    if state >= LEAST_STATE:
        return state
    word = next(words, None)
    if word is None:
        raise FormatError("too few words")
    return state << 16 | word


def from_coded(stored: bytes, width: int, length: int, base: bytes | None = None) -> bytes:
    """The `length` plain bytes of a payload of codec 4, or of 3 without a base."""
    require(base is None or len(base) == length, "the base has another length")
    coded = read_coded(stored, width, length, is_delta=base is not None)
    return coded.elements(bytes(length) if base is None else base)


def read_coded(stored: bytes, width: int, length: int, *, is_delta: bool) -> Coded:
    """What a payload of codec 3 or 4 says before any of its words is used."""
    take = _Taker(stored)
    mode, zeros, contexts, shift, lowest, lists, zero, count = CODED_HEADER.unpack(
        take(CODED_HEADER.size)
    )
    require(mode in ((OF_FLOATS, OF_INTEGERS) if is_delta else (ALONE,)), f"mode {mode}")
    require(zeros <= (24 if width == 4 else 0), f"{zeros} zero bits")
    n = 8 * width - zeros
    require(1 <= contexts <= (8 if mode == OF_FLOATS else 1), f"{contexts} contexts")
    require(shift < n, f"a shift by {shift} bits")
    require(mode == OF_FLOATS or shift == lowest == 0, "classes that nothing has")
    require(lists <= (mode != ALONE) and _blank(zero), "a header with other flags")
    elements = length // width
    lanes = 32 if elements < 16384 else 128
    rows = -(-elements // lanes)
    listed = int.from_bytes(take(-(-rows // 8) if lists else 0), "little")
    require(listed >> rows == 0, "a row behind the last one")
    raw_bits = list(take(contexts))
    require(all(r < n for r in raw_bits), "raw bits of a whole element")
    slots = [_read_slots(take) for _ in range(contexts)]
    words = struct.unpack(f"<{count}H", take(2 * count))
    states = struct.unpack(f"<{lanes}I", take(4 * lanes))
    require(take.is_at_end, "something behind the states")
    require(all(s >= LEAST_STATE for s in states), "a state that is none")
    return Coded(
        mode,
        width,
        elements,
        zeros,
        shift,
        lowest,
        bool(lists),
        [bool(listed >> row & 1) for row in range(rows)],
        raw_bits,
        slots,
        words,
        list(states),
    )


class _Taker:
    """Bytes, taken from the first on."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __call__(self, length: int) -> bytes:
        require(self._at + length <= len(self._data), "the payload ends too early")
        self._at += length
        return self._data[self._at - length : self._at]

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)


def _read_slots(take: _Taker) -> list[tuple[int, int, int]]:
    """(symbol, its frequency, place among its slots) of each slot that one table gives."""
    low, high = take(2)
    require(low <= high, "a table of no symbols")
    slots = []
    symbol = low
    while symbol <= high:
        (frequency,) = take(1)
        if frequency == 0:
            after = symbol + 1 + take(1)[0]
            require(low < symbol and after <= high, "a table that begins or ends with no frequency")
            symbol = after
            continue
        if frequency >= 128:
            frequency += 128 * take(1)[0] - 128
            require(frequency >= 128, "a frequency in two bytes for one")
        slots += [(symbol, frequency, place) for place in range(frequency)]
        symbol += 1
    require(len(slots) == 1024, "a table with another sum")
    return slots


def _offsets_in_files(records: dict[tuple[int, str], Any]) -> dict[str, set[int]]:
    """Where in files the blocks known to `records` lie, modulo 4096."""
    offsets: dict[str, set[int]] = {}
    files = [f for (kind, _), files in records.items() if kind == MANIFEST for f in files]
    for file in files:
        at = 0
        for part in file.parts:
            tensor = records.get((TENSOR, part.tensor))
            for block in tensor.blocks if tensor else []:
                offsets.setdefault(block, set()).add(at % PAGE)
            at += part.size
    return offsets


def _slice(data: bytes, entry: Entry) -> bytes:
    return data[entry.offset : entry.offset + entry.stored]


def _blank(data: bytes) -> bool:
    return not data.strip(b"\0")


# --- stores --------------------------------------------------------------------------------------


class IndependentStore:
    """A store, read through its index or, with index=False, from packs and mirror alone."""

    def __init__(self, path: Path, *, index: bool = True) -> None:
        self.path = Path(path)
        self.uuid, self.block_size = _read_format((self.path / "format").read_bytes())
        self.index = _read_index(self.path / "index") if index else {}
        self._places = self._from_index() if index else self._from_packs()
        self.ref_kinds = self._refs_of_index() if index else self._refs_of_mirror()

    def refs(self) -> dict[str, str]:
        return {name: snapshot for name, (_, snapshot) in self.ref_kinds.items()}

    def ids(self, kind: int) -> set[str]:
        return {name for k, name in self._places if k == kind}

    def place(self, kind: int, name: str) -> tuple[Path, Entry]:
        """The pack that holds something, and where in it."""
        require((kind, name) in self._places, f"no {KINDS[kind]} {name}")
        return self._places[kind, name]

    def block(self, name: str) -> bytes:
        return self._read(BLOCK, name)

    def tensor(self, name: str) -> Tensor:
        tensor = _read_tensor(self._read(TENSOR, name))
        require(len(tensor.blocks) == -(-tensor.size // self.block_size), "number of blocks")
        return tensor

    def manifest(self, name: str) -> list[File]:
        return _read_manifest(self._read(MANIFEST, name))

    def snapshot(self, name: str) -> Snapshot:
        return _read_snapshot(self._read(SNAPSHOT, name))

    def plan(self, name: str) -> Plan:
        return _read_plan(self._read(PLAN, name))

    def coverage(self, name: str) -> Coverage:
        return _read_coverage(self._read(COVERAGE, name))

    def virtual(self, name: str) -> Virtual:
        return _read_virtual(self._read(VIRTUAL, name))

    def note(self, name: str) -> Note:
        return _read_note(self._read(NOTE, name))

    def noted(self, snapshot: str) -> dict[str, tuple[str, Any]]:
        """Kind and value of the notes that count, by key."""
        notes = {name: self.note(name) for name in self.ids(NOTE)}
        own = {name: one for name, one in notes.items() if one.snapshot == snapshot}
        hidden = {name for one in own.values() if one.form == "removal" for name in one.notes}
        shown = [
            (one.time_ns, name, one)
            for name, one in own.items()
            if one.form in STATING and name not in hidden
        ]
        return {one.key: (one.form, one.value) for _, _, one in sorted(shown, key=lambda o: o[:2])}

    def tensor_bytes(self, name: str) -> bytes:
        tensor = self.tensor(name)
        blocks = [self.block(block) for block in tensor.blocks]
        require(all(len(b) == self.block_size for b in blocks[:-1]), "a short block inside")
        require(sum(map(len, blocks)) == tensor.size, "the blocks have other bytes")
        return b"".join(blocks)

    def files(self, snapshot: str) -> dict[str, int]:
        return {f.path: f.size for f in self.manifest(self.snapshot(snapshot).manifest)}

    def file_bytes(self, snapshot: str, path: str) -> bytes:
        files = {f.path: f for f in self.manifest(self.snapshot(snapshot).manifest)}
        require(path in files, f"no file {path}")
        parts = files[path].parts
        pieces = [self.tensor_bytes(part.tensor) for part in parts]
        require([len(p) for p in pieces] == [part.size for part in parts], "sizes of parts")
        tensors = [self.tensor(part.tensor) for part in parts]
        require(tensors[0].dtype == "BYTES", "bytes that are no tensor have a dtype")
        if files[path].form == 1:
            _check_safetensors(pieces[0], parts[1:], tensors[1:])
        return b"".join(pieces)

    def _read(self, kind: int, name: str) -> bytes:
        path, entry = self.place(kind, name)
        base = None
        if entry.base is not None:
            require(not self.place(BLOCK, entry.base)[1].is_delta, "the base of a delta is one")
            base = self._read(BLOCK, entry.base)
        with path.open("rb") as file:
            file.seek(entry.offset)
            return read_payload(entry, file.read(entry.stored), base)

    def _from_packs(self) -> dict[tuple[int, str], tuple[Path, Entry]]:
        places = {}
        since = self.pack_list()
        for path in sorted((self.path / "packs").glob("*/*.pack")):
            pack = verify_pack(path)
            require(pack.id in since, "a pack without a line")
            places.update({(e.kind, e.id): (path, e) for e in pack.entries})
        return places

    def _from_index(self) -> dict[tuple[int, str], tuple[Path, Entry]]:
        packs = {}
        for number, row in self.index["packs"].items():
            name = row[:32].hex()
            packs[number] = self.path / "packs" / name[:2] / f"{name}.pack"
            require(packs[number].stat().st_size == int.from_bytes(row[32:40], "big"), "pack size")
            require(row[40:] == bytes(4), "the place of a pack")
        rows = [(BLOCK, key, value) for key, value in self.index["blocks"].items()]
        rows += [(key[0], key[1:], value) for key, value in self.index["records"].items()]
        places = {}
        for kind, key, value in rows:
            require(len(key) == 32, "a key's length")
            require(len(value) in (LOCATION.size, LOCATION.size + 32), "a location's length")
            number, *numbers = LOCATION.unpack_from(value)
            entry = Entry(kind, key.hex(), *numbers, value[LOCATION.size :].hex() or None)
            _check_lengths(entry)
            places[kind, key.hex()] = packs[number.to_bytes(4, "big")], entry
        return places

    def _refs_of_index(self) -> dict[str, tuple[str, str]]:
        rows = [(k.decode(), _items(decode(v), "ref", 2)) for k, v in self.index["refs"].items()]
        return _check_refs((name, kind, _hex(snapshot, name)) for name, (kind, snapshot) in rows)

    def pack_list(self) -> dict[str, int]:
        """The packs of the newest list, and the generation of each."""
        found = [
            re.fullmatch(r"packs\.(0|[1-9]\d*)", p.name) for p in (self.path / "refs").iterdir()
        ]
        newest = max((int(name[1]) for name in found if name), default=None)
        if newest is None:
            return {}
        path = self.path / "refs" / f"packs.{newest}"
        generation, lines = _sealed_lines(path, "mstore packs 1", "pack list")
        require(generation == newest, "a pack list under another's name")
        require(lines.pop(0) == f"store {self.uuid}", "a pack list of another store")
        rows = [re.fullmatch(r"(0|[1-9]\d*) ([0-9a-f]{64})", line) for line in lines]
        require(all(rows), "a line of the pack list")
        packs = [(int(row[1]), row[2]) for row in rows if row]
        require(packs == sorted(packs), "the pack list is out of order")
        require(all(since <= generation for since, _ in packs), "a pack later than its list")
        return {pack: since for since, pack in packs}

    def _refs_of_mirror(self) -> dict[str, tuple[str, str]]:
        path = self.path / "refs" / "mirror"
        _, lines = _sealed_lines(path, "mstore refs 2", "mirror")
        rows = [re.fullmatch(r"(\S+) ([0-9a-f]{64}) (\S+)", line) for line in lines]
        require(all(rows), "a line of the mirror")
        refs = _check_refs((row[3], row[1], row[2]) for row in rows if row)
        require(list(refs) == sorted(refs), "the mirror is out of order")
        return refs


def _sealed_lines(path: Path, head: str, what: str) -> tuple[int, list[str]]:
    """Generation and lines of a text that ends with its own hash."""
    data = path.read_bytes()
    first, *lines = data.decode().split("\n")
    require(lines[-1:] == [""], f"last line of the {what}")
    require(first == head, f"first line of the {what}")
    body, hash, _ = data[:-72], data[-72:-1].decode(), lines.pop()
    require(hash == f"blake3 {blake3(body).hexdigest()}", f"the {what}'s hash")
    require(lines.pop() == hash, f"last line of the {what}")
    told = re.fullmatch(r"generation (0|[1-9]\d*)", lines.pop(0))
    require(told, f"the {what}'s generation")
    assert told is not None
    return int(told[1]), lines


def _read_format(line: bytes) -> tuple[str, int]:
    row = re.fullmatch(rb"mstore 3 ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}) ([0-9]+)\n", line)
    if row is None:
        raise FormatError("format line")
    block_size = int(row[2])
    require(65536 <= block_size <= 16777216 and block_size.bit_count() == 1, "block size")
    return row[1].decode(), block_size


def _read_index(path: Path) -> dict[str, dict[bytes, bytes]]:
    """Every row of every named database."""
    with lmdb.open(str(path), readonly=True, lock=False, max_dbs=64) as env:
        with env.begin() as reading:
            names = [bytes(name) for name, _ in reading.cursor()]
        found = {}
        for name in names:
            database = env.open_db(name, create=False)
            with env.begin(db=database) as reading:
                rows = {bytes(k): bytes(v) for k, v in reading.cursor()}
            kind = name.decode()
            found[kind] = rows if kind in UNCHECKED else _checked(kind, rows)
    return found


def _checked(database: str, rows: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Rows without the checks at their ends."""
    for key, row in rows.items():
        told = database.encode() + b"\0" + struct.pack(">H", len(key)) + key + row[:-8]
        check = blake3(told, derive_key_context="mstore 1 row at rest").digest()[:8]
        require(row[-8:] == check, f"a row of {database} does not match its check")
    return {key: row[:-8] for key, row in rows.items()}


def _check_refs(rows: Iterable[tuple[str, str, str]]) -> dict[str, tuple[str, str]]:
    refs = {}
    for name, kind, snapshot in rows:
        first, *rest = name.split("/", 2)
        own = {"remotes": "remote", "candidates": "candidate"}.get(first)
        require(kind == own if own else kind in ("branch", "tag"), f"ref {name} of kind {kind}")
        require(not own or len(rest) == 2, f"ref {name} of no remote or run")
        require(name not in refs, f"ref {name} twice")
        refs[name] = kind, snapshot
    return refs


def _check_safetensors(header: bytes, parts: list[Part], tensors: list[Tensor]) -> None:
    """The parts after the header are the tensors that it lists, in data order, without holes."""
    require(int.from_bytes(header[:8], "little") == len(header) - 8, "the header's length")
    listed = json.loads(header[8:])
    listed.pop("__metadata__", None)
    # Of tensors that begin at the same byte all but the last are empty; their order is the
    # header's, which the sort keeps.
    rows = sorted(listed.items(), key=lambda item: item[1]["data_offsets"])
    require([name for name, _ in rows] == [part.name for part in parts], "names of tensors")
    at = 0
    for (_, row), tensor in zip(rows, tensors, strict=True):
        require(row["data_offsets"] == [at, at + tensor.size], "offsets of tensors")
        require((row["dtype"], row["shape"]) == (tensor.dtype, tensor.shape), "dtype or shape")
        at += tensor.size
