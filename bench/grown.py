"""One task on a store that `growth.py` made, in a process of its own; prints seconds and memory.

    python bench/grown.py TASK STORE WORK ROUND

Seconds are of the task alone: imports, and opening the store where that is not the task, come
before.  anonymous_before is what the process had then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mstore.snapshots.add
import mstore.upkeep.disk_usage  # noqa: F401 -- what tasks import late must not be in their seconds
from mstore import Store
from mstore.blocks.packs import Kind
from mstore.upkeep.reachability import Inventory, Reach, Roots

REF = "family0/base"
MODEL_BLOCKS = 8
BLOCK = 1 << 20


def log_twenty(store: Store, work: Path, number: int) -> None:
    store.log(limit=20)


def log_one_branch(store: Store, work: Path, number: int) -> None:
    store.log(store.refs()[number].name)


def diff(store: Store, work: Path, number: int) -> None:
    """Of snapshots of whose payloads there are none: names and blocks, no distances."""
    names = [ref.name for ref in store.refs() if ref.name.startswith("family0/")]
    a, b = store[names[1 + number]], store[names[2 + number]]
    left, right = ({t.name: t for t in store.tensors(str(one.id))} for one in (a, b))
    assert left.keys() == right.keys()


def add(store: Store, work: Path, number: int) -> None:
    """A small checkpoint of new blocks, under a new name."""
    path = work / f"new{os.getpid()}.safetensors"
    header = {
        f"t{place}": {
            "dtype": "BF16",
            "shape": [1, BLOCK // 2],
            "data_offsets": [place * BLOCK, (place + 1) * BLOCK],
        }
        for place in range(MODEL_BLOCKS)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    data = np.random.default_rng(os.getpid()).bytes(MODEL_BLOCKS * BLOCK)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    began = time.perf_counter()
    store.add(path, name=f"new{os.getpid()}")
    path.unlink()
    raise Took(time.perf_counter() - began)


def du(store: Store, work: Path, number: int) -> None:
    store.usage([REF])


def mark(store: Store, work: Path, number: int) -> None:
    """All that refs and reflogs keep, as gc marks it."""
    catalog = store._catalog
    with catalog.index.env.read() as transaction:
        inventory = Inventory(catalog, transaction)
        roots = Roots.read(catalog, transaction, 0)
    reach = Reach(catalog, inventory)
    reach.grow(roots)
    if not reach.live[Kind.BLOCK].all():
        raise SystemExit("a block that a ref needs was not marked")


class Took(Exception):
    """Seconds of a task that has more to do than what is measured."""


def opened(path: Path, work: Path, number: int) -> None:
    """Open, and read one ref."""
    with Store.open(path) as store:
        store.show(REF)


TASKS: dict[str, Callable[[Store, Path, int], None] | None] = {
    "open": None,
    "log -n 20": log_twenty,
    "log of a branch": log_one_branch,
    "diff": diff,
    "add": add,
    "gc mark": mark,
    "du": du,
}


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    name, path, work, number = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    task = TASKS[name]
    before = anonymous()
    if task is None:
        began = time.perf_counter()
        opened(path, work, number)
        seconds = time.perf_counter() - began
    else:
        with Store.open(path) as store:
            before = anonymous()
            began = time.perf_counter()
            try:
                task(store, work, number)
                seconds = time.perf_counter() - began
            except Took as took:
                seconds = took.args[0]
    print(json.dumps({"seconds": seconds, "anonymous_before": before}))


if __name__ == "__main__":
    main()
