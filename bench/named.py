"""One command on a store of `refs.py`, in a process of its own; prints its wall and CPU seconds.

    python bench/named.py TASK STORE ROUND

Seconds are of the call alone: imports and opening the store come before.  What a task makes it
takes back, outside the seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mstore.upkeep.disk_usage  # noqa: F401 -- what tasks import late must not be in their seconds
from mstore import Store

EXPERT = "family0/expert0"
Took = tuple[float, float]
"""Wall and CPU seconds."""


def now() -> Took:
    return time.perf_counter(), time.process_time()


def since(began: Took) -> Took:
    wall, cpu = now()
    return wall - began[0], cpu - began[1]


def tag(store: Store, number: int) -> Took:
    began = now()
    store.tag(f"tag{number}", EXPERT)
    took = since(began)
    store.remove(f"tag{number}")
    return took


def refs(store: Store, number: int) -> Took:
    began = now()
    store.refs()
    return since(began)


def remove(store: Store, number: int) -> Took:
    began = now()
    store.remove(EXPERT)
    took = since(began)
    store.reset(EXPERT, f"{EXPERT}@{{1}}")
    return took


def du(store: Store, number: int) -> Took:
    began = now()
    store.usage()
    return since(began)


def du_of_one(store: Store, number: int) -> Took:
    began = now()
    store.usage([EXPERT])
    return since(began)


TASKS: dict[str, Callable[[Store, int], Took]] = {
    "tag": tag,
    "refs": refs,
    "rm": remove,
    "du": du,
    "du REF": du_of_one,
}


def main() -> None:
    task, path, number = TASKS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    with Store.open(path) as store:
        # What a first call brings into the process (the index opened for writing) is not of refs.
        store.configure("codec", "auto")
        wall, cpu = task(store, number)
    print(json.dumps({"wall": wall, "cpu": cpu}))


if __name__ == "__main__":
    main()
