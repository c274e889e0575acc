"""What an address shows: the bytes of a file or tensor, a document, or another address.

Pages are in `pages`, what takes long in `reports`.

Knows the store, not HTTP messages.  Every call may read the index or a disk, so none of them is
made on the thread that serves connections.  Thread-safe.

**Collected meanwhile.** A snapshot is looked up in the index at each request, so one that gc
removed is gone here too. `hold` keeps one from gc while its bytes are sent. It is refused where gc
was first. What the store is as a remote is kept as long as it is read
(`mstore.remotes.store_remote`).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
from blake3 import blake3

from mstore import Store
from mstore.api.exchanging import remote_of
from mstore.api.reports import Explanation, RefReport
from mstore.remotes.objects import ROOT
from mstore.store.leases import Hold
from mstore.store.view import SnapshotView
from mstore.terms import __version__
from mstore.terms.errors import MstoreError, NotFound
from mstore.terms.ids import Buffer, SnapshotId
from mstore_serve import addresses, documents
from mstore_serve.addresses import Address, Query, SnapshotName
from mstore_serve.conditions import Validators

JSON: Final = "application/json"
VARIES: Final = (("Vary", "Accept"),)
"""Of an address that has a page and a document."""
_BYTES: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_TYPES: Final = {".json": JSON, ".md": _TEXT, ".txt": _TEXT, ".yml": _TEXT, ".yaml": _TEXT}
_TEXT_NAMES: Final = frozenset({"LICENSE", "NOTICE", "README"})

FOREVER: Final = "max-age=31536000, immutable"
"""For bytes that never change: not `public`, because a proxy may ask for a password."""
ASK_AGAIN: Final = "no-cache"

_ID: Final = re.compile(r"[0-9a-f]{64}")
_PREFIX: Final = re.compile(r"[0-9a-f]{4,63}")
_KEPT: Final = 8
_KEPT_BYTES: Final = 4 << 20
SHORT: Final = 1000
"""Files of a snapshot whose directories are listed at once."""
_NS: Final = 1_000_000_000


class ServedBytes(msgspec.Struct, frozen=True):
    """Where bytes come from that do not lie in memory.

    read: returns exactly `size` bytes from `offset`, checked; raises as `SnapshotView.read`.
    prefetch: has bytes read and decoded ahead; never raises. is_computed: whether a read may take
    long, because a virtual merge computes it. hold: keeps them from gc until the function that it
    returns is called; may wait, and raises NotFound or Conflict if they are gone already.
    """

    hold: Callable[[], Callable[[], None]]
    read: Callable[[int, int], Buffer]
    prefetch: Callable[[int, int], None] | None
    is_computed: bool


class Shown(msgspec.Struct, frozen=True):
    """One version of what an address shows: `size` bytes, of `source` or `content`."""

    size: int
    media_type: str
    validators: Validators
    cache: str
    content: bytes = b""
    source: ServedBytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Elsewhere(msgspec.Struct, frozen=True):
    """Another address shows it: a relative one."""

    location: str


class Later(msgspec.Struct, frozen=True):
    """What takes long: `make` returns it, and raises as `Showing.find`.

    is_report: whether it may take minutes, so that nothing else should wait for it.
    """

    make: Callable[[], Shown | Elsewhere]
    is_report: bool = False


class ServedSnapshot:
    """One snapshot; the ETags of its files that were asked for, and the list of its tensors.

    tensors: kept if it is short, so that answers share it.
    """

    def __init__(self, view: SnapshotView) -> None:
        self.view = view
        self.tensors: Shown | None = None
        self.files = {file.path: file for file in view.manifest.files}
        self._etags: dict[str, str] = {}

    def etag(self, path: str) -> str:
        found = self._etags.get(path)
        if found is None:
            found = self._etags[path] = f'"{self.view.content_id(path).hex()}"'
        return found

    def listed(self, path: str, raw: bytes) -> list[documents.ServedEntry] | Elsewhere:
        """Return what is in a directory, by name; where it is, if its last slash is missing.

        raw: the address as it came.  Raises NotFound.
        """
        is_directory = not path or path.endswith("/")
        entries = self._entries(path if is_directory else f"{path}/")
        if not entries and path:
            raise NotFound("no such file in the snapshot", where=path)
        return entries if is_directory else Elsewhere(addresses.with_slash(raw))

    def _entries(self, directory: str) -> list[documents.ServedEntry]:
        """Return what is in a directory, whose path is empty or ends in a slash, by name."""
        found: dict[str, documents.ServedEntry] = {}
        for path, file in self.files.items():
            if not path.startswith(directory):
                continue
            name, slash, _ = path[len(directory) :].partition("/")
            if slash:
                found.setdefault(name, documents.ServedEntry(f"{name}/", None, None))
            else:
                found[name] = documents.ServedEntry(name, file.size, self.etag(path))
        return [found[name] for name in sorted(found)]


class Showing:
    """Everything that a store shows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[SnapshotId, ServedSnapshot] = OrderedDict()
        self._holds: dict[SnapshotId, _Shared] = {}
        self._refs: tuple[int, dict[str, SnapshotId]] | None = None
        self._remote = remote_of(store, "serve")

    def tidy(self) -> None:
        """Let go of what nobody reads any more; call it now and then."""
        self._remote.tidy()

    def close(self) -> None:
        """Let go of all."""
        self._remote.close()

    def find(self, address: Address, raw: bytes, query: Query) -> Shown | Elsewhere | Later:
        """Return what an address shows to a program; takes milliseconds.

        raw: the address as it came.

        Raises NotFound, Corrupt, StorageFailed and others.
        """
        self.follow()
        match address:
            case addresses.ThisServer():
                links = {"refs": "refs", "snapshots": "snapshots"}
                told = documents.RootDocument("mstore", __version__, self._store.uuid, links)
                return _document(told)
            case addresses.Refs(name):
                if name is not None:
                    return _document(self._store.ref(name))
                return _document(documents.RefsDocument(tuple(self._store.refs())))
            case addresses.Snapshots():
                return Later(self._all)
            case addresses.Reflog():
                return Later(partial(self._moves, query.ref or None))
            case addresses.RemoteObject(name):
                is_ready = self._remote.is_ready(name)
                return self._object(name) if is_ready else Later(partial(self._object, name))
            case addresses.Comparison() | addresses.ReportOf():
                raise TypeError(f"a report: {address}")
        found = self.snapshot(address.place)
        id = found.view.id.hex()
        if not address.place.is_ref and address.place.name != id:
            return Elsewhere(addresses.elsewhere(raw, id))
        match address:
            case addresses.Files(_, path):
                return self._file_or_directory(found, address.place, path, raw)
            case addresses.Tensors(_, ""):
                return found.tensors or Later(partial(self._tensors, found))
            case addresses.Tensors(_, name):
                return self._tensor(found.view, address.place, name)
            case addresses.PlanOf():
                return Later(partial(self._plan, found))
        return Later(partial(self._summary, found))

    def follow(self) -> None:
        """Open the store's new files if it was put back from a backup; before each answer."""
        self._store.generation()

    # -- snapshots -----------------------------------------------------------------------------

    def refs(self) -> dict[str, SnapshotId]:
        """Return the snapshots of all refs by name, of remote refs and candidates, too."""
        # Of thousands of refs, to read all for each request would take longer than its bytes.
        generation = self._store.generation()
        known = self._refs
        if known is None or known[0] != generation:
            known = self._refs = generation, self._store.ref_ids()
        return known[1]

    def ref(self, name: str) -> RefReport:
        """Return a ref.  Raises NotFound."""
        return self._store.ref(name)

    def snapshot_ids(self, digits: str) -> list[SnapshotId]:
        """Return the snapshots whose ids begin with these digits, in order."""
        return self._store.snapshot_ids(digits)

    def snapshot(self, place: SnapshotName) -> ServedSnapshot:
        """Return a snapshot.  Raises NotFound, also if its contents were pruned, and Corrupt."""
        if place.is_ref:
            return self._of(self._store.ref(place.name).snapshot.hex())
        if not _ID.fullmatch(place.name) and not _PREFIX.fullmatch(place.name):
            raise _no_snapshot(place.name)
        try:
            return self._of(place.name)
        except NotFound as error:
            if _ID.fullmatch(place.name):
                raise
            raise _no_snapshot(place.name) from error

    def _of(self, text: str) -> ServedSnapshot:
        """Return the snapshot of this id or beginning of one, which the index must have."""
        view = self._store.view(text)
        # A text may also name a ref, or a content: not here.
        if not view.id.hex().startswith(text):
            raise _no_snapshot(text)
        with self._lock:
            found = self._known.pop(view.id, None) or ServedSnapshot(view)
            self._known[view.id] = found
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def id_of(self, place: SnapshotName) -> SnapshotId:
        """Return the id of a snapshot, also of one whose contents were pruned.  Raises NotFound."""
        if place.is_ref:
            return self._store.ref(place.name).snapshot
        found: list[SnapshotId] = []
        if _ID.fullmatch(place.name) or _PREFIX.fullmatch(place.name):
            found = self._store.snapshot_ids(place.name)
        if len(found) != 1:
            raise _no_snapshot(place.name)
        return found[0]

    def hold(self, id: SnapshotId) -> Callable[[], None]:
        """Keep a snapshot from gc until the returned function is called.

        Answers share one hold of a snapshot.  May wait for gc to end.  Raises NotFound or Conflict
        if the snapshot is gone already.
        """
        with self._lock:
            shared = self._holds.setdefault(id, _Shared())
            shared.count += 1
        try:
            with shared.lock:
                if shared.hold is None:
                    shared.hold = self._store.hold(id, sure=True)
            # gc may have collected it before the hold.
            self._of(id.hex())
        except BaseException:
            self._let_go(id, shared)
            raise
        return partial(self._let_go, id, shared)

    def _let_go(self, id: SnapshotId, shared: _Shared) -> None:
        with self._lock:
            shared.count -= 1
            is_last = shared.count == 0
            if is_last:
                del self._holds[id]
        if is_last and shared.hold is not None:
            shared.hold.release()

    # -- what they show ------------------------------------------------------------------------

    def file(self, found: ServedSnapshot, place: SnapshotName, path: str) -> Shown | None:
        """Return a file of a snapshot, None if it has no such file."""
        file = found.files.get(path)
        if file is None:
            return None
        view = found.view
        read, prefetch = partial(view.read, path), partial(view.prefetch, path)
        source = ServedBytes(partial(self.hold, view.id), read, prefetch, view.is_virtual)
        return _bytes(view, place, file.size, _type_of(path), found.etag(path), source)

    def _file_or_directory(
        self,
        found: ServedSnapshot,
        place: SnapshotName,
        path: str | None,
        raw: bytes,
    ) -> Shown | Elsewhere | Later:
        if path is None:
            return Elsewhere("files/")
        file = self.file(found, place, path)
        if file is not None:
            return file
        make = partial(self._directory, found, path, raw)
        return Later(make) if len(found.files) > SHORT else make()

    def _directory(self, found: ServedSnapshot, path: str, raw: bytes) -> Shown | Elsewhere:
        listed = found.listed(path, raw)
        if isinstance(listed, Elsewhere):
            return listed
        return _document(documents.DirectoryDocument(path, tuple(listed)))

    def _object(self, name: str) -> Shown:
        if name == ROOT:
            got = self._remote.read_root()
            assert got is not None
            content, stamp = got
            validators = Validators(f'"{stamp.e_tag}"', None)
            return Shown(len(content), JSON, validators, ASK_AGAIN, content)
        size = self._remote.size(name)

        def read(offset: int, size: int) -> Buffer:
            return self._remote.read_each(name, [(offset, size)])[0]

        source = ServedBytes(partial(self._remote.hold, name), read, None, is_computed=False)
        # Its name is that of its bytes.
        etag = f'"{name.rpartition("/")[2]}"'
        return Shown(size, _BYTES, Validators(etag, None), FOREVER, source=source)

    def _tensor(self, view: SnapshotView, place: SnapshotName, name: str) -> Shown:
        record = view.record(name)

        def read(offset: int, size: int) -> Buffer:
            return view.tensor_bytes(name, offset, offset + size)

        source = ServedBytes(partial(self.hold, view.id), read, None, view.is_virtual)
        etag = f'"{view.tensors[name].hex()}"'
        shape = ",".join(map(str, record.shape))
        headers = (("X-Mstore-Dtype", record.dtype), ("X-Mstore-Shape", shape))
        return _bytes(view, place, record.nbytes, _BYTES, etag, source, headers)

    def _moves(self, name: str | None) -> Shown:
        moves = tuple(self._store.reflog(name))
        return _document(documents.ReflogDocument(name, moves))

    def _plan(self, found: ServedSnapshot) -> Shown:
        return _document(merge_of(self._store, found.view.id))

    def _all(self) -> Shown:
        ids = tuple(id.hex() for id in self._store.snapshot_ids())
        return _document(documents.SnapshotsDocument(ids))

    def _tensors(self, found: ServedSnapshot) -> Shown:
        # Another request may have made it while this one waited.
        if found.tensors is not None:
            return found.tensors
        tensors = tuple(self._store.tensors(found.view.id))
        made = _document(documents.TensorsDocument(tensors))
        if made.size <= _KEPT_BYTES:
            found.tensors = made
        return made

    def _summary(self, found: ServedSnapshot) -> Shown:
        report = self._store.show(found.view.id)
        assert report.manifest is not None
        told = documents.SnapshotDocument(
            snapshot=report.snapshot.hex(),
            manifest=report.manifest.hex(),
            parents=tuple(
                documents.ServedParent(one.role, one.snapshot.hex()) for one in report.parents
            ),
            made=report.made,
            origin=report.origin,
            author=report.author,
            plan=None if report.plan is None else report.plan.hex(),
            method=report.method,
            virtual=report.virtual,
            message=report.message,
            time_ns=report.time_ns,
            plain_bytes=report.plain_bytes,
            tensors=report.tensors,
            files=tuple(
                documents.ServedFile(
                    path, file.size, sum(1 for _ in file.tensors()), found.etag(path)
                )
                for path, file in found.files.items()
            ),
        )
        return _document(told)


