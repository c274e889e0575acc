"""The process behind one mount: `python -m mstore_fuse --store DIR (--revision REV | --all) DIR`.

Owns the life of that process, not the mount's contents.

    start     no fork (the starter has given it a session of its own): open the store, mount,
              and answer requests by threads
    ready     one line of JSON on --ready-fd: {"ready": true}, or the error that prevented it
    stop      SIGTERM, SIGINT or SIGHUP: unmount lazily, serve what is still open, end with the
              last close
    killed    readers get ENOTCONN until `mstore unmount` clears the mount

It never accesses a path below its own mount point: it would wait for itself. So its log must lie
elsewhere (`fuse_driver`).
"""

from __future__ import annotations

import ctypes
import json
import logging
import logging.handlers
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from mstore import Store
from mstore.store.leases import Hold
from mstore.terms import heap
from mstore.terms.errors import BadRequest, MstoreError, StorageFailed, Unavailable
from mstore.terms.phrases import Option, call, to_json
from mstore_fuse import connection, mount_table
from mstore_fuse.about import AboutStore
from mstore_fuse.driver import FolderName, MountRequest
from mstore_fuse.folders import AdapterFolder, FolderTree, ModelFolder
from mstore_fuse.fuse_driver import MountedSnapshot, parser, request_of
from mstore_fuse.operations import FuseOperations
from mstore_fuse.store_tree import RefTree, StoreTree
from mstore_fuse.tree import MountTree, SnapshotTree

_STOPPING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SYSLOG = Path("/dev/log")
_TOKEN = "MSTORE_TOKEN"  # noqa: S105 -- the name of a variable

_PR_SET_PDEATHSIG = 1
_ENDED = b"\0"  # no signal has number 0

log = logging.getLogger("mstore_fuse")


