"""One command on a store of `refs.py`, in a process of its own; prints its seconds.

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

import mstore.usage  # noqa: F401 -- what tasks import late must not be in their seconds
from mstore import Store

EXPERT = "family0/expert0"


def tag(store: Store, number: int) -> float:
    began = time.perf_counter()
    store.tag(f"tag{number}", EXPERT)
    seconds = time.perf_counter() - began
    store.remove(f"tag{number}")
    return seconds


def refs(store: Store, number: int) -> float:
    began = time.perf_counter()
    store.refs()
    return time.perf_counter() - began


def remove(store: Store, number: int) -> float:
    began = time.perf_counter()
    store.remove(EXPERT)
    seconds = time.perf_counter() - began
    store.reset(EXPERT, f"{EXPERT}@{{1}}")
    return seconds


def du(store: Store, number: int) -> float:
    began = time.perf_counter()
    store.usage()
    return time.perf_counter() - began


def du_of_one(store: Store, number: int) -> float:
    began = time.perf_counter()
    store.usage([EXPERT])
    return time.perf_counter() - began


TASKS: dict[str, Callable[[Store, int], float]] = {
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
        print(json.dumps({"seconds": task(store, number)}))


if __name__ == "__main__":
    main()
