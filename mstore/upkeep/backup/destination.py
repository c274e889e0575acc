"""A directory that is a backup of one store, and of no other.

    backup             "mstore backup 1 <uuid>": whose backup it is; the first file that is written
    index, counters    the generation of the last backup, and which packs were damaged when they
                       were copied
    tmp/incoming/      packs and the index of the next state, while they are not all there
    tmp/incoming.lock  held by the backup that runs: to others it looks like a lease

All else is a store. A commit to it makes it a store of its own: its generation then differs from
the row's, and no backup is taken there any more.

At every moment `index/` names packs that are in `packs/`, of one commit of the source. The new
index replaces the old one in one step, after all its packs have their names. Only then are old
packs removed: the new index condemns those that only the old one named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from mstore import fs
from mstore.blocks import lmdb_env
from mstore.blocks.index import Index
from mstore.blocks.schema import NamedPack
from mstore.store import layout as layouts
from mstore.store import leases
from mstore.store.config import Config
from mstore.store.layout import BACKUP_MARKER, Layout
from mstore.store.mirror import Mirror
from mstore.store.refs import refs_in
from mstore.terms.errors import BadRequest, Conflict, Corrupt, Incompatible, StorageFailed
from mstore.terms.ids import PackId
from mstore.terms.phrases import call, joined, phrase

_MARKER = re.compile(r"mstore backup ([0-9]+) ([0-9a-f-]{36})\n")
_VERSION = 1
_TEMPORARY = re.compile(r"\.backup\.[0-9a-f]{8}")
_LOCK = "incoming"
_HINT = "name a new directory"


class State(msgspec.Struct, frozen=True):
    """What a backup holds: refs as of a generation, packs (condemned ones too), damaged packs."""

    names: Mirror
    packs: tuple[NamedPack, ...]
    condemned: tuple[PackId, ...]
    damaged: frozenset[PackId]


class Destination:
    """A backup of `source`, being written.  `before` is what it holds; None: nothing yet."""

    def __init__(self, layout: Layout, lock: fs.LockFile) -> None:
        self.layout = layout
        self._lock = lock
        self.before = self._state()

    @classmethod
    @contextmanager
    def opened(cls, source: Layout, path: Path, filesystem: str) -> Iterator[Self]:
        """Open the backup of this store at `path`; begin one if nothing is there.

        Its permissions follow the umask of whoever makes it, not the sharing of the store.
        filesystem: the setting of the source.

        Raises BadRequest if the directory above is missing, Conflict if something else is there or
        another backup runs, Incompatible on an unknown filesystem, StorageFailed, Corrupt.
        """
        _require_for(source, path)
        _require_local(path, filesystem)
        if not path.parent.is_dir():
            # A disk that is not mounted, or a slip: a backup there would fill another disk.
            raise BadRequest(
                "the directory above it does not exist",
                where=str(path),
                hint=f"mkdir -p {shlex.quote(str(path.parent))}, or mount the disk that it is on",
            )
        fs.make_directories(path)
        layout = Layout(path, source.uuid, source.block_size)
        layout.require_kinds()
        if not (path / BACKUP_MARKER).exists():
            fs.replace_file(path / BACKUP_MARKER, f"mstore backup {_VERSION} {source.uuid}\n")
        fs.make_directory(layout.tmp, private=True, exist_ok=True)
        for directory in (layout.packs, layout.mirror.parent):
            fs.make_directory(directory, exist_ok=True)
        fs.sync_directory(path)
        lock = _locked(layout)
        try:
            found = cls(layout, lock)
            # Whole packs that an earlier run left stay in it.
            fs.make_directory(layout.incoming, private=True, exist_ok=True)
            found._clear()
            try:
                yield found
            finally:
                with suppress(StorageFailed, FileNotFoundError):
                    found._clear()
                    fs.remove_empty(layout.incoming)
        finally:
            lock.remove()
            layout.close()

    def _clear(self) -> None:
        """Leave nothing in tmp/incoming but whole packs."""
        for name in fs.listed(self.layout.incoming):
            path = self.layout.incoming / name
            if path.is_dir() and not path.is_symlink():
                fs.remove_tree(path)
            elif path.suffix != ".pack":
                fs.unlink(path, missing_ok=True)

    def _state(self) -> State | None:
        """Return what it holds.  Raises Conflict if it was written to, Corrupt if it is damaged."""
        layout = self.layout
        if not (layout.root / "format").exists():
            return None
        if lmdb_env.is_open(layout.index):
            raise Conflict("this process has the backup open", where=str(layout.root))
        try:
            with closing(Index(layout.index)) as index, index.env.read() as transaction:
                row = index.backup(transaction)
                generation = index.generation(transaction)
                if row is None or row.generation != generation:
                    raise Conflict(
                        "something was written to this backup, so it is a separate store now",
                        where=str(layout.root),
                        hint=_HINT,
                    )
                return State(
                    Mirror(generation, dict(refs_in(index, transaction).walk())),
                    tuple(index.named_packs(transaction)),
                    tuple(one.pack for one in index.condemned(transaction)),
                    frozenset(row.damaged),
                )
        except Corrupt as error:
            check = call("fsck", store=str(layout.root))
            error.advise(phrase("{check}    (or {new})", check=check, new=_HINT))
            raise

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold its locks.  Raises Conflict if others work in it, or if it has changed."""
        layout = self.layout
        with leases.collecting(layout):
            lock = fs.LockFile(layout.lock)
            try:
                if not lock.acquire(blocking=False) or leases.live(layout) - {_LOCK}:
                    raise Conflict(
                        "another command writes to the backup", where=str(layout.root), hint=_HINT
                    )
                if self._state() != self.before:
                    raise Conflict(
                        "the backup changed meanwhile", where=str(layout.root), hint=_HINT
                    )
                yield
            finally:
                lock.release()

    def lean(self, fresh: Path, config: Config) -> None:
        """Put in place what the next index needs of remotes; what the old one needs stays.

        fresh: what is kept of them. config: the settings that `settle` will write.
        """
        layout = self.layout
        fs.make_directory(layout.remotes, exist_ok=True)
        fs.sync_directory(layout.root)
        for name in fs.listed(fresh):
            _replace(fresh / name, layout.remotes / name)
        named = {one.name for one in config.remotes}
        with suppress(Corrupt):
            others = (one for one in Config.load(layout).remotes if one.name not in named)
            config = replace(config, remotes=(*config.remotes, *others))
        self._set(config)

    def replace_index(self, fresh: Path) -> None:
        """Put a whole new index in the place of the old one, in one step."""
        _replace(fresh, self.layout.index)

    def settle(self, config: Config, *, lazy: bool) -> None:
        """Write its settings, and the format file of a new one, which makes it a store.

        lazy: whether it leans on remotes; what is kept of others goes.
        """
        layout = self.layout
        self._set(config)
        kept = {one.name for one in config.lazy_remotes} if lazy else set()
        if fs.is_there(layout.remotes):
            for name in fs.listed(layout.remotes):
                if name not in kept:
                    fs.remove_tree(layout.remotes / name)
        if not (layout.root / "format").exists():
            layouts.write_format(layout)
            fs.sync_directory(layout.root.parent)

    def _set(self, config: Config) -> None:
        layout = self.layout
        settings = None
        with suppress(Corrupt):
            settings = Config.load(layout)
        if settings != config:
            config.save(layout)


