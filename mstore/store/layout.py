"""Where things lie in a store directory, and its one-line format file.

STORE/
  format      "mstore 3 <uuid> <block size>"
  config      settings in TOML; missing means defaults (`mstore.store.config`)
  lock        held (flock) by the one writer that is publishing
  packs/      sealed packs
  index/      LMDB: where things are, refs, reflog, leases
  stats/      LMDB: statistics of deltas, can be thrown away
  memo/       LMDB: what merges made, can be thrown away; made by the first merge
  refs/       text mirror of the refs, and the list of packs
  remotes/    what is known of remotes, can be read again; missing while there is none
  cache/      what lazy remotes sent and virtual merges made, can be thrown away; may be missing
  searches/   logs of searches that go on (`mstore.search.runlog`); may be missing
  lost+found/ packs that the index does not know; missing while there is none
  tmp/        one directory a running operation; garbage when its owner is gone
"""

from __future__ import annotations

import errno
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from mstore import fs
from mstore.fs.rights import Sharing
from mstore.terms.errors import (
    BadRequest,
    Conflict,
    Corrupt,
    Incompatible,
    NotFound,
    StorageFailed,
    Unavailable,
)
from mstore.terms.phrases import Call, Text, call, phrase

BACKUP_MARKER = "backup"
"""The file that says which store a directory is a backup of (`upkeep.backup.destination`)."""
KEPT_ROOT = "root"
KEPT_LISTS = "lists"
"""Where the root that was read last is, and its lists, in what is kept of a remote."""
FORMAT_VERSION = 3
MIN_BLOCK_SIZE = 1 << 16
MAX_BLOCK_SIZE = 1 << 24
DEFAULT_BLOCK_SIZE = 1 << 20
FORMAT_LIMIT = 4096
"""The most bytes of a format file that are read."""
_TABLES = ("index", "stats", "memo")

_VERSION = re.compile(r"0|[1-9][0-9]{0,8}")

_DIRECTORIES = (
    "packs",
    "index",
    "stats",
    "memo",
    "refs",
    "remotes",
    "cache",
    "searches",
    "lost+found",
    "tmp",
)
_MADE_ANEW = ("cache", "lock", "lost+found", "memo", "remotes", "stats", "tmp")
_PACKS_OF = re.compile("[0-9a-f]{2}")
_FILES = (
    *("format", "config", "lock", BACKUP_MARKER, "refs/mirror"),
    *(f"{table}/{name}" for table in _TABLES for name in ("data.mdb", "lock.mdb", "checked")),
)


