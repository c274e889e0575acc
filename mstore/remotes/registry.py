"""The remotes of a store: their names and addresses, and what each has.

They stand in the store's settings.  What this store keeps of a remote lies in `remotes/NAME/`, and
goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from mstore import fs
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.models.stats.store import StatsStore
from mstore.remotes import address
from mstore.remotes.fetch import Fetch
from mstore.remotes.layout import read_root
from mstore.remotes.limited import limited
from mstore.remotes.needs import LocalRecords, lineage
from mstore.remotes.objects import Absent, Objects
from mstore.remotes.state import Remote, RemoteState
from mstore.remotes.tracking import may_write
from mstore.store import gates, refs
from mstore.store.catalog import Catalog
from mstore.store.config import RemoteConfig
from mstore.store.leaning import all_leaning, require_here
from mstore.store.refs import refs_in
from mstore.store.transaction import RefMove, choose_moves
from mstore.terms.errors import BadRequest, Conflict, Corrupt, NotFound, did_you_mean
from mstore.terms.ids import Revision, SnapshotId
from mstore.terms.phrases import call, phrase
from mstore.terms.report import ProgressCallback, Report
from mstore.upkeep.backup.backup import CloneReport

ORIGIN = "origin"


class RemoteReport(Report, frozen=True):
    """A remote of a store."""

    name: str
    """its name"""
    url: str
    """its address"""
    endpoint: str
    """the server, where the provider's own is not meant; else empty"""
    region: str
    """the region; else empty"""
    addressing_style: str
    """where requests name the bucket, path or virtual; empty: as the environment says"""
    lazy: bool = False
    """whether blocks stay there until something reads them"""


class RemoteRef(Report, frozen=True):
    """A branch or tag of a remote."""

    name: str
    """its name"""
    kind: str
    """branch or tag"""
    snapshot: SnapshotId
    """the snapshot's id"""
    is_here: bool
    """whether this store has the snapshot"""
    local: SnapshotId | None
    """where the branch or tag of this name points here; null if there is none"""
    ahead: int | None
    """snapshots that its history here has and the remote's lacks; null where one is not here"""
    behind: int | None
    """snapshots that its history at the remote has and the one here lacks; null likewise"""


class RemoteContents(Report, frozen=True):
    """What a remote has."""

    name: str
    """its name in this store"""
    url: str
    """its address"""
    uuid: str
    """the remote's UUID"""
    generation: int
    """number of changes that it has seen"""
    block_size: int
    """bytes of a full block"""
    refs: tuple[RemoteRef, ...]
    """its branches and tags"""
    snapshots: int
    """snapshots"""
    whole_snapshots: int
    """those whose contents are there, too"""
    packs: int
    """packs"""
    bytes: int
    """their size"""


def _report(config: RemoteConfig) -> RemoteReport:
    return RemoteReport(**msgspec.structs.asdict(config))


def listed(catalog: Catalog) -> list[RemoteReport]:
    """Return the remotes of a store, by name."""
    return sorted(map(_report, catalog.config.remotes), key=lambda one: one.name)


def find(catalog: Catalog, name: str) -> RemoteConfig:
    """Return the settings of a remote. Raises NotFound with the most similar name."""
    known = {one.name: one for one in catalog.config.remotes}
    if name not in known:
        add = call("add_remote", name, "URL")
        raise NotFound("no such remote", where=name, hint=did_you_mean(name, known, add))
    return known[name]


def set_lazy(catalog: Catalog, name: str) -> None:
    """From now on, fetch only records of a remote: blocks come when something reads them."""
    config = find(catalog, name)
    if not config.lazy:
        others = (one for one in catalog.config.remotes if one.name != name)
        catalog.set_remotes((*others, msgspec.structs.replace(config, lazy=True)))


def add(catalog: Catalog, config: RemoteConfig) -> RemoteReport:
    """Give a name to a remote."""
    config = address.checked(config)
    if any(one.name == config.name for one in catalog.config.remotes):
        raise _taken(config.name)
    catalog.set_remotes((*catalog.config.remotes, config))
    return _report(config)


def _taken(name: str) -> Conflict:
    return Conflict(
        "there is a remote of this name",
        where=name,
        hint=phrase("choose another name, or first {remove}", remove=call("remove_remote", name)),
    )


