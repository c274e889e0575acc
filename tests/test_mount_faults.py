"""A fault under each read of a mount: the right error in bounded time, never wrong bytes.

Whoever reads something else does not notice, and once the fault is gone nothing of it is left.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mount_drivers import (
    SHARDS,
    Driver,
    Family,
    Served,
    drop_pages,
    on_disk,
    pack_of,
    served,
    survey,
    within,
)
from sick_disk import Disk, sick_disk

from mstore import Store
from mstore_fuse.mounts import mounts, unmount

pytest_plugins = ["mount_drivers"]
tmp_path_factory = on_disk

PATIENCE = 60.0
"""Seconds after which a read counts as stuck, on a machine that is much too busy."""
MANY = 16
"""More readers than the kernel lets wait at once, unless it is told."""


@pytest.fixture
def at(driver: Driver, family: Family, tmp_path: Path) -> Iterator[Callable[[str | None], Served]]:
    """`at(ref)` is a mount of that ref, or of the whole store; each is made once."""
    with ExitStack() as stack:
        made: dict[str | None, Served] = {}

        def mounted(ref: str | None) -> Served:
            if ref not in made:
                point = tmp_path / f"mnt {ref}"
                made[ref] = stack.enter_context(served(driver, family.store, ref, point))
            return made[ref]

        yield mounted


def looked_at(family: Family, shown: Path, ref: str) -> dict[str, int]:
    """The errors of a ref's files, each read whole; what is read is right."""
    return within(PATIENCE, lambda: survey(shown, family.sources[ref]))


def begin(shown: Path) -> None:
    """Read a page of each shard: its header and a block of its largest tensor.

    Then the record of that tensor is known, and reads of its other blocks get as far as these.
    """
    for name in SHARDS:
        with (shown / name).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert len(os.pread(file.fileno(), 4096, 0)) == 4096
        drop_pages(shown / name)


def flip(pack: Path) -> None:
    """Change one bit in each 64 KiB of the payloads of a pack: all blocks are damaged."""
    pack.chmod(0o644)
    data = bytearray(pack.read_bytes())
    for place in range(8192, len(data) - 200_000, 1 << 16):
        data[place] ^= 1
    pack.write_bytes(data)


def cut(pack: Path) -> None:
    pack.chmod(0o644)
    os.truncate(pack, pack.stat().st_size // 3)


def lose(pack: Path) -> None:
    pack.unlink()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("damage", [flip, cut, lose])
def test_a_damaged_pack_fails_its_own_reads_only(
    family: Family, at: Callable[[str | None], Served], damage: Callable[[Path], None]
) -> None:
    """A pack under a mount is changed, cut or removed: reads of its blocks give EIO and a line in
    the log, all others are right, in this mount, in others and in that of the whole store; when
    the pack is back, everything is readable again, without a new mount."""
    pack = pack_of(family.store, "base")
    kept = pack.with_suffix(".kept")
    shutil.copyfile(pack, kept)
    base, other, whole = at("base"), at("other"), at(None)
    if damage is not flip:
        # What was checked before it changed is another matter: see below.
        begin(base.point)
    damage(pack)
    errors = looked_at(family, base.point, "base")
    assert set(errors) == {"EIO"}
    assert "mstore_fuse" in base.log
    assert looked_at(family, other.point, "other") == {}
    assert looked_at(family, whole.point / "refs" / "other", "other") == {}
    assert set(looked_at(family, whole.point / "refs" / "base", "base")) <= {"EIO"}
    assert other.log == ""
    kept.rename(pack)
    assert looked_at(family, base.point, "base") == {}
    assert looked_at(family, whole.point / "refs" / "base", "base") == {}


@pytest.mark.sampled(3)
def test_what_was_checked_is_checked_again_if_asked_for(
    driver: Driver, family: Family, tmp_path: Path
) -> None:
    """With --verify=always a block that was right when it was first read, and changes under the
    mount, is EIO and never wrong."""
    with served(driver, family.store, "base", tmp_path / "mnt", "--verify=always") as base:
        begin(base.point)
        flip(pack_of(family.store, "base"))
        assert set(looked_at(family, base.point, "base")) == {"EIO"}


@pytest.mark.rest
def test_a_damaged_base_fails_what_is_stored_as_differences_to_it(
    driver: Driver, family: Family, at: Callable[[str | None], Served]
) -> None:
    """Where the base of a fine-tune is damaged, reads of the fine-tune are right or EIO: weights
    too, if they are stored as differences."""
    tuned = at("tuned")
    flip(pack_of(family.store, "base"))
    errors = looked_at(family, tuned.point, "tuned")
    assert set(errors) == {"EIO"}
    # Headers and the index are the base's own, in each of three files.
    assert (errors["EIO"] > 10) == (driver.codec == "dense")


@pytest.mark.rest
def test_a_map_over_a_damaged_block_ends_its_reader_alone(
    family: Family, at: Callable[[str | None], Served]
) -> None:
    """A process that touches what cannot be read gets SIGBUS; the mount and others go on."""
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'rb')\n"
        "print(len(bytes(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))))"
    )

    def mapped(path: Path) -> int:
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)
        return done.returncode

    tuned = at("tuned")
    lose(pack_of(family.store, "tuned"))
    assert mapped(tuned.point / SHARDS[0]) == -signal.SIGBUS
    assert tuned.process.poll() is None
    assert mapped(at("other").point / SHARDS[1]) == 0
    assert set(looked_at(family, tuned.point, "tuned")) == {"EIO"}


