"""The one module that changes a disk: announced, atomic, and its errors name the path."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore import fs
from mstore.fs import LockFile, NewFile, Operation
from mstore.terms.errors import Conflict, StorageFailed


class Listener:
    """An observer that keeps what was announced."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def __call__(self, operation: Operation) -> None:
        self.operations.append(operation)

    def kinds(self) -> list[str]:
        return [operation.kind for operation in self.operations]


# -- new files ---------------------------------------------------------------------------------


def test_appends_follow_each_other(tmp_path: Path) -> None:
    """Each append returns its offset; the file is their concatenation and can be read back."""
    file = NewFile(tmp_path / "f")
    assert [file.append(b"abc"), file.append(b""), file.append(memoryview(b"defg"))] == [0, 3, 3]
    assert (file.size, file.path.read_bytes()) == (7, b"abcdefg")
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "f").read_bytes() == b"abcdefg"


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system writes a part, the rest follows."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    file = NewFile(tmp_path / "f")
    file.append(b"abcdefgh")
    file.append(b"ij")
    file.close()
    assert (tmp_path / "f").read_bytes() == b"abcdefghij"


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    """A file, or a symlink to anywhere, of that name is an error and stays as it is."""
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("f", "link"):
        with pytest.raises(StorageFailed) as refusal:
            NewFile(tmp_path / name)
        assert refusal.value.errno == errno.EEXIST
    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_modes(tmp_path: Path) -> None:
    """A new file is its owner's alone, and read-only for all once it is protected."""
    file = NewFile(tmp_path / "f")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    file.protect()
    file.close()
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o444


def test_abandon_removes_the_file(tmp_path: Path) -> None:
    """An abandoned file is gone, also after close, and also if it was gone before."""
    for prepare in (NewFile.close, lambda file: file.path.unlink(), lambda file: None):
        file = NewFile(tmp_path / "f")
        file.append(b"data")
        prepare(file)
        file.abandon()
        assert list(tmp_path.iterdir()) == []


def test_abandon_spares_another_file(tmp_path: Path) -> None:
    """A file that was given the name of an abandoned one stays, whether that is closed or not."""
    for prepare in (NewFile.close, lambda file: None):
        file = NewFile(tmp_path / "f")
        prepare(file)
        (tmp_path / "other").write_text("precious")
        (tmp_path / "other").rename(file.path)
        file.abandon()
        assert file.path.read_text() == "precious"
        file.path.unlink()


# -- announcements -----------------------------------------------------------------------------


def _new_file(at: Path) -> None:
    NewFile(at / "new").close()


def _append(at: Path) -> None:
    file = NewFile(at / "new")
    try:
        file.append(b"data")
    finally:
        file.abandon()