class Layout(msgspec.Struct, frozen=True):
    """The paths and fixed facts of one store, and its open root directory."""

    root: Path
    uuid: uuid.UUID
    block_size: int
    opened: fs.Root | None = None
    """Serves all paths below `root` (`mstore.fs.roots`) while anybody has this layout."""

    def __post_init__(self) -> None:
        """Open the root. Raises StorageFailed."""
        # The working directory may change while a store is open.
        msgspec.structs.force_setattr(self, "root", self.root.absolute())
        if self.opened is None:
            msgspec.structs.force_setattr(self, "opened", fs.Root(self.root))

    def close(self) -> None:
        """Close the root directory; paths are then as good as those of any other directory."""
        if self.opened is not None:
            self.opened.close()

    def follow(self) -> None:
        """Open the directory that `root` leads to now.  Raises Unavailable for another store."""
        found = read(self.root)
        if found.uuid != self.uuid:
            found.close()
            raise Unavailable(
                "this store was replaced by another one while this process has it open",
                where=str(self.root),
                hint="close the store and open it again",
            )
        found.require_kinds()
        self.close()
        msgspec.structs.force_setattr(self, "opened", found.opened)

    def require_kinds(self) -> None:
        """Raise Conflict if an entry of the store is a link, a fifo, or of another wrong kind.

        LMDB opens its files by path, so this comes before any of them is opened. What replaces an
        entry later is found when it is opened.
        """
        try:
            fs.require_kinds(self.root, _DIRECTORIES, _FILES)
            with fs.translated(self.packs), suppress(FileNotFoundError):
                for name in fs.strays(self.packs):
                    if _PACKS_OF.fullmatch(name):
                        path = self.packs / name
                        raise fs.unexpected(path, fs.status_of(path).st_mode, "a directory")
        except Conflict as error:
            error.advise(self._instead(Path(error.where or "")))
            raise

    def _instead(self, path: Path) -> Text:
        """Return what to do with an entry of a wrong kind."""
        seen = f"see what it is: ls -ld {shlex.quote(str(path))}; then"
        entry, *below = path.relative_to(self.root).parts
        if below[:1] == ["lock.mdb"] or below[:1] == ["checked"] or entry in _MADE_ANEW:
            return f"{seen} remove it: it is made anew"
        if entry in ("index", "refs"):
            return phrase(
                "{seen} remove it, and run: {reindex}", seen=seen, reindex=call("reindex")
            )
        if entry == "packs":
            return phrase(
                "{seen} put back what belongs there, or remove it, and run: {repair}",
                seen=seen,
                repair=call("repair", read_data=True, sources=("BACKUP",)),
            )
        return f"{seen} put back what belongs there"

    @property
    def packs(self) -> Path:
        """Sealed packs, in one directory per two hex digits."""
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
        """The LMDB environment of the memo table; missing until the first row is written."""
        return self.root / "memo"

    @property
    def mirror(self) -> Path:
        """The text mirror of the refs."""
        return self.root / "refs" / "mirror"

    @property
    def pack_list(self) -> Path:
        """The pack list; a generation follows this name."""
        return self.root / "refs" / "packs"

    @property
    def lost_found(self) -> Path:
        """Packs that no row names; deleted only on request.  May be missing."""
        return self.root / "lost+found"

    @property
    def cache(self) -> Path:
        """What came from elsewhere or was computed (`mstore.store.disk_cache`).  May be missing."""
        return self.root / "cache"

    @property
    def remotes(self) -> Path:
        """What is known of remotes (`mstore.remotes.state`).  May be missing."""
        return self.root / "remotes"

    @property
    def searches(self) -> Path:
        """Logs of searches (`mstore.search.runlog`).  May be missing."""
        return self.root / "searches"

    @property
    def tmp(self) -> Path:
        """Files being written."""
        return self.root / "tmp"

    @property
    def incoming(self) -> Path:
        """Copies from another store, until all of them are complete (`mstore.upkeep.backup`)."""
        return self.tmp / "incoming"

    @property
    def config(self) -> Path:
        """The store's settings."""
        return self.root / "config"

    @property
    def lock(self) -> Path:
        """The writer lock."""
        return self.root / "lock"


@contextmanager
def for_a_full_disk(layout: Layout) -> Iterator[None]:
    """Where the disk is full, advise to remove what of the store can be computed again.

    For what makes room, or leads to it: it needs little, and on a disk of the store's own there is
    nothing else to remove.
    """
    try:
        yield
    except StorageFailed as error:
        code = error.errno or 0
        # Another hint knows more.
        if code in (errno.ENOSPC, errno.EDQUOT) and error.hint == fs.refusal(code, "", "").hint:
            error.advise(_room(layout))
        raise


def _room(layout: Layout) -> str:
    asides = sorted(layout.root.glob("*.damaged-*"))
    found = [path for path in (layout.cache, layout.stats, layout.memo, *asides) if path.is_dir()]
    if not found:
        return "remove files of 8 MiB from this disk, outside the store, and run the command again"
    named = " ".join(shlex.quote(str(path)) for path in found)
    return f"rm -r {named}    (computed again when needed), and run the command again"


def _is_block_size(size: int) -> bool:
    return MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and not size & (size - 1)