@dataclass(slots=True)
class Daemon:
    """One mount, from the opening of the store to its end.

    ready: called once, when the mount answers.
    """

    request: MountRequest
    ready: Callable[[BaseException | None], None]
    _store: Store | None = field(default=None, init=False)
    _hold: Hold | None = field(default=None, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _stop: bool = field(default=False, init=False)

    def run(self) -> None:
        """Mount, serve, and return when the mount has ended. Call from the main thread.

        Raises what prevented it.
        """
        # A signal may arrive in any thread, including those of numerical libraries. Python's own
        # handler then writes its number to this pipe, which is read below.
        events, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in _STOPPING:
            signal.signal(number, _heard)
        serving = threading.Thread(target=self._serve, args=(wake,), name="serving")
        serving.start()
        while os.read(events, 1) != _ENDED:
            self._detach()
        serving.join()
        if self._failure is not None:
            raise self._failure

    def _serve(self, wake: int) -> None:
        request = self.request
        try:
            tree = self._start()
            source = MountedSnapshot(request.store, request.shown, os.getpid())
            device = connection.mount(
                request.mountpoint, str(source), subtype="mstore", allow_other=request.allow_other
            )
            if self._stop:
                # It came before there was a mount to detach.
                self._detach()
            self.ready(None)
            what = request.shown or "all"
            log.info("serving %s of %s at %s", what, request.store, request.mountpoint)
            connection.serve(device, FuseOperations(tree))
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            self._failure = error
        finally:
            if self._hold is not None:
                self._hold.release()
            if self._store is not None:
                self._store.close()
            os.write(wake, _ENDED)

    def _start(self) -> MountTree:
        request = self.request
        # Reads need it.  Where an import fails half way, for want of descriptors, no other can
        # follow in this process: then there is no mount.
        from mstore.blocks import rans  # noqa: F401

        self._store = Store.open(
            request.store, cache_bytes=request.cache_bytes, verify=request.verify
        )
        # For blocks that come from a remote; a token on the command line could be seen.
        self._store.trust(*request.endpoints)
        self._store.token = os.environ.get(_TOKEN, "")
        self._store.cache_bytes_on_disk = request.cache_size
        self._store.keep_again = request.keep_again
        tree = self._tree(self._store)
        if self._stop:
            raise Unavailable("stopped before it was mounted", where=str(request.mountpoint))
        return tree

    def _tree(self, store: Store) -> MountTree:
        about, shown = AboutStore(store), self.request.show_meta
        revision = self.request.revision
        if revision is None:
            return StoreTree(store, about, show_about=shown)
        if self.request.folder is not None:
            is_models = self.request.folder is FolderName.MODELS
            folder = ModelFolder() if is_models else AdapterFolder(self.request.served_base)
            return FolderTree(store, revision, folder, about, show_about=shown)
        if self.request.follow:
            if revision not in store.ref_ids():
                # An unknown revision is the more useful error.
                store.view(revision)
                raise BadRequest(
                    f"{revision} is not a branch or tag, and only these can be followed",
                    where=Option("follow"),
                    hint=call("refs"),
                )
            return RefTree(StoreTree(store, about, show_about=shown), revision)
        view = store.view(revision)
        self._hold = store.hold(view.id, sure=True)
        return SnapshotTree(view, about, show_about=shown)

    def _detach(self) -> None:
        """Unmount lazily: open files stay readable, and the mount ends after the last close."""
        self._stop = True
        top = mount_table.at(self.request.mountpoint)
        source = MountedSnapshot.parse(top.source) if top is not None else None
        if source is None:
            return  # Already gone, or not created yet.
        if source.pid != os.getpid():
            log.warning("%s: another mount covers this one", self.request.mountpoint)
            return
        try:
            mount_table.detach(self.request.mountpoint, lazy=True)
        except OSError as error:
            log.error("%s: %s", self.request.mountpoint, error)


def _heard(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes a signal to the pipe only if it has a Python handler."""


def main(arguments: list[str] | None = None) -> int:
    """The command.  Exit status: 0 the mount has ended, 1 it could not be made, 2 usage."""
    given = parser().parse_args(arguments)
    request = request_of(given)
    request = replace(
        request,
        store=Path(os.path.realpath(request.store)),
        mountpoint=Path(os.path.realpath(request.mountpoint)),
    )
    report = _Report(given.ready_fd, request.foreground)
    if request.foreground:
        _end_with_parent()
    heap.keep_freed(one_arena=True)
    try:
        _set_up_log(request.foreground, request.log)
        Daemon(request, report).run()
        log.info("the mount at %s has ended", request.mountpoint)
    except MstoreError as error:
        report(error)
        return 1
    return 0


class _Report:
    """Tells the starter once whether the mount answers, then detaches from it."""

    def __init__(self, descriptor: int | None, foreground: bool) -> None:
        self._descriptor = descriptor
        self._foreground = foreground

    def __call__(self, error: BaseException | None) -> None:
        if self._descriptor is None:
            if error is not None:
                print(f"mstore_fuse: {error}", file=sys.stderr)  # noqa: T201 - the only report
        else:
            os.write(self._descriptor, json.dumps(_message(error)).encode() + b"\n")
            os.close(self._descriptor)
            self._descriptor = None
        if error is None and not self._foreground:
            # The starter reads stderr until its end, so it must be closed here.
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            os.close(null)


def _message(error: BaseException | None) -> dict[str, object]:
    if error is None:
        return {"ready": True}
    if not isinstance(error, MstoreError):
        return {"error": type(error).__name__, "what": f"{type(error).__name__}: {error}"}
    what, where, hint = (None if text is None else to_json(text) for text in error.texts)
    return {"error": type(error).__name__, "what": what, "where": where, "hint": hint}


def _end_with_parent() -> None:
    """End this foreground mount if the process that started it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _set_up_log(foreground: bool, file: Path | None) -> None:
    """Log to a file if one is given; else to the terminal, or in the background to syslog.

    Raises StorageFailed if the file cannot be opened.
    """
    said = "mstore_fuse[%(process)d]: %(message)s"
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        try:
            # It opens the file again once that was renamed, so the log can be rotated.
            handler = logging.handlers.WatchedFileHandler(file)
        except OSError as error:
            what = f"the log cannot be written: {error.strerror}"
            raise StorageFailed(what, where=str(file), errno=error.errno) from error
        log.setLevel(logging.INFO)
        said = f"%(asctime)s {said}"
    elif not foreground:
        handler = logging.NullHandler()
        if _SYSLOG.exists():
            handler = logging.handlers.SysLogHandler(str(_SYSLOG))
    handler.setFormatter(logging.Formatter(said))
    log.addHandler(handler)
    log.propagate = False
    logging.raiseExceptions = False
