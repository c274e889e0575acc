"""The note record: a later fact about a snapshot, never part of its id.

Notes only grow: a store never changes one, and two stores that meet have the union of theirs.
What holds follows from the set of a snapshot's notes alone, whatever the order in which they came
(`states`).  A removal is a note, too.  It hides the values that it names by NoteId, never a key:
what somebody else wrote under the key meanwhile stays.  It hides no signature and no removal, so
nobody can hide what another person vouches for, and no removal depends on another one.

A value is what JSON can say, as canonical MessagePack: one value, one byte string.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.store.objects.canonical import (
    DEFAULT_LIMITS,
    Count,
    IdBytes,
    Record,
    RecordLimits,
    too_long,
    too_many,
)
from mstore.terms.errors import BadRequest
from mstore.terms.ids import NoteId, SnapshotId

VALUE = "value"
EVALUATION = "evaluation"
VERDICT = "verdict"
LINK = "link"
SIGNATURE = "signature"
REMOVAL = "removal"
PASSED = "passed"
"""The one score of a command that names no scores: 1 for the exit status 0, else 0."""
STATING = (VALUE, EVALUATION, VERDICT, LINK)
"""Kinds of notes that give a key a value."""
KINDS = (*STATING, SIGNATURE, REMOVAL)

COUNTS = "counts"
REPLACED = "replaced"
REMOVED = "removed"

ED25519 = "ed25519"
_GATE = "gate: "
"""What the key of a verdict begins with."""
_HEX = re.compile("[0-9a-f]*")
_SIGNED = {"key": 64, "signature": 128}
"""The parts of a signature's value, and their hex digits."""

Value = Any
"""None, a boolean, an integer, a float, a text, or a list or dict of these."""


def verdict_key(gate: str) -> str:
    """Return the key of the notes that are verdicts of a gate."""
    return f"{_GATE}{gate}"


def gate_of(key: str) -> str | None:
    """Return the gate that a note of this key is a verdict of; None for another note."""
    return key.removeprefix(_GATE) if key.startswith(_GATE) else None


class Note(Record, frozen=True, array_like=True, tag="note/1"):
    """A fact about `snapshot`, of one of `KINDS`.

    notes: what a removal hides, sorted; the note of the snapshot that a signature signs, nothing
    if it signs the snapshot itself. key: what the value is of; the algorithm of a signature. data:
    the bytes of the value. author: who wrote it, empty if nobody said; proves nothing.
    """

    kind: ClassVar[Kind] = Kind.NOTE
    id_type: ClassVar[type[NoteId]] = NoteId

    snapshot: IdBytes
    notes: tuple[IdBytes, ...]
    form: str
    key: str
    data: bytes
    author: str
    time_ns: Count

    def id(self) -> NoteId:
        return NoteId.of(self.encode())

    def snapshot_id(self) -> SnapshotId:
        """The snapshot that it is about."""
        return SnapshotId(self.snapshot)

    def note_ids(self) -> tuple[NoteId, ...]:
        """The notes that it removes or signs."""
        return tuple(map(NoteId, self.notes))

    @property
    def value(self) -> Value:
        """The value."""
        return msgspec.msgpack.decode(self.data)

    def problem(self, limits: RecordLimits) -> str | None:
        if self.form not in KINDS:
            return "an unknown kind"
        try:
            value = unpacked(self.data, limits)
        except ValueError as error:
            return f"a value that is {error}"
        return (
            self._contradiction(value)
            or too_many("notes", len(self.notes), limits.removed)
            or too_long("a key", self.key, limits.name_bytes)
            or too_long("an author", self.author, limits.name_bytes)
        )

    def _contradiction(self, value: Value) -> str | None:
        if self.form == REMOVAL:
            if self.key or value is not None:
                return "a removal with a key or a value"
            if not self.notes or any(a >= b for a, b in pairwise(self.notes)):
                return "a removal of nothing, or out of order"
        elif self.form == SIGNATURE:
            if self.key != ED25519:
                return "an unknown algorithm"
            if len(self.notes) > 1:
                return "a signature of two notes"
            if not _is_signature(value):
                return "a signature of another form"
        elif self.notes or not self.key:
            return "a value without a key, or of notes"
        return None


def _is_signature(value: Value) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _SIGNED.keys()
        and all(
            isinstance(value[name], str)
            and len(value[name]) == size
            and _HEX.fullmatch(value[name])
            for name, size in _SIGNED.items()
        )
    )


# -- values --------------------------------------------------------------------------------------


def packed(value: object, where: str = "", limits: RecordLimits = DEFAULT_LIMITS) -> bytes:
    """Return the canonical bytes of a value.  Raises BadRequest for what is none."""
    try:
        return _packed(value, limits)
    except ValueError as error:
        raise BadRequest(f"the value is {error}", where=where) from None


def unpacked(data: bytes, limits: RecordLimits) -> Value:
    """Return the value of these bytes.  Raises ValueError if they are not canonical."""
    if len(data) > limits.value_bytes:
        raise ValueError(f"longer than {limits.value_bytes} bytes")
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        # TypeError: a list as a key of a map.
        raise ValueError("not MessagePack") from None
    if _packed(value, limits) != data:
        raise ValueError("not in canonical form")
    return value


def _packed(value: object, limits: RecordLimits) -> bytes:
    try:
        data = msgspec.msgpack.encode(_plain(value, limits.value_depth))
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    if len(data) > limits.value_bytes:
        raise ValueError(f"longer than {limits.value_bytes} bytes")
    return data


def _plain(value: object, depth: int) -> Value:
    """Return the value with its keys sorted, and numbers of other libraries as Python's own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        if not -(1 << 63) <= int(value) < 1 << 64:
            raise ValueError("an integer of more than 64 bits")
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ValueError("not a finite number")
        return float(value)
    if not isinstance(value, Mapping | list | tuple):
        raise ValueError(f"of a type that JSON has not: {type(value).__name__}")
    if depth == 0:
        raise ValueError("nested too deeply")
    if not isinstance(value, Mapping):
        return [_plain(one, depth - 1) for one in value]
    if not all(isinstance(key, str) for key in value):
        raise ValueError("an object with a key that is no text")
    return {key: _plain(value[key], depth - 1) for key in sorted(value)}


# -- what holds ----------------------------------------------------------------------------------


def states(notes: Mapping[NoteId, Note]) -> dict[NoteId, str]:
    """Return whether each note of one snapshot counts; removals and signatures always do.

    Of the values of a key that are not removed, whatever their kinds, the newest counts, by
    (time, id).
    """
    hidden = {id for one in notes.values() if one.form == REMOVAL for id in one.notes}
    newest: dict[str, tuple[int, NoteId]] = {}
    for id, one in notes.items():
        if one.form in STATING and id not in hidden:
            newest[one.key] = max(newest.get(one.key, (-1, id)), (one.time_ns, id))
    last = {id for _, id in newest.values()}

    def state(id: NoteId, note: Note) -> str:
        if note.form not in STATING or id in last:
            return COUNTS
        return REMOVED if id in hidden else REPLACED

    return {id: state(id, note) for id, note in notes.items()}
