"""The soak (`soak.py`, `make soak`) in its short form, and what readers wait for writers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import soak
from proof_models import BLOCK, model_files, write_files

from mstore.api import Store

LONG = 120.0
"""Seconds for which a writer holds everything that a writer can hold, unless it is killed."""


@pytest.mark.rest
def test_many_at_work_at_once_lose_nothing(tmp_path: Path) -> None:
    """Four processes for some seconds, and one that reads through mounts: refs are as acknowledged,
    contents right wherever they are read, fsck clean."""
    told = soak.soak(tmp_path, 4, seed=1, workers=4, readers=1)
    calls = set(told["calls"])  # type: ignore[call-overload]
    assert {"add", "merge", "gc", "pin", "prune", "fsck", "read"} <= calls
    if "server" in told:
        assert {"look", "follow", "keep"} <= calls


@pytest.mark.slow
def test_many_at_work_for_a_minute_lose_nothing(tmp_path: Path) -> None:
    """Eight processes for a minute, and two that read through mounts; the store stays small, and
    so does each process, that of a mount too."""
    told = soak.soak(tmp_path, 60, seed=2)
    assert told.get("server", 0) < 200 << 20  # type: ignore[operator]
    assert told["largest"] < 12 * told["live at most"]  # type: ignore[operator]


def hold_all(root: str, seconds: str) -> None:
    """A process's main: hold the writer lock and a write transaction, and say so."""
    with Store.open(root) as store:
        catalog = store._catalog
        with catalog.publishing(), catalog.index.env.write():
            print("held", flush=True)
            time.sleep(float(seconds))


@contextmanager
def a_long_writer(root: Path) -> Iterator[None]:
    """While another process holds the writer lock and a write transaction."""
    code = "import sys, test_soak; test_soak.hold_all(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(LONG)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            assert process.poll() is None, "the writer was gone before the reader was done"
            process.kill()


def test_readers_never_wait_for_a_writer(tmp_path: Path) -> None:
    """While a writer holds its lock and its transaction, a reader opens the store, looks up, reads
    and checks out."""
    files = model_files(1)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(write_files(tmp_path / "model", files), name="base", threads=1)
    with a_long_writer(tmp_path / "store"), Store.open(tmp_path / "store") as store:
        assert [ref.name for ref in store.refs()] == ["base"]
        assert store.log("base")
        for path, contents in files.items():
            assert b"".join(store.read_file("base", path)) == contents
        store.checkout("base", tmp_path / "out", threads=1)
        assert store.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_a_mount_never_waits_for_a_writer(tmp_path: Path) -> None:
    """The same for reads through a mount that is made meanwhile."""
    from mstore.terms.errors import Unavailable
    from mstore_fuse import mounts
    from mstore_fuse.fuse_driver import require_fuse

    try:
        require_fuse()
    except Unavailable as missing:
        pytest.skip(f"cannot mount: {missing}")
    files = model_files(1)
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        store.add(write_files(tmp_path / "model", files), name="base", threads=1)
    point = tmp_path / "point"
    point.mkdir()
    with a_long_writer(tmp_path / "store"):
        mounts.mount(tmp_path / "store", "base", point)
        try:
            assert {path.name: path.read_bytes() for path in point.iterdir()} == files
        finally:
            mounts.unmount(point)
