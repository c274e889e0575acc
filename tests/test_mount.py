"""mstore_fuse end to end: real stores behind real mounts.

Programs, ways to read, system calls, faults and holds have suites of their own, for every way to
mount (`mount_drivers`).

Skipped where this machine cannot mount (no /dev/fuse): `require_fuse` says so.
"""

from __future__ import annotations

import errno
import filecmp
import json
import mmap
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip_bit
from mount_drivers import drop_pages, files_below, on_disk
from safetensors import safe_open
from safetensors.numpy import save_file

from mstore import Store
from mstore.terms.errors import Conflict, Corrupt, MstoreError, NotFound, Unavailable
from mstore.terms.phrases import Option, call, phrase
from mstore_cli.spelling import Typed
from mstore_fuse import daemon, fuse_driver, mount_table
from mstore_fuse import mounts as mounts_module
from mstore_fuse.driver import MountInfo
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.mounts import Unmounted, mount, mounts, unmount, unmount_all

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(f"cannot mount: {missing}", allow_module_level=True)

BLOCK_SIZE = 64 << 10
BIG = "model-00001-of-00002.safetensors"


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Two shards of many blocks, odd sizes, an empty file, nested and non-ASCII names."""
    draw = np.random.default_rng(seed)
    (folder / "sub" / "deeper").mkdir(parents=True)
    for shard in (1, 2):
        tensors: dict[str, np.ndarray[Any, Any]] = {
            f"layer.{shard}.weight": draw.standard_normal((700, 513), dtype=np.float32),
            f"layer.{shard}.bias": draw.integers(0, 99, 7, dtype=np.int8),
            f"layer.{shard}.scalar": np.array(seed + shard, dtype=np.float64),
            f"layer.{shard}.none": np.zeros((0, 3), dtype=np.float16),
        }
        save_file(tensors, folder / f"model-0000{shard}-of-00002.safetensors")
    (folder / "config.json").write_text(f'{{"seed": {seed}}}' + " " * seed)
    (folder / "empty").touch()
    (folder / "sub" / "deeper" / "vocabulary ünd, so.txt").write_bytes(draw.bytes(200_001))
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A store, and the directories that its refs were added from."""
    root = tmp_path_factory.mktemp("family")
    originals = {name: write_checkpoint(root / name, seed) for name, seed in [("a", 1), ("b", 2)]}
    refs = {"team/a": originals["a"], "b": originals["b"]}
    with Store.init(root / "store", block_size=BLOCK_SIZE) as store:
        for ref, original in refs.items():
            store.add(original, name=ref)
    return root / "store", refs


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    """An empty directory; whatever is mounted below it when the test ends is unmounted."""
    folder = tmp_path / "a mount, point"
    folder.mkdir()
    yield folder
    for info in reversed(mounts()):
        if info.mountpoint.is_relative_to(tmp_path):
            unmount(info.mountpoint, lazy=True)
            if info.pid is not None:
                wait_until(lambda pid=info.pid: not runs(pid))  # type: ignore[misc]


@pytest.fixture
def mounted(family: tuple[Path, dict[str, Path]], point: Path) -> tuple[Path, Path, MountInfo]:
    """The mount of one snapshot, the directory it came from, and what `mount` said."""
    store, refs = family
    return point, refs["team/a"], mount(store, "team/a", point)


