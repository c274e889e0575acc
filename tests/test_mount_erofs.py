"""mstore_fuse.erofs end to end: real stores, shown by the kernel.

Skipped where this process is not root, or the kernel has no EROFS that mounts from files.
"""

from __future__ import annotations

import ctypes
import errno
import filecmp
import json
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import every_dtype_checkpoint
from cli_runs import Program
from mount_drivers import EROFS, drop_pages, files_below, on_disk
from msgspec import structs
from safetensors import safe_open
from safetensors.numpy import save_file

from mstore import Store, fs
from mstore.blocks.codecs import Codec
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    NotFound,
    StorageFailed,
    Unavailable,
)
from mstore_fuse import fuse_driver, mount_table
from mstore_fuse.driver import MountInfo
from mstore_fuse.erofs import driver as erofs_driver
from mstore_fuse.erofs import kernel, mapping, showing
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, mounts, unmount

tmp_path_factory = on_disk

BLOCK_SIZE = 64 << 10
MODEL = "model.safetensors"


def write_model(folder: Path, seed: int, rows: int = 700) -> Path:
    """A model whose blocks do not compress, with constants, odd sizes and nested files."""
    draw = np.random.default_rng(seed)
    (folder / "sub").mkdir(parents=True)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a.weight": draw.integers(0, 1 << 32, (rows, 513), dtype=np.uint32),
        "b.zeros": np.zeros((300, 513), np.float32),
        "c.ones": np.ones((300, 513), np.float32),
        "d.odd": draw.integers(0, 256, 33_333, dtype=np.uint8),
        "e.weight": draw.integers(0, 1 << 32, (rows, 257), dtype=np.uint32),
    }
    save_file(tensors, folder / MODEL, {"format": "np"})
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')
    (folder / "empty").touch()
    (folder / "sub" / "vocabulary ünd.txt").write_bytes(draw.bytes(20_001))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _kernel_mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    why = EROFS.why_not(tmp_path_factory.mktemp("probe"))
    if why is not None:
        pytest.skip(f"no kernel mounts: {why}")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory; whatever is mounted below it when the test ends is unmounted."""
    yield tmp_path
    for info in reversed(mounts()):
        if info.mountpoint.is_relative_to(tmp_path):
            unmount(info.mountpoint, lazy=True)


def build(root: Path) -> None:
    """A raw store, and the model of seed 1 that it has as `team/m`."""
    with Store.init(root / "the, store", block_size=BLOCK_SIZE, codec="raw") as made:
        made.add(write_model(root / "model", 1), name="team/m")


@pytest.fixture
def store(root: Path, copied: Path) -> Path:
    assert copied == root
    return root / "the, store"


def shown(store: Path, revision: str, **options: Any) -> Path:
    """Mount beside the store, by EROFS unless `options` say otherwise."""
    point = store.parent / f"shown {len(list(store.parent.glob('shown *')))}"
    point.mkdir()
    mount(store, revision, point, **{"driver": "erofs", **options})
    return point


def assert_same(point: Path, original: Path) -> None:
    assert files_below(point) == files_below(original)
    for path in files_below(original):
        assert filecmp.cmp(point / path, original / path, shallow=False), path


def leftovers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "tmp").iterdir())


def first_pack(store: Path) -> Path:
    """The largest pack."""
    return max(store.glob("packs/*/*.pack"), key=lambda path: path.stat().st_size)


def flip(store: Path, original: Path) -> None:
    """Flip a byte of the model, at rest, in a page that is shown from a pack."""
    content = (original / MODEL).read_bytes()
    wanted = content[-200_000:-199_968]
    pack = first_pack(store)
    data = bytearray(pack.read_bytes())
    data[data.index(wanted)] ^= 1
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.write(data)


# -- what is read ----------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_the_same_as_fuse_shows(root: Path, codec: str) -> None:
    """On the checkpoint of every dtype, both drivers show the same bytes, attributes and labels."""
    require_or_skip_fuse()
    original = every_dtype_checkpoint(root / "odd")
    with Store.init(root / "store", block_size=BLOCK_SIZE, codec=codec) as made:
        made.add(original, name="odd")
    by_kernel = shown(root / "store", "odd", allow_other=True)
    by_fuse = shown(root / "store", "odd", driver="fuse")
    assert_same(by_kernel, original)
    paths = [Path(), *sorted(p.relative_to(by_fuse) for p in by_fuse.rglob("*"))]
    assert paths == [Path(), *sorted(p.relative_to(by_kernel) for p in by_kernel.rglob("*"))]
    for path in paths:
        one, other = os.lstat(by_kernel / path), os.lstat(by_fuse / path)
        for key in ("st_mode", "st_uid", "st_gid", "st_nlink", "st_mtime_ns", "st_ctime_ns"):
            assert getattr(one, key) == getattr(other, key), (path, key)
        if stat.S_ISREG(one.st_mode):
            assert one.st_size == other.st_size
        labels = os.listxattr(by_fuse / path)
        assert labels
        assert sorted(os.listxattr(by_kernel / path)) == sorted(labels)
        for name in labels:
            assert os.getxattr(by_kernel / path, name) == os.getxattr(by_fuse / path, name)


def require_or_skip_fuse() -> None:
    try:
        require_fuse()
    except Unavailable as error:
        pytest.skip(f"no FUSE to compare with: {error}")


def test_ordinary_readers(store: Path, root: Path) -> None:
    """Maps, safe_open, cp -r and eight threads that read anywhere get what was added."""
    point = shown(store, "team/m")
    content = (root / "model" / MODEL).read_bytes()
    with (
        (point / MODEL).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert mapped[:] == content
    with (
        safe_open(point / MODEL, "np") as one,
        safe_open(root / "model" / MODEL, "np") as other,
    ):
        for name in other.keys():  # noqa: SIM118 - not a dict
            assert np.array_equal(one.get_tensor(name), other.get_tensor(name))
    subprocess.run(["cp", "-r", str(point), str(root / "copy")], check=True)
    assert_same(root / "copy", root / "model")
    wrong: list[int] = []

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        descriptor = os.open(point / MODEL, os.O_RDONLY)
        wrong.extend(
            offset
            for offset in draw.integers(0, len(content), 200).tolist()
            if os.pread(descriptor, 70_001, offset) != content[offset : offset + 70_001]
        )
        os.close(descriptor)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_map_ends_in_zeros(store: Path) -> None:
    """What lies behind a file in its pack does not show in the last page of a map."""
    point = shown(store, "team/m")
    size = (point / MODEL).stat().st_size
    inside = size % mmap.PAGESIZE
    assert inside
    with (
        (point / MODEL).open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped,
    ):
        # Python's map ends with the file, but the kernel maps whole pages.
        end = np.frombuffer(mapped, np.uint8).ctypes.data + size
        assert not any(ctypes.string_at(end, mmap.PAGESIZE - inside))


def table_line(point: Path) -> str:
    """The kernel's line about a mount."""
    where = str(point).replace(" ", "\\040")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return next(line for line in lines if line.split(" ")[4] == where)


