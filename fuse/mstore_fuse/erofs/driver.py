"""A mount by EROFS, from a store and a revision: survey, check, image, mount.

    hold the snapshot -> look up its blocks -> open the packs -> check every block in them
    -> write the image into the store's tmp/, under a lease -> mount -> remove the image's name

The kernel reads packs without a hash. So every raw block is read and hashed first, on all
processors, from the descriptors that become the devices of the mount.

Nothing of mstore stays running. The kernel holds the image and the packs open: what is mounted
stays readable, and right, whatever gc, rm or prune remove. Their space is free after `unmount`.

Crash promise: a process that dies on the way leaves a lease's directory, which the next writer
removes, and no mount.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from mstore import Store, fs
from mstore.blocks.location import Location
from mstore.blocks.packs import PAGE, PackGone
from mstore.blocks.reader import BlockReader
from mstore.fs.trees import require_alone
from mstore.store import contents
from mstore.store.catalog import Catalog
from mstore.store.leases import Lease
from mstore.store.models import resolved
from mstore.store.view import SnapshotView
from mstore.terms.errors import Conflict, Corrupt, StorageFailed, Unavailable
from mstore.terms.ids import BlockId, Buffer, PackId
from mstore.terms.phrases import call
from mstore_fuse import mount_table, readahead
from mstore_fuse.about import AboutStore
from mstore_fuse.erofs import kernel
from mstore_fuse.erofs.image import CopiedPages, Image
from mstore_fuse.erofs.mapping import Survey, page_map

OPTIONS = ("directio",)
"""The kernel reads packs straight into the pages of a mount's files, and caches once. The first
kernels that mount from files do so always, and know no such option."""
READ_AHEAD = 4 << 20
"""Bytes that the kernel reads ahead of a sequential reader."""

_ATTEMPTS = 3
_AT_ONCE = 64
_DONTCACHE = 0x80
_SPARE_FILES = 200
"""What the catalog may open besides, to read records and what is copied."""
_REASONS = {
    errno.ENODEV: "this kernel has no EROFS (modprobe erofs)",
    errno.ENOSYS: "this kernel is too old: kernel mounts need Linux 6.12",
    errno.ENOTBLK: "this kernel, or the filesystem of the store, cannot mount from files",
    errno.EPERM: "the kernel refuses; in a container, it needs CAP_SYS_ADMIN",
}


def require_root() -> None:
    """Raise Unavailable unless this process may mount."""
    if os.geteuid() != 0:
        raise Unavailable(
            "only root may mount with driver erofs", hint="run as root, or use driver fuse"
        )


def show(
    store: Path, revision: str, mountpoint: Path, *, checked: bool, everyone: bool = False
) -> None:
    """Mount a snapshot of the store at this real path of an empty directory.

    checked: whether to read and hash every block first. If not, a damaged pack gives wrong bytes.
    everyone: whether all users may read it, and not only root.

    Raises Unavailable where EROFS cannot be mounted, Incompatible if the snapshot is not stored
    raw, Corrupt for a block that does not match its id, and what opening the store and finding the
    revision raise.
    """
    require_root()
    _allow_files(0)
    catalog = Catalog.open(store)
    try:
        asked = resolved(catalog, revision)
        with contents.held(catalog, [asked.snapshot]), ExitStack() as files:
            view = SnapshotView(catalog, asked.snapshot, model=asked.model)
            survey, packs = _opened(catalog, view, revision, files)
            _require_own_way(catalog.layout.tmp)
            if checked:
                check_blocks(survey.raw_blocks(), packs, catalog.block_size)
            with _image_file(catalog, revision) as path:
                sizes = {pack: os.fstat(fd).st_size for pack, fd in packs.items()}
                labels = _labels(catalog, view)
                _write(path, view, survey, sizes, labels, everyone=everyone)
                _mount(path, list(packs.values()), mountpoint)
    finally:
        catalog.close()


def _opened(
    catalog: Catalog, view: SnapshotView, called: str, files: ExitStack
) -> tuple[Survey, dict[PackId, int]]:
    """Return where the snapshot lies, and its packs, open until the stack is closed."""
    for attempt in range(_ATTEMPTS):
        survey = Survey.of(view, called)
        survey.require_few_copies(called)
        _allow_files(len(survey.packs))
        with ExitStack() as opened:
            try:
                packs = {pack: _open(catalog, pack, opened) for pack in survey.packs}
            except PackGone:
                # gc may have moved its blocks since they were looked up.
                if attempt + 1 < _ATTEMPTS:
                    continue
                raise
            require_whole_pages({p: os.fstat(fd).st_size for p, fd in packs.items()})
            files.push(opened.pop_all())
            return survey, packs
    raise AssertionError("unreachable")


def _open(catalog: Catalog, pack: PackId, opened: ExitStack) -> int:
    descriptor = catalog.packs.descriptor(pack)
    opened.callback(os.close, descriptor)
    return descriptor


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files, if it has to open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = len(os.listdir("/proc/self/fd")) + count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise Unavailable(
            f"mounting needs {need} open files, and this process may open {hard} files",
            hint=f"ulimit -n {need}, or use driver fuse",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _require_own_way(directory: Path) -> None:
    """Raise Unavailable if another user could exchange what is in this directory.

    The kernel opens the image by its path, and the image says what is shown.
    """
    for above in (directory, *directory.parents):
        descriptor = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            require_alone(descriptor, above)
        except Conflict as error:
            raise Unavailable(
                f"driver erofs would trust others with what the kernel reads: {error.what}",
                where=str(above),
                hint="use driver fuse",
            ) from error
        finally:
            os.close(descriptor)


def _no_image(error: StorageFailed) -> Unavailable:
    """Return why there is no room for an image; FUSE needs none."""
    what = f"no image for the kernel can be written: {error.what}"
    return Unavailable(what, where=error.where, hint="use driver fuse")


@contextmanager
def _image_file(catalog: Catalog, revision: str) -> Iterator[Path]:
    """Yield a path in the store's tmp/ that says what the mount shows; removed at the end."""
    try:
        lease = Lease(catalog.layout, catalog.index, f"mount {revision}")
    except StorageFailed as error:
        raise _no_image(error) from error
    try:
        path = lease.directory / mount_table.image_name(revision)
        if len(os.fsencode(path)) > kernel.LONGEST_VALUE:
            raise Unavailable(
                "the paths of the store and the revision are longer than the kernel takes "
                f"({kernel.LONGEST_VALUE} bytes)",
                where=str(path),
                hint="use driver fuse",
            )
        yield path
    finally:
        lease.release()


