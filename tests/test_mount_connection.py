"""mstore_fuse.connection: what the kernel asks of a mount, and what it need not ask.

Skipped where this machine cannot mount (no /dev/fuse): `require_fuse` says so.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mount_drivers import on_disk

from mstore.terms.errors import Unavailable
from mstore_fuse import connection, mount_table
from mstore_fuse.connection import Opened, _Nodes
from mstore_fuse.fuse_driver import require_fuse
from mstore_fuse.protocol import Room, Status

tmp_path_factory = on_disk

try:
    require_fuse()
except Unavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)

MANY = 3000
FOLDERS = [f"{number:064x}" for number in range(MANY)]


class Folders:
    """A directory of many directories, which all have an empty file; counts what it is asked."""

    def __init__(self, lasts: float) -> None:
        self.asked: Counter[str] = Counter()
        self._lasts = lasts

    def status(self, path: str) -> Status:
        self.asked["status"] += 1
        if path not in ("", *FOLDERS) and not path.endswith("/file"):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._status(path)

    def _status(self, path: str) -> Status:
        mode = stat.S_IFREG | 0o444 if path.endswith("/file") else stat.S_IFDIR | 0o555
        lasts = self._lasts if path else 60.0
        owner = (os.getuid(), os.getgid())
        return Status(1 + hash(path) % (1 << 62), mode, 0, 0, 5, owner, 4096, lasts)

    def absent_for(self, path: str) -> float:
        return self._lasts

    def listing(self, path: str) -> list[tuple[str, Status | None, int, int]]:
        self.asked["listing"] += 1
        if path:
            return [("file", None, 7, stat.S_IFREG)]
        return [(name, self._status(name), 1, stat.S_IFDIR) for name in FOLDERS]

    def open(self, path: str, flags: int) -> Opened:
        return Opened(1, keep_cache=True, direct=False)

    def read(self, path: str, handle: int, offset: int, size: int) -> list[bytes]:
        return []

    def release(self, path: str, handle: int) -> None:
        self.asked["release"] += 1

    def room(self, path: str) -> Room:
        return Room(4096, 4096, 0, MANY, 255)

    def label(self, path: str, name: str) -> bytes:
        if name == "user.wrong":
            raise KeyError(name)
        if name != "user.long":
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return b"x" * 1000

    def labels(self, path: str) -> list[str]:
        return ["user.long"]


@contextmanager
def mounted(point: Path, lasts: float) -> Iterator[Folders]:
    """The folders as a mount that this process serves; others must read it."""
    point.mkdir()
    folders = Folders(lasts)
    device = connection.mount(point, "folders", subtype="test")
    serving = threading.Thread(target=connection.serve, args=(device, folders))
    serving.start()
    try:
        yield folders
    finally:
        mount_table.detach(point, lazy=True)
        serving.join()


def said(*command: str) -> list[str]:
    """The lines that a program prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return done.stdout.splitlines()


def test_a_long_listing_asks_for_no_name(tmp_path: Path) -> None:
    """`ls -l` of thousands of directories gets all of them, each once, with their attributes, and
    the kernel asks for none of them by name."""
    with mounted(tmp_path / "mnt", 60.0) as folders:
        lines = said("ls", "-l", str(tmp_path / "mnt"))[1:]
        assert [line.split()[-1] for line in lines] == FOLDERS
        assert all(line.startswith("dr-xr-xr-x") for line in lines)
        assert folders.asked["listing"] == 1
        assert folders.asked["status"] < 10


def test_what_does_not_last_is_asked_for_again(tmp_path: Path) -> None:
    """Attributes that may not be kept are asked for by name, each time."""
    with mounted(tmp_path / "mnt", 0.0) as folders:
        said("stat", str(tmp_path / "mnt" / FOLDERS[0]))
        before = folders.asked["status"]
        said("stat", str(tmp_path / "mnt" / FOLDERS[0]))
        assert folders.asked["status"] > before


def test_a_name_that_is_not_there_is_asked_for_once(tmp_path: Path) -> None:
    """That a name is absent is kept as long as the mount says."""
    with mounted(tmp_path / "mnt", 60.0) as folders:
        for _ in range(3):
            said("sh", "-c", f"! test -e {tmp_path}/mnt/nothing")
        assert folders.asked["status"] < 4


def test_files_below_are_found_opened_and_closed(tmp_path: Path) -> None:
    """A file that a listing told without attributes has them, reads as empty, and is released."""
    with mounted(tmp_path / "mnt", 60.0) as folders:
        path = tmp_path / "mnt" / FOLDERS[1]
        assert said("ls", "-l", str(path))[1].startswith("-r--r--r--")
        assert said("cat", str(path / "file")) == []
        names = "import os, sys; print(os.listxattr(sys.argv[1]), len(os.getxattr(*sys.argv[1:])))"
        assert said("python3", "-c", names, str(path), "user.long") == ["['user.long'] 1000"]
    assert folders.asked["release"] == 1


def test_a_bug_answers_the_request_and_ends_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody expected is EIO for who asked, with a line in the log; others go on."""
    wrong = "import os, sys; os.getxattr(sys.argv[1], 'user.wrong')"
    with mounted(tmp_path / "mnt", 60.0):
        for _ in range(20):
            done = subprocess.run(
                ["python3", "-c", wrong, str(tmp_path / "mnt")],
                check=False,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert "Errno 5" in done.stderr
        assert len(said("ls", str(tmp_path / "mnt"))) == MANY
    assert "KeyError" in caplog.text


def test_other_users_mount_by_fusermount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root gets the device from fusermount3, and its reason if it refuses."""
    if shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is not installed")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with mounted(tmp_path / "mnt", 60.0):
        assert said("ls", str(tmp_path / "mnt")) == FOLDERS
        entry = mount_table.at(tmp_path / "mnt")
        assert entry is not None
        assert (entry.type, entry.source) == ("fuse.test", "folders")
    with pytest.raises(Unavailable, match="fusermount3: "):
        connection.mount(tmp_path / "missing", "nothing", subtype="test")


def test_a_mount_that_is_refused_says_why(tmp_path: Path) -> None:
    """The error has the system's reason and the directory."""
    with pytest.raises(Unavailable, match="could not be made") as caught:
        connection.mount(tmp_path / "missing", "nothing", subtype="test")
    assert str(tmp_path / "missing") in str(caught.value)


def test_a_node_is_a_path_until_all_answers_with_it_are_forgotten() -> None:
    """Each answer with a node counts; then the number is not used again."""
    nodes = _Nodes()
    first = nodes.told("a")
    assert nodes.told("a") == first
    assert (nodes.path(first), nodes.path(1)) == ("a", "")
    nodes.forget([(first, 1), (1, 5)])
    assert nodes.path(first) == "a"
    nodes.forget([(first, 1), (99, 1)])
    with pytest.raises(OSError, match="Stale"):
        nodes.path(first)
    assert nodes.told("a") != first
    assert nodes.path(1) == ""
