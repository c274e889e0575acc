"""The driver FUSE, seen from who starts a mount: a daemon for each mount (`daemon`), from its
start to its first answer, in the foreground to its end.

The server of a mount is always a process of its own: a process that reads a mount which it serves
waits for itself. A daemon in the background belongs to no terminal and no caller: it outlives both.

Owns what starter and daemon share: the daemon's command line, its line of JSON when the mount
answers, and the source of the mount, which is in the kernel's table:

    mstore:<revision>@<store>#<pid>      `*` stands for the whole store
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec

from mstore.terms import errors
from mstore.terms.errors import BadRequest, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Option, Phrase, call, from_json, joined, phrase
from mstore_fuse import mount_table, readahead
from mstore_fuse.connection import DEVICE
from mstore_fuse.driver import Driver, DriverName, FolderName, MountInfo, MountRequest, Verify
from mstore_fuse.mount_table import TableEntry, escaped, unescaped

WITHOUT_FUSE = phrase(
    "{checkout} writes the same files without FUSE, and in Python store[REF].load() reads a model "
    "and store[REF].tensor(NAME) a single tensor",
    checkout=call("checkout", "REF", "DIR"),
)
"""The hint of every error about missing FUSE."""

FUSE_CONF = Path("/etc/fuse.conf")
"""Where the administrator lets users show their mounts to others (mount.fuse3(8))."""

_TYPE = "fuse.mstore"
_ALLOWED_LINE = "user_allow_other"
_WHOLE_STORE = "*"
_SOURCE = re.compile(r"mstore:(?P<revision>.*)@(?P<store>[^@]*)#(?P<pid>\d+)", re.DOTALL)
_ENDS_WITHIN = 10.0
_POLL = 0.02


class Fuse(Driver):
    """Mounts that a process of mstore serves."""

    name: ClassVar = DriverName.FUSE

    def refusal(self, request: MountRequest) -> BadRequest | None:
        if request.verify == Verify.NEVER:
            return BadRequest(
                f"only driver erofs can mount without checking, not driver {request.driver}",
                hint=Option("verify", Verify.ONCE.value),
            )
        if request.follow and request.revision is None:
            what = "a mount of the whole store follows all its refs anyway"
            return BadRequest(what, where=Option("follow"))
        if request.follow and request.folder is not None:
            what = f"a mount of {request.folder} follows all their refs anyway"
            return BadRequest(what, where=Option("follow"))
        if request.show_meta and request.folder is FolderName.MODELS:
            what = "a mount of models has no directories of snapshots, in which it could be listed"
            return BadRequest(what, where=Option("show_meta"))
        if request.served_base is not None and request.folder is not FolderName.ADAPTERS:
            return BadRequest(
                "only the configs of adapters name a base",
                where=Option("served_base"),
                hint=Option("adapters", True),
            )
        return None

    def require(self) -> None:
        require_fuse()

    def serve(self, request: MountRequest, answered: Callable[[], None]) -> None:
        if request.allow_other:
            _require_allowed()
        daemon = _Daemon.start(_with_log(request))
        is_answering = False
        try:
            daemon.wait(time.monotonic() + request.timeout)
            is_answering = True
            answered()
            if request.foreground:
                daemon.wait_for_end()
            else:
                daemon.let_go()
        except KeyboardInterrupt:
            # Once it answers it may have readers, even while `answered` still runs.
            if not (request.foreground and is_answering):
                daemon.abandon()
                raise
            daemon.finish()
        except BaseException:
            daemon.abandon()
            raise

    def status(self, entry: TableEntry) -> MountInfo | None:
        if not entry.whole or entry.type != _TYPE or entry.user is None:
            return None
        source = MountedSnapshot.parse(entry.source)
        if source is None:
            return None
        alive = serves(source.pid)
        pid = source.pid if alive else None
        return self._mounted(
            entry.mountpoint, source.store, source.revision, entry.user, pid, alive
        )

    def stop(self, mounted: MountInfo, *, lazy: bool) -> None:
        super().stop(mounted, lazy=lazy)
        if lazy or mounted.pid is None:
            return
        # Until the daemon has released its store.
        deadline = time.monotonic() + _ENDS_WITHIN
        while serves(mounted.pid) and time.monotonic() < deadline:
            time.sleep(_POLL)


class MountedSnapshot(msgspec.Struct, frozen=True):
    """What a mount shows, and which process serves it. revision: None for the whole store."""

    store: Path
    revision: str | None
    pid: int

    def __str__(self) -> str:
        revision = _WHOLE_STORE if self.revision is None else escaped(self.revision)
        return f"mstore:{revision}@{escaped(str(self.store), also='@')}#{self.pid}"

    @classmethod
    def parse(cls, text: str) -> MountedSnapshot | None:
        """Parse a mount's source; None if we did not write it."""
        found = _SOURCE.fullmatch(text)
        if found is None:
            return None
        revision, store = unescaped(found["revision"]), unescaped(found["store"])
        return cls(Path(store), None if revision == _WHOLE_STORE else revision, int(found["pid"]))


