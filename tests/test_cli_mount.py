"""`mount`, `mounts` and `unmount` from the command line."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from cli_runs import Program, unheard
from mount_drivers import on_disk

from mstore.terms.errors import Unavailable
from mstore_cli.commands.mount import notify_ready
from mstore_cli.keys import DOCUMENTS, keys_of
from mstore_fuse.driver import MountInfo
from mstore_fuse.fuse_driver import require_fuse

tmp_path_factory = on_disk


def can_mount() -> bool:
    try:
        require_fuse()
    except Unavailable:
        return False
    return True


needs_fuse = pytest.mark.skipif(not can_mount(), reason="this machine cannot mount")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A store with one snapshot, `tiny`."""
    root = tmp_path_factory.mktemp("mounting")
    content = random.Random(3).randbytes(300_000)
    write_safetensors(root / "m" / "model.safetensors", [("t", "U8", (300_000,), content)])
    mstore = Program(root / "store")
    mstore.succeed("init")
    mstore.succeed("add", root / "m", "--name", "tiny")
    return mstore


@pytest.fixture
def directory(store: Program, tmp_path: Path) -> Iterator[Path]:
    """An empty directory, on which nothing is mounted any more when the test ends."""
    point = tmp_path / "mnt"
    point.mkdir()
    yield point
    if os.path.ismount(point):
        store("unmount", point)


@needs_fuse
def test_mount_and_unmount(store: Program, directory: Path) -> None:
    """A mount answers when the command returns, is listed, and ends when told to."""
    mounted = store.succeed("mount", "tiny", directory, "--json").document
    assert list(mounted) == [key.name for key in DOCUMENTS["mount"]]
    assert (mounted["mountpoint"], mounted["revision"]) == (str(directory), "tiny")
    content = (directory / "model.safetensors").read_bytes()
    assert content == store.succeed("cat", "tiny:model.safetensors").raw
    listed = store.succeed("mounts", "--json").document["mounts"]
    assert mounted in listed
    assert all(list(one) == [key.name for key in keys_of(MountInfo)] for one in listed)
    assert str(directory) in store.succeed("mounts").out
    assert str(directory) in store.succeed("mounts", "-q").lines
    ended = store.succeed("unmount", directory, "--json").document
    assert ended == {"unmounted": str(directory)}
    assert not os.path.ismount(directory)


@needs_fuse
def test_a_dead_mount_is_told_with_its_remedy(store: Program, directory: Path) -> None:
    """Where the process behind a mount was killed, `mounts` says so, and what to type."""
    serving = store.succeed("mount", "tiny", directory, "--json").document
    remedy = f"mstore unmount {directory}"
    assert remedy not in store.succeed("mounts").out
    os.kill(serving["pid"], signal.SIGKILL)
    for _ in range(600):
        [told] = [
            one
            for one in store.succeed("mounts", "--json").document["mounts"]
            if one["mountpoint"] == str(directory)
        ]
        if not told["alive"]:
            break
        time.sleep(0.1)
    assert (told["alive"], told["pid"], told["user"]) == (False, None, os.geteuid())
    shown = store.succeed("mounts").lines
    assert any(line.startswith(str(directory)) and line.endswith("stale") for line in shown)
    assert f"  {remedy}" in shown
    store.succeed(*remedy.split()[1:])
    assert not os.path.ismount(directory)


@needs_fuse
def test_mount_all(store: Program, directory: Path) -> None:
    """--all shows the whole store: its refs and its snapshots."""
    assert "the whole store" in store.succeed("mount", "--all", directory).out
    assert (directory / "refs" / "tiny" / "model.safetensors").is_file()
    assert store.succeed("unmount", directory, "-q").lines == [str(directory)]


@needs_fuse
def test_mount_point_in_use(store: Program, directory: Path) -> None:
    """A mount point that is not empty is an error with exit 1, and nothing is mounted."""
    (directory / "file").write_text("mine")
    done = store("mount", "tiny", directory)
    assert done.status == 1
    assert done.out == ""
    assert "not empty" in done.err
    assert not os.path.ismount(directory)


def wait_until_idle(pid: int) -> None:
    """Until a process sleeps and takes no time of the processor for half a second."""
    seen: list[str] | None = None
    for _ in range(600):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, *times = fields[0], *fields[11:13]
        if state == "S" and times == seen:
            return
        seen = times if state == "S" else None
        time.sleep(0.5)
    raise AssertionError("it is never idle")