def _sync(at: Path) -> None:
    file = NewFile(at / "new")
    try:
        file.sync()
    finally:
        file.abandon()


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("create", _new_file),
    ("write", _append),
    ("fsync", _sync),
    ("rename", lambda at: fs.rename(at / "file", at / "new")),
    ("link", lambda at: fs.create_whole(at / "new", b"data")),
    ("unlink", lambda at: fs.unlink(at / "file")),
    ("mkdir", lambda at: fs.make_directory(at / "new")),
    ("mkdir", lambda at: fs.make_directories(at / "new" / "below")),
    ("rmtree", lambda at: fs.remove_tree(at / "tree")),
    ("syncdir", fs.sync_directory),
    ("create", lambda at: LockFile(at / "new").release()),
    ("rename", lambda at: fs.replace_file(at / "file", "new")),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_a_change_is_announced_before_it_is_made(
    kind: str, change: Callable[[Path], object], tmp_path: Path
) -> None:
    """An observer that raises OSError stops the change; the caller gets StorageFailed."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").touch()

    def refuse(operation: Operation) -> None:
        if operation.kind == kind:
            raise OSError(errno.EIO, "no")

    with fs.observed(refuse), pytest.raises(StorageFailed) as refusal:
        change(tmp_path)
    assert refusal.value.errno == errno.EIO
    assert refusal.value.where is not None
    assert refusal.value.where.startswith(str(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "leaf", "tree"]
    assert (tmp_path / "file").read_text() == "old"
    change(tmp_path)


def test_a_write_is_announced_with_place_and_data(tmp_path: Path) -> None:
    """Observers learn path, offset and bytes of each write, and nothing once they are done."""
    listener = Listener()
    with fs.observed(listener):
        file = NewFile(tmp_path / "f")
        file.append(b"ab")
        file.append(b"cd")
    file.abandon()
    path = str(tmp_path / "f")
    assert listener.operations == [
        Operation("create", path),
        Operation("write", path, offset=0, data=b"ab"),
        Operation("write", path, offset=2, data=b"cd"),
    ]


def test_the_inner_observer_hears_it(tmp_path: Path) -> None:
    """Observers nest: the innermost is told, and the outer one again afterwards."""
    outer, inner = Listener(), Listener()
    with fs.observed(outer):
        with fs.observed(inner):
            fs.make_directory(tmp_path / "a")
        fs.make_directory(tmp_path / "b")
    assert [o.path for o in inner.operations] == [str(tmp_path / "a")]
    assert [o.path for o in outer.operations] == [str(tmp_path / "b")]


# -- names -------------------------------------------------------------------------------------


def test_errors_name_the_path_and_say_what_to_do(tmp_path: Path) -> None:
    """A refusal of the system carries its errno, the path, and a hint where there is one."""
    with pytest.raises(StorageFailed) as missing:
        fs.unlink(tmp_path / "gone")
    assert (missing.value.errno, missing.value.where) == (errno.ENOENT, str(tmp_path / "gone"))
    assert missing.value.what == "no such file or directory"
    with pytest.raises(StorageFailed) as full, fs.translated("there"):
        raise OSError(errno.ENOSPC, "whatever")
    assert (full.value.what, full.value.where) == ("no space left on device", "there")
    assert full.value.hint is not None
    with pytest.raises(StorageFailed, match="odd"), fs.translated("there"):
        raise OSError("odd")


def test_missing_things_may_be_tolerated(tmp_path: Path) -> None:
    """unlink with missing_ok and remove_tree are quiet about what is not there."""
    fs.unlink(tmp_path / "gone", missing_ok=True)
    fs.remove_tree(tmp_path / "gone")


def test_make_directory_says_if_it_is_new(tmp_path: Path) -> None:
    """True for a new directory, False for one that was there, an error for a file of that name."""
    assert fs.make_directory(tmp_path / "d")
    assert not fs.make_directory(tmp_path / "d", exist_ok=True)
    with pytest.raises(StorageFailed):
        fs.make_directory(tmp_path / "d")


def test_make_directories_syncs_each_new_name(tmp_path: Path) -> None:
    """Every missing parent is made, and the directory that holds its name is synced."""
    listener = Listener()
    with fs.observed(listener):
        fs.make_directories(tmp_path / "a" / "b")
        fs.make_directories(tmp_path / "a" / "b")
    told = [(operation.kind, Path(operation.path)) for operation in listener.operations]
    assert told == [
        ("mkdir", tmp_path / "a"),
        ("syncdir", tmp_path),
        ("mkdir", tmp_path / "a" / "b"),
        ("syncdir", tmp_path / "a"),
    ]


def test_remove_tree_does_not_follow_links(tmp_path: Path) -> None:
    """A symlink in the tree goes, what it points at stays."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    fs.remove_tree(tmp_path / "tree")
    assert [p.name for p in tmp_path.rglob("*")] == ["kept", "file"]


