"""A mounted virtual merge: ordinary files whose bytes are computed while they are read.

Skipped where this machine cannot mount (no /dev/fuse).
"""

from __future__ import annotations

import filecmp
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import families
import pytest
from families import BLOCK
from mount_drivers import on_disk
from safetensors import safe_open

from mstore import MergeRequest, Store
from mstore.terms.errors import Unavailable
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, unmount

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(f"cannot mount: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a virtual merge `m` and nothing else of it, and the real one checked out."""
    family = families.layered(rows=700)
    root = family.write(tmp_path_factory.mktemp("family"))
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in family.names:
            store.add(root / name, name=name, base="base")
        experts = [("e0", 1.0), ("e1", 0.5), ("e2", 0.5)]
        plan = store.plan(
            MergeRequest(base="base", experts=experts, method="ties", parameters={"density": 0.3})
        )
        store.merge(plan, name="m", virtual=True)
        store.merge(plan, name="real")
        store.checkout("real", root / "real")
        request = MergeRequest(base="base", experts=["e0", "e1", "e2"], method="emr")
        store.emr(request, name="family")
        store.reset("masked", "family/e1")
        store.materialize("masked")
        store.checkout("masked", root / "masked")
    return root


@pytest.fixture
def point(place: Path, tmp_path: Path) -> Iterator[Path]:
    """The virtual merge, mounted."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    mount(place / "store", "m", folder)
    yield folder
    if os.path.ismount(folder):
        unmount(folder, lazy=True)


def test_every_file_is_the_real_merge(place: Path, point: Path) -> None:
    """cmp is equal on every file of the checkout of the real merge, and there are no others."""
    wanted = sorted(p.relative_to(place / "real") for p in (place / "real").rglob("*"))
    assert sorted(p.relative_to(point) for p in point.rglob("*")) == wanted
    for path in wanted:
        assert filecmp.cmp(point / path, place / "real" / path, shallow=False), path


def test_the_model_of_a_mask_is_mounted(place: Path, tmp_path: Path) -> None:
    """A model that a mask makes of another one is read from a mount as any virtual merge."""
    folder = tmp_path / "mnt"
    folder.mkdir()
    mount(place / "store", "family/e1", folder)
    try:
        for path in (place / "masked").rglob("*.safetensors"):
            assert filecmp.cmp(folder / path.name, path, shallow=False), path
    finally:
        unmount(folder, lazy=True)


def test_safetensors_load_it(place: Path, point: Path) -> None:
    """safe_open maps the mounted shards, and finds the tensors of the real merge, in any order."""
    for shard in sorted((place / "real").glob("*.safetensors")):
        with safe_open(point / shard.name, "np") as ours, safe_open(shard, "np") as theirs:
            assert ours.metadata() == theirs.metadata()
            assert set(ours.keys()) == set(theirs.keys())
            for name in reversed(list(theirs.keys())):
                one, other = ours.get_tensor(name), theirs.get_tensor(name)
                assert one.dtype == other.dtype
                assert one.tobytes() == other.tobytes(), name


def test_maps_and_threads(place: Path, point: Path) -> None:
    """A map touched from several threads at once, back to front, holds the real merge's bytes."""
    shard = max((place / "real").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    wanted = shard.read_bytes()
    with (point / shard.name).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        starts = list(reversed(range(0, len(wanted), 50_000)))
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda start: mapped[start : start + 50_000], starts))
        mapped.close()
    assert found == [wanted[start : start + 50_000] for start in starts]


def test_the_store_of_a_mount_goes_on(place: Path, tmp_path: Path) -> None:
    """In a mount of the whole store a virtual merge shows by name, and as real once it is."""
    folder = tmp_path / "all"
    folder.mkdir()
    with Store.open(place / "store") as store:
        store.reset("later", "m")
        mount(place / "store", None, folder)
        try:
            for _ in range(2):
                for path in (place / "real").rglob("*.safetensors"):
                    shown = folder / "refs" / "later" / path.name
                    assert filecmp.cmp(shown, path, shallow=False)
                store.materialize("later")
        finally:
            unmount(folder, lazy=True)
