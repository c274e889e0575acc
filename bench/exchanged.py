"""One task between a store and a remote, in a process of its own, told as JSON: for `remote.py`.

    python bench/exchanged.py TASK STORE URL JOBS

TASK: push (all refs), fetch, clone. Seconds are those of the call, processor seconds too; memory is
the resident memory at its peak, without what the process had before, all it needs imported.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path

from mstore import Store

LATE = (
    *("obstore", "obstore.store", "numpy", "concurrent.futures"),
    *(f"mstore.remotes.{name}" for name in ("push", "fetch", "registry")),
    *("mstore.snapshots.add", "mstore.merge.planning.session"),
)
"""What calls import when they need it."""


def memory(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def main() -> None:
    task, path, url, jobs = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    for late in LATE:
        importlib.import_module(late)
    store, name = None, ""
    if task != "clone":
        store = Store.open(path)
        [known] = store.remotes() or [store.add_remote("bench", url)]
        name = known.name
    # The peak is counted from here on: proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    idle = memory("VmRSS")
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    if store is None:
        Store.clone(url, path, jobs=jobs)
    elif task == "push":
        store.push(name, every=True, jobs=jobs)
    else:
        store.fetch(name, jobs=jobs)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wall": wall, "cpu": cpu, "memory": memory("VmHWM") - idle}))


if __name__ == "__main__":
    main()
