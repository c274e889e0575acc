"""The common part of the public API: the open catalog and the files opened with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Self

from mstore.blocks.lmdb_env import closed
from mstore.store.catalog import Catalog
from mstore.store.config import Config
from mstore.store.layout import DEFAULT_BLOCK_SIZE, locate
from mstore.store.models import Input, models_in, resolved
from mstore.terms.errors import BadRequest
from mstore.terms.ids import Revision, SnapshotId
from mstore.terms.phrases import Option, Phrase, call, is_text, phrase

ONCE = "once"
ALWAYS = "always"

# The calls that need numpy, numba and the merge engine import them: `log` must not wait for a
# compiler.
if TYPE_CHECKING:
    from mstore.blocks.codecs import Policy
    from mstore.blocks.elsewhere import PartReader
    from mstore.blocks.schema import PlanInputs
    from mstore.merge.planning.warnings import MergeWarning
    from mstore.merge.virtual.blocks import VirtualBlocks
    from mstore.models.stats.store import StatsStore
    from mstore.store.block_cache import BlockCache
    from mstore.store.disk_cache import DiskCache
    from mstore.store.memo import Memo
    from mstore.store.objects.manifest import File
    from mstore.store.objects.plan import Plan
    from mstore.store.view import SnapshotView
    from mstore.terms.ids import PlanId


class OpenStore:
    """Opening, closing, and the identity of a store.

    Use a store as a context manager, or call `close`.  Two are equal if they are of one directory,
    however its path was written.
    """

    cache_bytes_on_disk: int | None = None
    """The most bytes of `cache/`, which keeps computed blocks of virtual merges, and what came of
    lazy remotes; None: a tenth of the disk.

    Set it before anything is read.
    """
    keep_again: bool = False
    """Whether `cache/` keeps a computed block only if it was computed before, for another merge or
    by another process: for many virtual merges that are read once, and have few blocks in common.
    """

    def __init__(self, catalog: Catalog) -> None:
        if not isinstance(catalog, Catalog):
            raise BadRequest(
                "a store is opened with Store.open(PATH), and made with Store.init(PATH)"
            )
        self._begin(catalog.layout.root, catalog)

    def _begin(
        self,
        path: Path,
        catalog: Catalog | None,
        cache_bytes: int | None = None,
        verify: str = ONCE,
        author: str | Callable[[], str] = "",
    ) -> None:
        """Set the fields.  catalog: None opens it when it is first used."""
        if not is_text(author) and not callable(author):
            raise BadRequest("an author is text, or something to call for it")
        self._author = author
        if catalog is not None:
            catalog.author = lambda: self.author
        self._path = path
        self._place = os.path.realpath(path)
        self._opened = catalog
        # Guards what is opened lazily, and the change to closed.
        self._lock = RLock()
        self._closing = Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self._remarks: list[str] = []
        self._stats: StatsStore | None = None
        self._remembered: Memo | None = None
        # Plans that could not be stored because the store is read-only for this user.
        self._unkept: dict[PlanId, tuple[Plan, PlanInputs]] = {}
        # Neither model cards nor statistics of stored models change: a merge need not read again
        # what its plan has read.
        self._plan_warnings: dict[tuple[object, ...], tuple[MergeWarning, ...]] = {}
        self._cache: BlockCache | None = None
        self._cache_bytes = cache_bytes
        self._verify = verify
        self._views: dict[tuple[SnapshotId, str | None], SnapshotView] = {}
        self._views_lock = Lock()
        self._virtual: VirtualBlocks | None = None
        self._virtual_lock = Lock()
        self._on_disk: DiskCache | None = None
        if catalog is not None:
            self._lean(catalog)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    def __eq__(self, other: object) -> bool:
        return self._place == other._place if isinstance(other, OpenStore) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._place)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle path and settings: another process opens the store when it first uses it."""
        settings = (self._path, None, self._cache_bytes, self._verify, self.author)
        return _store_later, (type(self), settings)

    @classmethod
    def init(
        cls,
        path: str | Path,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        codec: str | None = None,
        shared: str | None = None,
        filesystem: str | None = None,
        author: str | Callable[[], str] = "",
    ) -> Self:
        """Create a store in a new or empty directory.

        block_size: bytes, a power of two from 64 KiB to 16 MiB, fixed for the store's life.
        codec, shared: as in `configure`. filesystem: as in `vouch`. author: as in `open`.

        Raises Conflict (the directory is not empty), BadRequest (an invalid setting), Incompatible
        (a filesystem that is not known to be local), StorageFailed.
        """
        settings = {"codec": codec, "shared": shared, "filesystem": filesystem}
        given = {key: value for key, value in settings.items() if value is not None}
        store = cls(Catalog.create(local_path(path), block_size, Config().changed(given)))
        store._author = author
        return store

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        cache_bytes: int | None = None,
        verify: str = "once",
        author: str | Callable[[], str] = "",
    ) -> Self:
        """Open the store in a directory.

        cache_bytes: the most decoded blocks that its views keep in memory, in bytes; 64 MiB unless
        given.  (One block is always kept.)
        verify: "once" checks each block when it is first read, and reads parts of a block that lies
        raw without checking it again; "always" checks a block every time that it is read from its
        pack.
        author: who makes the snapshots and notes, as they tell it: a text, or what is asked for it
        when one is made.

        Raises NotFound (no store there), Incompatible (another format, a filesystem that is not
        known to be local), Corrupt (the index cannot be opened), BadRequest, Unavailable,
        StorageFailed.
        """
        if verify not in (ONCE, ALWAYS):
            raise BadRequest(f"verify is once or always, not {verify!r}", where=Option("verify"))
        if cache_bytes is not None and cache_bytes < 0:
            raise BadRequest("a cache has at least 0 bytes", where=Option("cache_bytes"))
        store = cls.__new__(cls)
        catalog = Catalog.open(local_path(path))
        store._begin(catalog.layout.root, catalog, cache_bytes, verify, author)
        return store

    def _policy(self, codec: str | None) -> Policy:
        """Return the codecs that new blocks may use: `codec`, or the store's setting if None.

        Raises BadRequest.
        """
        config = self._catalog.config
        return (config if codec is None else config.changed({"codec": codec})).codec

    def _still_coded(self, files: Iterable[File], total: int, name: str) -> tuple[Phrase, ...]:
        """Return a remark if a result is not raw because the store had some of its blocks."""
        from mstore.upkeep.pins.positions import coded_blocks

        count = len(coded_blocks(self._catalog, files))
        text = (
            "{count} of {total} blocks were stored before and stay coded; to store all raw: {pin}"
        )
        pin = call("pin", name, raw=True)
        return (phrase(text, count=count, total=total, pin=pin),) if count else ()

    @classmethod
    def open_checked(cls, path: str | Path, *, author: str | Callable[[], str] = "") -> Self:
        """Open a store whose index may be damaged: check the index file before LMDB opens it.

        author: as for `open`.

        Raises as `open` does, and Corrupt if the index cannot be trusted.
        """
        from mstore.upkeep.check.index_file import require_sound

        require_sound(locate(local_path(path)))
        return cls.open(path, author=author)

    def close(self) -> None:
        """Release files and index once the reads of other threads have ended.

        A second call does nothing.  Later calls on the store raise Unavailable.

        Raises Unavailable, and closes nothing, when called inside another call of the same thread
        that holds the index.
        """
        opened = self._opened
        if self._pid != os.getpid():
            # In a forked child, only the pack descriptors are its own.
            if opened is not None:
                opened.packs.close()
            return
        with self._lock:
            opened = self._opened
            index = None if opened is None else opened.index.env
            for one in (index, self._stats, self._remembered):
                if one is not None:
                    one.require_outside()
            self._is_closed = True
        # A second call waits for the first.
        with self._closing, ExitStack() as parts:
            if opened is not None:
                elsewhere = opened.index.elsewhere
                if elsewhere is not None and elsewhere.reader is not None:
                    parts.callback(elsewhere.reader.close)
                parts.callback(opened.close)
            for part in (self._remembered, self._stats, self._virtual):
                if part is not None:
                    parts.callback(part.close)
            self._virtual = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return which tables were found damaged and recreated since the store was opened."""
        return tuple(self._remarks)

    @property
    def _catalog(self) -> Catalog:
        """The open catalog.  Raises Unavailable once the store is closed."""
        opened = self._opened
        if self._is_closed:
            raise closed(self._path)
        return self._open_now() if opened is None else opened

    def _open_now(self) -> Catalog:
        """Open a store that came from another process, unless another thread did."""
        with self._lock:
            if self._is_closed:
                raise closed(self._path)
            if self._opened is None:
                self._opened, self._pid = Catalog.open(self._path), os.getpid()
                self._opened.author = lambda: self.author
                self._lean(self._opened)
            return self._opened

    @property
    def is_lazy(self) -> bool:
        """Whether it reads blocks of a remote that are not here."""
        return self._catalog.index.elsewhere is not None

    @property
    def _reader(self) -> PartReader | None:
        """What reads lazy remotes, if there is one."""
        elsewhere = self._catalog.index.elsewhere
        return None if elsewhere is None else elsewhere.reader

    def _traffic(self) -> tuple[int, int]:
        """Return requests to lazy remotes until now, and bytes that came."""
        reader = self._reader
        return (0, 0) if reader is None else (reader.traffic.requests, reader.traffic.bytes)

    def _follow_remotes(self) -> None:
        """Read the blocks of remotes that another process has made lazy since, too."""
        self._catalog.follow_remotes()
        self._lean(self._catalog)

    def _lean(self, catalog: Catalog) -> None:
        """Let a catalog read the blocks of lazy remotes; the part about remotes knows how."""

    @property
    def path(self) -> Path:
        """The store's directory, as an absolute path."""
        return self._path

    @property
    def block_size(self) -> int:
        """The size of a full block in bytes."""
        return (self._opened or self._catalog).block_size

    @property
    def author(self) -> str:
        """The `author` of the snapshots and notes made here, as given to `open`; else empty."""
        return self._author if isinstance(self._author, str) else self._author()

    def doubt(self) -> str | None:
        """Why this store is readable but not writable; None if it is writable.

        Its index is older than the mirror of the refs or the list of packs: it was replaced by an
        older one, or is damaged.  Every write then raises Corrupt until `reindex` has rebuilt it.
        """
        return self._catalog.doubt()

    @property
    def uuid(self) -> str:
        """The store's UUID as text."""
        return str(self._catalog.layout.uuid)

    def generation(self) -> int:
        """Return a number that grows with every change of the store.

        While it is the same, so are all refs and the set of snapshots.  Cheap, for programs that
        follow a store.  If the store was put back from a backup meanwhile, this opens its new
        files, and the number may be smaller.

        Raises Unavailable if another store has taken the place of this one.
        """
        return self._catalog.generation()

    @property
    def _statistics(self) -> StatsStore:
        from mstore.models.stats.store import StatsStore

        with self._lock:
            layout = self._catalog.layout
            if self._stats is None:
                self._stats = StatsStore(layout.stats, self._remarks.append)
            return self._stats

    def _computing(self) -> VirtualBlocks:
        """The computer of virtual blocks, created when the first one is read."""
        with self._virtual_lock:
            if self._virtual is None:
                from mstore.merge.virtual.blocks import VirtualBlocks

                self._virtual = VirtualBlocks(
                    self._catalog,
                    self._memo,
                    self._cache_on_disk(self._catalog),
                    threads=thread_count(None),
                    keep_again=lambda: self.keep_again,
                    check_always=self._verify == ALWAYS,
                )
            return self._virtual

    def _cache_on_disk(self, catalog: Catalog) -> DiskCache:
        """The one cache of this store on its disk."""
        from mstore.store.disk_cache import DiskCache

        with self._lock:
            if self._on_disk is None:
                self._on_disk = DiskCache(catalog.layout.cache, lambda: self.cache_bytes_on_disk)
            return self._on_disk

    @property
    def _memo(self) -> Memo:
        from mstore.store.memo import Memo

        with self._lock:
            layout = self._catalog.layout
            if self._remembered is None:
                self._remembered = Memo(layout.memo, self._remarks.append)
            return self._remembered

    def _input(self, revision: Revision) -> Input:
        """Resolve a revision whose bytes are stored, with no tensor in two files of one model.

        Raises as `_stored`, and Incompatible.
        """
        return self._mergeable(self._whole(revision))

    def _mergeable(self, found: Input) -> Input:
        """Return a snapshot as `_input` does, which was resolved.  Raises as it does."""
        self._catalog.require_real(found.snapshot, found.name)
        manifest = self._catalog.manifest_of(found.snapshot)
        models_in(self._catalog, manifest).require_one_each(found.name)
        return found

    def _stored(self, revision: Revision) -> Input:
        """Resolve a revision whose bytes are stored.  Raises as `_whole`, BadRequest (virtual)."""
        found = self._whole(revision)
        self._catalog.require_real(found.snapshot, found.name)
        return found

    def _real(self, revision: Revision) -> SnapshotId:
        """Resolve a revision of a whole snapshot whose bytes are stored.  Raises as `_stored`."""
        # REF:MODEL is none.
        self._catalog.resolve(revision)
        return self._stored(revision).snapshot

    def _whole(self, revision: Revision) -> Input:
        """Resolve REF or REF:MODEL, whose contents were not pruned.  Raises as `resolved`."""
        return resolved(self._catalog, revision)

    def _reflog_days(self, days: int | None) -> int:
        if days is None:
            return self._catalog.config.reflog_days
        return self._catalog.config.changed({"reflog_days": whole_number(days)}).reflog_days