def remove(catalog: Catalog, name: str) -> RemoteReport:
    """Forget a remote and its refs."""
    config = find(catalog, name)
    if config.lazy:
        only_here = [one for one in all_leaning(catalog) if one.remote == name]
        require_here(only_here, f"remove {name}")
    _move_refs(catalog, name, None)
    catalog.set_remotes(tuple(one for one in catalog.config.remotes if one.name != name))
    fs.remove_tree(_directory(catalog, name))
    return _report(config)


def rename(catalog: Catalog, old: str, new: str) -> RemoteReport:
    """Rename a remote and its refs."""
    config = find(catalog, old)
    renamed = address.checked(msgspec.structs.replace(config, name=new))
    if any(one.name == new for one in catalog.config.remotes):
        raise _taken(new)
    _move_refs(catalog, old, new)
    others = (one for one in catalog.config.remotes if one.name != old)
    catalog.set_remotes((*others, renamed))
    # What is kept of it can be read again; an older root would no longer be noticed, so it moves.
    if fs.is_there(_directory(catalog, old)):
        fs.remove_tree(_directory(catalog, new))
        fs.rename(_directory(catalog, old), _directory(catalog, new))
    return _report(renamed)


def _move_refs(catalog: Catalog, old: str, new: str | None) -> None:
    begin = refs.directory_of(refs.REMOTE, old)

    def choose(transaction: IndexTransaction) -> list[RefMove]:
        moves = []
        known = refs_in(catalog.index, transaction)
        for name in list(known.names(begin)):
            ref = known.require(name)
            moves.append(RefMove(name, ref, None, "remote"))
            if new is not None:
                other = refs.directory_of(refs.REMOTE, new) + name.removeprefix(begin)
                moves.append(RefMove(other, known.get(other), ref, "remote"))
        return moves

    choose_moves(catalog, choose)


def _directory(catalog: Catalog, name: str) -> Path:
    return catalog.layout.remotes / name


@contextmanager
def opened(
    catalog: Catalog,
    name: str,
    endpoints: Collection[str],
    limit_rate: int | None = None,
    *,
    token: str = "",
    s3_credentials: Callable[[], Any] | None = None,
) -> Iterator[Remote]:
    """Open a remote; limit_rate: bytes a second. Raises NotFound, and as `address.opened`.

    Who may not write the store keeps what is known of the remote only until this ends.
    """
    with ExitStack() as stack:
        objects = address.opened(find(catalog, name), endpoints, token, s3_credentials)
        objects = stack.enter_context(closing(limited(objects, limit_rate)))
        directory = _directory(catalog, name)
        if not may_write(catalog):
            directory = stack.enter_context(fs.scratch())
        try:
            yield Remote(name, objects, directory)
        except (Absent, Corrupt) as error:
            if error.hint is None and (error.where or "").startswith(objects.where):
                error.advise(call("remote_fsck", name))
            raise


def contents(catalog: Catalog, remote: Remote) -> RemoteContents:
    """Return what a remote has now."""
    remote.make_directory()
    return remote.with_state(lambda state: _contents(catalog, remote, state))


def _contents(catalog: Catalog, remote: Remote, state: RemoteState) -> RemoteContents:
    packs = [row for row in state.packs().values() if row.is_there]
    snapshots = state.rows("snapshots").values()
    own = {name: ref.snapshot_id() for name, ref in catalog.refs().items()}
    source = LocalRecords(catalog)
    named = tuple(
        _ref(source, row.name, row.kind, SnapshotId(row.snapshot), own.get(row.name))
        for row in state.refs().values()
        if row.snapshot is not None
    )
    remote.remember(state)
    return RemoteContents(
        name=remote.name,
        url=remote.where,
        uuid=str(state.root.uuid),
        generation=state.root.generation,
        block_size=state.root.block_size,
        refs=named,
        snapshots=len(snapshots),
        whole_snapshots=sum(row.is_whole for row in snapshots),
        packs=len(packs),
        bytes=sum(row.size for row in packs),
    )


def _ref(
    source: LocalRecords, name: str, kind: str, there: SnapshotId, local: SnapshotId | None
) -> RemoteRef:
    is_here = source.is_known(there)
    if local is None or not is_here:
        return RemoteRef(name, kind, there, is_here, local, None, None)
    if local == there:
        return RemoteRef(name, kind, there, is_here, local, 0, 0)
    own, other = lineage(source, local), lineage(source, there)
    return RemoteRef(name, kind, there, is_here, local, len(own - other), len(other - own))


