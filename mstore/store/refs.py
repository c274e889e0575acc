"""Refs: names that point at snapshots, moved by compare-and-swap, with every move in the reflog.

    refs     name (UTF-8)                      -> [kind, snapshot]
    reflog   name + 0x00 + position u64        -> [old, new, action, time_ns, generation, kind]

The only module that knows these bytes. An add or merge moves the branch of its name; a tag never
moves. Functions take an open index
transaction, and the caller decides what else belongs to it. The text mirror is written after the
commit (`mstore.store.mirror`).
"""

from __future__ import annotations

import fnmatch
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from mstore.blocks import row_batches
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.errors import BadName, Conflict, Corrupt, NotFound, did_you_mean
from mstore.ids import ID_BYTES, SnapshotId
from mstore.objects.canonical import plain_id
from mstore.phrases import call, phrase
from mstore.store import snapshot_rows

BRANCH = "branch"
TAG = "tag"
MAX_NAME_BYTES = 200
_FORBIDDEN = frozenset("~^:@{}\\*?[]=\"'<>|$`")
# Control characters, invisible marks (some reverse the text direction), and every kind of space.
_UNSEEN = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})
_HEX_NAME = re.compile(r"[0-9a-f]{16,64}")
# Short enough to be an abbreviated id.
_HEX_PREFIX = re.compile(r"[0-9a-f]{4,15}")
_REFS = "refs"
_REFLOG = "reflog"
_POSITION = struct.Struct(">Q")
_AFTER_NAME = 1 + _POSITION.size
"""Bytes of a reflog's key after the name: a zero byte and the position."""
_UNREADABLE = (msgspec.MsgspecError, ValueError)


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """What a name points at; `kind` is BRANCH or TAG."""

    kind: str
    snapshot: bytes

    def snapshot_id(self) -> SnapshotId:
        """-"""
        return SnapshotId(self.snapshot)


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One line of a reflog. `old` is None for a creation, `new` for a removal.

    generation: of the commit that moved the ref. kind: what the ref is after the move, BRANCH or
    TAG; empty for a removal.
    """

    old: bytes | None
    new: bytes | None
    action: str
    time_ns: int
    generation: int
    kind: str


_encode = msgspec.msgpack.Encoder(enc_hook=plain_id).encode
_refs = msgspec.msgpack.Decoder(Ref)
_moves = msgspec.msgpack.Decoder(Move)


# Plain try blocks: a context manager per row would double the time that the mirror of all refs
# takes.


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
    """Build the error for an undecodable row; the mirror may still have what the row said."""
    return Corrupt(
        f"the index's row of this {what} cannot be read", where=name, hint=call("reindex")
    )


def check_name(name: str) -> None:
    """Raise BadName unless `name` can be a ref, a directory in a mount and a word in a shell."""

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
    """Return whether a text is an id, or too long a prefix of one to be the name of a ref."""
    return _HEX_NAME.fullmatch(text) is not None


def get(index: Index, transaction: IndexTransaction, name: str) -> Ref | None:
    """Return the ref of this name, or None. Raises Corrupt if its row is unreadable."""
    key = name.encode(errors="surrogatepass")
    if not key or len(key) > MAX_NAME_BYTES:
        return None
    value = index.get(transaction, _REFS, key)
    return None if value is None else _decode_ref(name, value)


def walk(index: Index, transaction: IndexTransaction) -> Iterator[tuple[str, Ref]]:
    """Yield all refs by name. Raises Corrupt if a row is unreadable."""
    for key, value in index.walk(transaction, _REFS):
        name = _name_of(key)
        yield name, _decode_ref(name, value)


def names(index: Index, transaction: IndexTransaction) -> list[str]:
    """Return the names of all refs, for hints: does not read rows, skips unreadable names."""
    return [key.decode(errors="ignore") for key in index.keys(transaction, _REFS)]


def missing(name: str, known: Iterable[str]) -> NotFound:
    """Build the error for a missing ref, with the most similar known name."""
    return NotFound("no such ref", where=name, hint=did_you_mean(name, known, call("refs")))


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern (`*`, `?`, `[abc]`); names contain none of these."""
    return any(character in text for character in "*?[")


