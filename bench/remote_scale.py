"""A remote of 10^7 blocks, 80,000 packs and 10^4 snapshots: fetch and push, in requests and bytes.

    python bench/remote_scale.py WORK [--packs 80000] [--small]

Writes and prints bench/results/remote_scale.json.  WORK needs 5 GB.  The remote is a directory.
Its lists and tables are real, those of packs that do not exist: their ids are random. Among them is
one small family that was really pushed. Every step is a process of its own: the first fetch of one
ref, a fetch of an unchanged remote, pushes of one new snapshot, fetches of it.

"anonymous" is anonymous memory at its peak, "resident" all that the process had in memory, mapped
files included. "beside" are bytes received but for those of packs.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measure import keep, machine, options, run
from safetensors.numpy import save_file

from mstore import Store
from mstore.blocks.codecs import Codec
from mstore.blocks.pack_tables import FIELDS
from mstore.blocks.packs import NONCE_BYTES, PAGE, Kind, header
from mstore.remotes import address
from mstore.remotes.layout import PackRow, PackState, RefRow, SnapshotRow, TableId, table_name
from mstore.remotes.objects import Listed, Objects, RootStamp
from mstore.remotes.shared_directory import SharedDirectory
from mstore.remotes.state import Changes, Remote
from mstore.terms.ids import ID_BYTES, Buffer, PackId

PACKS = 80_000
PACK_BLOCKS = 125
SNAPSHOTS = 10_000
REFS = 1_000
PUSH_PACKS = 100
"""Packs whose tables lie in one object."""
BLOCK = 1 << 16
STORED = BLOCK
AIMS = {"unchanged requests": 1, "beside": 2 << 20, "memory": 256 << 20}
Figures = dict[str, Any]


# The remote ---------------------------------------------------------------------------------------


def table(draw: np.random.Generator) -> bytes:
    """The header and table of a pack of random blocks."""
    rows = np.zeros(PACK_BLOCKS, FIELDS)
    ids = np.frombuffer(draw.bytes(PACK_BLOCKS * ID_BYTES), f"S{ID_BYTES}")
    rows["id"] = np.sort(ids)
    rows["offset"] = PAGE + np.arange(PACK_BLOCKS) * STORED
    rows["stored"], rows["plain"] = STORED, BLOCK
    rows["kind"], rows["codec"], rows["width"] = Kind.BLOCK, Codec.RAW, 2
    return header(draw.bytes(NONCE_BYTES)) + rows.tobytes()


def simulate(url: str, scratch: Path, packs: int, refs: int = REFS) -> None:
    """Add packs, snapshots and refs that do not exist to a remote; so many refs at PACKS packs."""
    draw = np.random.default_rng(1)
    remote = Remote("origin", address_objects(url), scratch)
    remote.make_directory()
    state = remote.state()
    changes = Changes()
    names: list[bytes] = []
    for start in range(0, packs, PUSH_PACKS):
        tables = [table(draw) for _ in range(min(PUSH_PACKS, packs - start))]
        data = b"".join(tables)
        id = TableId.of(data)
        made = state.root.generation + 1
        remote.objects.put_bytes(table_name(made, id), data)
        offset = 0
        for one in tables:
            pack = bytes(PackId.of(one))
            names.append(pack)
            size = PAGE + PACK_BLOCKS * STORED
            live = PackState.LIVE
            place = (made, bytes(id), offset, len(one))
            changes.put("packs", PackRow(pack, size, live, 0, PACK_BLOCKS, *place))
            offset += len(one)
    count = SNAPSHOTS * packs // PACKS
    snapshots = [draw.bytes(ID_BYTES) for _ in range(count)]
    for number, one in enumerate(snapshots):
        changes.put("snapshots", SnapshotRow(one, names[number % len(names)], True))
    for number, one in enumerate(snapshots[: refs * packs // PACKS]):
        changes.put("refs", RefRow(f"other/{number}", "branch", one, ()))
    remote.change(state, changes)


def address_objects(url: str) -> SharedDirectory:
    """The directory of a remote."""
    return SharedDirectory(Path(url.removeprefix("file://")))


# What a process does ------------------------------------------------------------------------------


class Counted(Objects):
    """Counts requests and bytes by the first part of names."""

    def __init__(self, inner: Objects) -> None:
        self._inner = inner
        self.where = inner.where
        self.requests: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _told(self, name: str, *, received: int = 0, sent: int = 0) -> None:
        kind = name.partition("/")[0]
        self.requests[kind] += 1
        self.received[kind] += received
        self.sent[kind] += sent

    def read_root(self, known: RootStamp | None = None) -> tuple[bytes, RootStamp] | None:
        found = self._inner.read_root(known)
        self._told("root", received=0 if found is None else len(found[0]))
        return found

    def swap_root(self, data: bytes, before: RootStamp | None) -> RootStamp:
        self._told("root", sent=len(data))
        return self._inner.swap_root(data, before)

    def probe(self, name: str) -> None:
        self._inner.probe(name)

    def read_each(self, name: str, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._told(name, received=sum(length for _, length in spans))
        return self._inner.read_each(name, spans)

    def size(self, name: str) -> int:
        self._told(name)
        return self._inner.size(name)

    def time_ns(self, name: str) -> int:
        self._told(name)
        return self._inner.time_ns(name)

    def put(self, name: str, size: int, pieces: Iterable[Buffer], *, jobs: int = 1) -> None:
        self._told(name, sent=size)
        self._inner.put(name, size, pieces, jobs=jobs)

    def names(self, below: str) -> Iterator[Listed]:
        return self._inner.names(below)

    def remove(self, name: str) -> None:
        self._inner.remove(name)


def step(path: Path, what: str) -> Figures:
    """Fetch or push, and count."""
    counted: list[Counted] = []
    real = address.opened

    def opened(*given: Any) -> Objects:
        counted.append(Counted(real(*given)))
        return counted[0]

    address.opened = opened
    began, before = time.perf_counter(), time.process_time()
    with Store.open(path) as store:
        if what == "push":
            store.push("origin", ["real"])
        else:
            store.fetch("origin", ["real"])
    seconds, cpu = time.perf_counter() - began, time.process_time() - before
    [one] = counted
    return {
        "seconds": seconds,
        "cpu": cpu,
        "requests": sum(one.requests.values()),
        "received": dict(one.received),
        "beside": sum(one.received.values()) - one.received["packs"],
        "sent": dict(one.sent),
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# The whole ----------------------------------------------------------------------------------------


def model(folder: Path, seed: int) -> Path:
    """A checkpoint of 1 MB."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng([2, seed])
    save_file({"w": draw.standard_normal((256, 1024)).astype("f4")}, folder / "model.safetensors")
    return folder


