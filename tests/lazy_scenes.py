"""A family at a remote and lazy stores of it: each scene is one command that reads there.

    read, load, opened, checkout, merge, virtual    what is not here comes while it is used
    prefetch, drop    what comes to stay, and goes again

`run` runs a scene's command and proves what it gave.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from exchanges import files, merged, sound
from fault_proxy import FaultProxy
from proof_models import BLOCK, MODEL, merged_files, model_files, tensors_in, write_files
from remote_scenes import URL, reached, shrink

from mstore import Store

EXPERTS = ("e1", "e2")
_buckets = count()


@dataclass(frozen=True)
class Family:
    """Lazy stores, and what the remote has.

    states: before the last push, and after it; a stale read finds the root of the first.
    lazy: has no weights. full: a lazy store that has all of them.
    """

    server: str
    states: tuple[dict[str, bytes], ...]
    lazy: Path
    full: Path
    scratch: Path

    def laid_out(self, command: str) -> Laid:
        """Lay out a scene at a proxy and a bucket of its own."""
        proxy = FaultProxy(self.server, f"lazy-{next(_buckets)}")
        proxy.fill(*self.states)
        path = self.scratch / proxy.bucket / "store"
        shutil.copytree(self.full if command == "drop" else self.lazy, path)
        return Laid(command, proxy, path)


@dataclass
class Laid:
    """A scene that is laid out."""

    command: str
    proxy: FaultProxy
    path: Path

    def run(self) -> None:
        """Run the command; raise its error."""
        COMMANDS[self.command](self.path)

    def sound(self) -> None:
        """Prove that the store has no damage, and that all of it is as it was pushed."""
        with Store.open(self.path) as store:
            sound(store)
            for number, name in enumerate(("base", *EXPERTS)):
                assert files(store, name) == model_files(1, number)

    def close(self) -> None:
        """End the proxy, and remove the store."""
        self.proxy.close()
        shutil.rmtree(self.path.parent)


def family(server: str, directory: Path) -> Family:
    """Make a base, two experts and a virtual merge at a remote, and lazy stores of them."""
    proxy = FaultProxy(server, f"family-{directory.name}".replace("_", "-"))
    proxy.fill()
    try:
        with reached(proxy), Store.init(directory / "author", block_size=BLOCK) as author:
            for number, name in enumerate(("base", *EXPERTS)):
                source = write_files(directory / name, model_files(1, number))
                author.add(source, name=name, base="base" if number else None, threads=1)
            author.add_remote("origin", URL)
            author.push("origin", every=True)
            before = proxy.objects()
            merged(author, "virtual", "base", *EXPERTS, virtual=True)
            author.push("origin", every=True)
            for name in ("lazy", "full"):
                Store.clone(URL, directory / name, lazy=True)
            with Store.open(directory / "full") as full:
                full.prefetch(every=True)
        return Family(
            server=server,
            states=(before, proxy.objects()),
            lazy=directory / "lazy",
            full=directory / "full",
            scratch=directory / "cases",
        )
    finally:
        proxy.close()


def _read(path: Path) -> None:
    with Store.open(path) as store:
        assert files(store, "e1") == model_files(1, 1)


def _load(path: Path) -> None:
    with Store.open(path) as store:
        wanted = tensors_in(model_files(1, 2)[MODEL])
        found = store["e2"].load(threads=2)
        for name, array in wanted.items():
            assert np.array_equal(found[name].view("u1"), array.view("u1"))


def _opened(path: Path) -> None:
    with Store.open(path) as store, store["e1"].safe_open() as file:
        wanted = tensors_in(model_files(1, 1)[MODEL])
        for name, array in wanted.items():
            assert np.array_equal(file.get_tensor(name).view("u1"), array.view("u1"))


def _checkout(path: Path) -> None:
    target = path.with_name("out")
    with Store.open(path) as store:
        store.checkout("e2", target, threads=1)
    found = {str(one.relative_to(target)): one.read_bytes() for one in target.iterdir()}
    shutil.rmtree(target)
    assert found == model_files(1, 2)


def _merge(path: Path) -> None:
    wanted = merged_files(model_files(1), [model_files(1, n) for n in (1, 2)], [0.5, 0.5])
    with Store.open(path) as store:
        merged(store, "m", "base", *EXPERTS)
        assert files(store, "m")[MODEL] == wanted[MODEL]


def _virtual(path: Path) -> None:
    wanted = merged_files(model_files(1), [model_files(1, n) for n in (1, 2)], [0.5, 0.5])
    with Store.open(path) as store:
        assert files(store, "virtual")[MODEL] == wanted[MODEL]


def _prefetch(path: Path) -> None:
    with Store.open(path) as store:
        store.prefetch(["e1"])
        assert store.show("e1").leans_on == ()


def _drop(path: Path) -> None:
    with Store.open(path) as store:
        store.drop(["e1"])
        store.gc()
        assert store.show("e1").leans_on != ()
        assert files(store, "e1") == model_files(1, 1)


COMMANDS: dict[str, Callable[[Path], None]] = {
    "read": _read,
    "load": _load,
    "opened": _opened,
    "checkout": _checkout,
    "merge": _merge,
    "virtual": _virtual,
    "prefetch": _prefetch,
    "drop": _drop,
}


def run_here(command: str, path: str) -> None:
    """Run a scene's command as a program, with the settings in the environment."""
    shrink()
    COMMANDS[command](Path(path))


def program(command: str, path: Path) -> list[str]:
    """Return how to start that."""
    code = "import sys, lazy_scenes; lazy_scenes.run_here(*sys.argv[1:])"
    return [sys.executable, "-c", code, command, str(path)]