def chosen(known: Iterable[str], asked: Sequence[str]) -> list[str]:
    """Return the requested names with patterns expanded, each once, in order.

    A pattern must match the whole name; `*` also matches `/`. A plain name is returned whether it
    is known or not. Raises NotFound for a pattern that matches nothing.
    """
    known = sorted(known)
    found: dict[str, None] = {}
    for one in asked:
        matched = fnmatch.filter(known, one) if is_pattern(one) else [one]
        if not matched:
            raise NotFound("no ref matches the pattern", where=one, hint=call("refs"))
        found.update(dict.fromkeys(matched))
    return list(found)


def move(
    index: Index,
    transaction: IndexTransaction,
    name: str,
    *,
    expect: Ref | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Compare-and-swap one ref, and append the move to the reflog.

    `new` None removes the ref and keeps its reflog. The reflog line records the index's current
    generation, which the publisher has set in this transaction (`mstore.store.generation`). Raises
    Conflict if the ref is not `expect` any more, or if one of two names would be a directory of the
    other.
    """
    if get(index, transaction, name) != expect:
        raise Conflict(
            "the ref moved while this command was running",
            where=name,
            hint=phrase("{reflog}, then run the command again", reflog=call("reflog", name)),
        )
    if expect is None:
        refuse_nesting(index, transaction, name)
    index.moved.add(name)
    if new is None:
        index.delete(transaction, _REFS, name.encode())
    else:
        put(index, transaction, name, new)
    old = None if expect is None else expect.snapshot
    append(index, transaction, name, old=old, new=new, action=action, time_ns=time_ns)


def append(
    index: Index,
    transaction: IndexTransaction,
    name: str,
    *,
    old: bytes | None,
    new: Ref | None,
    action: str,
    time_ns: int,
) -> None:
    """Append a line to the reflog of a name."""
    line = Move(
        old,
        None if new is None else new.snapshot,
        action,
        time_ns,
        index.generation(transaction),
        "" if new is None else new.kind,
    )
    key = _log_key(name, next_position(index, transaction, name))
    index.put(transaction, _REFLOG, key, _encode(line))


def put(index: Index, transaction: IndexTransaction, name: str, ref: Ref) -> None:
    """Write the row of a ref, without comparing it first and without a reflog line."""
    index.put(transaction, _REFS, name.encode(), _encode(ref))


def refuse_nesting(index: Index, transaction: IndexTransaction, name: str) -> None:
    """Raise Conflict if a new name would be below or above a ref."""
    parts = name.split("/")
    for length in range(1, len(parts)):
        above = "/".join(parts[:length])
        if get(index, transaction, above) is not None:
            raise Conflict(f"{above!r} is a ref, so {name!r} cannot be one below it", where=name)
    prefix = f"{name}/".encode()
    below = next(index.keys(transaction, _REFS, prefix), b"")
    if below.startswith(prefix):
        what = f"{below.decode()!r} is a ref, so {name!r} cannot be one above it"
        raise Conflict(what, where=name)


def refuse_shadow(index: Index, transaction: IndexTransaction, name: str) -> None:
    """Raise BadName if a new name would hide a stored snapshot whose id starts with it."""
    if not _HEX_PREFIX.fullmatch(name):
        return
    hidden = snapshot_rows.with_prefix(index, transaction, name)
    if hidden:
        raise BadName(
            f"{name!r} cannot be a new ref: the id of snapshot {hidden[0].short} begins with it",
            hint="choose another name, as in llama/merged",
        )


def _log_key(name: str, position: int) -> bytes:
    return name.encode() + b"\0" + _POSITION.pack(position)


def removed(index: Index, transaction: IndexTransaction, name: str) -> Ref | None:
    """Return what a removed name was last; None if it is a ref, never was one, or nobody knows."""
    moves = reflog(index, transaction, name)
    if len(moves) < 2 or moves[-1].new is not None or moves[-2].new is None or not moves[-2].kind:
        return None
    return Ref(moves[-2].kind, moves[-2].new)


def reflog(index: Index, transaction: IndexTransaction, name: str) -> list[Move]:
    """Return all moves of a name, oldest first, even if the ref was removed."""
    prefix = name.encode(errors="surrogatepass") + b"\0"
    return [_decode_move(name, value) for _, value in index.walk(transaction, _REFLOG, prefix)]


def walk_reflogs(index: Index, transaction: IndexTransaction) -> Iterator[tuple[str, Move]]:
    """Yield all moves of all names, removed ones too: by name, oldest first."""
    for key, value in index.walk(transaction, _REFLOG):
        name = _name_of(key[:-_AFTER_NAME])
        yield name, _decode_move(name, value)


def next_position(index: Index, transaction: IndexTransaction, name: str) -> int:
    """Return how many moves the reflog of `name` has: the position of its next line."""
    prefix = name.encode(errors="surrogatepass") + b"\0"
    with transaction.cursor(db=index.db(_REFLOG)) as cursor:
        beyond = cursor.set_range(prefix + b"\xff" * _AFTER_NAME)
        last = cursor.prev() if beyond else cursor.last()
        if not last or not cursor.key().startswith(prefix):
            return 0
        return int(_POSITION.unpack(cursor.key()[len(prefix) :])[0]) + 1


def require(index: Index, transaction: IndexTransaction, name: str) -> Ref:
    """Return the ref of this name. Raises NotFound with the most similar names."""
    ref = get(index, transaction, name)
    if ref is None:
        raise missing(name, names(index, transaction))
    return ref


# -- rows of an index that may be damaged --------------------------------------------------------


class LogRow(NamedTuple):
    """A line of a reflog as stored."""

    key: bytes
    value: bytes


def parse(key: bytes, value: bytes) -> tuple[str, Ref]:
    """Parse a row of `refs` strictly. Raises Corrupt, BadName, ValueError."""
    name = _name_of(key)
    ref = _decode_ref(name, value)
    check_name(name)
    if ref.kind not in (BRANCH, TAG):
        raise ValueError(f"not a kind of ref: {ref.kind}")
    return name, ref


def parse_log(row: LogRow) -> tuple[str, Move]:
    """Parse a row of `reflog` strictly. Raises Corrupt, BadName, ValueError."""
    if len(row.key) <= _AFTER_NAME or row.key[-_AFTER_NAME]:
        raise ValueError("not a position in a reflog")
    name = _name_of(row.key[:-_AFTER_NAME])
    check_name(name)
    return name, _decode_move(name, row.value)


def restore_log(index: Index, transaction: IndexTransaction, rows: Iterable[LogRow]) -> None:
    """Write lines of reflogs exactly as another index had them; `parse_log` has accepted them."""
    for row in rows:
        index.put(transaction, _REFLOG, row.key, row.value)


def readable(index: Index, unreadable: Callable[[str], None]) -> dict[str, Ref]:
    """Return the refs whose rows can be read, and call `unreadable` with each other name."""
    found = {}
    for batch in row_batches.of_table(index, _REFS):
        for key, _ in batch:
            try:
                name = key.decode()
                with index.env.read() as transaction:
                    ref = get(index, transaction, name)
            except (ValueError, Corrupt):
                unreadable(key.decode(errors="backslashreplace"))
            else:
                if ref is not None:
                    found[name] = ref
    return found


def unreadable_reflogs(index: Index) -> list[str]:
    """Return the names whose reflogs have a line that cannot be read, sorted."""
    names: set[bytes] = set()
    for batch in row_batches.of_table(index, _REFLOG):
        names.update(key[:-_AFTER_NAME] for key, _ in batch)
    found = []
    for raw in sorted(names):
        try:
            with index.env.read() as transaction:
                reflog(index, transaction, raw.decode())
        except (ValueError, Corrupt):
            found.append(raw.decode(errors="backslashreplace"))
    return found
