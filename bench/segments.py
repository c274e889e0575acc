"""Segments of foreign blocks beside LMDB with the same rows: open, lookups, disk, memory, merging.

    python bench/segments.py WORK [--rounds 5] [--blocks 10000000] [--small]

Writes and prints bench/results/segments.json.  WORK needs 5 GB.  Three rows in four name a base, as
in a family of deltas; a pack has 500 rows.  The rows come as 16 sorted segments, and one merge
makes one of them, with one sync.  LMDB gets the same rows in the form of the index, sorted in each
of 1024 commits, with one sync at the end.  Each round asks both in processes of their own; half of
the ids that are asked for have a row.  A batch is asked twice: a segment checks the pages that are
used for the first time.  Ids of the first part alone are asked for: a sixteenth of all rows.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lmdb
import numpy as np
from measure import drop_cache, keep, machine, options, run, spread

from mstore.blocks import location, pack_tables, segments
from mstore.blocks.location import Location
from mstore.blocks.packs import NO_BASE, Kind
from mstore.blocks.segment import FIELDS, ROW, Rows, Segment, write
from mstore.blocks.segments import Segments
from mstore.terms.ids import ID_BYTES, PackId

BLOCKS = 10_000_000
PARTS = 16
COMMITS = 64
"""Of a part."""
PACK_ROWS = 500
BATCHES = (1_000, 10_000, 100_000)
ONES = 5_000
ADDED = 400_000
Figures = dict[str, Any]


# The rows -----------------------------------------------------------------------------------------


def ids_of(part: int, count: int) -> bytes:
    """The ids of a part, one after the other, in no order."""
    return np.random.default_rng([4, part]).bytes(ID_BYTES * count)


def packs_of(part: int, count: int) -> list[PackId]:
    """The packs of a part, ascending."""
    packs = -(-count // PACK_ROWS)
    names = np.random.default_rng([5, part]).bytes(ID_BYTES * packs)
    return sorted(PackId(names[at : at + ID_BYTES]) for at in range(0, ID_BYTES * packs, ID_BYTES))


def rows_of(part: int, count: int) -> Rows:
    """The rows of a part, ascending."""
    rng = np.random.default_rng([6, part])
    rows = np.zeros(count, ROW)
    raw = rows.view(np.uint8).reshape(count, -1)
    raw[:, :ID_BYTES] = np.frombuffer(ids_of(part, count), np.uint8).reshape(count, -1)
    fields = rows.view(FIELDS)
    fields["pack"] = np.arange(count) // PACK_ROWS
    fields["offset"] = rng.integers(4096, 1 << 29, count)
    fields["stored"], fields["plain"], fields["codec"], fields["width"] = 1 << 18, 1 << 20, 4, 2
    bases = np.frombuffer(rng.bytes(ID_BYTES * 10_000), "V32")
    fields["base"] = bases[rng.integers(0, len(bases), count)]
    fields["base"][rng.random(count) < 0.25] = NO_BASE
    order = np.argsort(fields["first"].astype(np.uint64))
    return rows[order]


def make_segments(path: Path, parts: int, count: int) -> Figures:
    """Write the parts, and merge them."""
    Segments.create(path)
    written = []
    began = time.perf_counter()
    for part in range(parts):
        rows = rows_of(part, count)
        id = write(path, packs_of(part, count), iter([rows]), count)
        assert id is not None
        written.append(Segment(path, id))
    seconds_to_write = time.perf_counter() - began
    began = time.perf_counter()
    (merged,) = segments._merge(path, written, ())
    seconds = time.perf_counter() - began
    segments._write_list(path, [(merged.id, len(merged))])
    # The largest that this process was: with one part in memory, and then merging.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    merged.verify()
    return {
        "seconds_to_write_parts": seconds_to_write,
        "merge_seconds": seconds,
        "verify_seconds": time.perf_counter() - began,
        "peak": peak,
        "bytes": merged.path.stat().st_size,
        "rows": len(merged),
    }


def make_lmdb(path: Path, parts: int, count: int) -> Figures:
    """The rows as the index has them; packs have numbers there, too."""
    path.mkdir()
    env = lmdb.open(str(path), map_size=1 << 38, max_dbs=4, sync=False)
    blocks = env.open_db(b"blocks")
    seconds = 0.0
    for part in range(parts):
        rows = rows_of(part, count)
        raw = rows.view(np.uint8).reshape(count, -1)
        numbers = np.random.default_rng([7, part]).permutation(count)
        for some in np.array_split(numbers, COMMITS):
            chosen = raw[np.sort(some)]
            items = [
                (one[:32], one[33:87] if any(one[55:87]) else one[33:55])
                for one in map(bytes, chosen)
            ]
            began = time.perf_counter()
            with env.begin(write=True) as transaction, transaction.cursor(db=blocks) as cursor:
                cursor.putmulti(items, overwrite=False)
            seconds += time.perf_counter() - began
    began = time.perf_counter()
    env.sync(True)
    seconds += time.perf_counter() - began
    env.close()
    return {"insert_seconds": seconds, "bytes": (path / "data.mdb").stat().st_size}


# Questions, each in a process of its own ----------------------------------------------------------


class InSegments:
    """Asks segments."""

    def __init__(self, path: Path) -> None:
        self.of = Segments(path)

    def one(self, id: bytes) -> int:
        return sum(1 for _ in self.of.places(Kind.BLOCK, id))

    def has(self, ids: bytes) -> int:
        return int(self.of.has(Kind.BLOCK, ids).sum())

    def places(self, ids: bytes) -> int:
        return sum(one is not None for one in self.of.locations(Kind.BLOCK, ids))


class InLmdb:
    """Asks LMDB, as the index does."""

    def __init__(self, path: Path) -> None:
        self.env = lmdb.open(str(path), map_size=1 << 38, max_dbs=4, readonly=True, lock=False)
        self.blocks = self.env.open_db(b"blocks", create=False)
        # The index keeps the packs by number in memory.
        self.packs = [PackId(bytes(ID_BYTES))] * 100_000

    def one(self, id: bytes) -> int:
        with self.env.begin() as transaction:
            row: Any = transaction.get(id, db=self.blocks)
        return 0 if row is None else self._found([row])

    def _found(self, rows: list[Any]) -> int:
        found = []
        for row in rows:
            number, *rest = location.fields(row)
            found.append(Location(self.packs[number], *rest))
        return len(found)

    def _rows(self, ids: bytes) -> list[tuple[bytes, Any]]:
        asked = sorted(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))
        with self.env.begin() as transaction, transaction.cursor(db=self.blocks) as cursor:
            return cursor.getmulti(asked)

    def has(self, ids: bytes) -> int:
        return len(self._rows(ids))

    def places(self, ids: bytes) -> int:
        return self._found([row for _, row in self._rows(ids)])


def mixed(rng: np.random.Generator, stored: bytes, count: int) -> bytes:
    """Ids, half of which have a row."""
    known = np.frombuffer(stored, "V32")
    ids = np.concatenate(
        (
            known[rng.integers(0, len(known), count // 2)],
            np.frombuffer(rng.bytes(16 * count), "V32"),
        )
    )
    return bytes(rng.permutation(ids).tobytes())


def memory() -> dict[str, int]:
    """Resident bytes of this process: anonymous, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")}