def test_reading_past_the_page_cache_is_refused(store: Path) -> None:
    """A program that asks for O_DIRECT gets EINVAL, as on other filesystems that lack it."""
    point = shown(store, "team/m")
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(point / MODEL, os.O_RDONLY | os.O_DIRECT)


@pytest.mark.rest
def test_more_packs_than_mount_options_hold(root: Path) -> None:
    """A snapshot in 100 packs is one mount; a process that may open few files may open more."""
    original = root / "model"
    original.mkdir()
    with Store.init(root / "store", block_size=BLOCK_SIZE, codec="raw") as made:
        for number in range(100):
            data = np.random.default_rng(number).integers(0, 256, 9000, dtype=np.uint8)
            save_file({f"w{number}": data}, original / f"part {number}.safetensors")
            made.add(original, name="m")
    assert len(list((root / "store").glob("packs/*/*.pack"))) >= 100
    assert_same(shown(root / "store", "m"), original)
    (root / "at").mkdir()

    def mount_with(limit: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mstore_cli", "--store", str(root / "store"), "mount"]
        command += ["m", str(root / "at"), "--driver", "erofs"]
        script = f'ulimit {limit} 90 && exec "$@"'
        return subprocess.run(
            ["bash", "-c", script, "-", *command], check=False, capture_output=True, text=True
        )

    refused = mount_with("-n")
    assert "this process may open 90 files" in refused.stderr
    assert mount_with("-Sn").returncode == 0
    assert_same(root / "at", original)


def test_one_model_of_a_snapshot(root: Path, store: Path) -> None:
    """A kernel mount of REF:MODEL shows the model's directory alone."""
    for part in ("unet", "vae"):
        write_model(root / "pipeline" / part, 3)
    (root / "pipeline" / "model_index.json").write_text("{}")
    with Store.open(store) as made:
        made.add(root / "pipeline", name="pipeline", base=None)
    assert_same(shown(store, "pipeline:vae"), root / "pipeline" / "vae")


# -- life ------------------------------------------------------------------------------------


def test_gc_under_a_mount(store: Path, root: Path) -> None:
    """After rm and gc took the snapshot and its packs, the mount still shows every byte."""
    point = shown(store, "team/m")
    with Store.open(store) as opened:
        opened.add(write_model(root / "other", 2), name="other")
        before = set(store.glob("packs/*/*.pack"))
        opened.remove("team/m")
        opened.gc(reflog_days=0)
        assert before - set(store.glob("packs/*/*.pack")), "gc removed no pack"
        with pytest.raises(NotFound):
            opened.view("team/m")
    drop_all_pages(point)
    assert_same(point, root / "model")
    unmount(point)
    assert_same(shown(store, "other"), root / "other")


def drop_all_pages(point: Path) -> None:
    """Let the kernel forget what it has read of a mount's files."""
    for path in files_below(point):
        drop_pages(point / path)


def test_mounts_and_unmount(store: Path) -> None:
    """A kernel mount is listed with its driver, is ended as any other, and leaves no file."""
    before = leftovers(store)
    point = shown(store, "team/m")
    assert leftovers(store) == before
    info = next(one for one in mounts() if one.mountpoint == point)
    assert info == MountInfo(point, store, "team/m", None, True, 0, "erofs")
    with pytest.raises(Conflict, match="mounted here already"):
        mount(store, "team/m", point, driver="auto")
    with (point / "config.json").open() as file:
        with pytest.raises(Conflict, match="in use"):
            unmount(point)
        unmount(point, lazy=True)
        assert json.load(file) == {"seed": 1}
    assert mount_table.at(point) is None
    with pytest.raises(NotFound):
        unmount(point)


def test_the_kernel_reads_ahead(store: Path) -> None:
    """A mount reads 4 MiB ahead of a sequential reader, as on a disk."""
    entries = Path("/sys/class/bdi")
    # Entries do not say whose they are: another test may mount at the same moment.
    for _ in range(10):
        before = set(entries.glob("erofs*"))
        shown(store, "team/m")
        new = set(entries.glob("erofs*")) - before
        if any((entry / "read_ahead_kb").read_text().strip() == "4096" for entry in new):
            return
    pytest.fail("no mount reads so far ahead")


def test_a_mount_that_cannot_be_reported_is_removed(store: Path, root: Path) -> None:
    """If `on_ready` raises, nothing stays mounted."""

    def fail(info: MountInfo) -> None:
        assert mount_table.at(info.mountpoint) is not None
        raise ValueError("no terminal")

    (root / "at").mkdir()
    with pytest.raises(ValueError, match="no terminal"):
        mount(store, "team/m", root / "at", driver="erofs", on_ready=fail)
    assert mount_table.at(root / "at") is None


def test_inode_numbers_stay(store: Path) -> None:
    """A snapshot mounted again, and by another name, has the same inode numbers."""
    numbers = []
    for revision in ("team/m", "team/m@{0}"):
        point = shown(store, revision)
        numbers.append({path: (point / path).stat().st_ino for path in files_below(point)})
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0].values())) == len(numbers[0])