def _replace(fresh: Path, place: Path) -> None:
    """Put a whole directory in the place of an old one, in one step."""
    fs.sync_directory(fresh)
    fs.sync_directory(fresh.parent)
    if place.exists():
        fs.exchange(fresh, place)
    else:
        fs.rename(fresh, place)
    fs.sync_directory(place.parent)


def _locked(layout: Layout) -> fs.LockFile:
    while True:
        lock = fs.LockFile(layout.tmp / f"{_LOCK}{leases.LOCK}")
        if not lock.acquire(blocking=False):
            lock.release()
            raise Conflict(
                "another backup to this directory is running",
                where=str(layout.root),
                hint="run the command again when it has ended",
            )
        if lock.is_current():
            return lock
        # A sweeper saw the file in the instant before it was locked, and removed it.
        lock.release()


def _require_for(source: Layout, path: Path) -> None:
    """Raise Conflict unless this is a backup of the store, or nothing at all."""
    marker = path / BACKUP_MARKER
    if path.is_dir() and not marker.exists():
        with fs.translated(path):
            left = sorted(path.iterdir())
        if left and all(_TEMPORARY.fullmatch(one.name) for one in left):
            # Of a backup that was killed before it had written its first word.
            for one in left:
                fs.unlink(one, missing_ok=True)
            return
    if not marker.exists():
        if (path / "format").exists():
            raise Conflict("this is a store, not a backup of this one", where=str(path), hint=_HINT)
        fs.require_empty(path)
        return
    told = _MARKER.fullmatch(fs.read_file(marker, 200).decode("ascii", "replace"))
    if told is None:
        raise Conflict("not a backup made by mstore", where=str(path), hint=_HINT)
    if int(told[1]) != _VERSION:
        raise Incompatible(
            f"backup version {told[1]}; this mstore writes version {_VERSION}",
            where=str(path),
            hint="pip install -U mstore",
        )
    if told[2] != str(source.uuid):
        raise Conflict("this is a backup of another store", where=str(path), hint=_HINT)
    if (path / "format").exists():
        found = layouts.locate(path)
        if (found.uuid, found.block_size) != (source.uuid, source.block_size):
            raise Conflict("this is a backup of another store", where=str(path), hint=_HINT)


def _require_local(path: Path, filesystem: str) -> None:
    try:
        layouts.require_local(path, filesystem)
    except Incompatible as error:
        _, _, hint = error.texts
        elsewhere = (
            "a backup is a store; to a network filesystem copy format, config, refs/ and packs/ "
            "with rsync (docs/keeping.md, Backups)"
        )
        error.advise(joined(hint, elsewhere, between="\n"))
        raise