# -- a disk that fails --------------------------------------------------------------------------


@pytest.fixture
def disk(family: Family, tmp_path: Path) -> Iterator[Disk]:
    """The disk below the packs of the store."""
    with sick_disk(family.store / "packs", tmp_path) as made:
        yield made


@pytest.mark.sampled(3)
def test_an_error_of_the_disk_is_the_readers_and_passes(
    family: Family, disk: Disk, at: Callable[[str | None], Served]
) -> None:
    """While the disk gives EIO for a pack, so do reads of its blocks, in every mount; others are
    right, and once the disk works again, so is everything: nobody keeps a failure."""
    base, other, whole = at("base"), at("other"), at(None)
    refs = whole.point / "refs"
    begin(base.point)
    disk.tell({pack_of(family.store, "base").name: "EIO"})
    for shown, ref in ((base.point, "base"), (refs / "base", "base"), (base.point, "base")):
        assert set(looked_at(family, shown, ref)) == {"EIO"}
    assert "input/output error" in base.log
    assert "input/output error" in whole.log
    assert looked_at(family, other.point, "other") == {}
    assert looked_at(family, refs / "other", "other") == {}
    disk.tell({})
    assert looked_at(family, base.point, "base") == {}
    assert looked_at(family, refs / "base", "base") == {}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("code", ["EACCES", "ENOMEM"])
def test_an_error_of_this_machine_is_told_from_damage(
    family: Family, disk: Disk, at: Callable[[str | None], Served], code: str
) -> None:
    """Where the system refuses to read a pack, readers get its errno and not EIO, and the log says
    so; when it reads again, so do they."""
    base = at("base")
    begin(base.point)
    disk.tell({pack_of(family.store, "base").name: code})
    assert set(looked_at(family, base.point, "base")) == {code}
    assert os.strerror(getattr(errno, code)).lower() in base.log
    disk.tell({})
    assert looked_at(family, base.point, "base") == {}


@pytest.mark.sampled(2)
def test_too_few_descriptors_are_told_from_damage(
    family: Family, at: Callable[[str | None], Served]
) -> None:
    """A mount that can open no more packs answers EMFILE, with a line in the log, and reads are
    right when it can."""
    whole = at(None)
    refs = whole.point / "refs"
    assert looked_at(family, refs / "base", "base") == {}
    process = whole.process.pid
    limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert set(looked_at(family, refs / "other", "other")) == {"EMFILE"}
    finally:
        resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
    assert "too many open files" in whole.log.lower()
    assert looked_at(family, refs / "other", "other") == {}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("readers", [3, MANY])