def _write(
    path: Path,
    view: SnapshotView,
    survey: Survey,
    packs: Mapping[PackId, int],
    labels: Mapping[str, Mapping[str, str]],
    *,
    everyone: bool,
) -> None:
    image = Image(view.files, list(packs.values()), view.time_ns, everyone=everyone, labels=labels)
    devices = {pack: number for number, pack in enumerate(packs, 1)}
    file = fs.NewFile(path)

    def write(offset: int, data: bytes) -> None:
        try:
            file.write_at(offset, data)
        except StorageFailed as error:
            raise _no_image(error) from error

    try:
        copied = CopiedPages(image.data_block, write)
        for name, size in view.files.items():
            found = page_map(name, size, survey.files[name], devices, copied, view.read)
            write(*image.file(name, found))
        copied.flush()
        for offset, data in image.head(copied.count):
            write(offset, data)
    finally:
        file.close()


def _labels(catalog: Catalog, view: SnapshotView) -> dict[str, dict[str, str]]:
    """Return the labels that a FUSE mount has: by path of a file, '' for directories."""
    about = AboutStore(Store(catalog))
    of_all = {"snapshot": str(view.id)}
    found = {path: {**of_all, **about.labels(view, path)} for path in view.files} | {"": of_all}
    return {
        path: {f"mstore.{name}": value for name, value in each.items()}
        for path, each in found.items()
    }


def _mount(image: Path, packs: list[int], mountpoint: Path) -> None:
    before = _entries()
    try:
        kernel.mount(image, packs, mountpoint, OPTIONS)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, "the kernel refuses to mount it")
        raise Unavailable(
            f"{reason}: {error.strerror}", where=str(mountpoint), hint="use driver fuse"
        ) from error
    new = _entries() - before
    # Their names do not tell which mount is whose: if another one was made meanwhile, leave both.
    if len(new) == 1:
        readahead.widen_named(new.pop(), READ_AHEAD)


def _entries() -> set[str]:
    """Return what sysfs has of EROFS mounts."""
    try:
        return {name for name in os.listdir(readahead.ENTRIES) if name.startswith("erofs")}
    except OSError:
        return set()


class OpenPacks:
    """Packs by descriptor, as a `PackSource`: reads what these descriptors lead to."""

    def __init__(self, descriptors: Mapping[PackId, int]) -> None:
        self._descriptors = descriptors

    def read(self, pack: PackId, offset: int, length: int) -> Buffer:
        """Return these bytes. Raises as `PackFiles.read`."""
        try:
            with fs.reading(f"pack {pack.short}", call("fsck", read_data=True)):
                data = _read(self._descriptors[pack], length, offset)
        except OverflowError as error:
            raise _too_short(pack) from error
        if len(data) != length:
            raise _too_short(pack)
        return data

    def read_scattered(self, pack: PackId, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill the targets, one after another."""
        for target in targets:
            target[:] = self.read(pack, offset, len(target))
            offset += len(target)

    def will_need(self, pack: PackId, offset: int, length: int) -> None:
        """Do nothing."""


def _read(descriptor: int, length: int, offset: int) -> Buffer:
    """Read, and keep nothing in memory where the kernel can (Linux 6.14): mounts read past it."""
    data = bytearray(length)
    try:
        return data[: os.preadv(descriptor, [data], offset, _DONTCACHE)]
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return os.pread(descriptor, length, offset)


def _too_short(pack: PackId) -> Corrupt:
    return Corrupt("the pack ends too early", where=f"pack {pack.short}", hint=call("fsck"))


def check_blocks(
    blocks: Collection[tuple[BlockId, Location]],
    descriptors: Mapping[PackId, int],
    block_size: int,
) -> None:
    """Read and hash each of these blocks at its place, on all processors.

    Raises Corrupt naming a block that does not match its id, Unreadable, StorageFailed.
    """
    reader = BlockReader(OpenPacks(descriptors), block_size)
    in_order = sorted(blocks, key=lambda item: (item[1].pack, item[1].offset))

    def check_some(some: Sequence[tuple[BlockId, Location]]) -> None:
        for block, location in some:
            reader.block(block, location)

    waiting = iter(in_order)
    groups = iter(lambda: list(islice(waiting, _AT_ONCE)), [])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "check") as pool:
        try:
            for _ in pool.map(check_some, list(groups)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def require_whole_pages(sizes: Mapping[PackId, int]) -> None:
    """Raise Corrupt unless each pack is a whole number of pages, as the kernel reads them."""
    for pack, size in sizes.items():
        if size % PAGE:
            raise Corrupt("truncated pack", where=f"pack {pack.short}", hint=call("fsck"))