def serves(pid: int) -> bool:
    """Return whether this process is a daemon; False for a zombie, or another one by now."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"mstore_fuse" in arguments


# -- what must hold on this machine ----------------------------------------------------------------


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
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise Unavailable(
            "fusermount3 is not installed, and only root mounts without it",
            hint=_or_without("apt install fuse3; or without it", ": "),
        )


def _or_without(fix: str, between: str = "; ") -> Phrase | None:
    return joined(fix, WITHOUT_FUSE, between=between)


def _require_allowed() -> None:
    """Raise Unavailable unless this user may let other users into a mount."""
    if os.geteuid() == 0:
        return
    try:
        lines = FUSE_CONF.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if not any(line.strip() == _ALLOWED_LINE for line in lines):
        raise Unavailable(
            "only root may let other users into a mount, unless the administrator allows it",
            where=Option("allow_other"),
            hint=f"add the line {_ALLOWED_LINE} to {FUSE_CONF}",
        )


def _with_log(request: MountRequest) -> MountRequest:
    """Return the request with the real path of its log. Raises BadRequest, StorageFailed."""
    if request.log is None:
        return request
    log = Path(os.path.realpath(request.log))
    if log.is_relative_to(request.mountpoint):
        # The daemon would wait for itself.
        raise BadRequest(f"the log lies in the mount: {log}", where=Option("log"))
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise StorageFailed(
            f"the log cannot be written: {error.strerror}", where=str(log), errno=error.errno
        ) from error
    return replace(request, log=log)


# -- the daemon's command line ---------------------------------------------------------------------

_SWITCHES = ("foreground", "allow_other", "follow", "show_meta", "keep_again")


def words(request: MountRequest) -> list[str]:
    """Return the daemon's command line for a request, without the program."""
    line = [f"--store={request.store}"]
    line.append("--all" if request.revision is None else f"--revision={request.revision}")
    line.append(f"--verify={request.verify}")
    if request.log is not None:
        line.append(f"--log={request.log}")
    if request.cache_bytes is not None:
        line.append(f"--cache-bytes={request.cache_bytes}")
    if request.cache_size is not None:
        line.append(f"--cache-size={request.cache_size}")
    if request.folder is not None:
        line.append(f"--folder={request.folder}")
    if request.served_base is not None:
        line.append(f"--served-base={request.served_base}")
    line += [f"--endpoint={one}" for one in request.endpoints]
    line += [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(request, name)]
    return [*line, "--", str(request.mountpoint)]