def chosen_to_push(
    catalog: Catalog, name: str, names: Sequence[str], delete: Sequence[str], *, every: bool
) -> Sequence[str]:
    """Return the refs to push. Raises BadRequest where none was named."""
    if every and names:
        raise BadRequest("all refs, or some: not both", where=name)
    if every:
        kinds = (refs.BRANCH, refs.TAG)
        return [one for one, ref in catalog.refs().items() if ref.kind in kinds]
    if not names and not delete:
        raise BadRequest(
            "no ref was named",
            where=name,
            hint=phrase(
                "{some}, or {all}",
                some=call("push", name, refs=("REF",)),
                all=call("push", name, every=True),
            ),
        )
    return names


def require_gates(catalog: Catalog, names: Sequence[str]) -> None:
    """Raise GateFailed if a ref to push points at what a gate that guards it has not passed."""
    with catalog.index.env.read() as transaction:
        known = refs_in(catalog.index, transaction)
        found = {name: known.get(name) for name in refs.chosen(known.names(), names)}
        moves = {name: ref.snapshot_id() for name, ref in found.items() if ref is not None}
        gates.require_passed(
            catalog,
            transaction,
            moves,
            lambda name, snapshot, gate: call("judge", name, gates=(gate,)),
        )


def chosen(
    catalog: Catalog, revisions: Sequence[Revision], *, every: bool, verb: str
) -> dict[SnapshotId, str]:
    """Return the snapshots that are named, and what each is called.

    verb: of the call, for errors. Raises BadRequest where none was named, NotFound.
    """
    if every == bool(revisions):
        raise BadRequest("name snapshots, or all that refs name", hint=call(verb, "REF"))
    if every:
        kinds = (refs.BRANCH, refs.TAG)
        named = catalog.refs().items()
        return {ref.snapshot_id(): name for name, ref in named if ref.kind in kinds}
    return {catalog.resolve(revision): str(revision) for revision in revisions}


def clone(
    config: RemoteConfig,
    destination: Path,
    *,
    token: str,
    s3_credentials: Callable[[], Any] | None,
    jobs: int,
    limit_rate: int | None,
    progress: ProgressCallback | None,
) -> CloneReport:
    """Make a store with all that a remote has; see `Store.clone`."""
    began = time.monotonic()
    config = address.checked(config)
    trusted = {config.endpoint, address.web_server(config.url)}
    objects = address.opened(config, trusted, token, s3_credentials)
    with closing(limited(objects, limit_rate)) as objects:
        size = _block_size(objects)
        fs.require_empty(destination)
        with closing(Catalog.create(destination, size)) as catalog:
            try:
                catalog.set_remotes((config,))
                remote = Remote(ORIGIN, objects, _directory(catalog, ORIGIN))
                with closing(StatsStore(catalog.layout.stats)) as statistics:
                    report = Fetch(
                        catalog,
                        remote,
                        (),
                        pulls=True,
                        statistics=statistics,
                        lazy=config.lazy,
                        jobs=jobs,
                        progress=progress,
                    ).run()
            except BaseException as error:
                fs.remove_tree(catalog.layout.root)
                if isinstance(error, Absent | Corrupt):
                    # This store is gone, and with it the name of the remote.
                    check = call("remote_fsck", "NAME", store="STORE")
                    error.advise(phrase("where the remote has a name: {check}", check=check))
                raise
            with catalog.index.env.read() as transaction:
                return CloneReport(
                    path=str(catalog.layout.root),
                    uuid=str(catalog.layout.uuid),
                    source=config.url,
                    refs=len(report.moved),
                    snapshots=report.snapshots,
                    without_contents=report.without_contents,
                    packs=catalog.index.count(transaction, "packs"),
                    bytes_copied=report.bytes_received,
                    seconds=time.monotonic() - began,
                )


def _block_size(objects: Objects) -> int:
    try:
        got = objects.read_root()
    except Absent as error:
        raise Absent(
            "there is no remote",
            where=objects.where,
            hint=objects.how_to_begin("NAME"),
        ) from error
    assert got is not None
    return read_root(got[0], objects.where).block_size