def measured(work: Path, packs: int) -> Figures:
    """All steps, one after the other."""
    url = (work / "remote").as_uri()
    pusher, client = work / "pusher", work / "client"
    found: Figures = {}

    def do(name: str, path: Path, what: str) -> None:
        done = run([sys.executable, __file__, str(work), "--path", str(path), "--step", what])
        found[name] = json.loads(done.output) | {"anonymous": done.anonymous}
        print(name, found[name], file=sys.stderr, flush=True)

    with Store.init(pusher, block_size=BLOCK) as store:
        store.add(model(work / "model", 0), name="real")
        store.add_remote("origin", url)
        store.push("origin", every=True)
    began = time.perf_counter()
    simulate(url, work / "simulating", packs)
    found["simulated"] = {"packs": packs, "blocks": packs * PACK_BLOCKS}
    found["root bytes"] = max(len(p.read_bytes()) for p in (work / "remote/roots").iterdir())
    print(f"simulated in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    with Store.init(client, block_size=BLOCK) as store:
        store.add_remote("origin", url)
    do("first fetch of one ref", client, "fetch")
    do("fetch, unchanged", client, "fetch")
    for number, name in ((1, "first push there"), (2, "push")):
        with Store.open(pusher) as store:
            store.add(model(work / "model", number), name="real")
        do(f"{name} of one new snapshot", pusher, "push")
        do(f"fetch of one new snapshot, {number}", client, "fetch")
    do("push, unchanged", pusher, "push")
    return found


def main() -> None:
    parser = options(__doc__, rounds=1, millions=0.0)
    parser.add_argument("--packs", type=int, default=PACKS)
    parser.add_argument("--small", action="store_true", help="800 packs")
    parser.add_argument("--step", choices=("fetch", "push"), help="what a process does")
    parser.add_argument("--path", type=Path)
    given = parser.parse_args()
    work = given.work.absolute()
    if given.step:
        print(json.dumps(step(given.path, given.step)))
        return
    work.mkdir(parents=True, exist_ok=True)
    names = ("remote", "pusher", "client", "simulating", "model")
    for name in names:
        shutil.rmtree(work / name, ignore_errors=True)
    found = measured(work, 800 if given.small else given.packs)
    keep(given.results, "remote_scale", {"machine": machine(), "aims": AIMS, **found})
    for name in names:
        shutil.rmtree(work / name)
    os.sync()


if __name__ == "__main__":
    main()