# -- damage ----------------------------------------------------------------------------------


def test_a_flipped_byte_is_found_when_mounting(store: Path, root: Path) -> None:
    """A damaged block prevents the mount, with its name; `never` promises nothing, and shows it."""
    before = leftovers(store)
    flip(store, root / "model")
    (root / "at").mkdir()
    for driver in ("erofs", "auto"):
        with pytest.raises(Corrupt) as caught:
            mount(store, "team/m", root / "at", driver=driver)
        assert "block" in str(caught.value.where)
    assert mount_table.at(root / "at") is None
    assert leftovers(store) == before
    point = shown(store, "team/m", verify="never")
    damaged, good = (point / MODEL).read_bytes(), (root / "model" / MODEL).read_bytes()
    assert len(damaged) == len(good)
    assert sum(one != other for one, other in zip(damaged, good, strict=True)) == 1


def test_a_pack_that_is_cut_off_under_a_mount(store: Path, root: Path) -> None:
    """What is left is right, what is gone is EIO, and no reader hangs."""
    point = shown(store, "team/m")
    content = (root / "model" / MODEL).read_bytes()
    pack = first_pack(store)
    pack.chmod(0o644)
    os.truncate(pack, 1 << 20)
    drop_all_pages(point)
    descriptor = os.open(point / MODEL, os.O_RDONLY)
    codes = set()
    try:
        for offset in range(0, len(content), 50_000):
            try:
                data = os.pread(descriptor, 50_000, offset)
            except OSError as error:
                codes.add(error.errno)
            else:
                assert data == content[offset : offset + len(data)]
                assert data
    finally:
        os.close(descriptor)
    assert codes == {errno.EIO}


