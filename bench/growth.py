"""How a store grows: open, commit, log, diff and mark with up to 10^7 blocks, 10^4 snapshots.

    python bench/growth.py WORK [--rounds 5] [--blocks 100000 1000000 10000000] [--small]

Writes and prints bench/results/growth.json.  WORK needs 15 GB for the largest.  The stores are
simulated: index rows, records and pack footers are real, written as commits write them, but
payloads of blocks are holes in sparse files.  Ten families; each snapshot is an expert of its
family's base in which 3 of 300 tensors changed, whose blocks are deltas of the base's, or it is
the next snapshot of such a branch (three in four are).  Every task runs in a process of its own
(`grown.py`); memory is anonymous memory at its peak, without what the process had before.
"process" is the whole process, its start included, and its processor time.  COMMANDS are also run
as people do; AIMS (seconds of a process) stand beside what has one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lmdb
import numpy as np
from blake3 import blake3
from grown import TASKS
from measure import Run, keep, machine, options, run, spread

from mstore import Store
from mstore.blocks import schema
from mstore.blocks.codecs import Codec
from mstore.blocks.location import _LOCATION
from mstore.blocks.pack_store import HERE
from mstore.blocks.packs import _HEADER, _TAIL, ENTRY, MAGIC, PAGE, TAIL_MAGIC, VERSION, Kind
from mstore.store.objects.manifest import SAFETENSORS, File, Manifest, Part
from mstore.store.objects.snapshot import BASE, PREVIOUS, Parent, SnapshotRecord
from mstore.store.objects.tensor import BYTES, Tensor
from mstore.terms.ids import ManifestId, PackId, SnapshotId

BLOCKS = (100_000, 1_000_000, 10_000_000)
SNAPSHOTS = 10_000
FAMILIES = 10
TENSORS = 300
CHANGED = 3
BLOCK = 1 << 20
RATIO = 0.25
PACK_BYTES = 512 << 20
COMMITS = 200
"""Transactions that the rows are written in: as many pages are half full as in a real index."""
COMMANDS = {
    "mstore log -n 20": ("log", "-n", "20"),
    "mstore refs": ("refs",),
    "mstore show": ("show", "family0/base"),
    "mstore du": ("du", "family0/base"),
}
AIMS = {
    "mstore log -n 20": 0.15,
    "mstore refs": 0.12,
    "mstore show": 0.12,
    "mstore du": 10.0,
    "gc mark": 10.0,
    "du": 10.0,
}
Figures = dict[str, Any]


# Making a store -----------------------------------------------------------------------------------


@dataclass
class Open:
    """A pack that is being filled: its number, where its next payload goes, and its entries."""

    number: int
    offset: int
    entries: list[bytes]
    payloads: list[tuple[int, bytes]]


class Simulated:
    """Writes the rows and packs of a store that `Store.init` made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rng = np.random.default_rng(4)
        # Not synced: what is measured opens it anew, as the library does.
        self.env = lmdb.open(
            str(path / "index"), map_size=1 << 38, max_dbs=len(schema.DATABASES) + 8, sync=False
        )
        self.db = {name: self.env.open_db(name.encode()) for name in schema.DATABASES}
        self.rows: dict[str, list[tuple[bytes, bytes]]] = {name: [] for name in schema.DATABASES}
        self.packs = 0
        self.pack = self._new_pack()

    def _new_pack(self) -> Open:
        self.packs += 1
        return Open(self.packs - 1, PAGE, [], [])

    def ids(self, count: int) -> bytes:
        """Random ids, one after the other."""
        return self.rng.bytes(32 * count)

    def block(self, id: bytes, base: bytes | None) -> None:
        """A block of 1 MiB, raw, or a delta of RATIO."""
        stored = BLOCK if base is None else int(BLOCK * RATIO)
        codec = Codec.RAW if base is None else Codec.DELTA
        self._entry(id, Kind.BLOCK, int(codec), 2, stored, BLOCK, base or bytes(32), "blocks", id)

    def record(self, record: Any) -> bytes:
        """A record, with its bytes."""
        id, data, kind = bytes(record.id()), record.encode(), type(record).kind
        at = self.pack.offset
        self.pack.payloads.append((at, data))
        self._entry(id, kind, 0, 1, len(data), len(data), bytes(32), "records", bytes([kind]) + id)
        return id

    def _entry(
        self, id: bytes, kind: int, codec: int, width: int, stored: int, plain: int,
        base: bytes, database: str, key: bytes,
    ) -> None:  # fmt: skip
        pack = self.pack
        pack.entries.append(ENTRY.pack(id, base, pack.offset, stored, plain, kind, codec, width))
        row = _LOCATION.pack(pack.number, pack.offset, stored, plain, codec, width)
        self.rows[database].append((key, row + base if any(base) else row))
        pack.offset += stored
        if pack.offset >= PACK_BYTES:
            self.seal()

    def seal(self) -> None:
        """Write the pack: a footer, records, and holes."""
        pack, self.pack = self.pack, self._new_pack()
        head = _HEADER.pack(MAGIC, VERSION, self.rng.bytes(32))
        # Sorted by kind, then id.
        table = b"".join(sorted(pack.entries, key=lambda entry: (entry[80], entry[:32])))
        size = pack.offset + len(table) + _TAIL.size
        size += -size % PAGE
        digest = blake3(table).digest()
        id = PackId.of(head + table)
        path = self.path / "packs" / id.hex()[:2] / f"{id.hex()}.pack"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(head)
            for at, data in pack.payloads:
                file.seek(at)
                file.write(data)
            file.seek(pack.offset)
            file.write(table)
            file.truncate(size)
            file.seek(size - _TAIL.size)
            file.write(_TAIL.pack(pack.offset, len(table), digest, VERSION, TAIL_MAGIC))
        number = pack.number.to_bytes(4, "big")
        here = HERE.to_bytes(4, "big")
        self.rows["packs"].append((number, id + size.to_bytes(8, "big") + here))
        self.rows["pack_ids"].append((bytes(id), number))

    def flush(self) -> None:
        """One transaction with the rows so far."""
        with self.env.begin(write=True) as transaction:
            for table in schema.TABLES:
                rows = self.rows[table.name]
                rows.sort()
                rows[:] = [(key, table.sealed(key, value)) for key, value in rows]
                with transaction.cursor(db=self.db[table.name]) as cursor:
                    cursor.putmulti(rows)
                rows.clear()

    def close(self) -> None:
        self.seal()
        self.flush()
        self.env.sync(True)
        self.env.close()