def test_replace_text_is_durable(tmp_path: Path) -> None:
    """New text is written, synced, renamed over the old, and then the directory is synced."""
    (tmp_path / "staging").mkdir()
    (tmp_path / "text").write_text("old")
    listener = Listener()
    with fs.observed(listener):
        fs.replace_file(tmp_path / "text", "neu ü\n", staging=tmp_path / "staging")
    assert listener.kinds() == ["create", "write", "fsync", "rename", "syncdir"]
    assert Path(listener.operations[0].path).parent == tmp_path / "staging"
    assert listener.operations[-1].path == str(tmp_path)
    assert (tmp_path / "text").read_text(encoding="utf-8") == "neu ü\n"
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("kind", ["create", "write", "fsync", "rename"])
def test_a_failed_replacement_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Whatever fails before the rename: the old text is there and no temporary file."""

    def refuse(operation: Operation) -> None:
        if operation.kind == kind:
            raise OSError(errno.ENOSPC, "full")

    (tmp_path / "text").write_text("old")
    with fs.observed(refuse), pytest.raises(StorageFailed):
        fs.replace_file(tmp_path / "text", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert (tmp_path / "text").read_text() == "old"


def test_create_whole_is_done_once(tmp_path: Path) -> None:
    """The first to make a name makes it whole; the next changes nothing and learns that."""
    assert fs.create_whole(tmp_path / "f", b"first")
    assert not fs.create_whole(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


# -- locks -------------------------------------------------------------------------------------


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    """A held lock is refused to any other holder, of this process too, until it is released."""
    first, second = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire(blocking=False)
    first.release()
    first.release()
    assert second.acquire(blocking=False)
    second.release()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    """Kill the process that holds a lock, and it is free."""
    code = (
        "import sys, time, pathlib; from mstore.fs import LockFile\n"
        "lock = LockFile(pathlib.Path(sys.argv[1])); lock.acquire()\n"
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = LockFile(tmp_path / "lock", create=False)
        assert not lock.acquire(blocking=False)
        holder.send_signal(signal.SIGKILL)
    assert lock.acquire(blocking=False)
    lock.release()


def test_a_removed_lock_is_not_current(tmp_path: Path) -> None:
    """Whoever locked a file that was removed or replaced meanwhile can tell."""
    lock = LockFile(tmp_path / "lock")
    assert lock.is_current()
    other = LockFile(tmp_path / "lock")
    other.remove()
    assert not lock.is_current()
    LockFile(tmp_path / "lock").release()
    assert not lock.is_current()
    lock.release()


def test_a_lock_that_is_only_looked_at_is_not_made(tmp_path: Path) -> None:
    """Without `create` a missing lock file is an error, and stays missing."""
    with pytest.raises(StorageFailed):
        LockFile(tmp_path / "lock", create=False)
    assert list(tmp_path.iterdir()) == []


# -- filesystems -------------------------------------------------------------------------------

MOUNTINFO = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /data rw shared:5 master:1 - xfs /dev/sdb rw
31 22 0:27 / /data/share rw,nosuid - nfs4 server:/share rw,vers=4.2
32 22 0:28 / /with\040space\011tab rw - cifs //server/x rw
33 22 0:29 / /twice rw - ext4 /dev/sdc rw
34 33 0:30 / /twice rw - fuse.sshfs host: rw
35 22 0:31 / /back\134slash rw - nfs server:/ rw
not a line of mountinfo
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/store", "ext4"),
        ("/", "ext4"),
        ("/data", "xfs"),
        ("/data/store", "xfs"),
        ("/database", "ext4"),
        ("/data/share", "nfs4"),
        ("/data/share/deep/er", "nfs4"),
        ("/data/shared", "xfs"),
        ("/with space\ttab/x", "cifs"),
        ("/twice/x", "fuse.sshfs"),
        ("/back\\slash/x", "nfs"),
        ("/data/../data/share", "nfs4"),
    ],
)
def test_filesystem_type(path: str, kind: str, tmp_path: Path) -> None:
    """The longest mount point that holds a path counts, of equal ones the last, unescaped."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO)
    assert fs.filesystem_type(Path(path), mountinfo) == kind


def test_filesystem_type_of_this_machine(tmp_path: Path) -> None:
    """The kernel's own table is understood; where there is none, the type is unknown."""
    assert fs.filesystem_type(Path("/proc/self")) == "proc"
    assert fs.filesystem_type(Path("/"), tmp_path / "missing") == ""


@given(st.binary(max_size=300))
def test_no_mountinfo_is_a_surprise(table: bytes) -> None:
    """Whatever the table says, a type or nothing comes out."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(table)
        file.flush()
        assert isinstance(fs.filesystem_type(Path("/somewhere"), Path(file.name)), str)


def test_require_empty(tmp_path: Path) -> None:
    """Missing and empty directories pass; files, links and full directories are refused."""
    fs.require_empty(tmp_path / "missing")
    fs.require_empty(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(Conflict):
            fs.require_empty(path)


@pytest.mark.parametrize("back", [False, True])
def test_what_is_moved_away_while_asking_may_be_written(
    back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that another process moves away, or replaces, between two looks is not one that
    this user may not write."""
    table = tmp_path / "table"
    table.mkdir()
    ask = os.access

    def asked(path: Path, mode: int, *, effective_ids: bool) -> bool:
        if path == table and not (tmp_path / "aside").exists():
            table.rename(tmp_path / "aside")
            found = ask(path, mode, effective_ids=effective_ids)
            if back:
                table.mkdir()
            return found
        return ask(path, mode, effective_ids=effective_ids)

    monkeypatch.setattr(os, "access", asked)
    assert fs.may_write(table)
    assert (tmp_path / "aside").exists()
