"""Other users, groups and mounts for tests that root runs: real processes in a namespace of mounts.

A `World` is a directory that everybody may enter, and a mount namespace of its own in which the
interpreter and this checkout can be reached by everybody, wherever they lie, and `/dev/fuse` be
opened.  Nothing outside of it changes: users have their accounts in this namespace only.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("unshare", "nsenter", "setpriv", "mount")


@dataclass(frozen=True)
class User:
    """Somebody: a number, groups (the first is the user's own), a umask, and a home."""

    number: int
    groups: tuple[int, ...]
    home: Path
    umask: int = 0o022


@dataclass
class World:
    """A place for several users."""

    path: Path
    holder: int
    _hidden: dict[Path, Path] = field(default_factory=dict)

    def root(self, command: str) -> str:
        """Run a line of the shell as root within the namespace; it has to succeed."""
        return _checked(self.try_root(command))

    def try_root(self, command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a line of the shell as root within the namespace, whatever comes of it."""
        return self._enter(["sh", "-ec", command], self.path, seconds=seconds)

    def run(
        self, user: User, command: str, directory: Path, store: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of bash as somebody, whatever comes of it; both streams are `stdout`."""
        groups = ",".join(map(str, user.groups))
        line = [
            *("setpriv", f"--reuid={user.number}", f"--regid={user.groups[0]}"),
            *(f"--groups={groups}", "--"),
            *("bash", "-c", f"umask {user.umask:o}; {command}"),
        ]
        environment = {
            "HOME": str(user.home),
            "PATH": f"{self.path / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'fuse'}:{ROOT / 'cli'}:{ROOT / 'tests'}",
            "NO_COLOR": "1",
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
        }
        if store is not None:
            environment["MSTORE_STORE"] = str(store)
        return self._enter(line, directory, environment)

    def user(self, number: int, *groups: int, umask: int = 0o022, home: bool = True) -> User:
        """Somebody new, with a home, or with one that cannot be written."""
        with (self.path / "passwd").open("a") as accounts:
            # fusermount3 serves nobody without a name.
            accounts.write(f"u{number}:x:{number}:{number}::{self.path}:/bin/sh\n")
        at = self.path / f"home{number}"
        if not home:
            at.mkdir(mode=0o755)
            return User(number, (number, *groups), at, umask)
        at.mkdir()
        at.chmod(0o755)
        os.chown(at, number, number)
        return User(number, (number, *groups), at, umask)

    def _enter(
        self,
        line: list[str],
        directory: Path,
        environment: dict[str, str] | None = None,
        seconds: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        # The directory by its name within: what is mounted there is seen nowhere else.
        command = ["nsenter", f"--target={self.holder}", "--mount", "env", f"--chdir={directory}"]
        return subprocess.run(
            [*command, *line],
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )

    def open_up(self, path: Path) -> None:
        """Let everybody reach `path`: a directory above it that is closed shows only the way."""
        for above, child in pairwise([*reversed(path.parents), path]):
            if above in self._hidden:
                source = self._hidden[above] / child.name
                self.root(
                    f"mkdir -p {child}; mountpoint -q {child} || mount --bind {source} {child}"
                )
            elif not above.stat().st_mode & stat.S_IXOTH:
                kept = self.path / "hidden" / str(len(self._hidden))
                self._hidden[above] = kept
                self.root(
                    f"mkdir -p {kept}; mount --bind {above} {kept}; "
                    f"mount -t tmpfs -o mode=755 none {above}; "
                    f"mkdir -p {child}; mount --bind {kept / child.name} {child}"
                )


def why_not() -> str | None:
    """Why there can be no world here; None where there can."""
    if os.geteuid() != 0:
        return "only root can be several users"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {missing[0]}"
    # A mount as well: a container may be root and still not be let.
    tried = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", "mount -t tmpfs none /mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no mounts are allowed here: {tried.stderr.strip()}"


@contextmanager
def world() -> Iterator[World]:
    """A world, taken away with all its mounts when the block ends."""
    path = Path(tempfile.mkdtemp(prefix="mstore-users-", dir="/tmp"))
    path.chmod(0o755)
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 3600"],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        made = World(path, holder.pid)
        interpreter = Path(sys.executable)
        for needed in (ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
            made.open_up(needed)
        shutil.copy("/etc/passwd", path / "passwd")
        made.root(f"mount --bind {path}/passwd /etc/passwd")
        (path / "bin").mkdir()
        program = path / "bin" / "mstore"
        program.write_text(f'#!/bin/sh\nexec {interpreter} -m mstore_cli "$@"\n')
        program.chmod(0o755)
        python = path / "bin" / "python"
        # No link: an environment is found by where its interpreter is called.
        python.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
        python.chmod(0o755)
        if Path("/dev/fuse").exists():
            made.root(f"mknod -m 666 {path}/fuse c 10 229; mount --bind {path}/fuse /dev/fuse")
        yield made
    finally:
        # Mounts that a failed test left are served by processes of this namespace.
        for number in _within(holder.pid):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        holder.wait()
        shutil.rmtree(path, ignore_errors=True)


def _within(holder: int) -> list[int]:
    """The processes of a mount namespace, its holder last."""
    own = os.readlink(f"/proc/{holder}/ns/mnt")
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdigit() and os.readlink(path / "ns" / "mnt") == own:
                found.append(int(path.name))
    return sorted(found, key=lambda number: number == holder)


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout
    return done.stdout
