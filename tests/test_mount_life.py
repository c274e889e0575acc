"""The life of a mount: its options, what it tells about snapshots, refs that it follows.

Real mounts; skipped where this machine cannot mount.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from damage import flip_bit
from mount_drivers import on_disk
from safetensors.numpy import save_file

from mstore import Store
from mstore.terms.errors import BadRequest, MstoreError, NotFound, StorageFailed, Unavailable
from mstore.terms.phrases import Option
from mstore_fuse import fuse_driver
from mstore_fuse.driver import MountRequest
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import mount, mounts, unmount

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(f"cannot mount: {missing}", allow_module_level=True)

BLOCK_SIZE = 64 << 10
MODEL = "model.safetensors"


def write(folder: Path, seed: int) -> Path:
    """A model of some blocks, half of them zeros, with files of zeros and of nothing."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    weight = draw.standard_normal((300, 700), dtype=np.float32)
    tensors = {f"w{number}": weight + number for number in range(4)}
    save_file({**tensors, "zeros": np.zeros((1000, 1000), np.float32)}, folder / MODEL)
    (folder / "config.json").write_text(json.dumps({"seed": seed}) + " " * seed)
    (folder / "zeros.bin").write_bytes(bytes(3 << 20))
    (folder / "empty").touch()
    return folder


def build(root: Path) -> None:
    """Three models, and a store with two of them."""
    for seed, name in enumerate("abc", start=1):
        write(root / name, seed)
    with Store.init(root / "store", block_size=BLOCK_SIZE) as made:
        made.add(root / "a", name="a")
        made.add(root / "b", name="b", base="a")


