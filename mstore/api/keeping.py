"""Calls about space and integrity: gc, prune, check, repair, backup, sizes.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mstore.api.open_store import OpenStore, local_path, thread_count
from mstore.blocks import lmdb_check
from mstore.store.layout import for_a_full_disk
from mstore.terms.errors import BadRequest
from mstore.terms.phrases import call

if TYPE_CHECKING:
    from mstore.store.migrations import MigrateReport
    from mstore.terms.ids import Revision
    from mstore.terms.report import ProgressCallback
    from mstore.upkeep.backup.backup import BackupReport
    from mstore.upkeep.check.fsck import CheckReport
    from mstore.upkeep.check.reindex import ReindexReport
    from mstore.upkeep.check.repair import RepairReport
    from mstore.upkeep.disk_usage import StoreReport, UsageReport
    from mstore.upkeep.gc.collect import GcReport
    from mstore.upkeep.gc.prune import PruneReport
    from mstore.upkeep.pins.pin import PinReport, UnpinReport
    from mstore.upkeep.reuse import ReuseReport


class Keeping(OpenStore):
    """Calls about space and integrity: gc, prune, check, repair, backup, sizes."""

    def gc(
        self,
        *,
        dry_run: bool = False,
        wait: float = 0.0,
        reflog_days: int | None = None,
        dead_share: float | None = None,
        empty_lost_found: bool = False,
        progress: ProgressCallback | None = None,
    ) -> GcReport:
        """Drop everything that no ref, reflog or hold reaches, and free its space.

        Safe while other operations run; a second gc waits for the first.  Packs that the index does
        not know move to lost+found/.

        dry_run: only report what would be dropped.
        wait: seconds to wait for running operations, so that packs they may be reading can be
        deleted too; otherwise the next writer deletes them.
        reflog_days: keep what refs pointed at within this many days; None uses the store's setting.
        dead_share: rewrite packs of which at least this share is dead; None uses 0.3, and 0
        rewrites every pack with anything dead.
        empty_lost_found: also remove everything in lost+found/.

        Raises Corrupt (a needed record is damaged, or index, mirror and packs disagree),
        StorageFailed; then nothing is lost.
        """
        from mstore.upkeep.gc.collect import Collector, Limits
        from mstore.upkeep.gc.survey import DEAD_SHARE

        collector = Collector(
            self._catalog,
            reflog_days=self._reflog_days(reflog_days),
            limits=Limits(
                wait=wait,
                dead_share=DEAD_SHARE if dead_share is None else dead_share,
                empty_lost_found=empty_lost_found,
            ),
            progress=progress,
        )
        return (
            collector.dry_run() if dry_run else collector.run(self._memo, lambda: self._statistics)
        )

    def prune(
        self,
        branches: Sequence[str] = (),
        *,
        keep_last: int = 0,
        keep_daily: int = 0,
        keep_weekly: int = 0,
        keep_monthly: int = 0,
        keep_yearly: int = 0,
        keep_tagged: bool = True,
        unnamed_inputs: bool = False,
        dry_run: bool = False,
    ) -> PruneReport:
        """Drop the contents of old snapshots: on each branch, of those that no rule keeps.

        The tip of a branch always stays.  Dropped snapshots stay in the lineage; `gc` frees their
        space.

        branches: the branches to prune; all of them if none is named.
        keep_last: keep the newest N.
        keep_daily, keep_weekly, keep_monthly, keep_yearly: keep the newest snapshot of each of the
        last N days (weeks, months, years) that have one.
        keep_tagged: keep what a tag names; otherwise these tags are removed.
        unnamed_inputs: also drop the inputs of merges that no ref names.
        dry_run: only report what would be dropped.

        Raises BadRequest, NotFound.
        """
        from mstore.upkeep.gc.prune import PruneRules, prune

        wish = PruneRules(
            keep_last,
            tuple(branches),
            keep_daily=keep_daily,
            keep_weekly=keep_weekly,
            keep_monthly=keep_monthly,
            keep_yearly=keep_yearly,
            keep_tagged=keep_tagged,
            unnamed_inputs=unnamed_inputs,
        )
        with for_a_full_disk(self._catalog.layout):
            return prune(self._catalog, wish, reflog_days=self._reflog_days(None), dry_run=dry_run)

    def pin(
        self,
        revision: Revision,
        *,
        raw: bool,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> PinReport:
        """Rewrite the blocks of a snapshot raw and in file order, so that they can be mapped.

        Its files are then long pieces of packs: `Snapshot.load` maps them, `checkout` shares them
        with the files that it writes, and a mount reads them without decoding.  Contents and ids
        stay the same.  Blocks that other snapshots have, too, lie raw for them as well.  The store
        grows; what is replaced becomes free with the next `gc`.  A pin keeps nothing from `gc`, and
        goes with the snapshot.  Others may read and write meanwhile; `gc` waits.

        raw: must be True: there is no other form yet.

        Raises BadRequest (not raw, or a virtual merge), NotFound, Corrupt, StorageFailed (also if
        the disk lacks room for the copies); then nothing is changed.
        """
        if not raw:
            raise BadRequest(
                "say how its blocks are to lie: raw is the only form",
                where=str(revision),
                hint=call("pin", str(revision), raw=True),
            )
        from mstore.upkeep.pins.pin import pin

        id = self._real(revision)
        return pin(self._catalog, id, threads=thread_count(threads), progress=progress)

    def unpin(
        self,
        revision: Revision,
        *,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> UnpinReport:
        """Undo `pin`: code the blocks again as `add` would, by the setting `codec` of the store.

        Differences are stored to the base that the lineage names.  What another pinned snapshot
        has, too, stays raw.  Space becomes free with the next `gc`.

        Raises BadRequest (not pinned), NotFound, Corrupt, Conflict, StorageFailed; then nothing is
        changed.
        """
        from mstore.upkeep.pins.pin import unpin

        return unpin(
            self._catalog,
            self._real(revision),
            str(revision),
            threads=thread_count(threads),
            progress=progress,
        )

    def fsck(
        self,
        *,
        read_data: bool = False,
        sample: float | None = None,
        seed: int = 0,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> CheckReport:
        """Check the store's structure, and with `read_data` every byte.  Changes nothing.

        read_data: read every block and compare it with its id.
        sample: read this share of the blocks instead, above 0 and at most 1.
        seed: selects the sample; the same seed selects the same blocks.

        Raises Corrupt (the index is too damaged to be walked).
        """
        from mstore.upkeep.check.fsck import Checker, Scope

        scope = Scope.chosen(read_data=read_data, sample=sample, seed=seed)
        threads = thread_count(threads)
        return Checker(
            self._catalog.layout, scope, threads=threads, progress=progress, reader=self._reader
        ).run()

    def repair(
        self,
        *,
        sources: Sequence[str | Path] = (),
        read_data: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> RepairReport:
        """Check the store, replace what is broken by good copies, and drop the rest.

        Damaged statistics and a damaged memo table are set aside; `remarks` says so.

        sources: other stores, or checkpoints, that may have copies.
        read_data: look for broken payloads everywhere, not only where the structure is damaged.

        Raises Corrupt (the index cannot be trusted: run `reindex` first), StorageFailed.
        """
        from mstore.upkeep.check.fsck import Scope
        from mstore.upkeep.check.repair import Repair

        scope = Scope.chosen(read_data=read_data, sample=None, seed=0)
        paths = [local_path(source) for source in sources]
        threads = thread_count(threads)
        # Opening these files sets them aside.
        if lmdb_check.faults(self._catalog.layout.stats):
            self._statistics.file_bytes()
        if lmdb_check.faults(self._catalog.layout.memo):
            self._memo.file_bytes()
        return Repair(
            *(self._catalog.layout, scope, paths),
            threads=threads,
            progress=progress,
            reader=self._reader,
        ).run()

    @staticmethod
    def reindex(
        path: str | Path, *, use_old_index: bool = True, progress: ProgressCallback | None = None
    ) -> ReindexReport:
        """Rebuild the index of a store from its packs and its ref mirror.

        use_old_index: take refs, reflogs, plans and prunings from the existing index, as far as it
        can be read and agrees with the packs.

        Raises Conflict (the store is in use), NotFound, StorageFailed.
        """
        from mstore.upkeep.check.reindex import reindex

        return reindex(local_path(path), use_old_index=use_old_index, progress=progress)

    @staticmethod
    def migrate(path: str | Path, *, dry_run: bool = False) -> MigrateReport:
        """Migrate a store of an older format to the current one.

        dry_run: only report the steps.

        Raises Conflict (the store is in use), NotFound, Incompatible, StorageFailed.
        """
        from mstore.store.migrations import migrate

        return migrate(local_path(path), dry_run=dry_run)

    def backup(
        self,
        destination: str | Path,
        *,
        lazy: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> BackupReport:
        """Update the backup of this store at `destination`, or create one.

        Others may write and run gc meanwhile: the backup has the state of one commit.  Only packs
        that the backup lacks are copied, and each of their payloads is checked against its id.
        Until the copy is complete, the backup holds its previous state.  Damage in this store does
        not stop the backup: the report's `problems` name it.

        lazy: leave at lazy remotes what is only there, and let the backup lean on them, too: it has
        their settings and tables, and `leans_on` says what it lacks.  No remote is asked.  So a
        stored difference to a block that is only there is compared with this store's; `fsck` with
        `read_data` of the backup checks it against its id.

        Raises Conflict if `destination` holds something else, was written to, or is newer than this
        store, or if this store leans on a remote and the backup is not `lazy`; BadRequest for the
        store itself, Corrupt if the index or the tables of a remote are damaged or the index is not
        the newest, StorageFailed.
        """
        from mstore.upkeep.backup.backup import backup

        return backup(
            self._catalog,
            local_path(destination),
            threads=thread_count(threads),
            lazy=lazy,
            progress=progress,
        )

    def stats(self) -> StoreReport:
        """Return sizes in bytes and counts for the whole store."""
        from mstore.upkeep.disk_usage import store_report

        return store_report(
            self._catalog,
            statistics_bytes=self._statistics.file_bytes(),
            memo_bytes=self._memo.file_bytes(),
        )

    def reuse(self, revision: Revision) -> ReuseReport:
        """Return which blocks a snapshot has from its parents, which are its own, and by codec.

        Reads no block.  Raises NotFound, BadName, Corrupt.
        """
        from mstore.upkeep.reuse import reuse

        return reuse(self._catalog, self._catalog.resolve(revision))

    def usage(self, names: Sequence[str] = ()) -> UsageReport:
        """Return what refs take and share, and what gc would free without them.

        names: the refs; all of them if none is named.

        In a damaged store, missing objects count as zero bytes.  Raises NotFound.
        """
        from mstore.upkeep.disk_usage import usage

        return usage(self._catalog, names, reflog_days=self._catalog.config.reflog_days)
