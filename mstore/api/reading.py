"""Calls that read: views, logs, files, differences, checkouts.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from mstore.api.open_store import ALWAYS, OpenStore, local_path, thread_count, whole_number
from mstore.snapshots import lineage, notes
from mstore.store import contents, leases
from mstore.store.contents import placing_damage
from mstore.store.models import model_of, with_model
from mstore.store.objects.note import SIGNATURE
from mstore.terms.errors import BadRequest
from mstore.terms.ids import Buffer, Revision, SnapshotId
from mstore.terms.phrases import Option, call

if TYPE_CHECKING:
    from mstore.api.snapshot import Snapshot
    from mstore.models.compare import CompareReport
    from mstore.snapshots.checkout import CheckoutReport
    from mstore.snapshots.diff import DiffReport
    from mstore.snapshots.directory_diff import DirectoryDiffReport
    from mstore.snapshots.lineage import FileReport, SnapshotReport, TensorReport
    from mstore.snapshots.notes import NoteReport, SignatureReport
    from mstore.store.view import SnapshotView
    from mstore.terms.report import ProgressCallback


VIEWS_KEPT = 8


class Reading(OpenStore):
    """Calls that read: views, logs, files, differences, checkouts."""

    def view(self, revision: Revision) -> SnapshotView:
        """Return a snapshot as read-only files, as a mount shows it.

        REF:MODEL: one model, by the paths in its directory, with what lies beside it there.

        Raises NotFound (also if its contents were pruned), BadName.
        """
        from mstore.store.block_cache import CACHE_BYTES, BlockCache
        from mstore.store.view import SnapshotView

        asked = self._whole(revision)
        key = asked.snapshot, asked.model
        with self._views_lock:
            view = self._views.pop(key, None)
            if self._cache is None:
                limit = CACHE_BYTES if self._cache_bytes is None else self._cache_bytes
                self._cache = BlockCache(
                    self._catalog, limit, self._computing, check_always=self._verify == ALWAYS
                )
        # Outside of the lock: whoever asks for another snapshot need not wait for this one.
        if view is None:
            self._follow_remotes()
        made = view or SnapshotView(self._catalog, asked.snapshot, self._cache, model=asked.model)
        with self._views_lock:
            view = self._views.pop(key, made)
            # Evict the least recently used view, so that `tensor` after `tensor` decodes one
            # manifest.
            self._views[key] = view
            if len(self._views) > VIEWS_KEPT:
                del self._views[next(iter(self._views))]
        return view

    def snapshot_ids(self, digits: str = "") -> list[SnapshotId]:
        """Return every snapshot of the store whose id begins with these hex digits, by id."""
        return self._catalog.snapshot_ids(digits)

    def log(
        self,
        revision: Revision | None = None,
        limit: int | None = None,
        *,
        every: bool = False,
        signers: Mapping[bytes, str] | None = None,
    ) -> list[SnapshotReport]:
        """Return the lineage of a revision, or of all refs: children before parents, newest first.

        limit: the most snapshots to return.
        every: start from every stored snapshot instead of from refs, including those that no ref
        reaches.
        signers: trusted keys and their names (`signing.read_signers`), to name the signers of each
        snapshot.

        Raises NotFound, BadName.
        """
        if limit is not None and ((number := whole_number(limit)) is None or number < 0):
            raise BadRequest("the limit is at least 0", where=Option("limit"))
        starts = None if revision is None else [self._catalog.resolve(revision)]
        if every:
            starts = self._catalog.snapshot_ids()
        return self._noted(lineage.log(self._catalog, starts, limit), signers or {})

    def show(
        self, revision: Revision, *, signers: Mapping[bytes, str] | None = None
    ) -> SnapshotReport:
        """Return one snapshot: content, parents, author, message.

        signers: as for `log`.

        Raises NotFound, BadName.
        """
        id = self._catalog.resolve(revision)
        report = lineage.describe(self._catalog, id, lineage.names_of(self._catalog))
        return self._noted([report], signers or {})[0]

    def notes_of(
        self,
        revision: Revision,
        *,
        every: bool = False,
        signers: Mapping[bytes, str] | None = None,
    ) -> tuple[NoteReport, ...]:
        """Return what was noted about a snapshot, by key: the values that count.

        every: also values that newer ones replaced, and those that were removed.
        signers: as for `log`.

        Raises NotFound, BadName.
        """
        id = self._catalog.resolve(revision)
        return self._notes_and_signatures(id, signers or {}, every=every)[0]

    def signatures_of(
        self, revision: Revision, *, signers: Mapping[bytes, str] | None = None
    ) -> tuple[SignatureReport, ...]:
        """Return the signatures of a snapshot, without those of its notes; signers: as for `log`.

        Raises NotFound, BadName.
        """
        return self._notes_and_signatures(self._catalog.resolve(revision), signers or {})[1]

    def _noted(
        self, snapshots: list[SnapshotReport], signers: Mapping[bytes, str]
    ) -> list[SnapshotReport]:
        """Add notes and the state of signatures to reports; free in a store without notes."""
        with self._catalog.index.env.read() as transaction:
            if self._catalog.index.count(transaction, "notes") == 0:
                return snapshots
        noted = [self._notes_and_signatures(one.snapshot, signers) for one in snapshots]
        return [
            replace(one, notes=listed, signatures=signatures)
            for one, (listed, signatures) in zip(snapshots, noted, strict=True)
        ]

    def _notes_and_signatures(
        self, snapshot: SnapshotId, signers: Mapping[bytes, str], *, every: bool = False
    ) -> tuple[tuple[NoteReport, ...], tuple[SignatureReport, ...]]:
        found = notes.notes_on(self._catalog, snapshot)
        signed = {}
        if any(one.form == SIGNATURE for one in found.values()):
            from mstore.snapshots.signing import by_subject  # late: `log` of few stores needs it

            signed = by_subject(found, signers)
        return notes.reports(found, signed, every=every), signed.get(None, ())

    def files(self, revision: Revision) -> list[FileReport]:
        """Return the files of a snapshot (also if pruned) or a model (REF:MODEL), by path.

        Raises NotFound, BadName.
        """
        if model_of(str(revision)) is None:
            return lineage.files(self._catalog, self._catalog.resolve(revision))
        asked = self._whole(revision)
        return lineage.files(self._catalog, asked.snapshot, asked.model)

    def tensors(self, revision: Revision) -> list[TensorReport]:
        """Return the tensors of a snapshot, or of a model (REF:MODEL), in file and data order.

        Raises NotFound, BadName.
        """
        asked = self._whole(revision)
        return lineage.tensors(self._catalog, asked.snapshot, asked.model)

    def read_file(self, revision: Revision, path: str) -> Iterator[Buffer]:
        """Yield the bytes of one file, block by block.

        Raises NotFound before the first piece.  Raises Corrupt, naming the block, instead of
        yielding a piece that does not match its id.
        """
        view = self.view(revision)
        view.require(path)
        return view.stream(path)

    def diff(
        self,
        a: Revision,
        b: Revision,
        *,
        blocks: bool = False,
        exact: bool = False,
        threads: int | None = None,
    ) -> DiffReport:
        """Report how snapshot b differs from snapshot a: files, tensors, blocks, relative distance.

        blocks: also list the numbers of the blocks that differ.
        exact: compute all distances from the blocks. Otherwise, where there are statistics,
        distances come from these: exact between a model and its base, bounds and an estimate
        between two models of one base.
        Of snapshots with several models, each is compared with its namesake; REF:MODEL compares one
        model, and no files.

        Raises NotFound, BadName, Incompatible (b has no model of that name), Corrupt.
        """
        from mstore.snapshots.diff import diff

        older, newer = self._whole(a), self._whole(b)
        with contents.held(self._catalog, [older.snapshot, newer.snapshot]):
            return diff(
                self._catalog,
                older,
                newer,
                blocks=blocks,
                threads=thread_count(threads),
                statistics=None if exact else self._statistics,
                computing=self._computing,
            )

    def compare(
        self,
        *models: Revision,
        base: Revision | None = None,
        by: str = "layer",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        exact: bool = False,
        measure: bool = True,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> CompareReport:
        """Report how far models moved from their common base, and the cosines of their changes.

        models: snapshots, or one model of each (REF:MODEL).
        base: the model that they were made from; None: the nearest one that lineage knows of all.
        by: tensor, part, layer or model, what the parts of the report are. The tensors of a layer
        whose names differ in numbers alone are one part. only, skip: patterns of tensor names, as
        in `plan`.
        exact: read blocks where statistics only estimate a cosine.
        measure: read what has no statistics; otherwise that is None in the report, and no block is
        read.

        Reads no blocks of what has statistics; of the rest it reads all, and keeps what it
        measured.
        Tensors that not all models have in one shape are left out.

        Raises BadRequest (no model, a virtual merge, no common base, no such pattern), NotFound,
        BadName, Incompatible (no tensor in common), Corrupt, StorageFailed.
        """
        from mstore.models.compare import Reads, common_base, compare

        if not models:
            raise BadRequest("there is no model to compare", hint=call("compare", "REF", "REF"))
        sides = [self._stored(model) for model in models]
        if base is None:
            found = common_base(self._catalog, [side.snapshot for side in sides])
            if found is None:
                raise BadRequest(
                    "lineage knows no base that all of these have", hint=Option("base", "REF")
                )
            names = {ref.snapshot_id(): name for name, ref in self._catalog.refs().items()}
            base = names.get(found, found.short)
        own = with_model(self._catalog, self._stored(base), sides)
        with placing_damage(self._catalog, (side.snapshot for side in (own, *sides))):
            return compare(
                *(self._catalog, self._statistics, own, sides),
                by=by,
                only=only,
                skip=skip,
                reads=Reads.EXACT if exact else Reads.MISSING if measure else Reads.NOTHING,
                threads=thread_count(threads),
                progress=progress,
            )

    def diff_directory(
        self,
        revision: Revision,
        directory: str | Path,
        *,
        exclude: Sequence[str] = (),
        default_excludes: bool = True,
        blocks: bool = False,
        threads: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> DirectoryDiffReport:
        """Report how a directory, or one file, differs from a snapshot, or from a model of it.

        Of REF:MODEL it compares the files that `view` shows, and calls tensors MODEL:NAME.  Weights
        of other models of the directory do not count.

        Hashes every byte and writes nothing, neither in the store nor in the directory. exclude,
        default_excludes: as in `add`; they never leave out what the snapshot holds.  Raises
        NotFound, BadCheckpoint for a directory that `add` would not walk or that changes meanwhile,
        Corrupt, StorageFailed.
        """
        from mstore.checkpoint.exclusion import Exclusion
        from mstore.snapshots.directory_diff import diff_directory

        asked = self._whole(revision)
        with contents.held(self._catalog, [asked.snapshot]):
            return diff_directory(
                self._catalog,
                asked,
                local_path(directory),
                exclusion=Exclusion.chosen(exclude, defaults=default_excludes),
                blocks=blocks,
                threads=thread_count(threads),
                computing=self._computing,
                progress=progress,
            )

    def checkout(
        self,
        revision: Revision,
        directory: str | Path,
        *,
        threads: int | None = None,
        shared: bool = False,
        only: Sequence[str] = (),
        weights: bool = True,
        reflink: str = "auto",
        card: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CheckoutReport:
        """Write a byte-exact copy into a new or empty directory, or one file of weights.

        directory: a path that ends in .safetensors is a file, for a model that has one such file.

        revision: a snapshot, or REF:MODEL, of which it writes what `view` shows.
        only: patterns of the paths to write, such as `*.json`; without any, all files.
        weights: also write safetensors files and their indexes. Without them it is what programs
        need that read tensors elsewhere: configs and tokenizer.
        shared: also write if other users, whom you trust, may rename and remove entries in the
        parent directory.
        reflink: whether the files share their space on the disk with the store, as XFS and btrfs
        can do where blocks lie raw (`pin`): `auto` where it can be done, `always` or fail, `never`.
        card: write README.md as `export` sends it, completed with what the store knows of the
        model; all other files are the snapshot's. Of a single file its header is completed: title
        (the file's name), SHA-256 of its tensors, snapshot. `find` knows a file that went out so.

        Raises NotFound, BadRequest (the parent directory does not exist, or nothing lies so that it
        can be shared), BadCheckpoint (a path that cannot be created), Conflict (the directory is
        not empty, or others may write above it), Incompatible (this filesystem cannot share, or is
        not the store's), Corrupt, StorageFailed; then nothing is left behind.
        """
        from mstore.exports.card import card as card_of
        from mstore.exports.card import completed_header
        from mstore.snapshots.checkout import checkout, parse_reflink
        from mstore.snapshots.digests import note_file

        asked = self._whole(revision)
        target = local_path(directory)
        report = checkout(
            self._catalog,
            asked,
            target,
            threads=thread_count(threads),
            shared=shared,
            only=only,
            weights=weights,
            reflink=parse_reflink(reflink),
            made=lambda view: card_of(self._catalog, view, asked) if card else {},
            header=partial(completed_header, self._catalog, asked.snapshot, target.stem)
            if card
            else None,
            progress=progress,
            computing=self._computing,
        )
        if target.is_file():
            note_file(self._catalog, asked.snapshot, target, anew=card)
        return report

    def hold(self, snapshot: Snapshot | SnapshotId, *, sure: bool = False) -> leases.Hold:
        """Protect a snapshot's contents from garbage collection until the hold is released.

        It is released by `release`, or at the end of a `with` block.

        The hold ends with the process.  If it cannot be taken (in a store that is read-only for
        this user), it protects nothing; that is not an error.  A hold that is taken while gc
        publishes may be too late. sure: wait for gc's publishing to end; raises Conflict if the
        snapshot was collected.
        """
        id = snapshot if isinstance(snapshot, SnapshotId) else snapshot.id
        hold = leases.Hold(self._catalog.layout, id)
        if sure:
            try:
                contents.require_held(self._catalog, id)
            except BaseException:
                hold.release()
                raise
        return hold
