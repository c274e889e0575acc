"""Looking: views, logs, files, differences, checkouts.

Part of `mstore.api.Store`, which is all of them in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mstore import lineage
from mstore.api.arguments import checked
from mstore.api.open_store import OpenStore, Report, thread_count
from mstore.ids import Buffer, SnapshotId
from mstore.reports import (
    CheckoutReport,
    DiffReport,
    DirectoryDiffReport,
    FileReport,
    SnapshotReport,
    TensorReport,
)
from mstore.store import contents, leases

if TYPE_CHECKING:
    from mstore.view import SnapshotView


VIEWS_KEPT = 8


@checked("Store")
class Reading(OpenStore):
    """Looking: views, logs, files, differences, checkouts."""

    def view(self, revision: str | SnapshotId) -> SnapshotView:
        """A snapshot as read-only files, as a mount shows it.

        Raises NotFound (also where its contents were let go), BadName.
        """
        from mstore.view import BlockCache, SnapshotView

        id = revision if isinstance(revision, SnapshotId) else self._catalog.resolve(revision)
        contents.require(self._catalog, id, str(revision))
        with self._views_lock:
            view = self._views.pop(id, None)
            if view is None:
                if self._cache is None:
                    self._cache = BlockCache(self._catalog, computing=self._computing)
                view = SnapshotView(self._catalog, id, self._cache)
            # The view last used goes out last: `tensor` after `tensor` decodes one manifest.
            self._views[id] = view
            if len(self._views) > VIEWS_KEPT:
                del self._views[next(iter(self._views))]
        return view

    def snapshot_ids(self) -> list[SnapshotId]:
        """Every snapshot of the store."""
        return self._catalog.snapshot_ids()

    def log(
        self,
        revision: str | SnapshotId | None = None,
        limit: int | None = None,
        *,
        every: bool = False,
        signers: Mapping[bytes, str] | None = None,
    ) -> list[SnapshotReport]:
        """The lineage of a revision, or of all refs: children before parents, newest first.

        limit: so many snapshots at most.
        every: start from every stored snapshot instead of from refs, also those that no ref
        reaches.
        signers: trusted keys and their names (`signing.read_signers`), to tell whose signatures
        there are.

        Raises NotFound, BadName.
        """
        starts = None if revision is None else [self._catalog.resolve(revision)]
        if every:
            starts = self._catalog.snapshot_ids()
        return self._signed(lineage.log(self._catalog, starts, limit), signers or {})

    def show(
        self, revision: str | SnapshotId, *, signers: Mapping[bytes, str] | None = None
    ) -> SnapshotReport:
        """One snapshot: content, parents, origin, message.

        signers: as for `log`.

        Raises NotFound, BadName.
        """
        id = self._catalog.resolve(revision)
        report = lineage.describe(self._catalog, id, lineage.names_of(self._catalog))
        return self._signed([report], signers or {})[0]

    def _signed(
        self, snapshots: list[SnapshotReport], signers: Mapping[bytes, str]
    ) -> list[SnapshotReport]:
        """The same with the state of their signatures; free in a store without any."""
        with self._catalog.index.env.read() as transaction:
            if self._catalog.index.count(transaction, "signatures") == 0:
                return snapshots
        from mstore.signing import states

        return [
            replace(one, signatures=states(self._catalog, one.snapshot, signers))
            for one in snapshots
        ]

    def files(self, revision: str | SnapshotId) -> list[FileReport]:
        """The files of a snapshot, by path.  Raises NotFound, BadName."""
        return lineage.files(self._catalog, self._catalog.resolve(revision))

    def tensors(self, revision: str | SnapshotId) -> list[TensorReport]:
        """The tensors of a snapshot, in file and data order.  Raises NotFound, BadName."""
        return lineage.tensors(self._catalog, self._whole(revision))

    def read_file(self, revision: str | SnapshotId, path: str) -> Iterator[Buffer]:
        """The bytes of one file, block by block.

        Raises NotFound before the first piece, and Corrupt, naming the block, instead of a piece
        that is not what its id says.
        """
        view = self.view(revision)
        view.require(path)
        return view.stream(path)

    def diff(
        self,
        a: str | SnapshotId,
        b: str | SnapshotId,
        *,
        blocks: bool = False,
        threads: int | None = None,
    ) -> DiffReport:
        """How snapshot b differs from snapshot a: files, tensors, blocks, and how far they moved.

        blocks: also name the blocks that differ, by their numbers.

        Raises NotFound, BadName, Corrupt.
        """
        from mstore.diff import diff

        older, newer = self._whole(a), self._whole(b)
        with contents.held(self._catalog, [older, newer]):
            return diff(
                self._catalog,
                older,
                newer,
                blocks=blocks,
                threads=thread_count(threads),
                computing=self._computing,
            )

    def diff_directory(
        self,
        revision: str | SnapshotId,
        directory: str | Path,
        *,
        exclude: Sequence[str] = (),
        default_excludes: bool = True,
        blocks: bool = False,
        threads: int | None = None,
        progress: Report | None = None,
    ) -> DirectoryDiffReport:
        """How a directory, or one file, differs from a snapshot: is it what is stored?

        Every byte is hashed, and nothing written, here or there.  exclude, default_excludes: as
        `add` has them; they leave out nothing that the snapshot holds.  Raises NotFound,
        BadCheckpoint for a directory that `add` would not walk or that changes meanwhile, Corrupt,
        StorageFailed.
        """
        from mstore.checkpoint.exclusion import Exclusion
        from mstore.compare import compare

        id = self._whole(revision)
        with contents.held(self._catalog, [id]):
            return compare(
                self._catalog,
                id,
                Path(directory),
                exclusion=Exclusion.chosen(exclude, defaults=default_excludes),
                blocks=blocks,
                threads=thread_count(threads),
                computing=self._computing,
                progress=progress,
            )

    def checkout(
        self,
        revision: str | SnapshotId,
        directory: str | Path,
        *,
        threads: int | None = None,
        shared: bool = False,
        only: Sequence[str] = (),
        progress: Report | None = None,
    ) -> CheckoutReport:
        """Write a byte-exact copy into a new or empty directory.

        only: patterns of the paths to write, as `*.json`; all files where there is none.
        shared: also write where others, whom you trust, may rename and remove in the directory
        above.

        Raises NotFound, BadRequest (nothing is above it), BadCheckpoint (a path that cannot be
        made), Conflict (something is there, or others may write above it), Corrupt, StorageFailed;
        then nothing is left behind.
        """
        from mstore.checkout import checkout

        return checkout(
            self._catalog,
            self._whole(revision),
            Path(directory),
            threads=thread_count(threads),
            shared=shared,
            only=only,
            progress=progress,
            computing=self._computing,
        )

    def pin(self, snapshot: SnapshotId) -> leases.Pin:
        """Keep a snapshot's contents from garbage collection until the pin is released.

        The pin ends with the process.  Where it cannot be made (a store that may only be read), it
        keeps nothing, and that is no error.
        """
        return leases.Pin(self._catalog.layout, snapshot)
