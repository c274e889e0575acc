"""Checkouts that share extents with packs: on XFS and btrfs, on loop devices; refused elsewhere."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors
from loop_disks import FILESYSTEMS, MIB, loop_disk
from small_models import BLOCK, files_of

from mstore import MergeRequest, Store, fs
from mstore.terms.errors import BadRequest, Corrupt, Incompatible, StorageFailed


def model(directory: Path, seed: int) -> Path:
    """Two files of some MiB with odd lengths, and small ones."""
    draw = np.random.default_rng(seed)
    for number in range(2):
        floats = draw.normal(size=(700 + number, 517)).astype("f4")
        floats[3, 7] = number
        tensors = [
            (f"a{number}", "F32", floats.shape, floats.tobytes()),
            (f"b{number}", "U8", (37,), bytes(range(number, number + 37))),
            (f"zeros{number}", "F32", (20 + number, 517), bytes(4 * (20 + number) * 517)),
        ]
        write_safetensors(directory / f"model-{number}.safetensors", tensors)
    (directory / "config.json").write_text('{"a": 1}\n')
    (directory / "empty").touch()
    return directory


def filled(root: Path, models: Path) -> Path:
    """A dense store with a base and a fine-tune."""
    with Store.init(root, block_size=BLOCK, codec="dense") as store:
        store.add(model(models / "base", 1), name="base", threads=1)
        shutil.copytree(models / "base", models / "tuned")
        with (models / "tuned" / "model-0.safetensors").open("r+b") as file:
            file.seek(100_000)
            file.write(bytes(64))
        store.add(models / "tuned", name="tuned", base="base", threads=1)
    return root


@pytest.fixture(scope="module", params=list(FILESYSTEMS))
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A mounted filesystem of its own, of each kind."""
    with loop_disk(request.param, tmp_path_factory.mktemp(request.param), 400 * MIB) as disk:
        yield disk


def build(root: Path) -> None:
    """Such a store, and its checkpoints."""
    filled(root / "store", root)


@pytest.fixture
def store(disk: Path, template: Path, tmp_path: Path) -> Iterator[Store]:
    """A store on that disk; `tmp_path` has its checkpoints."""
    for name in ("base", "tuned"):
        (tmp_path / name).symlink_to(template / name)
    shutil.copytree(template / "store", disk / "store")
    with Store.open(disk / "store") as store:
        yield store
    for path in disk.iterdir():
        if path.name != "lost+found":
            shutil.rmtree(path)


def can_share(disk: Path) -> bool:
    return fs.filesystem_type(disk) in {"xfs", "btrfs"}


def extents(path: Path) -> list[str]:
    """The flags of a file's extents."""
    subprocess.run(["sync", "-f", str(path)], check=True)
    told = subprocess.run(["filefrag", "-v", str(path)], check=True, capture_output=True, text=True)
    return [line.rsplit(":", 1)[1].strip() for line in told.stdout.splitlines()[3:-1]]


@pytest.mark.sampled(4)
def test_a_pinned_snapshot_is_shared(store: Store, disk: Path, tmp_path: Path) -> None:
    """What is pinned takes no space again: all whole pages of its files are extents of packs; where
    a filesystem cannot share, they are copied."""
    store.pin("tuned", raw=True)
    report = store.checkout("tuned", disk / "out", threads=3)
    assert files_of(disk / "out") == files_of(tmp_path / "tuned")
    assert report.bytes_written == sum(map(len, files_of(tmp_path / "tuned").values()))
    if not can_share(disk):
        assert report.bytes_shared == 0
        return
    sizes = [path.stat().st_size for path in (disk / "out").glob("*.safetensors")]
    assert report.bytes_shared == sum(size // 4096 * 4096 for size in sizes)
    if shutil.which("filefrag"):
        flags = extents(disk / "out" / "model-0.safetensors")
        assert any("shared" in one for one in flags)
        assert len(flags) <= 3


@pytest.mark.sampled(4)
def test_a_shared_file_is_a_file_of_its_own(store: Store, disk: Path, tmp_path: Path) -> None:
    """Writing to a checkout changes nothing in the store, and gc nothing in the checkout."""
    store.configure("reflog_days", 0)
    store.pin("tuned", raw=True)
    store.checkout("tuned", disk / "out")
    with (disk / "out" / "model-0.safetensors").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(8192))
    assert store.fsck(read_data=True).problems == ()
    store.remove("tuned")
    store.gc(dead_share=0.0)
    whole = (disk / "out" / "model-1.safetensors").read_bytes()
    assert whole == (tmp_path / "tuned" / "model-1.safetensors").read_bytes()


