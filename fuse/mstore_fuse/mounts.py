"""Mounting from outside: start a daemon or have the kernel show a snapshot, list mounts, end them.

Used by the command line and by Python programs; keeps no state (see mount_table.py). Serves nothing
itself: a process that reads a mount which it serves waits for itself, so the server is always a
separate process.

A mount in the background belongs to no terminal and no caller: it outlives both.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mstore.terms import errors
from mstore.terms.errors import (
    Conflict,
    Incompatible,
    MstoreError,
    NotFound,
    StorageFailed,
    Unavailable,
)
from mstore.terms.phrases import Phrase, call, from_json, joined
from mstore_fuse import drivers, mount_table, readahead
from mstore_fuse.drivers import Driver, Verify
from mstore_fuse.libfuse import WITHOUT_FUSE
from mstore_fuse.mount_table import MountedSnapshot
from mstore_fuse.options import MountOptions

DEVICE = Path("/dev/fuse")

_ENDS_WITHIN = 10.0
_POLL = 0.02


class MountInfo(msgspec.Struct, frozen=True):
    """One mount.

    A mount that is not `alive` crashed: reading it fails with ENOTCONN until it is unmounted.
    `user` and root may unmount it.
    """

    mountpoint: Path
    """the directory"""
    store: Path
    """the store"""
    revision: str | None
    """what is shown; None: the whole store"""
    pid: int | None
    """the process that serves it; None if that has ended, or if the kernel does"""
    alive: bool
    """whether it answers; a dead one is cleared by `mstore unmount`"""
    user: int
    """the number of the user who mounted it"""
    driver: str
    """what serves it: `fuse`, or `erofs`, the kernel"""


def mount(
    store_path: Path,
    revision: str | None,
    mountpoint: Path,
    *,
    driver: str = Driver.FUSE,
    foreground: bool = False,
    timeout: float = 30.0,
    on_ready: Callable[[MountInfo], None] | None = None,
    on_cleared: Callable[[MountInfo], None] | None = None,
    allow_other: bool = False,
    log: Path | None = None,
    cache_bytes: int | None = None,
    verify: str = Verify.ONCE,
    follow: bool = False,
    show_meta: bool = False,
) -> MountInfo:
    """Show a snapshot (or, with `revision` None, the whole store) as files at `mountpoint`.

    Returns when the mount answers; in the foreground, when it has ended. Calls `on_ready` once the
    mount answers; if that raises, the mount is removed again. In the foreground, KeyboardInterrupt
    unmounts, waits for open files, and returns; a second one stops waiting. A mount of this user at
    the same place whose process has ended is removed first, and `on_cleared` told.

    allow_other: let other users read, too. Not root: needs user_allow_other in /etc/fuse.conf.
    log: append what goes wrong to this file; in the background it goes to syslog otherwise.
    cache_bytes, verify: as for `Store.open`.
    follow: the revision is a ref, and files opened after it moves show its new snapshot.
    show_meta: list the directory `.mstore` of a snapshot, which is found by name in any case.

    driver: `fuse`; `erofs`, by which the kernel itself reads the packs of a snapshot that is stored
    raw (as root, Linux 6.12 and later); or `auto`, `erofs` where it works and else `fuse`. With
    `erofs`, `verify` is `once`, which checks every block before this returns, whatever `timeout`
    says, or `never`; and there is no `foreground`, `log`, `follow` or `show_meta`.

    Raises NotFound, Conflict (mount point missing, not an empty directory, a mount already, a
    snapshot that is being collected),
    BadRequest (also: not with this driver), StorageFailed (the log), Unavailable (no FUSE, no
    EROFS, refused, no answer within `timeout` seconds), Incompatible (not stored raw, for `erofs`),
    Corrupt (a block that `erofs` would show), and what opening the store and finding the revision
    raise.
    """
    options = MountOptions(allow_other, log, cache_bytes, verify, follow, show_meta)
    by = drivers.choose(driver, options, revision, foreground=foreground)
    if by[0] is Driver.FUSE:
        require_fuse()
    target = _free_mountpoint(mountpoint, on_cleared)
    store = Path(os.path.realpath(store_path))
    if target.is_relative_to(store):
        raise Conflict("the mount point lies in the store itself", where=str(target))
    options = options.checked(revision, target)
    if by[0] is Driver.EROFS and revision is not None:
        refused = _shown_by_kernel(store, revision, target, options)
        if refused is None:
            return _announced(_info_at(target), on_ready)
        if len(by) == 1:
            raise refused
        try:
            require_fuse()
        except Unavailable as error:
            raise drivers.neither(refused, error) from error
    daemon = _Starting.start(store, revision, target, foreground, options)
    answered = False
    try:
        daemon.wait(time.monotonic() + timeout)
        info = _info_at(target)
        answered = True
        if on_ready is not None:
            on_ready(info)
        if foreground:
            daemon.wait_for_end()
        else:
            daemon.let_go()
    except KeyboardInterrupt:
        # Once it answers it may have readers, even while `on_ready` still runs.
        if not (foreground and answered):
            daemon.abandon()
            raise
        daemon.finish()
    except BaseException:
        daemon.abandon()
        raise
    return info


def _shown_by_kernel(
    store: Path, revision: str, target: Path, options: MountOptions
) -> Unavailable | Incompatible | None:
    """Mount by EROFS; return the error if it cannot show this snapshot here."""
    from mstore_fuse.erofs import driver  # late: needs numpy, which the command line starts without

    try:
        driver.show(
            store,
            revision,
            target,
            checked=options.verify != Verify.NEVER,
            everyone=options.allow_other,
        )
    except (Unavailable, Incompatible) as error:
        return error
    return None


def _announced(info: MountInfo, on_ready: Callable[[MountInfo], None] | None) -> MountInfo:
    """Report a mount that no process serves; remove it if that fails."""
    try:
        if on_ready is not None:
            on_ready(info)
    except BaseException:
        with suppress(OSError):
            mount_table.detach(info.mountpoint, lazy=True)
        raise
    return info


def mounts(user: int | None = None) -> list[MountInfo]:
    """List the mounts of mstore that this process sees, of any store: a user's, or all.

    Accesses none of them.
    """
    found = [info for entry in mount_table.entries() if (info := _info(entry)) is not None]
    return [info for info in found if user is None or info.user == user]


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """End a mount, or clear a crashed one. Returns when the daemon is gone, unless `lazy`.

    `lazy` removes the mount at once, and open files stay readable until they are closed. Raises
    NotFound (not a mount of mstore), Conflict (in use), StorageFailed.
    """
    target = Path(os.path.realpath(mountpoint))
    entry = mount_table.at(target)
    info = _info(entry) if entry is not None else None
    if info is None:
        raise NotFound("not a mount of mstore", where=str(target), hint=call("mounts"))
    try:
        mount_table.detach(target, lazy=lazy or not info.alive)
    except OSError as error:
        raise _unmount_error(error, target) from error
    if not lazy and info.pid is not None:
        _await_end(info.pid)


class Unmounted(msgspec.Struct, frozen=True):
    """What became of several mounts."""

    unmounted: tuple[Path, ...]
    """the directories that are mounts no more"""
    failed: tuple[MstoreError, ...]
    """why others still are, each with its directory"""


def unmount_all(*, lazy: bool = False) -> Unmounted:
    """End every mount of this user, of all stores, the latest first; go on where one fails."""
    ended, failed = [], []
    for info in reversed(mounts(os.geteuid())):
        try:
            unmount(info.mountpoint, lazy=lazy)
            ended.append(info.mountpoint)
        except MstoreError as error:
            failed.append(error)
    return Unmounted(tuple(ended), tuple(failed))


def require_fuse() -> None:
    """Raise Unavailable, naming what to install, if this machine cannot mount."""
    if not DEVICE.exists():
        raise Unavailable(
            "this machine has no FUSE",
            where=str(DEVICE),
            hint=_or_without("modprobe fuse (in a container: --device /dev/fuse)"),
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise Unavailable(
            "this user may not use FUSE", where=str(DEVICE), hint=_or_without("run as root")
        )
    if find_library("fuse3") is None:
        raise Unavailable(
            "libfuse 3 is not installed", hint=_or_without("apt install fuse3; or without it", ": ")
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise Unavailable(
            "fusermount3 is not installed, and only root mounts without it",
            hint=_or_without("apt install fuse3; or without it", ": "),
        )
    if importlib.util.find_spec("mfusepy") is None:
        raise Unavailable(
            "the Python package mfusepy is missing",
            hint=_or_without("pip install mfusepy; or without it", ": "),
        )


def _or_without(fix: str, between: str = "; ") -> Phrase | None:
    return joined(fix, WITHOUT_FUSE, between=between)


def _free_mountpoint(
    mountpoint: Path, on_cleared: Callable[[MountInfo], None] | None = None
) -> Path:
    """Return the real path of an empty directory on which nothing is mounted.

    Removes a mount of this user whose process has ended.
    """
    target = Path(os.path.realpath(mountpoint))
    while (entry := mount_table.at(target)) is not None:
        info = _info(entry)
        if info is None:
            raise Conflict("another file system is mounted here", where=str(target))
        if info.alive or info.user != os.geteuid():
            what = "a snapshot is mounted here already" if info.alive else "a stale mount is here"
            raise Conflict(what, where=str(target), hint=call("unmount", str(target)))
        unmount(target)
        if on_cleared is not None:
            on_cleared(info)
    try:
        with os.scandir(target) as found:
            occupied = next(found, None)
    except FileNotFoundError as error:
        raise NotFound(
            "the mount point does not exist",
            where=str(target),
            hint=f"mkdir -p {shlex.quote(str(target))}",
        ) from error
    except NotADirectoryError as error:
        raise Conflict(
            "the mount point is not a directory",
            where=str(target),
            hint="choose an empty directory",
        ) from error
    except OSError as error:
        raise StorageFailed(
            f"the mount point cannot be read: {error.strerror}",
            where=str(target),
            errno=error.errno,
        ) from error
    if occupied is not None:
        raise Conflict(
            f"the mount point is not empty: it holds {occupied.name!r}",
            where=str(target),
            hint="choose an empty directory",
        )
    return target


@dataclass(slots=True)
class _Starting:
    """A daemon from its start to its first answer (in the foreground: to its end)."""

    process: subprocess.Popen[bytes]
    ready: int
    mountpoint: Path

    @classmethod
    def start(
        cls,
        store: Path,
        revision: str | None,
        mountpoint: Path,
        foreground: bool,
        options: MountOptions,
    ) -> _Starting:
        """Start the daemon in a session of its own, without the caller's terminal."""
        receive, send = os.pipe()
        shown = ["--all"] if revision is None else [f"--revision={revision}"]
        # -P: do not import a file called mstore_fuse.py from the current directory.
        command = [sys.executable, "-P", "-m", "mstore_fuse", f"--store={store}", *shown]
        command += [f"--ready-fd={send}", *(["--foreground"] if foreground else [])]
        command += options.arguments()
        try:
            process = subprocess.Popen(
                [*command, "--", str(mountpoint)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if foreground else subprocess.PIPE,
                pass_fds=[send],
                start_new_session=True,
            )
        finally:
            os.close(send)
        return cls(process, receive, mountpoint)

    def wait(self, deadline: float) -> None:
        """Wait until the mount answers a stat. Raises the daemon's error, or Unavailable."""
        message = self._message(deadline)
        if message is None:
            raise Unavailable(
                f"the mount could not be made: {self._last_words()}",
                where=str(self.mountpoint),
                hint=WITHOUT_FUSE,
            )
        if not message.get("ready"):
            raise _error_from(message)
        device = self._first_answer(deadline)
        readahead.widen(device)
        self._close_pipe()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def let_go(self) -> None:
        """Background: reap the daemon when it ends, so that it leaves no zombie."""
        threading.Thread(target=self.process.wait, name="reap-mount", daemon=True).start()

    def wait_for_end(self) -> None:
        """Foreground: wait until the mount has ended in any way."""
        if status := self.process.wait():
            raise Unavailable(
                f"the process that served the mount ended with status {status}",
                where=str(self.mountpoint),
                hint="mount again",
            )

    def finish(self) -> None:
        """Foreground: end the mount and wait for open files; an interrupt stops waiting."""
        self.process.terminate()
        try:
            self.process.wait()
        except KeyboardInterrupt:
            self.process.kill()
            self.process.wait()
            self._clear()

    def abandon(self) -> None:
        """After a failed or cancelled start: leave no process and no mount behind."""
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self._close_pipe()
        self._clear()

    def _close_pipe(self) -> None:
        if self.ready >= 0:
            os.close(self.ready)
            self.ready = -1

    def _clear(self) -> None:
        entry = mount_table.at(self.mountpoint)
        if entry is not None and _info(entry) is not None:
            with suppress(OSError):
                mount_table.detach(self.mountpoint, lazy=True)

    def _message(self, deadline: float) -> dict[str, object] | None:
        """Return the daemon's line; None if it ended without one."""
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select(
                [self.ready], [], [], max(0, deadline - time.monotonic())
            )
            if not readable:
                raise _no_answer(self.mountpoint)
            part = os.read(self.ready, 65536)
            if not part:
                return None
            line += part
        message: dict[str, object] = json.loads(line)
        return message

    def _first_answer(self, deadline: float) -> int:
        """Return the mount's st_dev, from a stat in a thread that may hang."""
        answer: list[int | OSError] = []

        def ask() -> None:
            try:
                answer.append(os.stat(self.mountpoint).st_dev)
            except OSError as error:
                answer.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(max(0, deadline - time.monotonic()))
        if not answer:
            raise _no_answer(self.mountpoint)
        if isinstance(answer[0], OSError):
            raise Unavailable(
                f"the mount does not answer: {answer[0].strerror}",
                where=str(self.mountpoint),
                hint=WITHOUT_FUSE,
            )
        return answer[0]

    def _last_words(self) -> str:
        if self.process.stderr is None:
            return "libfuse refused (its reason is above)"
        said = self.process.stderr.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "the daemon ended without a word"


def _no_answer(mountpoint: Path) -> Unavailable:
    return Unavailable("the mount did not answer in time", where=str(mountpoint), hint=WITHOUT_FUSE)


def _error_from(message: dict[str, object]) -> MstoreError:
    """Rebuild the daemon's error as an exception of its class."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MstoreError)):
        kind = Unavailable
    where, hint = message.get("where"), message.get("hint")
    return kind(
        from_json(message["what"]),
        where=None if where is None else from_json(where),
        hint=None if hint is None else from_json(hint),
    )


def _info(entry: mount_table.TableEntry) -> MountInfo | None:
    source = MountedSnapshot.of(entry)
    if source is None:
        return None
    alive = source.alive
    pid = source.pid if alive else None
    driver = Driver.EROFS if entry.type == mount_table.KERNEL_TYPE else Driver.FUSE
    # Only root mounts by the kernel.
    user = entry.user or 0
    return MountInfo(entry.mountpoint, source.store, source.revision, pid, alive, user, driver)


def _info_at(mountpoint: Path) -> MountInfo:
    entry = mount_table.at(mountpoint)
    info = _info(entry) if entry is not None else None
    if info is None:
        raise Unavailable("the mount ended at once", where=str(mountpoint), hint=call("mounts"))
    return info


def _unmount_error(error: OSError, mountpoint: Path) -> MstoreError:
    if error.errno == errno.EBUSY:
        return Conflict(
            "the mount is in use: a process has a file or its working directory in it",
            where=str(mountpoint),
            hint=call("unmount", str(mountpoint), lazy=True),
        )
    return StorageFailed(
        f"could not unmount: {error.strerror}",
        where=str(mountpoint),
        hint="ask the user who mounted it",
        errno=error.errno,
    )


def _await_end(pid: int) -> None:
    """Wait until the daemon has released its store, or a time limit passes."""
    deadline = time.monotonic() + _ENDS_WITHIN
    while MountedSnapshot(Path(), None, pid).alive and time.monotonic() < deadline:
        time.sleep(_POLL)
