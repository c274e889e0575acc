"""What the suites about mounts share: every way to mount, and a family worth mounting.

A suite says `pytest_plugins = ["mount_drivers"]` and takes `driver` or `mounted`; it then runs once
for each of `DRIVERS`.  A new way to mount is one more of them.  It also says
`tmp_path_factory = on_disk`: the kernel mounts no image that lies in memory, and forgets no page.

PYTEST_DONT_REWRITE: nothing is asserted here, and those who use it import it before pytest does.
"""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Tensor, write_index, write_safetensors

from mstore import Store
from mstore.terms.errors import Unavailable
from mstore_fuse.driver import MountInfo
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, mounts, unmount

T = TypeVar("T")

BLOCK = 1 << 16
"""The block size of every store of these suites: files of a MiB have many blocks."""

START_WITHIN = 60.0
"""Seconds for a process to mount, on a machine that is much too busy."""

Mount = Callable[[Path, str | None, Path], Path]
"""`mounted(store, ref, directory)` makes the directory and mounts there; None: the whole store."""


@dataclass(frozen=True)
class Driver:
    """A way to mount: how stores keep their blocks, and what `mount` is told."""

    name: str
    codec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """arguments of `mount`"""
    served_with: tuple[str, ...] = ()
    """arguments of the process that serves"""
    has_process: bool = True
    """whether one serves, and so whether it shows a whole store; `served` and `mounted` skip tests
    for those without"""
    reads_directly: bool = True
    """whether a program may read past the page cache"""

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

    def why_not(self, folder: Path) -> str | None:
        """Why this machine cannot mount so; None where it can. folder: an empty one."""
        if self.has_process:
            return why_not()
        write_safetensors(folder / "m" / "model.safetensors", [("w", "U8", (1,), b"1")])
        with self.store(folder / "store") as store:
            store.add(folder / "m", name="m")
        try:
            self.mount(folder / "store", "m", folder / "mnt")
        except Unavailable as missing:
            return f"cannot mount: {missing}"
        unmount(folder / "mnt")
        return None


EROFS = Driver("erofs", "raw", {"driver": "erofs"}, has_process=False, reads_directly=False)
DRIVERS = (Driver("fuse-raw", "raw"), Driver("fuse-dense", "dense"), EROFS)


def why_not() -> str | None:
    """Why no process can serve a mount here; None where one can."""
    try:
        require_fuse()
    except Unavailable as missing:
        return f"cannot mount: {missing}"
    return None


@pytest.fixture(scope="session")
def on_disk(request: pytest.FixtureRequest) -> Iterator[pytest.TempPathFactory]:
    """What makes a suite's directories on a disk, and not in memory as usual (`conftest`)."""
    root = Path(tempfile.mkdtemp(prefix="mstore-pytest-", dir="/var/tmp"))
    yield pytest.TempPathFactory(
        given_basetemp=root,
        retention_count=3,
        retention_policy="failed",
        trace=request.config.trace.get("tmpdir"),
        _ispytest=True,
    )
    if not request.session.testsfailed:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module", params=DRIVERS, ids=str)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Each of DRIVERS."""
    made: Driver = request.param
    reason = made.why_not(tmp_path_factory.mktemp("probe"))
    if reason is not None:
        pytest.skip(reason)
    return made


@pytest.fixture(scope="module")
def mounted(driver: Driver) -> Iterator[Mount]:
    """Mounts that last to the end of the module, unless they are ended before."""
    with ExitStack() as stack:

        def make(store: Path, ref: str | None, directory: Path) -> Path:
            if ref is None and not driver.has_process:
                pytest.skip(f"{driver} shows no whole store")
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

    Those of two seeds have no block in common.

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
            # Names of the seed: strangers have no block in common, not even of a header.
            name = f"seed{seed}.{number}.{layer}.weight"
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


@pytest.fixture(scope="module")
def whole(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A sound family, which tests copy."""
    return write_family(tmp_path_factory.mktemp("whole"), driver)


@pytest.fixture
def family(whole: Family, tmp_path: Path) -> Family:
    """A copy to damage, and in which things are removed."""
    return copy_family(whole, tmp_path)


def files_below(folder: Path) -> list[Path]:
    """Every file, relative."""
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def drop_pages(path: Path) -> None:
    """Let the kernel forget what it has read of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# -- mounts with faults -------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A mount, the process that serves it, and what that has logged."""

    point: Path
    process: subprocess.Popen[bytes]
    said: Path

    @property
    def log(self) -> str:
        """All lines so far."""
        return self.said.read_text()


@contextmanager
def served(
    driver: Driver, store: Path, ref: str | None, point: Path, *words: str
) -> Iterator[Served]:
    """A mount whose process is killed in the end, however it is by then, and whoever waits."""
    if not driver.has_process:
        pytest.skip(f"no process serves {driver}")
    point.mkdir(parents=True)
    said = point.with_suffix(".log")
    receive, send = os.pipe()
    shown = "--all" if ref is None else f"--revision={ref}"
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "mstore_fuse", f"--store={store}", shown),
                *driver.served_with,
                *words,
                *(f"--ready-fd={send}", "--foreground", "--", str(point)),
            ],
            stderr=stderr,
            pass_fds=[send],
        )
    os.close(send)
    try:
        with open(receive, "rb") as ready:
            # Not for ever: the mount may need what a test has stopped.
            readable, _, _ = select.select([ready], [], [], START_WITHIN)
            assert readable, "no mount in time"
            assert ready.readline() == b'{"ready": true}\n', said.read_text()
        yield Served(point, process, said)
    finally:
        process.kill()
        process.wait()
        end(point)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns, in a thread that may hang: then TimeoutError."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome.result(timeout=seconds)


def survey(shown: Path, original: Path, step: int = BLOCK) -> dict[str, int]:
    """Read a mounted directory piece by piece: error -> how often.

    Asserts that whatever could be read is right.  A file that cannot be opened counts once.
    """
    found: Counter[str] = Counter()
    for path in files_below(original):
        try:
            _survey_file(shown / path, (original / path).read_bytes(), step, found)
        except OSError as error:
            found[errno.errorcode[error.errno or 0]] += 1
    return dict(found)


def _survey_file(path: Path, wanted: bytes, step: int, found: Counter[str]) -> None:
    with path.open("rb", buffering=0) as file:
        # Whole requests: what the kernel reads ahead fails or succeeds by itself.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        offset = 0
        while offset < len(wanted):
            size = min(step - offset % step, len(wanted) - offset)
            try:
                data = os.pread(file.fileno(), size, offset)
            except OSError as error:
                found[errno.errorcode[error.errno or 0]] += 1
                offset += size
            else:
                # Fewer bytes than there are may come where the next ones fail, but some.
                assert data, f"{path} ends at {offset}"
                assert data == wanted[offset : offset + len(data)], f"{path} at {offset}"
                offset += len(data)


def pack_of(store: Path, ref: str) -> Path:
    """The pack with most of a ref's own blocks."""
    with Store.open(store) as opened:
        view = opened.view(ref)
        places = Counter(
            extent.location.pack
            for extent in view.physical_extents(SHARDS[0])
            if extent.location is not None
        )
        return Path(opened._catalog.packs.where(places.most_common(1)[0][0]))