def answer(way: type[InSegments | InLmdb], path: Path, count: int, number: int) -> Figures:
    """What one process measures."""
    rng = np.random.default_rng([8, number])
    stored = ids_of(0, count)
    before = memory()
    began = time.perf_counter()
    asked = way(path)
    opened = time.perf_counter() - began
    assert asked.has(stored[:ID_BYTES]) == 1
    found = {"open": opened, "open_and_first": time.perf_counter() - began}
    ones = mixed(rng, stored, ONES)
    began = time.perf_counter()
    known = sum(asked.one(ones[at : at + ID_BYTES]) for at in range(0, len(ones), ID_BYTES))
    found["places 1"] = ONES / (time.perf_counter() - began)
    assert known == ONES // 2
    asks: dict[str, Callable[[bytes], int]] = {"has": asked.has, "places": asked.places}
    for name, ask in asks.items():
        for batch in BATCHES:
            ids = mixed(rng, stored, batch)
            for when in ("first", "again"):
                began = time.perf_counter()
                known = ask(ids)
                found[f"{name} {batch}, {when}"] = batch / (time.perf_counter() - began)
                assert known == batch // 2
    after = memory()
    del stored
    return found | {name: after[name] - before[name] for name in after}


WAYS: dict[str, type[InSegments | InLmdb]] = {"segments": InSegments, "lmdb": InLmdb}


def measured(work: Path, count: int, rounds: int) -> Figures:
    """The answers of all rounds, with what is in memory, and the first with nothing in it."""
    found: dict[str, list[Figures]] = {
        name: [] for name in (*WAYS, *(f"{way}, cold" for way in WAYS))
    }
    for number in range(rounds):
        for way in WAYS:
            for name in (f"{way}, cold", way):
                if name != way:
                    drop_cache(work / way)
                words = [str(work), "--ask", way, "--count", str(count), "--number", str(number)]
                done = run([sys.executable, __file__, *words])
                found[name].append(json.loads(done.output))
    return {
        name: {what: spread([one[what] for one in runs]) for what in runs[0]}
        for name, runs in found.items()
    }


def added(path: Path, count: int) -> Figures:
    """Rows a second of `add`, from tables of packs in memory, into one segment."""
    ids = ids_of(99, count)
    rows = np.zeros(count, pack_tables.FIELDS)
    rows["id"] = np.frombuffer(ids, rows["id"].dtype)
    rows["kind"], rows["codec"], rows["width"] = Kind.BLOCK, 4, 2
    rows["offset"] = 4096 + np.arange(count) * ID_BYTES
    rows["stored"], rows["plain"] = 1 << 18, 1 << 20
    tables = [
        (pack, rows[number * PACK_ROWS :][:PACK_ROWS])
        for number, pack in enumerate(packs_of(99, count))
    ]
    into = Segments.create(path)
    began = time.perf_counter()
    into.add(tables)
    return {"rows": count, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = options(__doc__, rounds=5, millions=0.0)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--small", action="store_true", help="200,000 blocks, two rounds")
    parser.add_argument("--ask", choices=list(WAYS), help="what a process of a round measures")
    parser.add_argument("--count", type=int)
    parser.add_argument("--number", type=int)
    given = parser.parse_args()
    work = given.work.absolute()
    if given.ask:
        print(json.dumps(answer(WAYS[given.ask], work / given.ask, given.count, given.number)))
        return
    if given.small:
        given.rounds, given.blocks = 2, 200_000
    work.mkdir(parents=True, exist_ok=True)
    for name in (*WAYS, "added"):
        shutil.rmtree(work / name, ignore_errors=True)
    count = given.blocks // PARTS
    results: Figures = {"machine": machine(), "rounds": given.rounds}
    results["segments"] = make_segments(work / "segments", PARTS, count)
    results["added"] = added(work / "added", min(ADDED, given.blocks))
    results["lmdb"] = make_lmdb(work / "lmdb", PARTS, count)
    results["asked"] = measured(work, count, given.rounds)
    for name in (*WAYS, "added"):
        shutil.rmtree(work / name)
    keep(given.results, "segments", results)


if __name__ == "__main__":
    main()