def test_always_or_an_error(store: Store, disk: Path, tmp_path: Path) -> None:
    """`always` names what the filesystem cannot do, or what is to be pinned; nothing is left."""
    before = set(disk.iterdir())
    with pytest.raises(BadRequest, match="raw") as unpinned:
        store.checkout("tuned", disk / "out", reflink="always")
    assert "pin" in (unpinned.value.hint or "")
    store.pin("tuned", raw=True)
    if can_share(disk):
        assert store.checkout("tuned", disk / "out", reflink="always").bytes_shared > MIB
        with pytest.raises(Incompatible, match="one filesystem") as far:
            store.checkout("tuned", tmp_path / "out", reflink="always")
        assert "directory on the filesystem" in (far.value.hint or "")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(disk / "out")
    else:
        with pytest.raises(Incompatible, match=r"\(ext4\)") as refused:
            store.checkout("tuned", disk / "out", reflink="always")
        assert "btrfs" in (refused.value.hint or "")
    assert set(disk.iterdir()) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


@pytest.mark.sampled(2)
def test_never_copies(store: Store, disk: Path, tmp_path: Path) -> None:
    """`never` copies everything, and so does `auto` to another filesystem."""
    store.pin("tuned", raw=True)
    for number, target in enumerate((disk / "out", tmp_path / "out")):
        word = "auto" if number else "never"
        assert store.checkout("tuned", target, reflink=word).bytes_shared == 0
        assert files_of(target) == files_of(tmp_path / "tuned")


@pytest.mark.sampled(2)
def test_what_is_not_raw_is_copied(store: Store, disk: Path, tmp_path: Path) -> None:
    """Blocks that are coded, or at a place that is not congruent, are copied beside shared ones."""
    store.pin("base", raw=True)
    shared = store.checkout("tuned", disk / "out", threads=2).bytes_shared
    assert files_of(disk / "out") == files_of(tmp_path / "tuned")
    assert (shared > MIB) == can_share(disk)


def test_shared_bytes_are_checked(store: Store, disk: Path) -> None:
    """A flipped bit in a pack is an error that names the block, and no directory is made."""
    store.pin("tuned", raw=True)
    first = store.view("tuned").physical_extents("model-0.safetensors")[5].location
    assert first is not None
    path = Path(store._catalog.packs.where(first.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(first.offset + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Corrupt) as damaged:
        store.checkout("tuned", disk / "out")
    assert damaged.value.block is not None
    assert [one.name for one in disk.iterdir() if "out" in one.name] == []


def test_a_failure_leaves_nothing(store: Store, disk: Path) -> None:
    """An I/O error while sharing is an error, and nothing is left of the directory."""
    store.pin("tuned", raw=True)

    def fail(operation: fs.Operation) -> None:
        if operation.kind == "clone":
            raise OSError(errno.EIO, "Input/output error")

    with fs.observed(fail), pytest.raises(StorageFailed):
        store.checkout("tuned", disk / "out")
    assert [one.name for one in disk.iterdir() if "out" in one.name] == []


@pytest.mark.sampled(2)
def test_no_room_to_share_is_room_to_copy(store: Store, disk: Path, tmp_path: Path) -> None:
    """Where a filesystem refuses one share for its records, that piece is copied, and only that."""
    store.pin("tuned", raw=True)
    asked: list[str] = []

    def fail(operation: fs.Operation) -> None:
        if operation.kind == "clone":
            asked.append(operation.path)
            if len(asked) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    with fs.observed(fail):
        report = store.checkout("tuned", disk / "out")
    assert files_of(disk / "out") == files_of(tmp_path / "tuned")
    assert len(asked) == 2
    if can_share(disk):
        assert 0 < report.bytes_shared < report.bytes_written // 3 * 2


# -- anywhere ----------------------------------------------------------------------------------


@pytest.fixture
def anywhere(template: Path, tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def test_another_word_is_refused(anywhere: Store, tmp_path: Path) -> None:
    """The choice has three words, and another one is an error that names them."""
    with pytest.raises(BadRequest, match="auto, always, never"):
        anywhere.checkout("base", tmp_path / "out", reflink="sometimes")
    assert not (tmp_path / "out").exists()


def test_a_virtual_merge_has_nothing_to_share(anywhere: Store, tmp_path: Path) -> None:
    """`always` refuses a virtual merge, whose blocks are in no pack, and names materialize."""
    request = MergeRequest(base="base", experts=["tuned"], method="linear", skip=["*:b*"])
    anywhere.merge(anywhere.plan(request), name="later", virtual=True)
    with pytest.raises(BadRequest, match="virtual") as refused:
        anywhere.checkout("later", tmp_path / "out", reflink="always")
    assert "materialize" in (refused.value.hint or "")
    assert anywhere.checkout("later", tmp_path / "out").bytes_shared == 0
