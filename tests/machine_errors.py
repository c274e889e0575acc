"""A program that does one thing with a store on a machine that refuses something.

    python machine_errors.py

Each line of standard input is JSON, [DOING, STORE, OTHER] or [DOING, STORE, OTHER, MACHINE], and is
done by a child of its own, so that nothing is imported twice and nothing is left of the last one.
DOING is a name of `DOINGS`; OTHER is the directory that it makes, updates or reads.  MACHINE
`kernels`: compiled code cannot be loaded; `files`: no file can be opened beyond those that are open
once the store is, then only one more, and so on until it succeeds.  Prints a line of JSON, for each
try: the error, by its class, errno and text, or what was reported as damage.  A child that fails
ends it.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import pkgutil
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mstore
from mstore import Store
from mstore.terms.errors import MstoreError, Unavailable

NO_KERNELS = "compiled kernels cannot run here"
MOST_FILES = 100
"""Nothing here needs more at once."""


def without_kernels() -> None:
    """From now on in this process; nothing may have run a compiled pass before."""
    from mstore.numeric import passes

    def refuse(self: passes.Pass) -> Any:
        raise Unavailable(NO_KERNELS)

    passes.Pass.load = refuse  # type: ignore[method-assign]


@contextmanager
def with_files(more: int | None) -> Iterator[None]:
    """Let this process open so many more files; None: as many as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if more is not None:
        names = os.listdir("/proc/self/fd")
        # The limit is of numbers, and some below the highest that is open are free.
        free = sorted(set(range(len(names) + more + 1)) - {int(name) for name in names})
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def read(store: Store) -> list[str]:
    """Every file of every snapshot, as a mount and `serve` read."""
    for name in ("base", "tuned", "other"):
        snapshot = store[name]
        for file in snapshot.files():
            for _ in store.read_file(name, file.path):
                pass
    return []


def merge(store: Store) -> list[str]:
    """Run the plan that the store has."""
    (plan,) = store.plans()
    store.merge(plan, name="merged")
    return []


def told(problems: Any) -> list[str]:
    return [f"{one.kind} {one.where}: {one.what}" for one in problems]


def repaired(report: Any) -> list[str]:
    return [*told(report.before.problems), *(f"dropped {one}" for one in report.dropped)]


DOINGS: dict[str, Callable[[Store, Path, Path], list[str]]] = {
    "fsck": lambda store, path, other: told(store.fsck(read_data=True, threads=2).problems),
    "repair": lambda store, path, other: repaired(store.repair(read_data=True, threads=2)),
    "repair from": lambda store, path, other: repaired(
        store.repair(read_data=True, sources=[other], threads=2)
    ),
    "backup": lambda store, path, other: told(store.backup(other, threads=2).problems),
    "clone": lambda store, path, other: [str(Store.clone(path, other, threads=2))][1:],
    "gc": lambda store, path, other: list(store.gc(dead_share=0).left),
    "pin": lambda store, path, other: [str(store.pin("tuned", raw=True, threads=2))][1:],
    "verify": lambda store, path, other: [str(store.verify("tuned", {}, read_data=True))][1:],
    "read": lambda store, path, other: read(store),
    "merge": lambda store, path, other: merge(store),
    "add": lambda store, path, other: [str(store.add(other, name="new", base="base"))][1:],
}


def tried(doing: str, path: Path, other: Path, more: int | None) -> dict[str, Any]:
    try:
        if doing == "reindex":
            with with_files(more):
                said = list(map(str, Store.reindex(path).remarks))
        else:
            with Store.open(path) as store, with_files(more):
                said = DOINGS[doing](store, path, other)
    except (MstoreError, OSError) as error:
        code = getattr(error, "errno", None)
        name = None if code is None else errno.errorcode.get(code, str(code))
        return {"error": type(error).__name__, "errno": name, "text": str(error)}
    return {"damage": said}


def main(doing: str, path: Path, other: Path, machine: str = "") -> None:
    if machine == "kernels":
        without_kernels()
    elif machine == "files":
        # What decodes is imported now: that is not what is tried, and an import that fails half way
        # for want of descriptors, in one thread of two, is another error or cannot be repeated.
        with Store.open(path) as store:
            read(store)
    answers = []
    for more in range(MOST_FILES) if machine == "files" else (None,):
        answers.append(tried(doing, path, other, more))
        if "damage" in answers[-1]:
            break
    sys.stdout.write(json.dumps(answers) + "\n")
    sys.stdout.flush()


def obey() -> int:
    """Do each line in a child; nothing of the store is open, and no thread runs, in this process.

    Returns the exit status.
    """
    for module in pkgutil.walk_packages(mstore.__path__, "mstore."):
        # Those are compiled from: they import numba.
        if not module.name.endswith(("passes", "compiling", "draws")):
            importlib.import_module(module.name)
    for line in sys.stdin:
        doing, path, other, *machine = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                main(doing, Path(path), Path(other), *machine)
                status = 0
            except BaseException:  # noqa: BLE001 -- whatever it is, the parent must not go on here
                traceback.print_exc()
            os._exit(status)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(obey())