def _store_later(kind: type[OpenStore], settings: tuple[Any, ...]) -> OpenStore:
    """Return a store that is opened when it is first used."""
    store = kind.__new__(kind)
    store._begin(*settings)
    return store


def thread_count(threads: int | None) -> int:
    """Return the given number, or as many threads as this process may use.  Raises BadRequest."""
    if threads is None:
        return len(os.sched_getaffinity(0))
    return _count("threads", threads)


def job_count(jobs: int) -> int:
    """Return a number of jobs.  Raises BadRequest."""
    return _count("jobs", jobs)


def _count(what: str, given: int) -> int:
    number = whole_number(given)
    if number is None or not 1 <= number <= 256:
        raise BadRequest(f"{what} must be between 1 and 256, not {given}")
    return number


def whole_number(given: Any) -> int | None:
    """Return a whole number, also of numpy, as Python's own; None for anything else."""
    is_whole = isinstance(given, Integral) and not isinstance(given, bool)
    return int(given) if is_whole else None


def local_path(path: str | Path) -> Path:
    """Return a path whose ~ stands for the home directory of this user's account.

    Raises BadRequest for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadRequest(f"a path is text or os.PathLike, not {type(path).__name__}")
    text = os.fspath(path)
    if text != "~" and not text.startswith("~/"):
        return Path(text)
    import pwd  # late: few paths begin so

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir, text[2:])
    except KeyError as error:
        raise BadRequest("this user has no home directory", where=text) from error