@pytest.mark.rest
@needs_fuse
def test_foreground_ends_with_ctrl_c(store: Program, directory: Path) -> None:
    """In the foreground the mount is announced when it answers, and Ctrl-C ends it cleanly."""
    line = ["--store", str(store.store), "mount", "tiny", str(directory), "--foreground"]
    running = subprocess.Popen(
        [sys.executable, "-m", "mstore_cli", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == f"mounted tiny at {directory}\n"
    assert os.path.ismount(directory)
    # The program has gone from saying so to waiting for the end.
    wait_until_idle(running.pid)
    running.send_signal(signal.SIGINT)
    _out, err = running.communicate(timeout=300)
    assert (running.returncode, err) == (0, "")
    assert not os.path.ismount(directory)


@pytest.mark.rest
@needs_fuse
@pytest.mark.parametrize("foreground", [[], ["--foreground"]])
def test_a_mount_that_cannot_be_announced_is_not_left(
    foreground: list[str], store: Program, directory: Path
) -> None:
    """If the result cannot be written, the command fails and nothing stays mounted."""
    done = unheard("--store", str(store.store), "mount", "tiny", str(directory), *foreground)
    assert done.returncode == 1
    assert b"no space left" in done.stderr
    assert not os.path.ismount(directory)


def test_without_fuse(store: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no FUSE, the error names `mstore checkout`, in the store that was given."""
    # Not as an attribute: the package may have a function of the module's name.
    monkeypatch.setattr(
        import_module("mstore_fuse.fuse_driver"), "DEVICE", tmp_path / "dev" / "fuse"
    )
    done = store("mount", "tiny", tmp_path)
    assert done.status == 1
    assert done.out == ""
    assert " checkout REF DIR" in done.err


@pytest.mark.rest
@needs_fuse
def test_options_of_mount(store: Program, directory: Path, tmp_path: Path) -> None:
    """The options reach the mount, and mistakes in them are told in the words of the command."""
    log = tmp_path / "log"
    line = ("mount", "tiny", directory, "--log", log, "--cache", "8MiB", "--verify", "always")
    said = store.succeed(*line, "--follow", "--show-meta").lines
    assert any("--safetensors-load-strategy=prefetch" in text for text in said)
    assert ".mstore" in os.listdir(directory)
    assert os.getxattr(directory, "user.mstore.ref") == b"tiny"
    assert "serving tiny" in log.read_text()
    store.succeed("unmount", directory)
    for given, told in [
        (["--cache", "much"], "--cache"),
        (["--verify", "never"], "--verify"),
        (["--log", tmp_path / "no" / "log"], "cannot be written"),
    ]:
        done = store("mount", "tiny", directory, *given)
        assert (done.status, done.out) == (1 if given[0] == "--log" else 2, "")
        assert told in done.err
    snapshot = store.succeed("show", "tiny", "-q").lines[0]
    done = store("mount", snapshot, directory, "--follow")
    assert done.status == 2
    assert "--follow" in done.err
    assert "mstore" in done.err
    assert not os.path.ismount(directory)


@pytest.mark.rest
@needs_fuse
def test_a_stale_mount_is_cleared_by_the_next(store: Program, directory: Path) -> None:
    """`mount` where a mount crashed clears it and says so."""
    serving = store.succeed("mount", "tiny", directory, "--json").document
    os.kill(serving["pid"], signal.SIGKILL)
    for _ in range(600):
        if not Path(f"/proc/{serving['pid']}/cmdline").exists():
            break
        time.sleep(0.1)
    assert store.succeed("mount", "tiny", directory).lines[0].startswith("cleared a stale mount")
    assert (directory / "model.safetensors").stat().st_size > 300_000
    store.succeed("unmount", directory)
    assert not os.path.ismount(directory)


@needs_fuse
def test_unmount_all(store: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--all ends every mount and tells each; one in use is told with what to type, exit 1."""
    module = import_module("mstore_fuse.mounts")
    listed = module.mounts

    def ours(user: int | None = None) -> list[MountInfo]:
        # Other tests have mounts, too.
        return [one for one in listed(user) if one.mountpoint.is_relative_to(tmp_path)]

    monkeypatch.setattr(module, "mounts", ours)
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        place.mkdir()
        store.succeed("mount", "tiny", place)
    with (one / "model.safetensors").open("rb"):
        done = store("unmount", "--all", "--json")
        assert done.status == 1
        assert done.document == {"unmounted": [str(two)], "failed": [str(one)]}
        assert list(done.document) == [key.name for key in DOCUMENTS["unmount --all"]]
        assert f"mstore unmount {one} --lazy" in done.err
        assert store.succeed("unmount", "--all", "--lazy").lines == [f"unmounted {one}"]
    assert store.succeed("unmount", "--all").lines == ["nothing is mounted"]


@pytest.mark.parametrize("given", [[], ["--all", "DIR"]])
def test_unmount_needs_one_of_both(store: Program, given: list[str]) -> None:
    """A directory, or --all: neither and both are wrong usage."""
    assert store("unmount", *given).status == 2


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY=1 goes to the socket that systemd names, and a socket that is gone is no error."""
    name = f"\0mstore-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        notify_ready()
        assert heard.recv(100) == b"READY=1\n"
    notify_ready()
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_ready()


@needs_fuse
def test_systemd_is_told_when_the_mount_answers(
    store: Program, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message comes when the mount answers, not before."""
    told: list[bool] = []
    done = "mstore_cli.commands.mount.notify_ready"
    monkeypatch.setattr(done, lambda: told.append(os.path.ismount(directory)))
    store.succeed("mount", "tiny", directory)
    assert told == [True]
