"""Refs: names that point at snapshots, moved by compare-and-swap, every move in the reflog.

    refs     name (UTF-8)                      -> [kind, snapshot]
    reflog   name + 0x00 + position u64        -> [old, new, action, time_ns, generation, kind]

A branch moves when something is added or merged under its name; a tag does not move.  Functions
take an open index transaction; the caller decides what else belongs to the same step.  The text
mirror is written after the commit (`mstore.store.mirror`).
"""

from __future__ import annotations

import fnmatch
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from mstore.blocks.index import Index
from mstore.errors import BadName, Conflict, Corrupt, NotFound, did_you_mean
from mstore.ids import ID_BYTES, SnapshotId
from mstore.objects.canonical import plain_id

BRANCH = "branch"
TAG = "tag"
MAX_NAME_BYTES = 200
_FORBIDDEN = frozenset("~^:@{}\\*?[]=\"'<>|$`")
# Controls, invisible marks (they also turn text round), and all kinds of space.
_UNSEEN = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_HEX_NAME = re.compile(r"[0-9a-f]{16,64}")
# As much of an id as may stand for it.
_HEX_PREFIX = re.compile(r"[0-9a-f]{4,15}")
_POSITION = struct.Struct(">Q")
_UNREADABLE = (msgspec.MsgspecError, ValueError)


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """What a name points at; `kind` is BRANCH or TAG."""

    kind: str
    snapshot: bytes

    def snapshot_id(self) -> SnapshotId:
        """The snapshot."""
        return SnapshotId(self.snapshot)


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One line of a reflog.  `old` is None for a creation, `new` for a removal.

    generation: of the commit that moved the ref; 0 where it is from before there were any.
    kind: what the ref is since then, BRANCH or TAG; empty for a removal, and where nobody wrote it.
    """

    old: bytes | None
    new: bytes | None
    action: str
    time_ns: int
    generation: int = 0
    kind: str = ""


_encode = msgspec.msgpack.Encoder(enc_hook=plain_id).encode
_refs = msgspec.msgpack.Decoder(Ref)
_moves = msgspec.msgpack.Decoder(Move)


# Plain try blocks: a context manager a row would be half the time of the mirror, of all refs.


def _decode_ref(name: str, value: bytes) -> Ref:
    try:
        ref = _refs.decode(value)
        if len(ref.snapshot) != ID_BYTES:
            raise ValueError("not the length of an id")
    except _UNREADABLE as error:
        raise _unreadable(name, "ref") from error
    return ref


def _decode_move(name: str, value: bytes) -> Move:
    try:
        move = _moves.decode(value)
        for id in (move.old, move.new):
            if id is not None:
                SnapshotId(id)
    except _UNREADABLE as error:
        raise _unreadable(name, "move in the reflog") from error
    return move


def _name_of(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(key.decode(errors="backslashreplace"), "name") from error


def _unreadable(name: str, what: str) -> Corrupt:
    """A row that says nothing is damage of the index; the mirror may still have what it said."""
    return Corrupt(
        f"the index's row of this {what} cannot be read", where=name, hint="mstore reindex"
    )


def check_name(name: str) -> None:
    """Raise BadName unless `name` can be a ref, a directory of a mount and a word in a shell."""

    def refuse(why: str) -> BadName:
        return BadName(
            f"{name!r} cannot be a ref: {why}",
            hint="use letters, digits, '.', '_', '-' and '/', as in llama/merged",
        )

    if not isinstance(name, str):
        raise refuse("it is no text")
    if not name:
        raise refuse("it is empty")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise refuse("it is not valid Unicode") from error
    if len(encoded) > MAX_NAME_BYTES:
        raise refuse(f"it is longer than {MAX_NAME_BYTES} bytes")
    if unicodedata.normalize("NFC", name) != name:
        raise refuse("it is not in Unicode normal form C")
    for character in name:
        if character in _FORBIDDEN or unicodedata.category(character) in _UNSEEN:
            raise refuse(f"it contains {character!r}")
    if is_like_id(name):
        raise refuse("it looks like an id")
    for part in name.split("/"):
        if not part:
            raise refuse("it has an empty part between slashes")
        if part.startswith((".", "-")) or part.endswith(".lock"):
            raise refuse(f"the part {part!r} starts with '.' or '-' or ends with '.lock'")


def is_like_id(text: str) -> bool:
    """Whether this is an id, or so much of one that it cannot be the name of a ref."""
    return _HEX_NAME.fullmatch(text) is not None


def get(index: Index, transaction: Any, name: str) -> Ref | None:
    """The ref of this name, or None.  Raises Corrupt where its row cannot be read."""
    key = name.encode(errors="surrogatepass")
    if not key or len(key) > MAX_NAME_BYTES:
        return None
    value = index.get(transaction, "refs", key)
    return None if value is None else _decode_ref(name, value)


def walk(index: Index, transaction: Any) -> Iterator[tuple[str, Ref]]:
    """All refs by name.  Raises Corrupt where a row cannot be read."""
    for key, value in index.walk(transaction, "refs"):
        name = _name_of(key)
        yield name, _decode_ref(name, value)


def names(index: Index, transaction: Any) -> list[str]:
    """The names of all refs, for hints: rows are not read, and unreadable names are left out."""
    with transaction.cursor(db=index.db("refs")) as cursor:
        return [bytes(key).decode(errors="ignore") for key in cursor.iternext(values=False)]


def missing(name: str, known: Iterable[str]) -> NotFound:
    """The error for a ref that is not there, with the known name that was probably meant."""
    return NotFound("no such ref", where=name, hint=did_you_mean(name, known, "mstore refs"))


def is_pattern(text: str) -> bool:
    """Whether it is a pattern (`*`, `?`, `[abc]`) and not a name, which has none of these."""
    return any(character in text for character in "*?[")


def chosen(known: Iterable[str], asked: Sequence[str]) -> list[str]:
    """The names that are asked for, patterns replaced by what they match; each once, in order.

    A pattern is matched against the whole name, `*` also over `/`.  A name is taken as it is,
    known or not.  Raises NotFound for a pattern that matches nothing.
    """
    known = sorted(known)
    found: dict[str, None] = {}
    for one in asked:
        matched = fnmatch.filter(known, one) if is_pattern(one) else [one]
        if not matched:
            raise NotFound("no ref matches the pattern", where=one, hint="mstore refs")
        found.update(dict.fromkeys(matched))
    return list(found)


def move(
    index: Index,
    transaction: Any,
    name: str,
    *,
    expect: Ref | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Compare-and-swap of one ref, with its line in the reflog.

    `new` None removes the ref (its reflog stays).  The line has the generation that the index has
    now: whoever publishes has set it in this transaction (`mstore.store.generation`).  Raises
    Conflict if the ref is not what was expected any more, or if one of two names would be a
    directory of the other.
    """
    if get(index, transaction, name) != expect:
        raise Conflict(
            "the ref moved while this command was running",
            where=name,
            hint=f"mstore reflog {name}, then run the command again",
        )
    if expect is None:
        _refuse_nesting(index, transaction, name)
    key = name.encode()
    index.moved.add(name)
    if new is None:
        transaction.delete(key, db=index.db("refs"))
    else:
        put(index, transaction, name, new)
    old = None if expect is None else expect.snapshot
    append(index, transaction, name, old=old, new=new, action=action, time_ns=time_ns)