def parser() -> ArgumentParser:
    """Return the parser of the daemon's command line; `request_of` takes what it returns."""
    made = ArgumentParser(prog="python -m mstore_fuse")
    made.add_argument("--store", required=True, metavar="DIR", type=Path)
    shown = made.add_mutually_exclusive_group(required=True)
    shown.add_argument("--revision", metavar="REV")
    shown.add_argument("--all", action="store_true")
    made.add_argument("--ready-fd", type=int, metavar="N")
    made.add_argument("--verify", default=Verify.ONCE.value)
    made.add_argument("--log", type=Path, metavar="FILE")
    made.add_argument("--cache-bytes", type=int, metavar="N")
    made.add_argument("--cache-size", type=int, metavar="N")
    made.add_argument("--folder", type=FolderName, choices=[*FolderName])
    made.add_argument("--served-base", metavar="NAME")
    made.add_argument("--endpoint", action="append", default=[], metavar="URL")
    for name in _SWITCHES:
        made.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    made.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path)
    return made


def request_of(given: Namespace) -> MountRequest:
    """Return the request that a command line states."""
    return MountRequest(
        given.store,
        given.revision,
        given.mountpoint,
        log=given.log,
        cache_bytes=given.cache_bytes,
        cache_size=given.cache_size,
        endpoints=tuple(given.endpoint),
        folder=given.folder,
        served_base=given.served_base,
        verify=given.verify,
        **{name: getattr(given, name) for name in _SWITCHES},
    )


# -- the daemon as its starter sees it -------------------------------------------------------------


@dataclass(slots=True)
class _Daemon:
    """A daemon that was started."""

    process: subprocess.Popen[bytes]
    ready: int
    mountpoint: Path

    @classmethod
    def start(cls, request: MountRequest) -> _Daemon:
        """Start the daemon in a session of its own, without the caller's terminal."""
        receive, send = os.pipe()
        # -P: do not import a file called mstore_fuse.py from the current directory.
        command = [sys.executable, "-P", "-m", "mstore_fuse", f"--ready-fd={send}"]
        try:
            process = subprocess.Popen(
                command + words(request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if request.foreground else subprocess.PIPE,
                pass_fds=[send],
                start_new_session=True,
            )
        finally:
            os.close(send)
        return cls(process, receive, request.mountpoint)

    def wait(self, deadline: float) -> None:
        """Wait until the mount answers a stat. Raises the daemon's error, or Unavailable."""
        message = self._message(deadline)
        if message is None:
            raise self._unavailable(f"the mount could not be made: {self._last_words()}")
        if not message.get("ready"):
            raise _error_from(message)
        device = self._first_answer(deadline)
        readahead.widen(f"{os.major(device)}:{os.minor(device)}")
        self._close_pipes()

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
            self.abandon()

    def abandon(self) -> None:
        """Leave no process and no mount behind."""
        self.process.kill()
        self.process.wait()
        self._close_pipes()
        entry = mount_table.at(self.mountpoint)
        if entry is not None and Fuse().status(entry) is not None:
            with suppress(OSError):
                mount_table.detach(self.mountpoint, lazy=True)

    def _close_pipes(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.ready >= 0:
            os.close(self.ready)
            self.ready = -1

    def _message(self, deadline: float) -> dict[str, object] | None:
        """Return the daemon's line; None if it ended without one."""
        line = b""
        while not line.endswith(b"\n"):
            left = max(0, deadline - time.monotonic())
            if not select.select([self.ready], [], [], left)[0]:
                raise self._unavailable("the mount did not answer in time")
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
            raise self._unavailable("the mount did not answer in time")
        if isinstance(answer[0], OSError):
            raise self._unavailable(f"the mount does not answer: {answer[0].strerror}")
        return answer[0]

    def _unavailable(self, what: str) -> Unavailable:
        return Unavailable(what, where=str(self.mountpoint), hint=WITHOUT_FUSE)

    def _last_words(self) -> str:
        if self.process.stderr is None:
            return "its reason is above"
        said = self.process.stderr.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "the daemon ended without a word"


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
