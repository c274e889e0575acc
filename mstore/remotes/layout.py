"""What a remote has: its root, and the lists that the root names.

    mstore-remote        the root: JSON, at most 64 KiB; the one object that is replaced
    lists/<made>-<id>    a list: at most 4096 rows of one kind, sorted; see `LISTS`
    tables/<made>-<id>   header and footer tables of packs, one after the other
    stats/<made>-<id>    statistics of one snapshot's weights (`remotes.statistics`)
    packs/ab/<id>.pack   a pack, as in any store
    probe/...            what a client tries; may be removed at any time

docs/format-remote.md describes the bytes. A list, table or object of statistics is named by its
bytes, a pack by its table: so whoever trusts a root can prove all that it leads to. <made> is the
generation of the root that such an object is made for: if that root does not name it, no later one
will.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec

from mstore.blocks.packs import ENTRY, HEADER_BYTES
from mstore.remotes.objects import MOST_ROOT_BYTES
from mstore.store.layout import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from mstore.terms.errors import Corrupt, Incompatible, Unavailable
from mstore.terms.ids import ID_BYTES, Id, PackId, SnapshotId

VERSION: Final = 1
MOST_ROWS: Final = 4096
MOST_LIST_BYTES: Final = 16 << 20
"""Longest list that is read."""
MOST_MOVES: Final = 256
"""Moves of one ref that a push keeps."""
MOST_TABLE_BYTES: Final = 256 << 20
"""Longest table of a pack that is read."""

MOST_STATISTICS_BYTES: Final = 256 << 20
"""Longest object of statistics."""

IdBytes = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ListId(Id):
    """Names a list of a remote by its bytes."""

    __slots__ = ()
    context = "mstore 1 remote list"


class TableId(Id):
    """Names an object of footer tables by its bytes."""

    __slots__ = ()
    context = "mstore 1 remote tables"


class StatisticsId(Id):
    """Names an object of statistics by its bytes."""

    __slots__ = ()
    context = "mstore 1 remote statistics"


class PackState(IntEnum):
    """What becomes of a pack. A name that was ever `DELETING` never comes back."""

    LIVE = 0
    CONDEMNED = 1
    DELETING = 2
    DELETED = 3


class RemoteMove(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One move of a ref; `old` is None for a creation, `new` for a removal.

    time_ns: by the remote's clock. generation: of the root in which it became visible.
    """

    old: IdBytes | None
    new: IdBytes | None
    action: str
    time_ns: Number
    generation: Number


class RefRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A branch or tag and its moves, oldest first; `snapshot` is None once it was removed."""

    name: str
    kind: str
    snapshot: IdBytes | None
    moves: Annotated[tuple[RemoteMove, ...], msgspec.Meta(max_length=MOST_ROWS)]

    @property
    def key(self) -> bytes:
        return self.name.encode(errors="surrogatepass")


class SnapshotRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A snapshot, the pack of its record, and whether its contents are there too."""

    id: IdBytes
    pack: IdBytes
    is_whole: bool

    @property
    def key(self) -> bytes:
        return self.id


class PackRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A pack: its bytes, its state since when (by the remote's clock), and where its table lies.

    entries: of its table. made, table, offset, length: the object in tables/, and the part of it;
    zeros if nobody knows the table: the pack of a push that did not end.
    """

    id: IdBytes
    size: Number
    state: PackState
    time_ns: Number
    entries: Number
    made: Number
    table: IdBytes
    offset: Number
    length: Number

    @property
    def key(self) -> bytes:
        return self.id

    @property
    def pack(self) -> PackId:
        """Its name."""
        return PackId(self.id)

    @property
    def is_there(self) -> bool:
        """Whether a snapshot may need what is in it."""
        return self.state in (PackState.LIVE, PackState.CONDEMNED)

    @property
    def table_name(self) -> str:
        """The object that has its table."""
        return table_name(self.made, TableId(self.table))

    @property
    def is_known(self) -> bool:
        """Whether its table is known; of an object that no push named, only its name is."""
        return self.length > 0

    def problem(self) -> str | None:
        """Return what is impossible about this row, before anything is read or made by it."""
        if not self.is_known and not self.entries and self.state != PackState.LIVE:
            return None
        if self.length != HEADER_BYTES + self.entries * ENTRY.size:
            return f"a table of {self.length} bytes for {self.entries} entries"
        if self.length > min(self.size, MOST_TABLE_BYTES):
            return f"a table of {self.length} bytes in a pack of {self.size}"
        return None


class NoteRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A note, the snapshot that it is about, and the pack of its record."""

    snapshot: IdBytes
    note: IdBytes
    pack: IdBytes

    @property
    def key(self) -> bytes:
        return self.snapshot + self.note

    def snapshot_id(self) -> SnapshotId:
        """What it is about."""
        return SnapshotId(self.snapshot)


class StatisticsRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Statistics of the weights of a snapshot: the object that has them, and its bytes."""

    snapshot: IdBytes
    made: Number
    statistics: IdBytes
    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_STATISTICS_BYTES)]

    @property
    def key(self) -> bytes:
        return self.snapshot

    @property
    def name(self) -> str:
        """Its object."""
        return f"stats/{self.made:016x}-{self.statistics.hex()}"


LISTS: Final[Mapping[str, type[Any]]] = {
    "refs": RefRow,
    "snapshots": SnapshotRow,
    "packs": PackRow,
    "notes": NoteRow,
    "statistics": StatisticsRow,
}
"""The kinds of lists, and their rows."""
_DECODERS: Final[Mapping[str, msgspec.msgpack.Decoder[tuple[str, list[Any]]]]] = {
    # The number of rows is checked before they are made.
    kind: msgspec.msgpack.Decoder(
        tuple[str, Annotated[list[row_type], msgspec.Meta(max_length=MOST_ROWS)]]  # type: ignore[valid-type]
    )
    for kind, row_type in LISTS.items()
}
Change = Mapping[bytes, Any]
"""Rows by their keys; None removes one."""


class Named(msgspec.Struct, frozen=True):
    """A list as the root names it.

    first: the key of its first row, in hex digits. size: its bytes. made: the generation of the
    root that it was made for.
    """

    kind: str
    id: str
    first: str
    rows: Number
    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_LIST_BYTES)]
    made: Number

    @property
    def name(self) -> str:
        """Its object."""
        return f"lists/{self.file}"

    @property
    def file(self) -> str:
        """The last part of that."""
        return f"{self.made:016x}-{self.id}"


class RemoteRoot(msgspec.Struct, frozen=True):
    """What the root says. nonce: random, so that no two roots are alike."""

    version: int
    uuid: UUID
    block_size: int
    generation: Number
    nonce: str
    lists: tuple[Named, ...]

    def encode(self) -> bytes:
        """Return its bytes. Raises Unavailable if they are too many."""
        text = msgspec.json.format(msgspec.json.encode({"mstore-remote": self}), indent=1)
        if len(text) > MOST_ROOT_BYTES:
            raise Unavailable(
                f"the remote's root would have {len(text)} bytes; the limit is {MOST_ROOT_BYTES}",
                hint="a remote of fewer models, or another prefix for new ones",
            )
        return text

    def of(self, kind: str) -> list[Named]:
        """Return the lists of one kind, in order."""
        return [one for one in self.lists if one.kind == kind]


def read_root(data: bytes, where: str) -> RemoteRoot:
    """Parse a root. Raises Corrupt, Incompatible for another version."""
    try:
        told = json.loads(data)["mstore-remote"]
        if told["version"] != VERSION:
            raise Incompatible(
                f"a remote of version {str(told['version'])[:20]}; this mstore knows {VERSION}",
                where=where,
                hint="pip install -U mstore",
            )
        root = msgspec.convert(told, RemoteRoot)
        for one in root.lists:
            ListId.parse(one.id)
            bytes.fromhex(one.first)
            if one.kind in LISTS and not 1 <= one.rows <= MOST_ROWS:
                raise ValueError(f"a list of {one.rows} rows")
        for kind in LISTS:
            firsts = [bytes.fromhex(one.first) for one in root.of(kind)]
            if firsts != sorted(set(firsts)):
                raise ValueError(f"lists of {kind} that do not ascend")
        size = root.block_size
        if not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ValueError(f"a block size of {size}")
    except Incompatible:
        raise
    except Exception as error:
        raise Corrupt(f"not the root of a remote: {error}", where=where) from error
    return root


def pack_name(pack: PackId) -> str:
    """Return the name of a pack's object."""
    return f"packs/{pack.hex()[:2]}/{pack.hex()}.pack"


def table_name(made: int, table: TableId) -> str:
    """Return the name of an object of tables."""
    return f"tables/{made:016x}-{table.hex()}"


def encode_list(kind: str, rows: Sequence[Any]) -> tuple[ListId, bytes]:
    """Return name and bytes of a list."""
    data = msgspec.msgpack.encode((f"mstore list {kind}/1", list(rows)))
    return ListId.of(data), data


def decode_list(named: Named, data: bytes, where: str) -> list[Any]:
    """Return the rows of a list, whose bytes are proved by its name. Raises Corrupt."""
    if str(ListId.of(data)) != named.id:
        raise Corrupt("the list does not match its name", where=where)
    try:
        head, rows = _DECODERS[named.kind].decode(data)
        keys = [row.key for row in rows]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a list of a remote: {error}", where=where) from error
    if (
        head != f"mstore list {named.kind}/1"
        or len(rows) != named.rows
        or keys != sorted(set(keys))
        or keys[0].hex() != named.first
    ):
        raise Corrupt("the list is not what the root says", where=where)
    if named.kind == "packs":
        for row in rows:
            problem = row.problem()
            if problem is not None:
                raise Corrupt(problem, where=f"{where}, pack {row.pack.hex()}")
    return rows


def place(lists: Sequence[Named], key: bytes) -> int:
    """Return the number of the list that has the row of a key, if any has it; 0 if none may."""
    firsts = [bytes.fromhex(one.first) for one in lists]
    return max(0, bisect_right(firsts, key) - 1)


def split(rows: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Cut sorted rows into lists: one, or several that have room for more."""
    if not rows:
        return
    count = 1 if len(rows) <= MOST_ROWS else -(-len(rows) // (MOST_ROWS * 3 // 4))
    size = -(-len(rows) // count)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
