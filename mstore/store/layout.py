"""Where things lie in a store directory, and its one-line format file.

STORE/
  format      "mstore 2 <uuid> <block size>"
  config      settings in TOML; missing means defaults (`mstore.store.config`)
  lock        held (flock) by the one writer that is publishing
  packs/      sealed packs
  index/      LMDB: where things are, refs, reflog, leases
  stats/      LMDB: statistics of deltas, can be thrown away
  memo/       LMDB: what merges made, can be thrown away; made by the first merge
  refs/       text mirror of the refs
  lost+found/ packs that the index does not know; missing while there is none
  tmp/        one directory a running operation; garbage when its owner is gone
"""

from __future__ import annotations

import errno
import re
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mstore import fs
from mstore.errors import BadRequest, Conflict, Corrupt, Incompatible, NotFound, StorageFailed
from mstore.sharing import Sharing

BACKUP_MARKER = "backup"
"""The file that says whose backup a directory is (`mstore.backup.destination`)."""
FORMAT_VERSION = 2
MIN_BLOCK_SIZE = 1 << 16
MAX_BLOCK_SIZE = 1 << 24
DEFAULT_BLOCK_SIZE = 1 << 20
FORMAT_LIMIT = 4096
"""Bytes of a format file that are looked at."""

_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths and fixed facts of one store."""

    root: Path
    uuid: uuid.UUID
    block_size: int

    @property
    def packs(self) -> Path:
        """Sealed packs, two hex digits a directory."""
        return self.root / "packs"

    @property
    def index(self) -> Path:
        """The LMDB index."""
        return self.root / "index"

    @property
    def stats(self) -> Path:
        """The LMDB environment of statistics."""
        return self.root / "stats"

    @property
    def memo(self) -> Path:
        """The LMDB environment of the memo table; missing until something is remembered."""
        return self.root / "memo"

    @property
    def mirror(self) -> Path:
        """The text mirror of the refs."""
        return self.root / "refs" / "mirror"

    @property
    def lost_found(self) -> Path:
        """What no row names, and nobody deletes unasked; may be missing."""
        return self.root / "lost+found"

    @property
    def tmp(self) -> Path:
        """What is being written."""
        return self.root / "tmp"

    @property
    def incoming(self) -> Path:
        """Where copies from another store lie until all of them are there (`mstore.backup`)."""
        return self.tmp / "incoming"

    @property
    def config(self) -> Path:
        """The store's settings."""
        return self.root / "config"

    @property
    def lock(self) -> Path:
        """The writer lock."""
        return self.root / "lock"


def _is_block_size(size: int) -> bool:
    return MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and not size & (size - 1)


def _nearest_block_size(size: int) -> str:
    """The allowed size that is nearest, as people write it."""
    within = min(max(size, MIN_BLOCK_SIZE), MAX_BLOCK_SIZE)
    lower = 1 << (within.bit_length() - 1)
    nearest = lower if within - lower <= 2 * lower - within else 2 * lower
    return f"{nearest >> 20}MiB" if nearest >= 1 << 20 else f"{nearest >> 10}KiB"


def _format_line(layout: Layout, version: int = FORMAT_VERSION) -> str:
    return f"mstore {version} {layout.uuid} {layout.block_size}\n"


# All that a `creating` which was killed can leave behind.  Anything else is somebody's.
_UNFINISHED = re.compile(
    r"lock|config|packs|refs(/mirror)?|tmp(/\.(mirror|format|config)\.[0-9a-f]{8}|/incoming(/.*)?)?"
    r"|(index|stats)(/(data\.mdb|lock\.mdb|\.lock\.mdb\.[0-9a-f]{8}))?"
)


@contextmanager
def creating(root: Path, block_size: int, sharing: Sharing = Sharing.UMASK) -> Iterator[Layout]:
    """Lay out a new store; the format file comes last: without it there is no store.

    The block puts the first contents in place.  If it fails, or anything here, what was made is
    removed.  Raises Conflict if `root` holds a store or anything else, BadRequest for a bad block
    size, Incompatible on a network filesystem.
    """
    if not _is_block_size(block_size):
        raise BadRequest(
            f"block size {block_size} is not a power of two between 64 KiB and 16 MiB",
            hint=f"mstore init --block-size {_nearest_block_size(block_size)}",
        )
    _require_unused(root)
    fs.require_local(root)
    layout = Layout(root, uuid.uuid4(), block_size)
    is_new = not root.exists()
    try:
        fs.make_directories(root)
        fs.serve_owner(root)
        share(layout, sharing)
        lock = fs.LockFile(layout.lock)
    except BaseException as error:
        # Nothing is locked yet: what lies there may be somebody else's.
        if is_new and root.is_dir() and not any(root.iterdir()):
            fs.remove_empty(root)
        if isinstance(error, StorageFailed) and error.hint is None:
            error.hint = "name a new directory, in one that you may write to"
        raise
    try:
        # Of two at a time the second waits here, and then finds a store.
        lock.acquire()
        _require_unused(root)
        try:
            _clear(layout)
            for directory in (layout.packs, layout.index, layout.stats, layout.mirror.parent):
                fs.make_directory(directory)
            fs.make_directory(layout.tmp, private=True)
            yield layout
            # Or the format's name could outlive a power loss that theirs did not.
            fs.sync_directory(root)
            write_format(layout)
            fs.sync_directory(root.parent)
        except BaseException:
            _clear(layout)
            fs.unlink(root / "format", missing_ok=True)
            fs.unlink(layout.lock, missing_ok=True)
            if is_new:
                fs.remove_empty(root)
            raise
    finally:
        lock.release()