@dataclass(slots=True)
class _Shared:
    """A hold that several answers share."""

    count: int = 0
    hold: Hold | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _bytes(
    view: SnapshotView,
    place: SnapshotName,
    size: int,
    media_type: str,
    etag: str,
    source: ServedBytes,
    headers: tuple[tuple[str, str], ...] = (),
) -> Shown:
    """Return bytes of a snapshot: at its own address they never change."""
    return Shown(
        size,
        media_type,
        Validators(etag, None if place.is_ref else view.time_ns // _NS),
        ASK_AGAIN if place.is_ref else FOREVER,
        source=source,
        headers=(("X-Mstore-Snapshot", view.id.hex()), *headers),
    )


def merge_of(store: Store, id: SnapshotId) -> Explanation:
    """Return what made a snapshot by merging.  Raises NotFound if it is no merge."""
    if store.show(id).plan is None:
        raise NotFound("this snapshot is no merge, so it has no plan", where=id.short)
    return store.explain(id)


def _document(document: object) -> Shown:
    return made(documents.encoded(document), JSON, VARIES)


def made(content: bytes, media_type: str, headers: tuple[tuple[str, str], ...] = ()) -> Shown:
    """Return what is made for one request: another version of mstore may make it otherwise."""
    validators = Validators(f'"{blake3(content).hexdigest()}"', None)
    return Shown(len(content), media_type, validators, ASK_AGAIN, content, headers=headers)


def _type_of(path: str) -> str:
    name = path.rpartition("/")[2]
    suffix = name[name.rfind(".") :].lower() if "." in name else ""
    return _TEXT if name in _TEXT_NAMES else _TYPES.get(suffix, _BYTES)


def _no_snapshot(text: str) -> MstoreError:
    return NotFound("no such snapshot", where=text)
