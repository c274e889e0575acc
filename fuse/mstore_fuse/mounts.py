"""Mounting from outside: make, list and end mounts, by any driver.

Used by the command line and by Python programs; keeps no state (see `mount_table`).
"""

from __future__ import annotations

import errno
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

import msgspec

from mstore import fs
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Incompatible,
    MstoreError,
    NotFound,
    StorageFailed,
    Unavailable,
)
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Option, call, phrase
from mstore_fuse import mount_table
from mstore_fuse.driver import (
    EVERY,
    Driver,
    DriverName,
    FolderName,
    MountInfo,
    MountRequest,
    Verify,
)
from mstore_fuse.erofs.driver import Erofs
from mstore_fuse.fuse_driver import Fuse

Choice = TypeVar("Choice", bound=StrEnum)

DRIVERS: dict[str, Driver] = {one.name: one for one in (Erofs(), Fuse())}
"""Every driver by its name, in the order in which `auto` tries them; the last shows anything."""

_WITHOUT_MOUNT = phrase(
    "{checkout} writes the same files (by reflink, on XFS and btrfs, they share the store's "
    "space), and in Python store[REF].load() and .safe_open() read tensors without files",
    checkout=call("checkout", "REF", "DIR"),
)


def mount(
    store_path: Path,
    revision: str | None,
    mountpoint: Path,
    *,
    driver: str = "fuse",
    foreground: bool = False,
    timeout: float = 30.0,
    on_ready: Callable[[MountInfo], None] | None = None,
    on_cleared: Callable[[MountInfo], None] | None = None,
    allow_other: bool = False,
    log: Path | None = None,
    cache_bytes: int | None = None,
    verify: str = "once",
    follow: bool = False,
    adapters: bool = False,
    models: bool = False,
    served_base: str | None = None,
    show_meta: bool = False,
    endpoints: Sequence[str] = (),
    cache_size: int | None = None,
    keep_again: bool = False,
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
    adapters: show those branches and tags that are adapters, each as a directory of its name, as
    vLLM and LoRAX look for them; the revision is a pattern of their names, or None for all.
    models: show the models of one file that branches and tags have, each as NAME.safetensors with
    previews and the like beside it, as ComfyUI and A1111 look for them; the revision as with
    adapters.
    served_base: what the configs of adapters call the base, so that an engine which serves it by
    this name takes them; None leaves the configs as they are.
    show_meta: list the directory `.mstore` of a snapshot, which is found by name in any case.
    endpoints: as for `Store.trust`, if the store is lazy; credentials and MSTORE_TOKEN come from
    the environment. cache_size, keep_again: as `Store.cache_bytes_on_disk` and
    `Store.keep_again`.

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
    if adapters and models:
        what = "a mount shows adapters or models, not both"
        raise BadRequest(what, where=Option("models"))
    kinds = {FolderName.ADAPTERS: adapters, FolderName.MODELS: models}
    folder = next((kind for kind, is_asked in kinds.items() if is_asked), None)
    request = MountRequest(
        store=Path(os.path.realpath(store_path)),
        revision=EVERY if folder and revision is None else revision,
        mountpoint=mountpoint,
        driver=_one_of(DriverName, "driver", driver),
        foreground=foreground,
        timeout=timeout,
        allow_other=allow_other,
        log=log,
        cache_bytes=cache_bytes,
        verify=_one_of(Verify, "verify", verify),
        follow=follow,
        folder=folder,
        served_base=served_base,
        show_meta=show_meta,
        endpoints=tuple(endpoints),
        cache_size=cache_size,
        keep_again=keep_again,
    )
    *preferred, last = _chosen(request)
    if not preferred:
        last.require()
    request = replace(request, mountpoint=_free_mountpoint(mountpoint, on_cleared))
    if request.mountpoint.is_relative_to(request.store):
        raise Conflict("the mount point lies in the store itself", where=str(request.mountpoint))
    made: list[MountInfo] = []

    def answered() -> None:
        made.append(_info_at(request.mountpoint))
        if on_ready is not None:
            on_ready(made[0])

    for one in preferred:
        try:
            one.require()
            one.serve(request, answered)
        except (Unavailable, Incompatible) as refused:
            if made:
                raise
            try:
                last.require()
            except Unavailable as missing:
                raise _neither({one: refused, last: missing}) from missing
        else:
            return made[0]
    last.serve(request, answered)
    return made[0]


@contextmanager
def shown(
    store_path: Path,
    revision: str | None,
    mountpoint: Path,
    *,
    endpoints: Sequence[str] = (),
    cache_size: int | None = None,
    keep_again: bool = False,
) -> Iterator[Path]:
    """Make a directory, and mount a snapshot (None: the whole store) there for the time of the
    block.

    The mount ends with this process, too, however that ends. Arguments, and what this raises, as
    for `mount`; at the end of the block Unavailable, if the mount has ended meanwhile.
    """
    fs.make_directory(mountpoint, private=True)
    answers: SimpleQueue[MstoreError | None] = SimpleQueue()

    def serve() -> None:
        # The thread waits for the end: a mount in the foreground ends with its starter.
        try:
            mount(
                store_path,
                revision,
                mountpoint,
                foreground=True,
                on_ready=lambda info: answers.put(None),
                endpoints=endpoints,
                cache_size=cache_size,
                keep_again=keep_again,
            )
            answers.put(None)
        except MstoreError as error:
            answers.put(error)

    server = threading.Thread(target=serve, name="mount", daemon=True)
    server.start()
    refused = answers.get()
    if refused is not None:
        raise refused
    try:
        yield mountpoint
    finally:
        try:
            unmount(mountpoint)
        except Conflict:
            unmount(mountpoint, lazy=True)
        except NotFound:
            # It ended by itself, which the answer below tells.
            pass
        server.join()
    ended = answers.get()
    if ended is not None:
        raise ended


class Mounted:
    """Shows snapshots of a store, one after the other, by mounts that stay for the time of a block.

    A mount takes most of a second to make and to end.  As many are made as snapshots are shown at
    the same time, each of the whole store.  Arguments are those of `shown`.  Thread-safe.
    """

    def __init__(
        self,
        store_path: Path,
        *,
        endpoints: Sequence[str] = (),
        cache_size: int | None = None,
        keep_again: bool = False,
    ) -> None:
        self._make = partial(
            shown,
            store_path,
            None,
            endpoints=endpoints,
            cache_size=cache_size,
            keep_again=keep_again,
        )
        self._free: list[tuple[Path, ExitStack]] = []
        self._used: set[Path] = set()
        self._has_ended = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """End the mounts.  Nobody waits for those in use: they end when their files are closed."""
        with self._lock:
            self._has_ended = True
            used = list(self._used)
        for _, made in self._free:
            made.close()
        for place in used:
            with suppress(NotFound):
                unmount(place, lazy=True)
            with suppress(OSError):
                # Who shows it removes it, unless this process ends first.
                os.rmdir(place)
                os.rmdir(place.parent)

    @contextmanager
    def show(self, snapshot: SnapshotId, scratch: Path) -> Iterator[Path]:
        """Show a snapshot for the time of the block.  It needs no scratch directory.

        Raises what `shown` raises; at the end of the block Unavailable, if the mount has ended
        meanwhile.
        """
        with self._lock:
            place, made = self._free.pop() if self._free else (None, ExitStack())
        if place is None:
            try:
                place = made.enter_context(self._make(made.enter_context(fs.scratch()) / "store"))
            except BaseException:
                made.close()
                raise
        model = place / "snapshots" / str(snapshot)
        with self._lock:
            self._used.add(place)
        try:
            yield model
        finally:
            with self._lock:
                self._used.remove(place)
            try:
                # Not of the mount point: an empty directory is left of a mount that has ended.
                os.stat(model)
            except OSError as error:
                # It says why, if it can.
                made.close()
                raise Unavailable(
                    f"the mount does not answer: {error.strerror}", where=str(place)
                ) from error
            with self._lock:
                is_kept = not self._has_ended
                if is_kept:
                    self._free.append((place, made))
            if not is_kept:
                made.close()


def _one_of(kind: type[Choice], name: str, value: str) -> Choice:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(kind)
        what = f"{name} is one of {names}, not {value!r}"
        raise BadRequest(what, where=Option(name)) from error


def _chosen(request: MountRequest) -> list[Driver]:
    """Return the drivers to try, in order. Raises BadRequest if the last can never do it."""
    if request.driver is DriverName.AUTO:
        *others, last = DRIVERS.values()
        tried = [*(one for one in others if one.refusal(request) is None), last]
    else:
        tried = [DRIVERS[request.driver]]
    refusal = tried[-1].refusal(request)
    if refusal is not None:
        raise refusal
    return tried


def _neither(refusals: dict[Driver, MstoreError]) -> Unavailable:
    """Return the error where no driver works."""
    whys = "; ".join(f"by {one.name.upper()}, {why.what}" for one, why in refusals.items())
    *_, last = refusals.values()
    what = f"nothing can be mounted here: {whys}"
    return Unavailable(what, where=last.where, hint=_WITHOUT_MOUNT)


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
        DRIVERS[info.driver].stop(info, lazy=lazy)
    except OSError as error:
        raise _unmount_error(error, target) from error


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


def _info(entry: mount_table.TableEntry) -> MountInfo | None:
    told = (one.status(entry) for one in DRIVERS.values())
    return next((info for info in told if info is not None), None)


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