def test_a_read_that_hangs_delays_no_other(
    family: Family, disk: Disk, at: Callable[[str | None], Served], readers: int
) -> None:
    """While the disk does not answer for one pack, everything else of the mount is listed, looked
    up and read: other snapshots, and of the same one what is in memory; then all is right."""
    refs = at(None).point / "refs"
    path, wanted = refs / "base" / SHARDS[0], (family.sources["base"] / SHARDS[0]).read_bytes()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(readers) as pool:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        disk.tell({pack_of(family.store, "base").name: "wait"})
        try:
            places = [number * (len(wanted) // readers) for number in range(readers)]
            reading = [pool.submit(os.pread, file.fileno(), 4096, place) for place in places]
            until(lambda: disk.waits() > 0)
            assert looked_at(family, refs / "other", "other") == {}
            listed = within(PATIENCE, lambda: [os.listdir(refs), os.listdir(refs / "base")])
            assert sorted(listed[0]) == ["base", "other", "tuned"]
            assert within(PATIENCE, lambda: path.stat().st_size) == len(wanted)
            assert not any(each.done() for each in reading)
        finally:
            disk.tell({})
        for place, each in zip(places, reading, strict=True):
            assert each.result(PATIENCE) == wanted[place : place + 4096]
    assert looked_at(family, refs / "base", "base") == {}


@pytest.mark.sampled(2)
def test_a_snapshot_that_cannot_be_looked_up_delays_no_other(
    family: Family, disk: Disk, at: Callable[[str | None], Served]
) -> None:
    """While the disk does not answer for the record of one snapshot, the others of the store are
    listed, looked up and read."""
    refs = at(None).point / "refs"
    with ThreadPoolExecutor(1) as pool:
        disk.tell({pack_of(family.store, "base").name: "wait"})
        try:
            asked = pool.submit(os.listdir, refs / "base")
            until(lambda: disk.waits() > 0)
            assert looked_at(family, refs / "other", "other") == {}
            assert not asked.done()
        finally:
            disk.tell({})
        assert SHARDS[0] in asked.result(PATIENCE)


def until(true: Callable[[], bool]) -> None:
    """Wait for something that will happen."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


# -- siblings that stand still ------------------------------------------------------------------

HOLDING = {
    "a collection": "with leases.collecting(store._catalog.layout):",
    "a write": "with store._catalog.publishing(), store._catalog.index.env.write():",
    "a lease": "if lease := leases.Lease(store._catalog.layout, store._catalog.index, 'test'):",
}


@contextmanager
def stopped(code: str, *arguments: Path) -> Iterator[None]:
    """While another process, which has run this code, is stopped in the middle of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        process.send_signal(signal.SIGSTOP)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def stop(process: int) -> None:
    """Stop a process; returns when all its threads stand still.

    One that was just taking a request would have it for good: its reader cannot be killed.
    """
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").iterdir())
    until(lambda: all("State:\tT" in (each / "status").read_text() for each in threads))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("what", HOLDING)
def test_a_sibling_that_was_stopped_is_not_waited_for(
    family: Family, at: Callable[[str | None], Served], what: str
) -> None:
    """While a process that collects, writes or reads stands still with all that it holds, mounts
    are made, read and looked up as ever, those of the whole store too."""
    code = (
        "import sys, time; from mstore import Store; from mstore.store import leases\n"
        f"store = Store.open(sys.argv[1])\n{HOLDING[what]}\n"
        "    print('holding', flush=True); time.sleep(1000)"
    )
    with stopped(code, family.store):
        for ref in ("tuned", "other"):
            assert looked_at(family, at(ref).point, ref) == {}
            assert looked_at(family, at(None).point / "refs" / ref, ref) == {}


@pytest.mark.rest
def test_a_mount_whose_process_was_stopped_delays_no_other(
    family: Family, at: Callable[[str | None], Served]
) -> None:
    """While the process of one mount stands still, its readers wait and may be killed; another
    mount of the store is made and read, mounts are listed, gc and add run; when it goes on, its
    readers get their bytes."""
    base = at("base")
    path = base.point / SHARDS[0]
    drop_pages(path)
    stop(base.process.pid)
    waiting = [subprocess.Popen(["md5sum", path], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert looked_at(family, at("other").point, "other") == {}
        assert looked_at(family, at(None).point / "refs" / "base", "base") == {}
        listed = within(PATIENCE, mounts)
        assert {info.mountpoint for info in listed} >= {base.point, at(None).point}
        with Store.open(family.store) as store:
            assert within(PATIENCE, store.gc).snapshots_dropped == ()
            added = within(PATIENCE, lambda: store.add(family.sources["other"], name="again"))
            assert added.snapshot
        waiting[0].kill()
        assert waiting[0].wait(PATIENCE) == -signal.SIGKILL
        assert waiting[1].poll() is None
    finally:
        base.process.send_signal(signal.SIGCONT)
        for each in waiting:
            each.wait(PATIENCE)
    assert waiting[1].returncode == 0
    assert looked_at(family, base.point, "base") == {}


# -- the store itself ---------------------------------------------------------------------------


@pytest.mark.rest
def test_a_store_that_is_gone_is_an_error_at_most(
    family: Family, at: Callable[[str | None], Served]
) -> None:
    """The store is moved away, then put back: meanwhile reads are right or EIO, names that were
    known stay; afterwards all is right.  Removed for good, what nobody has read is EIO, with a line
    in the log, and the process goes on."""
    shown = {"base": at("base").point, "other": at(None).point / "refs" / "other"}
    tuned = at("tuned")
    (shown["other"] / "config.json").read_bytes()
    away = family.store.with_name("away")
    family.store.rename(away)
    for ref, point in shown.items():
        assert set(looked_at(family, point, ref)) <= {"EIO"}
        assert (point / SHARDS[1]).stat().st_size
    away.rename(family.store)
    for ref, point in shown.items():
        assert looked_at(family, point, ref) == {}
    shutil.rmtree(family.store)
    assert set(looked_at(family, tuned.point, "tuned")) == {"EIO"}
    assert sorted(os.listdir(tuned.point)) == sorted(os.listdir(family.sources["tuned"]))
    assert "mstore_fuse" in tuned.log
    assert tuned.process.poll() is None
    for ref, point in shown.items():
        assert set(looked_at(family, point, ref)) <= {"EIO"}


def remove_index(index: Path) -> None:
    shutil.rmtree(index)


def remove_index_file(index: Path) -> None:
    (index / "data.mdb").unlink()


def empty_index(index: Path) -> None:
    os.truncate(index / "data.mdb", 0)


def overwrite_index(index: Path) -> None:
    """All pages but the two that say where the others are."""
    with (index / "data.mdb").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(8192)
        file.write(b"\xa5" * (size - 8192))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("damage", "answers"),
    [
        # What is mapped outlives its name.
        (remove_index, set()),
        (remove_index_file, set()),
        (overwrite_index, {"EIO"}),
        # The kernel ends a process that touches a map behind the end of its file.
        (empty_index, {"ENOTCONN"}),
    ],
)
def test_an_index_that_is_damaged_gives_no_wrong_bytes(
    family: Family,
    at: Callable[[str | None], Served],
    damage: Callable[[Path], None],
    answers: set[str],
) -> None:
    """The index is removed, emptied or overwritten under a mount: reads are right or an error, in
    bounded time; what the kernel has in memory stays readable unless the mount is gone; a mount
    that is gone is listed as such, and can be cleared."""
    base, whole = at("base"), at(None)
    known = base.point / "config.json"
    known.read_bytes()
    damage(family.store / "index")
    for shown in (base.point, whole.point / "refs" / "base"):
        # A request that it was answering while it ended.
        found = set(looked_at(family, shown, "base")) - {"ECONNABORTED"}
        assert found == answers
    if "ENOTCONN" in answers:
        assert base.process.wait(PATIENCE) == -signal.SIGBUS
        (listed,) = (info for info in mounts() if info.mountpoint == base.point)
        assert not listed.alive
        unmount(base.point)
        assert os.listdir(base.point) == []
        return
    assert base.process.poll() is None
    assert known.read_bytes() == (family.sources["base"] / "config.json").read_bytes()
    assert ("the index could not be used" in base.log) == bool(answers)