def _nearest_block_size(size: int) -> int:
    """Return the nearest allowed size."""
    within = min(max(size, MIN_BLOCK_SIZE), MAX_BLOCK_SIZE)
    lower = 1 << (within.bit_length() - 1)
    return lower if within - lower <= 2 * lower - within else 2 * lower


def _format_line(layout: Layout, version: int = FORMAT_VERSION) -> str:
    return f"mstore {version} {layout.uuid} {layout.block_size}\n"


# Everything that a killed `creating` can leave behind.  Anything else belongs to somebody.
_UNFINISHED = re.compile(
    r"lock|config|packs|refs(/mirror|/packs\.[0-9]+)?|tmp(/\.(mirror|packs\.[0-9]+|format|config)\.[0-9a-f]{8}|/incoming(/.*)?)?"
    r"|(index|stats)(/(data\.mdb|lock\.mdb|\.lock\.mdb\.[0-9a-f]{8}))?"
)


@contextmanager
def creating(root: Path, block_size: int, sharing: Sharing = Sharing.UMASK) -> Iterator[Layout]:
    """Lay out a new store; writes the format file last, which makes it a store.

    Call `require_local` before.  The caller's block adds the first contents.  If that or anything
    here fails, everything created is removed.  Raises Conflict if `root` holds a store or anything
    else, BadRequest for a bad block size.
    """
    if not _is_block_size(block_size):
        raise BadRequest(
            f"block size {block_size} is not a power of two between 64 KiB and 16 MiB",
            hint=call("init", block_size=_nearest_block_size(block_size)),
        )
    _require_unused(root)
    is_new = not root.exists()
    try:
        fs.make_directories(root)
        layout = Layout(root, uuid.uuid4(), block_size)
        _require_unused(root)
        share(layout, sharing)
        lock = fs.LockFile(layout.lock)
    except BaseException as error:
        # Nothing is locked yet: existing files may belong to another process.
        if is_new and root.is_dir() and not any(root.iterdir()):
            fs.remove_empty(root)
        if isinstance(error, StorageFailed) and error.hint is None:
            error.advise("name a new directory, in one that you may write to")
        raise
    try:
        # Of two concurrent calls the second waits here, and then finds a store.
        lock.acquire()
        _require_unused(root)
        try:
            _clear(layout)
            for directory in (layout.packs, layout.index, layout.stats, layout.mirror.parent):
                fs.make_directory(directory)
            fs.make_directory(layout.tmp, private=True)
            yield layout
            # Otherwise the name of the format file could survive a power loss that the other names
            # did not.
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
        layout.close()


def write_format(layout: Layout) -> None:
    """Write the format file, the last file of a new store."""
    fs.replace_file(layout.root / "format", _format_line(layout), staging=layout.tmp)


def _require_unused(root: Path) -> None:
    """Raise Conflict unless `root` is missing, empty, or left by a killed `creating`."""
    if (root / "format").exists():
        raise Conflict(
            "there is a store already", where=str(root), hint=call("stats", store=str(root))
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
        layout.remotes,
        layout.tmp,
    ):
        fs.remove_tree(directory)
    fs.unlink(layout.config, missing_ok=True)


def _no_store(root: Path) -> NotFound:
    if (root / BACKUP_MARKER).exists():
        return NotFound(
            "a first backup that did not finish",
            where=str(root),
            hint=phrase(
                "of its store run again: {backup}",
                backup=call("backup", str(root), store="STORE"),
            ),
        )
    # A killed `init` leaves no packs.
    if any(root.glob("packs/*")) and (root / "refs").is_dir():
        return NotFound(
            "this looks like a store without its file format",
            where=str(root),
            hint=_copy_format(root),
        )
    is_there = root.exists()
    return NotFound(
        "no store here" if is_there else "no store here: there is no such directory",
        where=str(root),
        hint=phrase(
            "name another path, or make a store at this one: {init}",
            init=call("init", store=str(root)),
        ),
    )