def test_a_lost_pack(store: Path, root: Path) -> None:
    """A pack that is gone is an error before anything is mounted, and harmless after."""
    point = shown(store, "team/m")
    first_pack(store).unlink()
    assert_same(point, root / "model")
    (root / "at").mkdir()
    with pytest.raises(Corrupt, match="missing"):
        mount(store, "team/m", root / "at", driver="erofs")


# -- what it cannot show ---------------------------------------------------------------------


def test_coded_blocks_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is stored dense is refused, with how much it is, and `auto` uses FUSE."""
    monkeypatch.setattr(mapping, "COPIED_BYTES", 100_000)
    draw = np.random.default_rng(1)
    (root / "model").mkdir()
    save_file({"w": draw.standard_normal((800, 512)).astype("<f4")}, root / "model" / MODEL)
    with Store.init(root / "store", block_size=BLOCK_SIZE, codec="dense") as made:
        made.add(root / "model", name="m")
    with pytest.raises(Incompatible) as caught:
        shown(root / "store", "m")
    assert "1.6 MiB of 1.6 MiB are stored compressed" in caught.value.what
    assert "raw" in str(caught.value.hint)
    require_or_skip_fuse()
    point = shown(root / "store", "m", driver="auto")
    assert next(one for one in mounts() if one.mountpoint == point).driver == "fuse"
    assert_same(point, root / "model")


def test_auto_takes_the_kernel(store: Path, root: Path) -> None:
    """A raw snapshot is shown by the kernel if `auto` may choose."""
    point = shown(store, "team/m", driver="auto")
    assert next(one for one in mounts() if one.mountpoint == point).driver == "erofs"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options", [{"follow": True}, {"show_meta": True}, {"verify": "always"}], ids=str
)
def test_auto_leaves_to_fuse_what_the_kernel_cannot(store: Path, options: dict[str, Any]) -> None:
    """With `auto`, an option that only FUSE has chooses FUSE."""
    require_or_skip_fuse()
    point = shown(store, "team/m", driver="auto", **options)
    assert next(one for one in mounts() if one.mountpoint == point).driver == "fuse"


def test_an_image_that_others_could_exchange_is_not_mounted(store: Path, root: Path) -> None:
    """The kernel opens the image by its path: where another user may rename in a directory of the
    path, EROFS is refused, and `auto` uses FUSE."""
    (root / "at").mkdir()
    for change, restore in (
        (lambda: os.chown(store / "tmp", 65534, 65534), lambda: os.chown(store / "tmp", 0, 0)),
        (lambda: store.chmod(0o777), lambda: store.chmod(0o755)),
    ):
        change()
        with pytest.raises(Unavailable, match="trust others"):
            mount(store, "team/m", root / "at", driver="erofs")
        require_or_skip_fuse()
        point = shown(store, "team/m", driver="auto")
        assert mounts()[-1].driver == "fuse"
        unmount(point)
        restore()
    assert mount(store, "team/m", root / "at", driver="erofs").driver == "erofs"


def test_an_image_without_room_leaves_it_to_fuse(
    store: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no image can be written, EROFS is not available; the snapshot is not at fault."""

    (root / "at").mkdir()

    def full(file: fs.NewFile, offset: int, data: bytes) -> None:
        raise StorageFailed("No space left on device", errno=errno.ENOSPC)

    monkeypatch.setattr(fs.NewFile, "write_at", full)
    with pytest.raises(Unavailable, match="No space left"):
        mount(store, "team/m", root / "at", driver="erofs")
    assert leftovers(store) == []


