"""What the suites about mounts share: every way to mount, and a family worth mounting.

A suite says `pytest_plugins = ["mount_drivers"]` and takes `driver` or `mounted`; it then runs once
for each of `DRIVERS`.  A new way to mount is one more of them.

PYTEST_DONT_REWRITE: nothing is asserted here, and those who use it import it before pytest does.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, write_index, write_safetensors

from mstore import Store
from mstore.errors import Unavailable
from mstore_fuse.mounts import MountInfo, mount, mounts, require_fuse, unmount

BLOCK = 1 << 16
"""The block size of every store of these suites: files of a MiB have many blocks."""

Mount = Callable[[Path, str | None, Path], Path]
"""`mounted(store, ref, directory)` makes the directory and mounts there; None: the whole store."""


@dataclass(frozen=True)
class Driver:
    """A way to mount: how stores keep their blocks, and what `mount` is told."""

    name: str
    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """arguments of `mount`"""

    def __str__(self) -> str:
        return self.name

    def store(self, path: Path) -> Store:
        """A new store, open, that forgets at once what no ref names."""
        store = Store.init(path, block_size=BLOCK, codec=self.codec)
        store.configure("reflog_days", 0)
        return store

    def mount(self, store: Path, ref: str | None, directory: Path) -> MountInfo:
        """Mount at a directory that is made if it is missing."""
        directory.mkdir(exist_ok=True, parents=True)
        return mount(store, ref, directory, **self.options)


DRIVERS = (Driver("fuse-raw", "raw"), Driver("fuse-dense", "dense"))


def why_not() -> str | None:
    """Why nothing can be mounted here; None where it can."""
    try:
        require_fuse()
    except Unavailable as missing:
        return f"cannot mount: {missing}"
    return None


@pytest.fixture(scope="module", params=DRIVERS, ids=str)
def driver(request: pytest.FixtureRequest) -> Driver:
    """Each of DRIVERS."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made: Driver = request.param
    return made


@pytest.fixture(scope="module")
def mounted(driver: Driver) -> Iterator[Mount]:
    """Mounts that last to the end of the module, unless they are ended before."""
    with ExitStack() as stack:

        def make(store: Path, ref: str | None, directory: Path) -> Path:
            driver.mount(store, ref, directory)
            stack.callback(end, directory)
            return directory

        yield make


def end(directory: Path) -> None:
    """Unmount if it is a mount."""
    if any(info.mountpoint == directory.resolve() for info in mounts()):
        unmount(directory, lazy=True)


@dataclass(frozen=True)
class Family:
    """A store with the refs `base`, `tuned` (a fine-tune of it) and `other`, and their sources."""

    store: Path
    sources: Mapping[str, Path]


def write_family(root: Path, driver: Driver) -> Family:
    """Three checkpoints of 3 MB, added to a new store, each in a pack of its own.

    The blocks of `tuned` are differences to those of `base` where the store is dense.
    """
    sources = {name: root / name for name in ("base", "tuned", "other")}
    write_checkpoint(sources["base"], 1)
    write_checkpoint(sources["tuned"], 1, tuned=2)
    write_checkpoint(sources["other"], 3)
    with driver.store(root / "store") as store:
        for name, source in sources.items():
            store.add(source, name=name, base="base" if name == "tuned" else None)
    return Family(root / "store", sources)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ODD = "sub/deeper/vocabulary ünd, so.txt"


def write_checkpoint(folder: Path, seed: int, tuned: int = 0) -> Path:
    """Two shards whose tensors begin and end anywhere, an index, an odd name, an empty file.

    tuned: changes the weights as a fine-tune does.
    """
    draw = np.random.default_rng(seed)
    small = np.random.default_rng([seed, tuned])
    weights = {}
    for number, shard in enumerate(SHARDS):
        tensors: list[Tensor] = []
        for layer, shape in enumerate([(700, 513), (7,), (33, 64), (0, 3), (300, 512)]):
            values = draw.normal(0, 0.02, shape).astype("f4")
            if tuned:
                values += small.normal(0, 1e-4, shape).astype("f4")
            name = f"layer.{number}.{layer}.weight"
            tensors.append((name, "BF16", shape, values.astype(ml_dtypes.bfloat16).tobytes()))
            weights[name] = shard
        write_safetensors(folder / shard, tensors, metadata={"format": "pt"}, padding=number)
    write_index(folder / "model.safetensors.index.json", weights)
    (folder / "config.json").write_text(f'{{"seed": {seed}, "tuned": {tuned}}}' + " " * seed)
    (folder / "empty").touch()
    odd = folder / ODD
    odd.parent.mkdir(parents=True)
    odd.write_bytes(random.Random(f"{seed} {tuned}").randbytes(200_001))
    return folder


def copy_family(family: Family, root: Path) -> Family:
    """The same family with a store of its own, to be damaged."""
    shutil.copytree(family.store, root / "store")
    return Family(root / "store", family.sources)


def files_below(folder: Path) -> list[Path]:
    """Every file, relative."""
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def drop_pages(path: Path) -> None:
    """Let the kernel forget what it has read of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