def write_format(layout: Layout) -> None:
    """Make a directory a store: the last thing that is written of one."""
    fs.replace_text(layout.root / "format", _format_line(layout), staging=layout.tmp)


def _require_unused(root: Path) -> None:
    """Raise Conflict unless `root` is missing, empty, or what a killed `creating` left."""
    if (root / "format").exists():
        raise Conflict(
            "there is a store already", where=str(root), hint=f"mstore --store {root} stats"
        )
    if root.is_dir() and not root.is_symlink():
        with fs.translated(root):
            if all(_UNFINISHED.fullmatch(str(p.relative_to(root))) for p in root.rglob("*")):
                return
    fs.require_empty(root)


def _clear(layout: Layout) -> None:
    for directory in (
        layout.packs,
        layout.index,
        layout.stats,
        layout.mirror.parent,
        layout.tmp,
    ):
        fs.remove_tree(directory)
    fs.unlink(layout.config, missing_ok=True)


def _no_store(root: Path) -> NotFound:
    if (root / BACKUP_MARKER).exists():
        return NotFound(
            "a first backup that did not finish",
            where=str(root),
            hint=f"of its store run again: mstore --store STORE backup {shlex.quote(str(root))}",
        )
    # What a killed `init` leaves has no pack.
    if any(root.glob("packs/*")) and (root / "refs").is_dir():
        return NotFound(
            "this looks like a store without its file format",
            where=str(root),
            hint=_copy_format(root),
        )
    return NotFound("no store here", where=str(root), hint=f"mstore --store {root} init")


def _copy_format(root: Path) -> str:
    return f"copy it from a backup: cp BACKUP/format {shlex.quote(str(root / 'format'))}"


def _format_fields(root: Path) -> tuple[str, list[str]]:
    """The line of the format file and its fields.  Raises NotFound, Corrupt, StorageFailed."""
    path = root / "format"
    try:
        with fs.translated(path), path.open("rb") as file:
            line = file.read(FORMAT_LIMIT).decode("ascii", "replace")
    except StorageFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _no_store(root) from error
        raise
    fields = line.split()
    if len(fields) < 2 or fields[0] != "mstore" or not _VERSION.fullmatch(fields[1]):
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root))
    return line, fields


def version_of(root: Path) -> int:
    """The format version of the store at `root`, whatever it is.  Raises NotFound, Corrupt."""
    return int(_format_fields(root)[1][1])


def too_new(root: Path, version: int) -> Incompatible:
    """The error for a store of a newer format."""
    return Incompatible(
        f"store format {version}; this mstore reads format {FORMAT_VERSION}",
        where=str(root),
        hint="pip install -U mstore",
    )


def locate(root: Path) -> Layout:
    """Read the format file.  Raises NotFound, Incompatible (another version, network), Corrupt."""
    version = version_of(root)
    if version > FORMAT_VERSION:
        raise too_new(root, version)
    if version < FORMAT_VERSION:
        raise Incompatible(
            f"store format {version} is older than format {FORMAT_VERSION}, which is read here",
            where=str(root),
            hint="mstore migrate",
        )
    layout = read(root)
    fs.require_local(root)
    fs.serve_owner(root)
    return layout


def share(layout: Layout, sharing: Sharing) -> None:
    """Have a store's files, those that are there and those to come, be for whom `sharing` names.

    Nobody loses what he may do now.  Raises StorageFailed where some are another user's.
    """
    fs.share_tree(layout.root, sharing, private=(layout.tmp, layout.lock))
    fs.share(layout.root, sharing)


def require_writable(layout: Layout) -> None:
    """Raise StorageFailed where this user may read the store and not write it; say what to do."""
    fs.require_writable(
        layout.root,
        [
            layout.tmp,
            layout.lock,
            layout.index,
            layout.index / "data.mdb",
            layout.index / "lock.mdb",
            layout.packs,
        ],
    )


def read(root: Path) -> Layout:
    """The same of a store of any version whose paths are these.  Raises NotFound, Corrupt."""
    path = root / "format"
    line, fields = _format_fields(root)
    try:
        layout = Layout(root, uuid.UUID(fields[2]), int(fields[3]))
    except (IndexError, ValueError) as error:
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root)) from error
    if line != _format_line(layout, int(fields[1])) or not _is_block_size(layout.block_size):
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root))
    return layout