@pytest.fixture
def originals(template: Path) -> dict[str, Path]:
    return {name: template / name for name in "abc"}


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of it, open."""
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mnt"
    folder.mkdir()
    yield folder
    for info in mounts():
        if info.mountpoint == folder:
            unmount(folder, lazy=True)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is the assertion
        call()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


# -- a ref that is followed ------------------------------------------------------------------


def test_a_followed_ref_shows_what_it_points_at(
    store: Store, originals: dict[str, Path], point: Path
) -> None:
    """After the ref moved, files that are opened are the new ones, an open file stays; a mount
    without `follow` stays where it was; without the ref there is an empty directory."""
    fixed = point.parent / "fixed"
    fixed.mkdir()
    store.reset("main", "a")
    mount(store.path, "main", point, follow=True)
    mount(store.path, "main", fixed)
    try:
        number = os.stat(point).st_ino
        with (point / MODEL).open("rb") as file:
            store.reset("main", "b")
            time.sleep(0.2)
            assert file.read() == (originals["a"] / MODEL).read_bytes()
        until(lambda: (point / "config.json").stat().st_size == 13)
        subprocess.run(["diff", "-r", point, originals["b"]], check=True)
        subprocess.run(["diff", "-r", fixed, originals["a"]], check=True)
        assert os.getxattr(point, "user.mstore.ref") == b"main"
        assert os.getxattr(point / MODEL, "user.mstore.snapshot").decode() == str(store["b"].id)
        assert os.stat(point).st_ino == number
        assert os.stat(point).st_mtime_ns == store["b"].time_ns
        store.remove("main")
        until(lambda: os.listdir(point) == [])
        assert code_of(lambda: os.stat(point / MODEL)) == "ENOENT"
        assert os.listxattr(point) == []
        store.reset("main", "a")
        until((point / "config.json").exists)
        subprocess.run(["diff", "-r", point, originals["a"]], check=True)
    finally:
        unmount(fixed)


@pytest.mark.rest
def test_only_a_ref_can_be_followed(store: Store, point: Path) -> None:
    """An id, a revision and the whole store are refused, and what does not exist is not found."""
    for revision in (str(store["a"].id), "a@{0}", None):
        with pytest.raises(BadRequest) as caught:
            mount(store.path, revision, point, follow=True)
        assert caught.value.texts[1] == Option("follow")
    with pytest.raises(NotFound):
        mount(store.path, "nobody", point, follow=True)
    assert [info for info in mounts() if info.mountpoint == point] == []


# -- files and labels about a snapshot ---------------------------------------------------------


def test_files_about_a_snapshot(store: Store, originals: dict[str, Path], point: Path) -> None:
    """manifest.json and lineage.json are found by name, say what the library says, and are neither
    listed nor counted."""
    mount(store.path, "b", point)
    assert sorted(os.listdir(point)) == sorted(os.listdir(originals["b"]))
    about = point / ".mstore"
    assert sorted(os.listdir(about)) == ["lineage.json", "manifest.json"]
    manifest = json.loads((about / "manifest.json").read_bytes())
    view = store.view("b")
    assert manifest["snapshot"] == str(view.id)
    assert manifest["manifest"] == str(view.manifest_id)
    assert [(one["path"], one["size"], one["tensors"]) for one in manifest["files"]] == [
        (one.path, one.size, one.tensors) for one in store.files("b")
    ]
    assert [
        (one["name"], one["dtype"], one["shape"], one["id"]) for one in manifest["tensors"]
    ] == [
        (one.name, one.dtype, list(one.shape), str(view.tensors[one.name]))
        for one in store.tensors("b")
    ]
    same = {one["path"] for one in manifest["files"]} & {"empty", "zeros.bin"}
    other = json.loads(json.dumps(manifest))
    ids = {one["path"]: one["id"] for one in other["files"]}
    for path in same:
        assert ids[path] == store.view("a").content_id(path).hex()
    assert ids[MODEL] != store.view("a").content_id(MODEL).hex()
    lineage = json.loads((about / "lineage.json").read_bytes())["snapshots"]
    assert [one["snapshot"] for one in lineage] == [str(one.snapshot) for one in store.log("b")]
    assert lineage[0]["parents"][0]["role"] == "base"
    assert lineage[0]["refs"] == ["b"]
    for name in ("manifest.json", "lineage.json"):
        content = (about / name).read_bytes()
        assert (about / name).stat().st_size == len(content)
        with (about / name).open("rb") as file:
            assert os.pread(file.fileno(), 10, 5) == content[5:15]
            assert os.pread(file.fileno(), 10, len(content)) == b""
    assert os.statvfs(point).f_files == len(os.listdir(originals["b"]))


@pytest.mark.rest
def test_show_meta_lists_them(store: Store, point: Path) -> None:
    """With `show_meta` a listing has them, in a mount of the whole store in each snapshot."""
    mount(store.path, None, point, show_meta=True)
    for folder in (point / "refs" / "a", point / "snapshots" / str(store["b"].id)):
        assert ".mstore" in os.listdir(folder)
    assert sorted(os.listdir(point)) == ["refs", "snapshots"]
    path = point / "refs" / "a" / ".mstore" / "manifest.json"
    assert json.loads(path.read_bytes())["snapshot"] == str(store["a"].id)


@pytest.mark.rest
def test_what_was_added_comes_first(
    store: Store, originals: dict[str, Path], point: Path, tmp_path: Path
) -> None:
    """A snapshot that has a `.mstore` itself shows that, listed, and no other files there."""
    for name, content in [("d", None), ("e", b"a file")]:
        shutil.copytree(originals["a"], tmp_path / name)
        own = tmp_path / name / ".mstore"
        if content is None:
            own.mkdir()
            (own / "manifest.json").write_bytes(b"mine")
        else:
            own.write_bytes(content)
        store.add(tmp_path / name, name=name)
    mount(store.path, None, point, show_meta=True)
    for name in ("d", "e"):
        subprocess.run(["diff", "-r", point / "refs" / name, tmp_path / name], check=True)


@pytest.mark.rest
def test_labels(store: Store, point: Path) -> None:
    """Extended attributes say which snapshot, which ref, how many tensors and which content; those
    of others are absent, and those of the system not supported."""
    mount(store.path, None, point)
    file = point / "refs" / "a" / MODEL
    labels = {name: os.getxattr(file, name).decode() for name in os.listxattr(file)}
    view = store.view("a")
    assert labels == {
        "user.mstore.snapshot": str(view.id),
        "user.mstore.ref": "a",
        "user.mstore.tensors": "5",
        "user.mstore.file": view.content_id(MODEL).hex(),
    }
    by_id = point / "snapshots" / str(view.id)
    assert os.listxattr(by_id) == ["user.mstore.snapshot"]
    assert "user.mstore.tensors" not in os.listxattr(by_id / "config.json")
    assert os.listxattr(point / "refs") == []
    assert code_of(lambda: os.getxattr(file, "user.other")) == "ENODATA"
    assert code_of(lambda: os.getxattr(file, "user.mstore.other")) == "ENODATA"
    assert code_of(lambda: os.getxattr(file, "security.capability")) in ("ENOTSUP", "EOPNOTSUPP")
    assert code_of(lambda: os.setxattr(file, "user.mstore.snapshot", b"x")) == "EROFS"


# -- what files take ---------------------------------------------------------------------------


def test_files_take_what_they_take_at_rest(
    store: Store, originals: dict[str, Path], point: Path
) -> None:
    """st_blocks counts stored bytes, each block of a file once, and is never 0 for a file that has
    bytes: programs would take it for one hole."""
    mount(store.path, "a", point)
    view = store.view("a")
    for path, size in view.files.items():
        shown = os.stat(point / path)
        assert shown.st_size == size
        stored = view.stored_bytes(path)
        assert shown.st_blocks == -(-max(stored, min(size, 1)) // 512), path
    # One block of zeros, in 48 places.
    assert 0 < os.stat(point / "zeros.bin").st_blocks <= 2
    whole = sum(os.stat(point / path).st_blocks for path in view.files) * 512
    assert whole < sum(view.files.values()) // 2


COPIES = [
    "cp -r {source}/. {target}",
    "cp -r --sparse=always {source}/. {target}",
    "tar -C {source} -S -cf - . | tar -C {target} -xf -",
    "tar -C {source} -S --hole-detection=raw -cf - . | tar -C {target} -xf -",
    "rsync -aS {source}/ {target}/",
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", COPIES)
def test_programs_that_look_for_holes_copy_every_byte(
    store: Store, originals: dict[str, Path], point: Path, tmp_path: Path, command: str
) -> None:
    """Files that take less than their size are no files with holes."""
    if shutil.which(command.split(maxsplit=1)[0]) is None:
        pytest.skip(f"no {command.split(maxsplit=1)[0]}")
    mount(store.path, "a", point)
    target = tmp_path / "copy"
    target.mkdir()
    subprocess.run(["sh", "-c", command.format(source=point, target=target)], check=True)
    subprocess.run(["diff", "-r", target, originals["a"]], check=True)


# -- log, cache, checks, others ----------------------------------------------------------------


@pytest.mark.rest
def test_the_log_of_a_mount(originals: dict[str, Path], point: Path, tmp_path: Path) -> None:
    """In the background, too, the log says when the mount began and ended and which read failed
    why, once; it is appended to."""
    with Store.init(tmp_path / "raw", block_size=BLOCK_SIZE, codec="raw") as made:
        made.add(originals["a"], name="a")
    content = (originals["a"] / MODEL).read_bytes()
    flip_bit(tmp_path / "raw", content[200_000:200_064])
    log = tmp_path / "log"
    log.write_text("before\n")
    mount(tmp_path / "raw", "a", point, log=log)
    with (point / MODEL).open("rb", buffering=0) as file:
        for _ in range(3):
            assert code_of(lambda: os.pread(file.fileno(), 64, 200_000)) == "EIO"
    unmount(point)
    lines = log.read_text().splitlines()
    assert lines[0] == "before"
    assert f"serving a of {tmp_path / 'raw'} at {point}" in lines[1]
    assert sum("damaged" in line or "block" in line for line in lines) == 1
    assert f"the mount at {point} has ended" in lines[-1]


def test_a_log_that_cannot_be_written(store: Store, point: Path, tmp_path: Path) -> None:
    """A log in a directory that is not there, or in the mount itself, is refused beforehand."""
    with pytest.raises(StorageFailed, match="the log cannot be written"):
        mount(store.path, "a", point, log=tmp_path / "nowhere" / "log")
    with pytest.raises(BadRequest, match="in the mount"):
        mount(store.path, "a", point, log=point / "log")
    assert os.listdir(point) == []
    assert not os.path.ismount(point)


def test_blocks_are_checked_once_or_always(
    originals: dict[str, Path], point: Path, tmp_path: Path
) -> None:
    """A raw block that is damaged after it was checked: with "always" the next read of the pack is
    EIO."""
    with Store.init(tmp_path / "raw", block_size=BLOCK_SIZE, codec="raw") as made:
        made.add(originals["a"], name="a")
    content = (originals["a"] / MODEL).read_bytes()
    mount(tmp_path / "raw", "a", point, verify="always", cache_bytes=0)
    with (point / MODEL).open("rb", buffering=0) as file:
        assert file.read() == content
        flip_bit(tmp_path / "raw", content[200_000:200_064])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert code_of(lambda: os.pread(file.fileno(), 64, 200_000)) == "EIO"
        assert os.pread(file.fileno(), 64, 2_000_000) == content[2_000_000:2_000_064]


def test_options_reach_the_store(store: Store, point: Path) -> None:
    """A policy that does not exist and a negative cache are refused, and nothing is mounted."""
    for given in ({"verify": "sometimes"}, {"cache_bytes": -1}):
        with pytest.raises(BadRequest) as caught:
            mount(store.path, "a", point, **given)  # type: ignore[arg-type]
        assert caught.value.texts[1] == Option(next(iter(given)))
    assert not os.path.ismount(point)


def test_options_cross_to_the_daemon() -> None:
    """What the caller chose is what the daemon's command line says."""
    plain = MountRequest(Path("/s t"), None, Path("-m"))
    chosen = MountRequest(
        Path("-s"),
        "--all",
        Path("/mnt"),
        foreground=True,
        allow_other=True,
        log=Path("/x y"),
        cache_bytes=5,
        verify="always",
        follow=True,
        show_meta=True,
    )
    for request in (plain, chosen):
        given = fuse_driver.parser().parse_args(fuse_driver.words(request))
        assert fuse_driver.request_of(given) == request