def wait_until(true: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    return fuse_driver.serves(pid)


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is the assertion
        call()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


def is_mounted(point: Path) -> bool:
    return mount_table.at(point) is not None


# -- what is read ----------------------------------------------------------------------------


def test_every_file_is_what_was_added(mounted: tuple[Path, Path, MountInfo]) -> None:
    """cmp is equal on every file, and there are no others; sizes are right; nothing is a link."""
    point, original, _ = mounted
    assert files_below(point) == files_below(original)
    for path in files_below(original):
        assert filecmp.cmp(point / path, original / path, shallow=False), path
        shown = os.lstat(point / path)
        assert shown.st_size == os.path.getsize(original / path)
        assert (shown.st_blocks > 0) == (shown.st_size > 0)
        assert stat.S_IMODE(shown.st_mode) == 0o444
    space = os.statvfs(point)
    total = sum(os.path.getsize(original / path) for path in files_below(original))
    assert 0 <= space.f_blocks * space.f_frsize - total < space.f_frsize
    assert space.f_bfree == 0


def test_mapped_reading(mounted: tuple[Path, Path, MountInfo]) -> None:
    """mmap works, by hand and through safetensors, cold and warm."""
    point, original, _ = mounted
    expected = (original / BIG).read_bytes()
    drop_pages(point / BIG)
    with (point / BIG).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        assert data[-1] == expected[-1]
        assert data[:] == expected
    with safe_open(point / BIG, "np") as shown, safe_open(original / BIG, "np") as kept:
        assert shown.keys() == kept.keys()
        for name in kept.keys():  # noqa: SIM118 - safe_open is no mapping
            assert np.array_equal(shown.get_tensor(name), kept.get_tensor(name))


def test_concurrent_readers(mounted: tuple[Path, Path, MountInfo]) -> None:
    """Eight threads that read pieces all over the files get the right ones."""
    point, original, _ = mounted
    paths = [path for path in files_below(original) if os.path.getsize(original / path)]
    contents = {path: (original / path).read_bytes() for path in paths}
    wrong: list[tuple[Path, int, int]] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        opened = {path: os.open(point / path, os.O_RDONLY) for path in paths}
        for _ in range(150):
            path = draw.choice(paths)
            at, size = draw.randrange(len(contents[path])), draw.randrange(1, 300_000)
            if draw.random() < 0.2:
                os.posix_fadvise(opened[path], 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(opened[path], size, at) != contents[path][at : at + size]:
                wrong.append((path, at, size))
        for number in opened.values():
            os.close(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_flipped_bit_is_an_error(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """A damaged block gives EIO to whoever reads it, and nobody else notices."""
    _, refs = family
    store = point.parent / "store"
    with Store.init(store, block_size=BLOCK_SIZE, codec="raw") as made:
        made.add(refs["b"], name="b")
    expected = (refs["b"] / BIG).read_bytes()
    at = len(expected) // 2
    flip_bit(store, expected[at : at + 64])
    mount(store, "b", point)
    with (point / BIG).open("rb", buffering=0) as file:
        assert code_of(lambda: os.pread(file.fileno(), 64, at)) == "EIO"
        assert os.pread(file.fileno(), 4096, 0) == expected[:4096]
        far = at + 2 * BLOCK_SIZE
        assert os.pread(file.fileno(), 4096, far) == expected[far : far + 4096]
    assert code_of(lambda: shutil.copy(point / BIG, point.parent / "copy")) == "EIO"
    other = BIG.replace("00001", "00002")
    assert filecmp.cmp(point / other, refs["b"] / other, shallow=False)


@pytest.mark.rest
def test_inodes_are_the_same_in_every_mount(
    family: tuple[Path, dict[str, Path]], mounted: tuple[Path, Path, MountInfo]
) -> None:
    """A file keeps its inode number across mounts, and different files have different ones."""
    store, _ = family
    point, original, _ = mounted
    before = {path: os.stat(point / path).st_ino for path in files_below(original)}
    assert len(set(before.values())) == len(before)
    listed = {entry.name: entry.inode() for entry in os.scandir(point)}
    assert listed["config.json"] == before[Path("config.json")]
    unmount(point)
    mount(store, "team/a", point)
    assert {path: os.stat(point / path).st_ino for path in before} == before


def test_pages_are_kept_between_opens(mounted: tuple[Path, Path, MountInfo]) -> None:
    """What was read once is read from the kernel's memory: the daemon is not asked."""
    point, _, info = mounted
    (point / BIG).read_bytes()
    before = bytes_served_by(info)
    (point / BIG).read_bytes()
    assert bytes_served_by(info) - before < BLOCK_SIZE


def bytes_served_by(info: MountInfo) -> int:
    """What the daemon has written, and it writes only to /dev/fuse."""
    return int(Path(f"/proc/{info.pid}/io").read_text().split("wchar:")[1].split()[0])


@pytest.mark.rest
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise the read-ahead")
def test_read_ahead_is_raised(mounted: tuple[Path, Path, MountInfo]) -> None:
    """The kernel asks for a MiB at a time."""
    device = os.stat(mounted[0]).st_dev
    knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    assert knob.read_text().strip() == "1024"


# -- the whole store -------------------------------------------------------------------------


def test_the_whole_store(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """Every ref by its name, every snapshot by its id, the same bytes through both."""
    store, refs = family
    mount(store, None, point)
    assert sorted(os.listdir(point)) == ["refs", "snapshots"]
    assert sorted(os.listdir(point / "refs")) == ["b", "team"]
    with Store.open(store) as opened:
        ids = {ref.name: str(ref.snapshot) for ref in opened.refs()}
    assert sorted(os.listdir(point / "snapshots")) == sorted(ids.values())
    for ref, original in refs.items():
        for shown in (point / "refs" / ref, point / "snapshots" / ids[ref]):
            subprocess.run(["diff", "-r", shown, original], check=True)
    assert code_of(lambda: os.stat(point / "refs" / "nobody")) == "ENOENT"
    assert code_of(lambda: os.stat(point / "snapshots" / ("0" * 64))) == "ENOENT"


@pytest.mark.rest
def test_one_model_of_a_snapshot(
    family: tuple[Path, dict[str, Path]], tmp_path: Path, point: Path
) -> None:
    """A mount of REF:MODEL is the model's directory, as a loader of this model wants it."""
    pipeline = tmp_path / "pipeline"
    for number, part in enumerate(("unet", "vae")):
        shutil.copytree(family[1]["b"], pipeline / part)
        (pipeline / part / "config.json").write_text(f'{{"part": {number}}}')
    (pipeline / "model_index.json").write_text("{}")
    with Store.open(family[0]) as store:
        store.add(pipeline, name="pipeline", base=None)
    info = mount(family[0], "pipeline:vae", point)
    assert info.revision == "pipeline:vae"
    wanted = files_below(pipeline / "vae")
    assert files_below(point) == wanted
    assert all(
        (point / one).read_bytes() == (pipeline / "vae" / one).read_bytes() for one in wanted
    )
    told = json.loads((point / ".mstore" / "manifest.json").read_text())
    assert [one["path"] for one in told["files"]][:2] == ["config.json", "empty"]
    assert told["tensors"][0]["name"].startswith("layer.1")
    unmount(point)
    with pytest.raises(NotFound, match="no such model; it has unet, vae"):
        mount(family[0], "pipeline:text", point)


def test_the_mount_follows_its_refs(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """A new ref appears, a removed one goes, and a moved one shows the other snapshot: whole, and
    not before the last reader of the first one has closed its files."""
    _, refs = family
    path = point.parent / "store"
    store = Store.init(path, block_size=BLOCK_SIZE)
    store.add(refs["team/a"], name="main")
    mount(path, None, point)
    main = point / "refs" / "main"
    subprocess.run(["diff", "-r", main, refs["team/a"]], check=True)

    store.add(refs["b"], name="later/b")
    subprocess.run(["diff", "-r", point / "refs" / "later" / "b", refs["b"]], check=True)

    with (main / BIG).open("rb") as file:
        store.reset("main", "later/b")
        time.sleep(0.2)
        assert file.read() == (refs["team/a"] / BIG).read_bytes()
        assert (main / "config.json").read_bytes() == (refs["team/a"] / "config.json").read_bytes()
    wait_until(lambda: os.path.getsize(main / "config.json") == 13)
    subprocess.run(["diff", "-r", main, refs["b"]], check=True)

    store.remove("later/b")
    assert os.listdir(point / "refs") == ["main"]
    store.close()


@pytest.mark.rest
def test_readers_of_a_moving_ref_never_see_a_mixture(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """While a ref goes back and forth, every file read through it is one snapshot's, whole."""
    _, refs = family
    path = point.parent / "store"
    store = Store.init(path, block_size=BLOCK_SIZE)
    store.add(refs["team/a"], name="a")
    store.add(refs["b"], name="b")
    store.add(refs["b"], name="main")
    mount(path, None, point)
    names = [BIG, "config.json"]
    allowed = {
        name: {(original / name).read_bytes() for original in refs.values()} for name in names
    }
    seen: dict[str, set[bytes]] = {name: set() for name in names}
    over = threading.Event()

    def read(mapped: bool) -> None:
        while not over.is_set():
            for name in names:
                with (point / "refs" / "main" / name).open("rb") as file:
                    if mapped:
                        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                            seen[name].add(data[:])
                    else:
                        seen[name].add(file.read())
            time.sleep(0.005)

    threads = [threading.Thread(target=read, args=(mapped,)) for mapped in (False, True)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 600
    moves = 0
    while moves < 16 or (seen != allowed and time.monotonic() < until):
        store.reset("main", "ab"[moves % 2])
        moves += 1
        time.sleep(0.12)
    over.set()
    for thread in threads:
        thread.join()
    store.close()
    assert seen == allowed


# -- the life of a mount ---------------------------------------------------------------------


def test_mounts_lists_what_is_mounted(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """One process for each mount; revision, store, place and process are listed."""
    store, _ = family
    one, two = point / "one", point / "two"
    one.mkdir()
    two.mkdir()
    made = [mount(store, "team/a", one), mount(store, None, two)]
    listed = [info for info in mounts() if info.mountpoint.is_relative_to(point)]
    assert listed == made
    assert [info.revision for info in made] == ["team/a", None]
    assert {info.store for info in made} == {store.resolve()}
    assert all(info.alive for info in made)
    assert made[0].pid != made[1].pid
    assert os.getpid() not in {info.pid for info in made}
    unmount(one)
    assert [info for info in mounts() if info.mountpoint.is_relative_to(point)] == made[1:]
    assert not runs(made[0].pid or 0)


def test_a_mount_outlives_the_shell(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """The caller returns at once with its pipes closed, and its end does not end the mount."""
    store, refs = family
    code = (
        "import sys; from pathlib import Path; from mstore_fuse.mounts import mount;"
        "mount(Path(sys.argv[1]), 'b', Path(sys.argv[2]))"
    )
    script = '"$0" -c "$1" "$2" "$3"; echo done; kill -HUP 0; sleep 60'
    shell = subprocess.Popen(
        ["sh", "-c", script, sys.executable, code, store, point],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    said, complained = shell.communicate(timeout=600)
    assert (said, complained) == (b"done\n", b"")
    assert shell.returncode == -signal.SIGHUP
    assert filecmp.cmp(point / BIG, refs["b"] / BIG, shallow=False)


def test_sigterm_waits_for_the_last_close(mounted: tuple[Path, Path, MountInfo]) -> None:
    """The mount goes at once; open files and mappings are served until they are closed."""
    point, original, info = mounted
    expected = (original / BIG).read_bytes()
    assert info.pid is not None
    with (point / BIG).open("rb", buffering=0) as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            os.kill(info.pid, signal.SIGTERM)
            wait_until(lambda: not is_mounted(point))
            assert os.listdir(point) == []
            assert file.readall() == expected
            os.kill(info.pid, signal.SIGTERM)  # once more changes nothing
            assert data[:] == expected
        assert runs(info.pid)
    wait_until(lambda: not runs(info.pid or 0))


@pytest.mark.rest
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_an_idle_mount(
    mounted: tuple[Path, Path, MountInfo], number: signal.Signals
) -> None:
    """Nothing open: the mount and its process are gone."""
    point, _, info = mounted
    assert info.pid is not None
    os.kill(info.pid, number)
    wait_until(lambda: not runs(info.pid or 0))
    assert not is_mounted(point)


@pytest.mark.rest
def test_a_crashed_mount_is_recognised_and_cleared(
    family: tuple[Path, dict[str, Path]], mounted: tuple[Path, Path, MountInfo]
) -> None:
    """kill -9: readers get an error, `mounts` shows it dead, `unmount` clears it."""
    store, _ = family
    point, _, info = mounted
    held = os.open(point / BIG, os.O_RDONLY)
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: not runs(info.pid or 0))
    # A process loses its memory a moment before its files: until then, requests are aborted.
    wait_until(lambda: code_of(lambda: os.listdir(point)) == "ENOTCONN")
    assert code_of(lambda: os.pread(held, 100, 0)) == "ENOTCONN"
    (listed,) = [entry for entry in mounts() if entry.mountpoint == point]
    assert (listed.alive, listed.pid, listed.revision) == (False, None, "team/a")
    unmount(point)  # although a file is open
    assert code_of(lambda: os.close(held)) == "ENOTCONN"
    assert os.listdir(point) == []
    mount(store, "team/a", point)
    assert (point / "config.json").exists()


def test_a_new_mount_clears_a_crashed_one(
    family: tuple[Path, dict[str, Path]], mounted: tuple[Path, Path, MountInfo]
) -> None:
    """After kill -9, `mount` at the same place removes what is left, says so, and mounts."""
    store, refs = family
    point, _, info = mounted
    held = os.open(point / BIG, os.O_RDONLY)
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: not runs(info.pid or 0))
    cleared: list[MountInfo] = []
    mount(store, "b", point, on_cleared=cleared.append)
    assert [(one.mountpoint, one.revision, one.alive) for one in cleared] == [
        (point, "team/a", False)
    ]
    assert filecmp.cmp(point / BIG, refs["b"] / BIG, shallow=False)
    assert code_of(lambda: os.close(held)) == "ENOTCONN"
    unmount(point)
    assert not is_mounted(point)


@pytest.mark.rest
def test_a_crashed_mount_of_somebody_else_is_left(
    family: tuple[Path, dict[str, Path]],
    mounted: tuple[Path, Path, MountInfo],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stale mount of another user is not removed by the way: the error names `unmount`."""
    point, _, info = mounted
    assert info.pid is not None
    os.kill(info.pid, signal.SIGKILL)
    wait_until(lambda: not runs(info.pid or 0))
    with monkeypatch.context() as patch:
        patch.setattr(mounts_module.os, "geteuid", lambda: info.user + 1)
        with pytest.raises(Conflict, match="stale") as caught:
            mounts_module._free_mountpoint(point)
    assert caught.value.texts[2] == call("unmount", str(point))
    assert is_mounted(point)


@pytest.mark.rest
def test_all_mounts_are_ended_at_once(
    family: tuple[Path, dict[str, Path]], point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unmount_all` ends every mount of this user, also a stale one, and tells which is in use."""
    one, two, three = (point / name for name in ("one", "two", "three"))
    for place in (one, two, three):
        place.mkdir()
        made = mount(family[0], "b", place)
    assert made.pid is not None
    os.kill(made.pid, signal.SIGKILL)
    wait_until(lambda: not runs(made.pid or 0))
    asked: list[int | None] = []

    def ours(user: int | None = None) -> list[MountInfo]:
        # Other tests have mounts, too.
        asked.append(user)
        return [info for info in mounts(user) if info.mountpoint.is_relative_to(point)]

    monkeypatch.setattr(mounts_module, "mounts", ours)
    with (one / BIG).open("rb") as file:
        ended = unmount_all()
        assert ended.unmounted == (three, two)
        (error,) = ended.failed
        assert isinstance(error, Conflict)
        assert error.where == str(one)
        assert unmount_all(lazy=True).unmounted == (one,)
        assert len(file.read()) > BLOCK_SIZE
    assert unmount_all() == Unmounted((), ())
    assert set(asked) == {os.geteuid()}


def test_a_mount_in_use_is_not_taken_away(mounted: tuple[Path, Path, MountInfo]) -> None:
    """`unmount` refuses and names `--lazy`, which lets the open file live on."""
    point, original, info = mounted
    with (point / BIG).open("rb") as file:
        with pytest.raises(Conflict) as caught:
            unmount(point)
        assert caught.value.texts[2] == call("unmount", str(point), lazy=True)
        assert is_mounted(point)
        unmount(point, lazy=True)
        assert not is_mounted(point)
        assert file.read() == (original / BIG).read_bytes()
    wait_until(lambda: not runs(info.pid or 0))


def test_unmount_needs_a_mount_of_ours(point: Path) -> None:
    """A plain directory, and another file system, are left alone."""
    for other in (point, Path("/proc")):
        with pytest.raises(NotFound, match="not a mount of mstore"):
            unmount(other)


@pytest.mark.rest
def test_a_mount_that_nobody_was_told_of_is_taken_away(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """If the caller cannot take note of the mount, there is none, and no process."""
    made: list[MountInfo] = []

    def fail(info: MountInfo) -> None:
        made.append(info)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        mount(family[0], "b", point, on_ready=fail)
    assert not is_mounted(point)
    assert not runs(made[0].pid or 0)


FOREGROUND = """
import sys
from pathlib import Path
from mstore_fuse.mounts import mount
def ready(info):
    print(info.pid, flush=True)
mount(Path(sys.argv[1]), "b", Path(sys.argv[2]), foreground=True, on_ready=ready)
print("ended", flush=True)
"""


def start_in_foreground(store: Path, point: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", FOREGROUND, str(store), str(point)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_in_the_foreground_caller_and_mount_end_together(
    family: tuple[Path, dict[str, Path]], point: Path, number: signal.Signals
) -> None:
    """Ctrl-C, or any other end of the caller, unmounts; open files are served to their end."""
    store, refs = family
    process, daemon = start_in_foreground(store, point)
    with (point / BIG).open("rb") as file:
        process.send_signal(number)
        wait_until(lambda: not is_mounted(point))
        assert file.read() == (refs["b"] / BIG).read_bytes()
    said, complained = process.communicate(timeout=600)
    assert said == ("ended\n" if number == signal.SIGINT else "")
    assert complained == ""
    wait_until(lambda: not runs(daemon))


@pytest.mark.rest
def test_in_the_foreground_an_interrupt_while_it_is_announced_is_served_too(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """Ctrl-C while `on_ready` still runs ends the mount as any other: open files are served."""
    store, refs = family
    opened: list[bytes] = []

    def interrupted(info: MountInfo) -> None:
        file = (point / BIG).open("rb")

        def read() -> None:
            with file:
                wait_until(lambda: not is_mounted(point))
                opened.append(file.read())

        reader.append(threading.Thread(target=read))
        reader[0].start()
        raise KeyboardInterrupt

    reader: list[threading.Thread] = []
    mount(store, "b", point, foreground=True, on_ready=interrupted)
    reader[0].join()
    assert opened == [(refs["b"] / BIG).read_bytes()]


@pytest.mark.rest
def test_in_the_foreground_unmount_ends_the_call(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """`unmount` from elsewhere: the call returns."""
    process, _ = start_in_foreground(family[0], point)
    unmount(point)
    assert process.communicate(timeout=600) == ("ended\n", "")
    assert process.returncode == 0


@pytest.mark.rest
def test_in_the_foreground_a_crash_is_an_error(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """A daemon that is killed leaves no dead mount behind, and the call raises."""
    process, daemon = start_in_foreground(family[0], point)
    os.kill(daemon, signal.SIGKILL)
    _, complained = process.communicate(timeout=600)
    assert "Unavailable" in complained
    assert not is_mounted(point)


# -- what goes wrong before ------------------------------------------------------------------


def refused(store: Path, revision: str | None, point: Path, **options: float) -> MstoreError:
    """The error of a mount that must fail; nothing may be left of it."""
    before = mount_table.at(point)
    with pytest.raises(MstoreError) as caught:
        mount(store, revision, point, **options)  # type: ignore[arg-type]
    assert mount_table.at(point) == before
    return caught.value


def test_bad_mount_points(family: tuple[Path, dict[str, Path]], point: Path) -> None:
    """Missing, a file, not empty, taken, in the store: said so, with the place named."""
    store, _ = family
    missing, file, full = point / "missing", point / "file", point
    error = refused(store, "b", missing)
    assert isinstance(error, NotFound)
    assert (error.where, error.hint) == (str(missing), f"mkdir -p {shlex.quote(str(missing))}")
    file.touch()
    for place, what in [(file, "not a directory"), (full, "not empty: it holds 'file'")]:
        error = refused(store, "b", place)
        assert isinstance(error, Conflict)
        assert what in str(error)
        assert error.where == str(place)
    assert isinstance(refused(store, "b", Path("/proc")), Conflict)
    inside = store / "tmp" / "inside"
    inside.mkdir()
    assert isinstance(refused(store, "b", inside), Conflict)
    inside.rmdir()


def test_a_second_mount_at_the_same_place(
    family: tuple[Path, dict[str, Path]], mounted: tuple[Path, Path, MountInfo]
) -> None:
    """A living mount is never covered by another one."""
    error = refused(family[0], "b", mounted[0])
    assert isinstance(error, Conflict)
    assert error.texts[2] == call("unmount", str(mounted[0]))


def test_what_the_store_says_reaches_the_caller(
    family: tuple[Path, dict[str, Path]], point: Path
) -> None:
    """An unknown ref and a missing store are the library's own errors, hints included."""
    store, _ = family
    with Store.open(store) as opened, pytest.raises(NotFound) as direct:
        opened.view("nobody")
    error = refused(store, "nobody", point)
    assert (type(error), error.texts) == (NotFound, direct.value.texts)
    error = refused(point.parent / "nowhere", "b", point)
    assert isinstance(error, NotFound)
    assert "nowhere" in str(error)
    refused(store, "--all", point)


def test_errors_of_the_daemon_keep_their_parts() -> None:
    """Operations that an error names cross to the caller as data, which each face spells."""
    hint = phrase("{check}, then {mount}", check=call("fsck"), mount=call("mount", "REF", "DIR"))
    told = Corrupt("lost", where=Option("revision"), hint=hint)
    heard = fuse_driver._error_from(json.loads(json.dumps(daemon._message(told))))
    assert (type(heard), heard.texts) == (Corrupt, told.texts)
    assert heard.told(Typed()).hint == "mstore fsck, then mstore mount REF DIR"
    heard = fuse_driver._error_from(json.loads(json.dumps(daemon._message(KeyError("x")))))
    assert (heard.what, heard.where, heard.hint) == ("KeyError: 'x'", None, None)


def pretend_python(folder: Path, script: str) -> str:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.rest
def test_a_daemon_that_does_not_answer(
    family: tuple[Path, dict[str, Path]], point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that was given, the caller gets an error and the process is gone."""
    silent = pretend_python(point.parent, f"echo $$ > '{point.parent}/pid'; exec sleep 60")
    monkeypatch.setattr(sys, "executable", silent)
    # Long enough for the script to have said who it is, on a machine that is busy.
    error = refused(family[0], "b", point, timeout=3)
    assert isinstance(error, Unavailable)
    assert "checkout(REF, DIR)" in (error.hint or "")
    assert not Path("/proc", (point.parent / "pid").read_text().strip()).exists()


def test_a_daemon_that_dies(
    family: tuple[Path, dict[str, Path]], point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words are in the error."""
    dying = pretend_python(point.parent, "echo 'fusermount3: mount failed: no' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", dying)
    error = refused(family[0], "b", point)
    assert isinstance(error, Unavailable)
    assert "fusermount3: mount failed: no" in str(error)


def test_the_current_directory_is_not_trusted(
    family: tuple[Path, dict[str, Path]], point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is called like one of our modules is not run, wherever `mount` is called."""
    (point.parent / "mstore_fuse.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(point.parent)
    assert mount(family[0], "b", Path(point.name)).mountpoint == point


def test_a_machine_without_fuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing part is named, with what to install and what works without it."""

    def hint() -> str:
        with pytest.raises(Unavailable) as caught:
            require_fuse()
        return f"{caught.value} -- {caught.value.hint}"

    module = sys.modules[require_fuse.__module__]
    said = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "DEVICE", tmp_path / "fuse")
        said.append(hint())
        assert "no FUSE" in said[-1]
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 1000)
        patch.setattr("shutil.which", lambda name: None)
        said.append(hint())
        assert "fusermount3" in said[-1]
        assert "apt install fuse3" in said[-1]
    for text in said:
        assert "checkout(REF, DIR)" in text
        assert "store[REF].tensor(NAME)" in text


@pytest.mark.rest
def test_a_mount_goes_on_after_its_packs_were_rewritten(tmp_path: Path, point: Path) -> None:
    """gc moves what a mount shows into other packs; the mount finds it there."""
    with Store.init(tmp_path / "store", block_size=BLOCK_SIZE) as store:
        store.configure("reflog_days", 0)
        original = write_checkpoint(tmp_path / "a", 1)
        half = tmp_path / "half"
        shutil.copytree(original, half)
        (half / BIG).unlink()
        name = "model.safetensors"
        (half / "model-00002-of-00002.safetensors").rename(half / name)
        store.add(original, name="a")
        store.add(half, name="half")
        mount(store.path, "half", point)
        with (point / name).open("rb") as file:
            start = file.read(70_000)
            store.remove("a")
            assert len(store.gc().packs_rewritten) == 1
            assert start + file.read() == (half / name).read_bytes()