@dataclass
class Model:
    """A snapshot's tensors, to make the next one from."""

    tensors: list[Tensor]
    parts: list[Part]


class Family:
    """A base and its experts."""

    def __init__(self, into: Simulated, blocks: int, number: int) -> None:
        self.into = into
        self.number = number
        cuts = np.linspace(0, blocks, TENSORS + 1).astype(int)
        # A tensor of no block would be no tensor.
        self.lengths = [max(1, int(b - a)) for a, b in pairwise(cuts)]
        self.header = Tensor(BYTES, (20_000,), 20_000, into.ids(1))
        into.block(self.header.blocks, None)
        into.record(self.header)
        self.tensors = [self._tensor(length, None) for length in self.lengths]
        self.tips: dict[int, tuple[SnapshotId, Model]] = {}
        self.base = self._snapshot(self._model(self.tensors), ())

    def _tensor(self, blocks: int, base: Tensor | None) -> Tensor:
        ids = self.into.ids(blocks)
        for at in range(0, len(ids), 32):
            self.into.block(ids[at : at + 32], None if base is None else base.blocks[at : at + 32])
        tensor = Tensor("BF16", (blocks, BLOCK // 2), blocks * BLOCK, ids)
        self.into.record(tensor)
        return tensor

    def _model(self, tensors: list[Tensor]) -> Model:
        header = Part(None, self.header.id(), self.header.nbytes)
        parts = [
            Part(f"model.layers.{number // 9}.part{number % 9}.weight", one.id(), one.nbytes)
            for number, one in enumerate(tensors)
        ]
        return Model(tensors, [header, *parts])

    def _snapshot(self, model: Model, parents: tuple[Parent, ...]) -> SnapshotId:
        size = sum(part.nbytes for part in model.parts)
        manifest = Manifest((File("model.safetensors", SAFETENSORS, size, tuple(model.parts)),))
        content = ManifestId(self.into.record(manifest))
        now = time.time_ns()
        record = SnapshotRecord(
            content,
            parents,
            "add",
            None,
            "",
            None,
            None,
            f"family {self.number}",
            now,
            "mstore simulated",
        )
        id = SnapshotId(self.into.record(record))
        rows = self.into.rows
        rows["snapshots"].append((id, content + now.to_bytes(8, "big")))
        rows["contents"].append((content + id, b""))
        for parent in parents:
            rows["children"].append((parent.snapshot + id + parent.role.encode(), b""))
        return id

    def expert(self, branch: int) -> None:
        """One snapshot more; on a branch that is there it has that one's tip as `previous`."""
        rng = self.into.rng
        known = self.tips.get(branch)
        tensors = list(self.tensors if known is None else known[1].tensors)
        for place in rng.choice(TENSORS, CHANGED, replace=False).tolist():
            tensors[place] = self._tensor(self.lengths[place], self.tensors[place])
        parents = [] if known is None else [Parent(PREVIOUS, known[0])]
        model = self._model(tensors)
        id = self._snapshot(model, (*parents, Parent(BASE, self.base)))
        self.tips[branch] = (id, model)

    def refs(self) -> Iterator[tuple[str, SnapshotId]]:
        yield f"family{self.number}/base", self.base
        for branch, (id, _) in self.tips.items():
            yield f"family{self.number}/expert{branch}", id


def simulate(path: Path, blocks: int, snapshots: int) -> Figures:
    """A store of about so many blocks; what is in it."""
    shutil.rmtree(path, ignore_errors=True)
    Store.init(path).close()
    into = Simulated(path)
    experts = snapshots - FAMILIES
    # An expert brings CHANGED of TENSORS parts of a base's blocks.
    of_base = blocks / (FAMILIES + experts * CHANGED / TENSORS)
    families = []
    for number in range(FAMILIES):
        families.append(Family(into, int(of_base), number))
        into.flush()
    every = max(1, experts // COMMITS)
    for number in range(experts):
        family = families[number % FAMILIES]
        # A quarter as many branches as experts.
        family.expert(int(into.rng.integers(0, 1 + experts // FAMILIES // 4)))
        if number % every == 0:
            into.flush()
    move_rows(into, families)
    into.close()
    with Store.open(path) as store:
        with store._catalog.index.env.read() as transaction:
            rows = {
                name: store._catalog.index.count(transaction, name) for name in schema.DATABASES
            }
        index_bytes = store._catalog.index.env.file_bytes()
    return {
        "blocks": rows["blocks"],
        "snapshots": rows["snapshots"],
        "refs": rows["refs"],
        "records": rows["records"],
        "index_bytes": index_bytes,
        "plain_bytes_of_blocks": rows["blocks"] * BLOCK,
    }


def move_rows(into: Simulated, families: list[Family]) -> None:
    """Refs, each with the line of its creation in the reflog."""
    from mstore.store.refs import BRANCH

    for family in families:
        for name, id in family.refs():
            ref = schema.REFS.value.encode(schema.Ref(BRANCH, id))
            into.rows["refs"].append((name.encode(), ref))
            line = schema.Move(None, id, "add", time.time_ns(), 1, BRANCH)
            key = schema.REFLOG.key.encode((name, 0))
            into.rows["reflog"].append((key, schema.REFLOG.value.encode(line)))


# Measuring ----------------------------------------------------------------------------------------


def measured(store: Path, rounds: int, work: Path) -> Figures:
    """Each task of `grown.py` and each command, each time in a process of its own."""
    found: Figures = {}
    for task in TASKS:
        seconds, memory, runs = [], [], []
        for number in range(rounds):
            program = [sys.executable, str(Path(__file__).parent / "grown.py")]
            done = run([*program, task, str(store), str(work), str(number)])
            told = json.loads(done.output)
            runs.append(done)
            seconds.append(told["seconds"])
            memory.append(max(0, done.anonymous - told["anonymous_before"]))
        found[task] = {"seconds": spread(seconds), "anonymous": spread(memory)} | process(runs)
    for command, words in COMMANDS.items():
        program = [sys.executable, "-m", "mstore_cli", "--store", str(store), *words]
        runs = [run(program) for _ in range(rounds)]
        memory = [one.anonymous for one in runs]
        seconds = [one.wall for one in runs]
        found[command] = {"seconds": spread(seconds), "anonymous": spread(memory)} | process(runs)
    for name, told in found.items():
        told["aim_seconds"] = AIMS.get(name)
        print(name, told, flush=True)
    return found


def process(runs: list[Run]) -> Figures:
    """Seconds of whole processes, by the clock and of the processor."""
    return {
        "process": {
            "seconds": spread([one.wall for one in runs]),
            "cpu_seconds": spread([one.cpu for one in runs]),
        }
    }


def main() -> None:
    parser = options(__doc__, rounds=5, millions=0.0)
    parser.add_argument("--blocks", type=int, nargs="*", default=list(BLOCKS))
    parser.add_argument("--snapshots", type=int, default=SNAPSHOTS)
    parser.add_argument("--small", action="store_true", help="10^4 and 10^5 blocks, 500 snapshots")
    given = parser.parse_args()
    if given.small:
        given.rounds, given.blocks, given.snapshots = 2, [10_000, 100_000], 500
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    results: Figures = {"machine": machine(), "rounds": given.rounds, "sizes": {}}
    for blocks in given.blocks:
        store = work / f"grown{blocks}"
        began = time.perf_counter()
        told = simulate(store, blocks, given.snapshots)
        told["seconds_to_make"] = time.perf_counter() - began
        results["sizes"][str(blocks)] = told | {"tasks": measured(store, given.rounds, work)}
        shutil.rmtree(store)
    keep(given.results, "growth", results)


if __name__ == "__main__":
    main()