def test_letting_others_in_needs_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root needs user_allow_other in fuse.conf: without it, the error says the line."""
    conf = tmp_path / "fuse.conf"
    monkeypatch.setattr(fuse_driver, "FUSE_CONF", conf)
    monkeypatch.setattr(fuse_driver.os, "geteuid", lambda: 1000)
    for text in (None, "#user_allow_other\n", "mount_max = 9\n"):
        if text is not None:
            conf.write_text(text)
        with pytest.raises(Unavailable) as caught:
            fuse_driver._require_allowed()
        assert f"add the line user_allow_other to {conf}" in str(caught.value.texts[2])
    conf.write_text("mount_max = 9\n  user_allow_other\n")
    fuse_driver._require_allowed()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as somebody else")
def test_others_read_only_where_they_are_let_in(store: Store, point: Path) -> None:
    """Another user gets EACCES from a mount, and with `allow_other` the bytes."""
    for folder in point.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o111)
    command = ["setpriv", "--reuid=65534", "--clear-groups", "cat", str(point / "config.json")]

    def read() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, check=False, capture_output=True)

    mount(store.path, "a", point)
    assert b"Permission denied" in read().stderr
    unmount(point)
    mount(store.path, "a", point, allow_other=True)
    assert read().stdout == (point / "config.json").read_bytes()


# -- many threads on one map -------------------------------------------------------------------


@pytest.mark.rest
def test_threads_that_fault_on_one_map_never_deadlock(
    store: Store, originals: dict[str, Path], point: Path
) -> None:
    """Threads of one process that touch tensors of one mapped file at once, as transformers does:
    100 rounds from a cold start all end, with the right bytes."""
    wanted = (originals["a"] / MODEL).read_bytes()
    mount(store.path, "a", point)
    places = range(0, len(wanted), 4096 * 17)
    wrong: list[int] = []

    def touch(data: mmap.mmap, first: int) -> None:
        wrong.extend(place for place in places[first::8] if data[place] != wanted[place])

    for _ in range(100):
        with (point / MODEL).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                threads = [
                    threading.Thread(target=touch, args=(data, first), daemon=True)
                    for first in range(8)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_stat_does_not_wait_for_a_disk(store: Store) -> None:
    """While the bytes at rest cannot be counted, they are unknown, at once after the first time;
    then they are known."""
    from mstore_fuse.about import AboutStore

    release = threading.Event()

    class Slow:
        id = "x"

        def stored_bytes(self, path: str) -> int:
            assert release.wait(60)
            return 7

    about = AboutStore(store, patience=0.01)
    slow = Slow()
    assert about.stored(slow, "a") is None  # type: ignore[arg-type]
    about._patience = 60
    assert about.stored(slow, "a") is None  # type: ignore[arg-type]
    assert about.stored(slow, "b") is None  # type: ignore[arg-type]
    release.set()
    until(lambda: about.stored(slow, "b") == 7)  # type: ignore[arg-type]
    assert about.stored(slow, "a") == 7  # type: ignore[arg-type]


def test_damage_is_no_failure_of_stat(store: Store) -> None:
    """Where the bytes at rest cannot be counted, a file takes its size."""
    from mstore_fuse.tree import Nothing, SnapshotTree

    class Lost(Nothing):
        def stored(self, view: object, path: str) -> int:
            raise MstoreError("lost")

    tree = SnapshotTree(store.view("a"), Lost())
    assert tree.stored("zeros.bin") == 3 << 20