def append(
    index: Index,
    transaction: Any,
    name: str,
    *,
    old: bytes | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Add a line to the reflog of a name."""
    line = Move(
        old,
        None if new is None else new.snapshot,
        action,
        time_ns,
        index.generation(transaction),
        "" if new is None else new.kind,
    )
    key = _log_key(name, next_position(index, transaction, name))
    index.put(transaction, "reflog", key, _encode(line))


def put(index: Index, transaction: Any, name: str, ref: Ref) -> None:
    """Write the row of a ref, without a look at what was there and without a line in the reflog."""
    index.put(transaction, "refs", name.encode(), _encode(ref))


def _refuse_nesting(index: Index, transaction: Any, name: str) -> None:
    parts = name.split("/")
    for length in range(1, len(parts)):
        above = "/".join(parts[:length])
        if get(index, transaction, above) is not None:
            raise Conflict(f"{above!r} is a ref, so {name!r} cannot be one below it", where=name)
    prefix = f"{name}/".encode()
    with transaction.cursor(db=index.db("refs")) as cursor:
        if cursor.set_range(prefix) and cursor.key().startswith(prefix):
            below = cursor.key().decode()
            raise Conflict(f"{below!r} is a ref, so {name!r} cannot be one above it", where=name)


def refuse_shadow(index: Index, transaction: Any, name: str) -> None:
    """Raise BadName for a new name that begins the id of a stored snapshot: it would hide that."""
    if not _HEX_PREFIX.fullmatch(name):
        return
    with transaction.cursor(db=index.db("snapshots")) as cursor:
        if cursor.set_range(bytes.fromhex(name.ljust(64, "0"))) and cursor.key().hex().startswith(
            name
        ):
            raise BadName(
                f"{name!r} cannot be a new ref: the id of snapshot "
                f"{SnapshotId(cursor.key()).short} begins with it",
                hint="choose another name, as in llama/merged",
            )


def _log_key(name: str, position: int) -> bytes:
    return name.encode() + b"\0" + _POSITION.pack(position)


def reflog(index: Index, transaction: Any, name: str) -> list[Move]:
    """All moves of a name, oldest first; also of one that was removed."""
    prefix = name.encode(errors="surrogatepass") + b"\0"
    return [_decode_move(name, value) for _, value in index.walk(transaction, "reflog", prefix)]


def walk_reflogs(index: Index, transaction: Any) -> Iterator[tuple[str, Move]]:
    """All moves of all names, removed ones too: by name, oldest first."""
    for key, value in index.walk(transaction, "reflog"):
        name = _name_of(key[: -_POSITION.size - 1])
        yield name, _decode_move(name, value)


def next_position(index: Index, transaction: Any, name: str) -> int:
    """How many moves the reflog of `name` has: the position of its next line."""
    prefix = name.encode(errors="surrogatepass") + b"\0"
    with transaction.cursor(db=index.db("reflog")) as cursor:
        beyond = cursor.set_range(prefix + b"\xff" * (_POSITION.size + 1))
        last = cursor.prev() if beyond else cursor.last()
        if not last or not cursor.key().startswith(prefix):
            return 0
        return int(_POSITION.unpack(cursor.key()[len(prefix) :])[0]) + 1


def require(index: Index, transaction: Any, name: str) -> Ref:
    """The ref of this name.  Raises NotFound with the nearest names."""
    ref = get(index, transaction, name)
    if ref is None:
        raise missing(name, names(index, transaction))
    return ref
