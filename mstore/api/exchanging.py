"""Calls about remotes: add and remove them, push, fetch, pull, clone.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstore.api.open_store import OpenStore, job_count, local_path, thread_count

if TYPE_CHECKING:
    from mstore.remotes.bundling import BundleReport
    from mstore.remotes.check import RemoteCheckReport
    from mstore.remotes.collect import RemoteGcReport
    from mstore.remotes.copying import CopyReport
    from mstore.remotes.fetch import FetchReport
    from mstore.remotes.prefetch import DropReport, PrefetchReport
    from mstore.remotes.push import PushReport
    from mstore.remotes.registry import RemoteContents, RemoteReport
    from mstore.remotes.state import Remote
    from mstore.remotes.statistics import OutgoingStatistics
    from mstore.remotes.store_remote import StoreRemote
    from mstore.remotes.usage import RemoteUsageReport
    from mstore.store.catalog import Catalog
    from mstore.terms.ids import Revision
    from mstore.terms.report import ProgressCallback
    from mstore.upkeep.backup.backup import CloneReport

JOBS: Final = 8
"""Requests at once, unless a caller says otherwise."""


class Exchanging(OpenStore):
    """Calls about remotes: add and remove them, push, fetch, pull."""

    trusted_endpoints: Collection[str] = ()
    """Servers that may get credentials, though the store's settings name them; see `trust`."""
    token: str = ""
    """Says who asks, to web servers that `trust` names."""
    s3_credentials: Callable[[], Any] | None = None
    """Gives credentials for s3:// (a credential provider of obstore); None: the environment does.

    They go to Amazon's own servers, and to others that `trust` names. They are never pickled.
    """

    def trust(self, *endpoints: str) -> None:
        """Let credentials be sent to these servers, where a remote names one as its endpoint.

        A store's settings may be a stranger's, so what they name is not enough.  It holds for this
        object only.  Raises BadRequest for what is no address of a server.
        """
        from mstore.remotes import address

        more = map(address.checked_endpoint, endpoints)
        self.trusted_endpoints = frozenset((*self.trusted_endpoints, *more))

    def remotes(self) -> list[RemoteReport]:
        """Return the remotes of this store, by name."""
        from mstore.remotes import registry

        return registry.listed(self._catalog)

    def add_remote(
        self,
        name: str,
        url: str,
        *,
        endpoint: str = "",
        region: str = "",
        addressing_style: str = "",
    ) -> RemoteReport:
        """Give a name to a remote; asks nothing of it, and the first push makes it.

        url: s3://, gs://, az:// or file:///; or, to read only, bundle:FILE or http(s)://, which is
        what `mstore serve` has below /remote/. endpoint: the server, where the provider's own is
        not meant. addressing_style: where requests to S3 name the bucket: path, as in
        https://SERVER/BUCKET, or virtual, as in https://BUCKET.SERVER; empty: as the variable
        AWS_VIRTUAL_HOSTED_STYLE_REQUEST says, else path. Credentials come from the environment.

        Raises BadName, BadRequest (an address with a password or signature, say), Conflict (there
        is a remote of this name).
        """
        from mstore.remotes import registry
        from mstore.store.config import RemoteConfig

        config = RemoteConfig(name, url, endpoint, region, addressing_style)
        return registry.add(self._catalog, config)

    def rename_remote(self, old: str, new: str) -> RemoteReport:
        """Rename a remote, and its refs in this store. Raises NotFound, Conflict, BadName."""
        from mstore.remotes import registry

        return registry.rename(self._catalog, old, new)

    def remove_remote(self, name: str) -> RemoteReport:
        """Forget a remote, and its refs in this store; nothing changes there. Raises NotFound."""
        from mstore.remotes import registry

        return registry.remove(self._catalog, name)

    def remote_contents(self, name: str) -> RemoteContents:
        """Return what a remote has now: refs, snapshots, bytes. Raises NotFound, Unavailable."""
        from mstore.remotes import registry

        with self._remote(name) as remote:
            return registry.contents(self._catalog, remote)

    def remote_gc(
        self,
        name: str,
        *,
        reflog_days: int | None = None,
        grace_hours: float = 24.0,
        dry_run: bool = False,
    ) -> RemoteGcReport:
        """Drop what no ref of a remote reaches; safe while others push, fetch and collect.

        What is not needed any more is condemned first; a run after the time of grace deletes it,
        by the remote's clock.

        reflog_days: keep what its refs pointed at within this many days; None: as in this store.
        grace_hours: for how long condemned packs stay, for those who read them. dry_run: only
        report.

        Raises Corrupt (something that is needed is missing), Unavailable; then nothing is dropped.
        """
        from mstore.remotes.collect import RemoteCollector

        days = self._catalog.config.reflog_days if reflog_days is None else reflog_days
        with self._remote(name) as remote:
            return RemoteCollector(
                self._catalog, remote, reflog_days=days, grace_hours=grace_hours
            ).run(dry_run=dry_run)

    def remote_fsck(
        self,
        name: str,
        *,
        read_data: bool = False,
        jobs: int = JOBS,
        progress: ProgressCallback | None = None,
    ) -> RemoteCheckReport:
        """Check that a remote has what its refs need, whole; changes nothing.

        read_data: also read every payload, and compare it with its id.

        Raises Corrupt (the root or a list is damaged), NotFound, Unavailable.
        """
        from mstore.remotes.check import RemoteCheck

        with self._remote(name) as remote:
            return RemoteCheck(self._catalog, remote, jobs=job_count(jobs), progress=progress).run(
                read_data=read_data
            )

    def remote_usage(self, name: str) -> RemoteUsageReport:
        """Return what the refs of a remote take there and share. Raises NotFound, Unavailable."""
        from mstore.remotes.usage import usage

        with self._remote(name) as remote:
            return usage(self._catalog, remote)

    def push(
        self,
        name: str,
        refs: Sequence[str] = (),
        *,
        every: bool = False,
        ancestors: bool = False,
        force_with_lease: bool = False,
        delete: Sequence[str] = (),
        dry_run: bool = False,
        jobs: int = JOBS,
        limit_rate: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> PushReport:
        """Send what refs need to a remote, then move its refs of the same names, all in one step.

        What the remote has is not sent again.  If the call is interrupted, the same call goes on.
        Statistics go along, so that whoever fetches can plan merges without reading weights; for
        these, the trim thresholds at densities of 0.1 to 0.9 are found first, once for a model.

        refs: branches and tags, or patterns of them. every: all of them.
        ancestors: also send the contents of all ancestors; otherwise only their records.
        force_with_lease: replace a branch that has other commits there, if it is still where this
        store saw it last.
        delete: refs to remove there.
        dry_run: only report what would be sent, and in how many requests.
        jobs: parts that are sent at once.
        limit_rate: the most bytes a second, all parts together.

        Raises Conflict (a ref has commits there that it lacks here), GateFailed, NotFound,
        BadRequest, Incompatible (another block size, a server that ignores conditions), Corrupt,
        Unavailable.
        """
        from mstore.remotes import registry
        from mstore.remotes.push import Push

        chosen = registry.chosen_to_push(self._catalog, name, refs, delete, every=every)
        registry.require_gates(self._catalog, chosen)
        with self._remote(name, limit_rate) as remote:
            return Push(
                self._catalog,
                remote,
                chosen,
                delete=delete,
                contents_of_ancestors=ancestors,
                force_with_lease=force_with_lease,
                outgoing=self._outgoing(progress),
                jobs=job_count(jobs),
                progress=progress,
            ).run(dry_run=dry_run)

    def fetch(
        self,
        name: str,
        refs: Sequence[str] = (),
        *,
        ancestors: bool = False,
        lazy: bool = False,
        signers: Mapping[bytes, str] | None = None,
        jobs: int = JOBS,
        limit_rate: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> FetchReport:
        """Bring what a remote's refs need, and move the refs below remotes/NAME/; no branch moves.

        refs: the remote's branches and tags, or patterns; none: all, and those that it removed are
        removed here, too.  Everything is checked against its id before it is published.
        ancestors: also bring contents of ancestors, where the remote has them.
        lazy: from now on, bring records of this remote and no weights: a block comes when something
        reads it, and a part of the disk keeps what came (`cache_bytes_on_disk`).
        signers: trusted keys and their names, as for `log`.  Where the store has the setting
        `require_signed`, refs move only to snapshots that one of them signed.
        jobs: parts that are received at once. limit_rate: the most bytes a second.

        Raises NotFound, Corrupt (what came is not what its id says), Conflict (a signature that the
        store requires is missing), Unavailable; then nothing changed.
        """
        return self._fetched(
            name,
            refs,
            pulls=False,
            ancestors=ancestors,
            lazy=lazy,
            signers=signers,
            jobs=jobs,
            limit_rate=limit_rate,
            progress=progress,
        )

    def pull(
        self,
        name: str,
        refs: Sequence[str] = (),
        *,
        ancestors: bool = False,
        lazy: bool = False,
        signers: Mapping[bytes, str] | None = None,
        jobs: int = JOBS,
        limit_rate: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> FetchReport:
        """Fetch, and move branches of the same names, where that loses no commit; make new ones.

        A branch that has other commits than the remote's stays; the report names it in `diverged`.
        Arguments and errors are those of `fetch`.
        """
        return self._fetched(
            name,
            refs,
            pulls=True,
            ancestors=ancestors,
            lazy=lazy,
            signers=signers,
            jobs=jobs,
            limit_rate=limit_rate,
            progress=progress,
        )

    def prefetch(
        self,
        revisions: Sequence[Revision] = (),
        *,
        every: bool = False,
        only: Sequence[str] = (),
        dry_run: bool = False,
        jobs: int = JOBS,
        limit_rate: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> PrefetchReport:
        """Bring what snapshots have only at lazy remotes, so that it can be read without them.

        every: all that refs name. only: patterns of tensor names; the others stay there. dry_run:
        only report. jobs, limit_rate: as for `fetch`.

        Raises NotFound, BadRequest, Corrupt, Unavailable; then nothing of that remote came.
        """
        from functools import partial

        from mstore.remotes import registry
        from mstore.remotes.prefetch import prefetch

        return prefetch(
            self._catalog,
            partial(self._remote, limit_rate=limit_rate),
            list(registry.chosen(self._catalog, revisions, every=every, verb="prefetch")),
            only=only,
            dry_run=dry_run,
            jobs=job_count(jobs),
            progress=progress,
        )

    def drop(
        self, revisions: Sequence[Revision] = (), *, every: bool = False, dry_run: bool = False
    ) -> DropReport:
        """Remove local copies of what lazy remotes have of snapshots; `gc` then frees the space.

        Blocks stay that something needs which the remote does not have: a snapshot that was not
        pushed, or the base of a difference of one.  The remote is asked: a ref there must reach the
        snapshots, with their contents.

        every: all that refs name, but for what is pinned and what no lazy remote has. dry_run: only
        report.

        Raises Conflict if no lazy remote has one, or it is pinned, NotFound, BadRequest,
        Unavailable; then nothing was removed.
        """
        from mstore.remotes import registry
        from mstore.remotes.prefetch import drop

        found = registry.chosen(self._catalog, revisions, every=every, verb="drop")
        return drop(self._catalog, self._remote, found, every=every, dry_run=dry_run)

    def bundle(
        self,
        path: str | Path,
        refs: Sequence[str],
        *,
        progress: ProgressCallback | None = None,
    ) -> BundleReport:
        """Write what refs need into a new file, for one person: `Store.clone("bundle:FILE", DIR)`.

        The file is a remote that is only read: `add_remote(NAME, "bundle:FILE")` and `fetch` work,
        too. It has the refs' contents, their statistics, the records of their ancestors, notes and
        signatures. It has no reflogs and no settings.

        refs: branches and tags, or patterns of them.

        Raises Conflict if there is a file of this name, NotFound, BadRequest, Corrupt,
        StorageFailed; then no file was made.
        """
        from mstore.remotes.bundling import write_bundle

        return write_bundle(
            self._catalog,
            local_path(path),
            refs,
            statistics=self._outgoing(progress),
            progress=progress,
        )

    def copy_to(
        self,
        destination: str | Path,
        refs: Sequence[str],
        *,
        signers: Mapping[bytes, str] | None = None,
        jobs: int = JOBS,
        progress: ProgressCallback | None = None,
    ) -> CopyReport:
        """Copy what refs need to another store on this machine, and move its refs of those names.

        All in one transaction there, as `pull` does: a branch that has other commits there stays,
        and the report names it in `diverged`.  What the other store has is not copied again.  Of
        ancestors only records are copied, as far as the other store lacks them.

        refs: branches and tags, or patterns of them. jobs: parts that are copied at once.
        signers: as for `fetch`, if the other store has the setting `require_signed`.

        Raises NotFound, BadRequest (the same store), Incompatible (another block size), Conflict (a
        signature that the other store requires is missing), Corrupt, StorageFailed; then nothing
        changed.
        """
        from mstore.remotes.copying import copy_refs

        return copy_refs(
            self._catalog,
            local_path(destination),
            refs,
            signers=signers,
            jobs=job_count(jobs),
            progress=progress,
        )

    @staticmethod
    def clone(
        source: str | Path,
        destination: str | Path,
        *,
        endpoint: str = "",
        region: str = "",
        addressing_style: str = "",
        token: str = "",
        lazy: bool = False,
        s3_credentials: Callable[[], Any] | None = None,
        threads: int | None = None,
        jobs: int = JOBS,
        limit_rate: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> CloneReport:
        """Create a store with everything from another one, or from a remote.

        source: a store's directory, whose refs, reflogs and settings come along, but for its
        remotes; or the address of a remote, which the new store knows as `origin`. endpoint,
        region, addressing_style, jobs, limit_rate: of a remote, as in `add_remote` and `fetch`.
        token: for a web server. s3_credentials: as the attribute. lazy: bring records and no
        weights of a remote, as `fetch` does; of a lazy store's directory, copy what is stored there
        and lean on its lazy remotes for the rest, as `backup` does. threads: for a directory.

        The new store has its own UUID.  Others may write and run gc meanwhile.  Each payload is
        checked against its id.  Raises Conflict if something exists at `destination`, or if the
        source leans on a remote and the clone is not `lazy`; BadRequest if `destination` lies
        inside the source, or for a `lazy` clone of a directory without a lazy remote; Corrupt if
        the source is damaged, NotFound, Unavailable, StorageFailed; then nothing was created.
        """
        from mstore.remotes import address

        if address.is_address(str(source)):
            from mstore.remotes import registry
            from mstore.store.config import RemoteConfig

            return registry.clone(
                RemoteConfig(
                    registry.ORIGIN, str(source), endpoint, region, addressing_style, lazy
                ),
                local_path(destination),
                token=token,
                s3_credentials=s3_credentials,
                jobs=job_count(jobs),
                limit_rate=limit_rate,
                progress=progress,
            )
        from mstore.upkeep.backup.backup import clone

        return clone(
            local_path(source),
            local_path(destination),
            threads=thread_count(threads),
            lazy=lazy,
            progress=progress,
        )

    def _remote(self, name: str, limit_rate: int | None = None) -> AbstractContextManager[Remote]:
        """Open a remote, with what the user trusts it with."""
        from mstore.remotes import registry

        return registry.opened(
            self._catalog,
            name,
            self.trusted_endpoints,
            limit_rate,
            token=self.token,
            s3_credentials=self.s3_credentials,
        )

    def _take_pushed(self, remote: str, name: str) -> None:
        """Move the branch here, too, that a merge has moved at a lazy remote."""
        from mstore.remotes import registry

        if registry.find(self._catalog, remote).lazy:
            self.pull(remote, [name])

    def _lean(self, catalog: Catalog) -> None:
        elsewhere = catalog.index.elsewhere
        if elsewhere is not None and elsewhere.reader is None:
            from mstore.remotes.lazy import RemoteParts

            elsewhere.reader = RemoteParts(self._remote, self._cache_on_disk(catalog))

    def _outgoing(self, progress: ProgressCallback | None) -> OutgoingStatistics:
        from mstore.remotes.statistics import OutgoingStatistics

        return OutgoingStatistics(
            self._catalog, self._statistics, threads=thread_count(None), progress=progress
        )

    def _fetched(
        self,
        name: str,
        refs: Sequence[str],
        *,
        pulls: bool,
        ancestors: bool,
        lazy: bool,
        signers: Mapping[bytes, str] | None,
        jobs: int,
        limit_rate: int | None,
        progress: ProgressCallback | None,
    ) -> FetchReport:
        from mstore.remotes import registry
        from mstore.remotes.fetch import Fetch

        if lazy:
            registry.set_lazy(self._catalog, name)
            self._follow_remotes()
        with self._remote(name, limit_rate) as remote:
            return Fetch(
                self._catalog,
                remote,
                refs,
                pulls=pulls,
                contents_of_ancestors=ancestors,
                signers=signers,
                statistics=self._statistics,
                lazy=registry.find(self._catalog, name).lazy,
                jobs=job_count(jobs),
                progress=progress,
            ).run()


def remote_of(store: OpenStore, purpose: str) -> StoreRemote:
    """Return what a store is as a remote that is only read; close it before the store.

    For `mstore serve`.  purpose: says to others who keeps packs from gc.
    """
    from mstore.remotes.store_remote import StoreRemote

    return StoreRemote(store._catalog, purpose)