def test_each_place_of_a_block_is_checked(store: Path) -> None:
    """Files that were looked up apart may name two places of one block: both are hashed."""
    with Store.open(store) as opened:
        view = opened.view("team/m")
        survey = mapping.FileMap.of(view, "team/m")
    one = next(p for pieces in survey.files.values() for p in pieces if p.at.codec == Codec.RAW)
    elsewhere = structs.replace(one.at, offset=one.at.offset + 4096)
    survey.files["again"] = [structs.replace(one, at=elsewhere)]
    assert {place for block, place in survey.raw_blocks() if block == one.block} >= {
        one.at,
        elsewhere,
    }


@pytest.mark.parametrize(("others", "mode"), [(False, 0o500), (True, 0o555)])
def test_other_users_read_only_if_asked(
    store: Path, others: bool, mode: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As with FUSE, only the user who mounted it, root, may read it unless others are let in."""
    point = shown(store, "team/m", allow_other=others)
    for folder in (point, point / "sub"):
        assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert stat.S_IMODE((point / MODEL).stat().st_mode) == mode & 0o444
    command = ["setpriv", "--reuid=65534", "--clear-groups", "cat", str(point / "config.json")]
    # The directories above belong to root alone.
    base = tmp_path_factory.getbasetemp()
    parents = [parent for parent in point.parents if parent.is_relative_to(base)]
    before = {parent: parent.stat().st_mode for parent in parents}
    for parent in parents:
        parent.chmod(0o755)
    done = subprocess.run(command, check=False, capture_output=True)
    for parent in parents:
        parent.chmod(stat.S_IMODE(before[parent]))
    assert (done.returncode == 0) is others, done.stderr


@pytest.mark.parametrize(
    ("revision", "options", "what"),
    [
        (None, {}, "not the whole store"),
        ("team/m", {"foreground": True}, "no process"),
        ("team/m", {"log": Path("log")}, "no process"),
        ("team/m", {"follow": True}, "cannot follow"),
        ("team/m", {"show_meta": True}, "only the files"),
        ("team/m", {"verify": "always"}, "at each read"),
        ("team/m", {"driver": "fuse", "verify": "never"}, "without checking"),
        ("team/m", {"driver": "auto", "verify": "never"}, "without checking"),
        ("team/m", {"driver": "nfs"}, "one of fuse, erofs, auto"),
        ("team/m", {"verify": "twice"}, "one of once, never, always"),
    ],
)
def test_what_no_driver_does(
    store: Path, root: Path, revision: str | None, options: dict[str, Any], what: str
) -> None:
    """What a driver cannot do is refused before anything is opened."""
    (root / "at").mkdir()
    with pytest.raises(BadRequest, match=what):
        mount(store, revision, root / "at", **{"driver": "erofs", **options})


def test_without_root_and_fuse(store: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither driver works, the error gives both reasons and the ways without a mount."""
    (root / "at").mkdir()
    monkeypatch.setattr(erofs_driver.os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="only root"):
        mount(store, "team/m", root / "at", driver="erofs")
    monkeypatch.setattr(fuse_driver, "DEVICE", root / "no fuse")
    with pytest.raises(Unavailable) as caught:
        mount(store, "team/m", root / "at", driver="auto")
    assert "only root" in caught.value.what
    assert "no FUSE" in caught.value.what
    for way in ("checkout", "reflink", "load()", "safe_open"):
        assert way in str(caught.value.hint)


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENOTBLK, errno.EPERM, errno.EINVAL])
def test_a_kernel_that_refuses(
    store: Path, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A kernel without EROFS, or without mounts from files, is an error that says so."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(kernel, "mount", refuse)
    before = leftovers(store)
    (root / "at").mkdir()
    with pytest.raises(Unavailable) as caught:
        mount(store, "team/m", root / "at", driver="erofs")
    assert os.strerror(code) in caught.value.what
    assert leftovers(store) == before


def test_options_that_the_kernel_does_not_know(
    store: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older kernel, which lacks an option, mounts without it; this one reads packs directly."""
    monkeypatch.setattr(showing, "OPTIONS", (*showing.OPTIONS, "later"))
    point = shown(store, "team/m")
    assert_same(point, root / "model")
    assert "directio" in table_line(point).split(" - ")[1].split(" ")[2].split(",")


@pytest.mark.rest
def test_a_store_on_a_filesystem_that_cannot_back_mounts(root: Path) -> None:
    """A store in memory (tmpfs) cannot be mounted from; `auto` shows it by FUSE."""
    require_or_skip_fuse()
    memory = root / "memory"
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(memory)], check=True)
    try:
        with Store.init(memory / "store", codec="raw") as made:
            made.add(write_model(root / "model", 3), name="m")
        (root / "at").mkdir()
        with pytest.raises(Unavailable, match="cannot mount from files"):
            mount(memory / "store", "m", root / "at", driver="erofs")
        info = mount(memory / "store", "m", root / "at", driver="auto")
        assert info.driver == "fuse"
        assert_same(root / "at", root / "model")
        unmount(root / "at")
    finally:
        subprocess.run(["umount", "-l", str(memory)], check=True)


def test_a_store_path_longer_than_the_kernel_takes(root: Path) -> None:
    """The kernel takes a source of 255 bytes; a longer one is an error, not a cut name."""
    deep = root.joinpath(*["d" * 100] * 2)
    deep.mkdir(parents=True)
    with Store.init(deep / "store", codec="raw") as made:
        made.add(write_model(root / "model", 4), name="m")
    (root / "at").mkdir()
    with pytest.raises(Unavailable, match="longer than the kernel takes"):
        mount(deep / "store", "m", root / "at", driver="erofs")


def test_the_command(store: Path, root: Path) -> None:
    """`mount --driver erofs`, `mounts` and `unmount` say who serves, as text and as JSON."""
    (root / "at").mkdir()

    def run(*arguments: str) -> str:
        return Program(store).succeed(*arguments).out

    said = run("mount", "team/m", str(root / "at"), "--driver", "erofs", "--verify", "never")
    assert "by the kernel" in said
    assert "not checked" in said
    listed = json.loads(run("mounts", "--json"))["mounts"]
    mine = next(one for one in listed if one["mountpoint"] == str(root / "at"))
    assert (mine["driver"], mine["pid"], mine["alive"]) == ("erofs", None, True)
    assert "erofs" in run("mounts")
    run("unmount", str(root / "at"))
    assert mount_table.at(root / "at") is None
