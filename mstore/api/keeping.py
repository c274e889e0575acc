"""Space and soundness: collection, pruning, checking, repair, sizes.

Part of `mstore.api.Store`, which is all of them in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mstore import lineage
from mstore.api.arguments import checked
from mstore.api.open_store import OpenStore, Report, thread_count
from mstore.blocks import lmdb_check
from mstore.blocks.packs import Kind
from mstore.reports import (
    BackupReport,
    CheckReport,
    CloneReport,
    GcReport,
    MigrateReport,
    PruneReport,
    ReindexReport,
    RepairReport,
    StoreReport,
    UsageReport,
)
from mstore.store.layout import FORMAT_VERSION


@checked("Store")
class Keeping(OpenStore):
    """Space and soundness: collection, pruning, checking, repair, sizes."""

    def gc(
        self,
        *,
        dry_run: bool = False,
        wait: float = 0.0,
        reflog_days: int | None = None,
        dead_share: float | None = None,
        empty_lost_found: bool = False,
        progress: Report | None = None,
    ) -> GcReport:
        """Drop all that no ref, reflog or pin reaches, and give its space back.

        Safe beside everything else; a second one waits for the first.  Packs that the index does
        not know go to lost+found/.

        dry_run: only say what would go.
        wait: seconds to wait for running operations, so that packs they may be reading can go too;
        else the next writer removes them.
        reflog_days: what refs pointed at in so many days stays; None takes the store's setting.
        dead_share: packs of which this share is dead are written anew; None takes 0.3, and 0 means
        all with anything dead.
        empty_lost_found: also remove all that lies in lost+found/.

        Raises Corrupt (a needed record is damaged, or index, mirror and packs do not agree),
        StorageFailed; nothing is lost then.
        """
        from mstore.gc.collect import Collector, Limits
        from mstore.gc.survey import DEAD_SHARE

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
        return collector.dry_run() if dry_run else collector.run(self._memo, self._statistics)

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
        """Let the contents of old snapshots go: of each branch, those that nothing here keeps.

        The tip of a branch always stays.  What goes stays in the lineage, and its space comes back
        with `gc`.

        branches: which ones; all of them where none is named.
        keep_last: keep the newest so many.
        keep_daily, keep_weekly, keep_monthly, keep_yearly: keep the newest of each of the last so
        many days (weeks, months, years) in which there is one.
        keep_tagged: keep what a tag names; else these tags are removed.
        unnamed_inputs: also let go what was merged in and no ref names.
        dry_run: only say what would go.

        Raises BadRequest, NotFound.
        """
        from mstore.gc.prune import Wish, prune

        wish = Wish(
            keep_last,
            tuple(branches),
            keep_daily=keep_daily,
            keep_weekly=keep_weekly,
            keep_monthly=keep_monthly,
            keep_yearly=keep_yearly,
            keep_tagged=keep_tagged,
            unnamed_inputs=unnamed_inputs,
        )
        return prune(self._catalog, wish, reflog_days=self._reflog_days(None), dry_run=dry_run)

    def fsck(
        self,
        *,
        read_data: bool = False,
        sample: float | None = None,
        seed: int = 0,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> CheckReport:
        """Check the store's structure, and with `read_data` every byte.  Changes nothing.

        read_data: read every block and compare it with its id.
        sample: read this share of the blocks instead, above 0 and up to 1.
        seed: draws them; the same seed draws the same ones.

        Raises Corrupt (the index is too damaged to be walked).
        """
        from mstore.check.fsck import Checker, Scope

        scope = Scope.chosen(read_data=read_data, sample=sample, seed=seed)
        threads = thread_count(threads)
        return Checker(self._catalog.layout, scope, threads=threads, progress=progress).run()

    def repair(
        self,
        *,
        sources: Sequence[str | Path] = (),
        read_data: bool = False,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> RepairReport:
        """Check the store, put good copies in the place of what is broken, and drop the rest.

        Statistics and a memo table that are damaged are set aside; `notes` says so.

        sources: other stores, or checkpoints, that may have copies.
        read_data: look for broken payloads everywhere, and not only where the structure is damaged.

        Raises Corrupt (the index cannot be believed: `reindex` comes first), StorageFailed.
        """
        from mstore.check.fsck import Scope
        from mstore.check.repair import Repair

        scope = Scope.chosen(read_data=read_data, sample=None, seed=0)
        paths = [Path(source) for source in sources]
        threads = thread_count(threads)
        # Opening them sets them aside.
        if lmdb_check.faults(self._catalog.layout.stats):
            self._statistics.file_bytes()
        if lmdb_check.faults(self._catalog.layout.memo):
            self._memo.file_bytes()
        return Repair(self._catalog.layout, scope, paths, threads=threads, progress=progress).run()

    @staticmethod
    def reindex(
        path: str | Path, *, use_old_index: bool = True, progress: Report | None = None
    ) -> ReindexReport:
        """Make the index of a store anew, from its packs and its ref mirror.

        use_old_index: take refs, reflogs, plans and prunings over from the index that is there, as
        far as it can be read and agrees with the packs.

        Raises Conflict (somebody uses the store), NotFound, StorageFailed.
        """
        from mstore.check.reindex import reindex

        return reindex(Path(path), use_old_index=use_old_index, progress=progress)

    @staticmethod
    def migrate(path: str | Path, *, dry_run: bool = False) -> MigrateReport:
        """Bring a store of an older format to this one.

        dry_run: only say which steps there are.

        Raises Conflict (somebody uses the store), NotFound, Incompatible, StorageFailed.
        """
        from mstore.store.migrations import migrate

        return migrate(Path(path), dry_run=dry_run)

    def backup(
        self,
        destination: str | Path,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> BackupReport:
        """Bring the backup of this store at `destination` up to date, or begin one.

        Others may write and collect meanwhile: the backup has the state of one commit.  Only packs
        that it has not are copied, and each payload of them is checked against its id.  Until all
        is there it holds what it held before.  What is damaged here stops nothing: the report's
        `problems` name it.  Raises Conflict where something else is at `destination`, where it was
        written to, or where it is newer than this store; BadRequest for the store itself, Corrupt
        where the index is damaged or not the newest, StorageFailed.
        """
        from mstore.backup.backup import backup

        return backup(
            self._catalog, Path(destination), threads=thread_count(threads), progress=progress
        )

    @staticmethod
    def clone(
        source: str | Path,
        destination: str | Path,
        *,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> CloneReport:
        """Make a new store with all that the one at `source` has: refs, reflogs, settings.

        It has a name (UUID) and packs of its own.  Others may write and collect meanwhile.  Each
        payload is checked against its id.  Raises Conflict where something is at `destination`,
        BadRequest where that lies in the source, Corrupt where the source is damaged, NotFound,
        StorageFailed; then nothing was made.
        """
        from mstore.backup.clone import clone

        return clone(
            Path(source), Path(destination), threads=thread_count(threads), progress=progress
        )

    def stats(self) -> StoreReport:
        """Sizes in bytes and counts of the whole store."""
        from mstore.disk_usage import store_usage

        catalog = self._catalog
        used = store_usage(catalog, reflog_days=catalog.config.reflog_days)
        with catalog.index.env.read() as transaction:
            packs = list(catalog.index.packs(transaction))
            unique = sum(location.raw_length for _, location in catalog.index.blocks(transaction))
            tensors = sum(
                1 for kind, _, _ in catalog.index.records(transaction) if kind == Kind.TENSOR
            )
            blocks = catalog.index.count(transaction, "blocks")
        ids = catalog.snapshot_ids()
        reached = lineage.ancestry(catalog, lineage.names_of(catalog))
        plain_bytes = sum(lineage.plain_bytes(catalog, id) for id in reached)
        return StoreReport(
            path=str(self.path),
            uuid=self.uuid,
            format_version=FORMAT_VERSION,
            block_size=self.block_size,
            refs=len(catalog.refs()),
            snapshots=len(ids),
            packs=len(packs),
            blocks=blocks,
            tensors=tensors,
            plain_bytes=plain_bytes,
            unique_bytes=unique,
            stored_bytes=sum(size for _, size in packs),
            index_bytes=catalog.index.env.file_bytes(),
            statistics_bytes=self._statistics.file_bytes(),
            memo_bytes=self._memo.file_bytes(),
            codecs=used.codecs,
            unreachable_bytes=used.unreachable_bytes,
            dead_bytes=used.dead_bytes,
            overhead_bytes=used.overhead_bytes,
            condemned_bytes=used.condemned_bytes,
            leftover_bytes=used.leftover_bytes,
            lost_found_bytes=used.lost_found_bytes,
        )

    def usage(self, names: Sequence[str] = ()) -> UsageReport:
        """What refs take and share, and what gc would free without them; all refs for no names.

        What is missing of a damaged store counts nothing.  Raises NotFound.
        """
        from mstore.disk_usage import usage

        return usage(self._catalog, names, reflog_days=self._catalog.config.reflog_days)