def _copy_format(root: Path) -> str:
    return f"copy it from a backup: cp BACKUP/format {shlex.quote(str(root / 'format'))}"


def _opened(root: Path) -> fs.Root:
    """Open the directory of a store. Raises NotFound, StorageFailed."""
    try:
        return fs.Root(root)
    except StorageFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _no_store(root) from error
        raise


def _format_fields(root: Path) -> tuple[str, list[str]]:
    """Return the format file's line and its fields.  Raises NotFound, Corrupt, StorageFailed."""
    path = root / "format"
    try:
        line = fs.read_file(path, FORMAT_LIMIT).decode("ascii", "replace")
    except StorageFailed as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _no_store(root) from error
        raise
    fields = line.split()
    if len(fields) < 2 or fields[0] != "mstore" or not _VERSION.fullmatch(fields[1]):
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root))
    return line, fields


def version_of(root: Path) -> int:
    """Return the format version of the store at `root`, known or not.  Raises NotFound, Corrupt."""
    opened = _opened(root)
    try:
        return int(_format_fields(root)[1][1])
    finally:
        opened.close()


def too_new(root: Path, version: int) -> Incompatible:
    """Return the error for a store of a newer format."""
    return Incompatible(
        f"store format {version}; this mstore reads format {FORMAT_VERSION}",
        where=str(root),
        hint="pip install -U mstore",
    )


def locate(root: Path) -> Layout:
    """Read the format file and open the store's directory.

    Raises NotFound, Incompatible (another version), Corrupt, Conflict (an entry of the store is a
    link, a fifo, or of another kind than it should be), StorageFailed.
    """
    version = version_of(root)
    if version > FORMAT_VERSION:
        raise too_new(root, version)
    if version < FORMAT_VERSION:
        raise Incompatible(
            f"store format {version} is older than format {FORMAT_VERSION}, which is read here",
            where=str(root),
            hint=call("migrate"),
        )
    layout = read(root)
    layout.require_kinds()
    return layout


def require_local(root: Path, vouched: str, vouch: Callable[[str], Call] | None = None) -> None:
    """Raise Incompatible unless LMDB's locks and map are reliable on the filesystem at `root`.

    vouched: the type that the store's setting `filesystem` names. vouch: returns what names another
    one, if that is not `configure`.
    """
    kind = fs.filesystem_type(root)
    if kind and kind not in fs.LOCAL_FILESYSTEMS and kind != vouched:
        raise Incompatible(
            f"a store's index needs a local filesystem, and mstore does not know {kind} as one",
            where=str(root),
            hint=phrase(
                "use a local disk; or, if locks and shared maps hold there for all who use the "
                "store: {vouch}",
                vouch=vouch(kind) if vouch else call("vouch", kind),
            ),
        )


def share(layout: Layout, sharing: Sharing) -> None:
    """Apply `sharing` to a store's files, existing and future; never removes permissions."""
    fs.share_tree(layout.root, sharing, private=(layout.tmp, layout.lock))
    fs.share(layout.root, sharing)


def require_writable(layout: Layout) -> None:
    """Raise StorageFailed, with a hint, if this user may read the store but not write it."""
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
    """Do `locate` for any version with these paths.  Raises NotFound, Corrupt, Conflict."""
    path = root / "format"
    opened = _opened(root)
    line, fields = _format_fields(root)
    try:
        layout = Layout(root, uuid.UUID(fields[2]), int(fields[3]), opened)
    except (IndexError, ValueError) as error:
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root)) from error
    if line != _format_line(layout, int(fields[1])) or not _is_block_size(layout.block_size):
        raise Corrupt("not a format file", where=str(path), hint=_copy_format(root))
    return layout


def tables_of(remote: Path) -> Path:
    """Return where the tables of a remote's packs are, in what is kept of it."""
    return remote / "places"
