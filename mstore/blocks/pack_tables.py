"""Tables of packs as arrays: whoever reads those of a remote reads 10^7 rows, and checks each.

`mstore.blocks.packs` has the form of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.blocks.location_arrays import Numbers
from mstore.blocks.packs import ENTRY, HEADER_BYTES, MOST_OFFSET, PAGE, PackEntry, require_header
from mstore.terms.errors import Corrupt
from mstore.terms.ids import PackId

FIELDS: Final = np.dtype(
    {
        "names": ["id", "base", "offset", "stored", "plain", "kind", "codec", "width"],
        "formats": ["S32", "V32", "<u8", "<u4", "<u4", "u1", "u1", "u1"],
        "offsets": [0, 32, 64, 72, 76, 80, 81, 82],
        "itemsize": ENTRY.size,
    }
)
"""An entry.  id: numpy compares such as memcmp(3) does, zero bytes at the end included."""
PackTable = npt.NDArray[np.void]
"""The entries of one pack, sorted by kind and id: `FIELDS` of each; or those of several packs."""


def read_tables(parts: Sequence[tuple[PackId, bytes]], where: str) -> tuple[PackTable, Numbers]:
    """Return the tables of packs, one behind the other, and where each begins and the last ends.

    parts: packs, and of each its header's first bytes and its table.  All are checked at once: a
    pack of a remote may be small, and the remote have 10^5.  Raises Corrupt if bytes are not the
    pack's, Incompatible for another version.
    """
    for pack, data in parts:
        if PackId.of(data) != pack:
            raise Corrupt("the table does not match its pack's name", where=where)
        require_header(data[:HEADER_BYTES], where)
        if (len(data) - HEADER_BYTES) % ENTRY.size:
            raise Corrupt("not the table of a pack", where=where)
    rows = [(len(data) - HEADER_BYTES) // ENTRY.size for _, data in parts]
    places = np.cumsum([0, *rows])
    table = np.frombuffer(b"".join([data[HEADER_BYTES:] for _, data in parts]), FIELDS)
    return _checked(table, MOST_OFFSET, places[:-1], where), places


def parsed(data: bytes, end: int, where: str) -> PackTable:
    """Return a table whose payloads end at `end` at the latest.

    Raises Corrupt for an entry that is out of bounds or order.
    """
    return _checked(np.frombuffer(data, FIELDS), end, np.zeros(1, np.int64), where)


def _checked(table: PackTable, end: int, starts: Numbers, where: str) -> PackTable:
    """Return tables whose entries are in bounds, and in order from each start on."""
    offset, kind, id = table["offset"], table["kind"], table["id"]
    is_bad = np.zeros(len(table) + 1, np.bool_)
    is_bad[1:-1] = (kind[1:] < kind[:-1]) | ((kind[1:] == kind[:-1]) & (id[1:] <= id[:-1]))
    is_bad[starts] = False
    # Compared so that no sum overflows.
    is_bad[:-1] |= (offset < PAGE) | (offset > end) | (table["stored"] > np.uint64(end) - offset)
    if is_bad.any():
        [bad, *_] = entries_of(table[is_bad[:-1]])
        raise Corrupt(f"footer entry {bad.id.hex()[:12]} is out of bounds or order", where=where)
    return table


def ids_of(table: PackTable) -> list[bytes]:
    """Return the ids of a table's entries."""
    ids: list[bytes] = table["id"].view("V32").tolist()
    return ids


def entries_of(table: PackTable) -> tuple[PackEntry, ...]:
    """Return the entries of a table, one by one."""
    columns: list[list[Any]] = [
        ids_of(table) if name == "id" else table[name].tolist()
        for name in ("id", "kind", "codec", "width", "offset", "stored", "plain", "base")
    ]
    return tuple(map(PackEntry, *columns))
