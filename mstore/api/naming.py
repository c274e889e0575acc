"""Calls about refs, their reflogs, notes and signatures.

Part of `mstore.api.Store`, which combines all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstore.api.open_store import OpenStore, local_path
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.snapshots import lineage, notes
from mstore.store import refs
from mstore.store.layout import for_a_full_disk
from mstore.store.refs import Ref, refs_in
from mstore.terms.errors import BadName, Conflict, NotFound
from mstore.terms.ids import NoteId, Revision, SnapshotId
from mstore.terms.phrases import call, joined
from mstore.terms.report import Report

if TYPE_CHECKING:
    from mstore.snapshots.digests import FileDigest
    from mstore.snapshots.lineage import ReflogReport, RefReport
    from mstore.snapshots.notes import NoteReport, SignatureReport
    from mstore.snapshots.signing import SigningKey, VerifyReport
    from mstore.store.transaction import RefMove
    from mstore.terms.report import ProgressCallback


class RemoveReport(Report, frozen=True):
    """Removed refs, and what they pointed at."""

    removed: tuple[str, ...]
    """the refs"""
    kinds: tuple[str, ...]
    """branch, tag, remote or candidate, for each"""
    snapshots: tuple[SnapshotId, ...]
    """where each pointed"""
    unnamed_snapshots: int
    """snapshots that no ref reaches any more"""
    reflog_days: int
    """number of days for which reflogs keep them from gc"""
    dry_run: bool = False
    """whether this only reports what would be removed"""


class Naming(OpenStore):
    """Calls about refs, their reflogs, notes and signatures."""

    def refs(self, *names: str) -> list[RefReport]:
        """Return refs by name: branches and tags, or those that match these names and patterns.

        Patterns match remote refs and candidates only if they begin like them: `remotes/*`,
        `candidates/*`.

        Raises NotFound.
        """
        found = lineage.refs(self._catalog)
        if not names:
            return [one for one in found if one.kind not in refs.DIRECTORIES]
        by_name = {one.name: one for one in found}
        chosen = refs.chosen(by_name, names)
        for name in chosen:
            if name not in by_name:
                raise refs.missing(name, by_name)
        return [by_name[name] for name in sorted(chosen)]

    def ref_ids(self) -> dict[str, SnapshotId]:
        """Return the snapshot of each ref by name, candidates included.

        Reads only the index, so lost and unreadable snapshots do not matter.
        """
        return {name: ref.snapshot_id() for name, ref in self._catalog.refs().items()}

    def ref(self, name: str) -> RefReport:
        """Return the ref of this full name.  Raises NotFound."""
        return lineage.ref(self._catalog, name)

    def tag(self, name: str, revision: Revision) -> RefReport:
        """Create a tag: a name for a snapshot that does not move.

        Raises NotFound, BadName, Conflict (the name is taken).
        """
        from mstore.store.transaction import RefMove, choose_moves

        refs.check_name(name)
        new = refs.Ref(refs.TAG, self._catalog.resolve(revision))

        def choose(transaction: IndexTransaction) -> list[RefMove]:
            current = refs_in(self._catalog.index, transaction).get(name)
            if current is not None and current.kind == refs.BRANCH:
                what = "the name is taken by a branch"
                raise Conflict(what, where=name, hint=call("tag", f"{name}-v1", str(revision)))
            if current is not None:
                tag = call("tag", name, str(revision))
                again = joined(call("remove", name), tag)
                raise Conflict("the name is taken by a tag", where=name, hint=again)
            return [RefMove(name, None, new, f"tag: {revision}")]

        choose_moves(self._catalog, choose)
        return lineage.ref(self._catalog, name)

    def require_branch(self, name: str) -> None:
        """Check that this name is a branch, or that a branch of this name may be made.

        Raises BadName, Conflict (a tag has the name, or a ref above or below it).
        """
        from mstore.store.transaction import branch_to_move

        branch_to_move(self._catalog, name)

    def reset(self, name: str, revision: Revision) -> RefReport:
        """Point a branch at another snapshot; the reflog keeps the old position.

        A name that is no ref becomes a branch.  A tag, remote ref or candidate that was removed,
        and is reset to what it named, is that again.

        Raises NotFound, BadName, Conflict (the name is a tag's).
        """
        snapshot = self._catalog.resolve(revision)
        return self._point(name, snapshot, f"reset: {revision}", lambda current: None)

    def move(self, name: str, expect: Revision | None, snapshot: Revision) -> RefReport:
        """Point a branch at another snapshot, if nobody moved it meanwhile.

        expect: where it must point now; None: it must not exist.

        Raises Conflict if it points elsewhere, and as `reset`; then nothing has moved.
        """
        was = None if expect is None else self._catalog.resolve(expect)

        def require(current: Ref | None) -> None:
            now = None if current is None else current.snapshot_id()
            if now != was:
                told = ["no ref" if one is None else f"at {one.short}" for one in (now, was)]
                what = f"is {told[0]}; expected: {told[1]}"
                raise Conflict(what, where=name, hint=call("reflog", name))

        new = self._catalog.resolve(snapshot)
        return self._point(name, new, f"move: {snapshot}", require)

    def _point(
        self,
        name: str,
        snapshot: SnapshotId,
        action: str,
        require: Callable[[Ref | None], None],
    ) -> RefReport:
        """Point a branch at a snapshot; `require` is asked about what it is now."""
        from mstore.store.transaction import RefMove, choose_moves

        def choose(transaction: IndexTransaction) -> list[RefMove]:
            index = self._catalog.index
            current = refs_in(index, transaction).get(name)
            removed = None if current is not None else refs_in(index, transaction).removed(name)
            is_back = removed is not None and removed.snapshot == snapshot
            new = removed if removed and is_back else refs.Ref(refs.BRANCH, snapshot)
            refs.check(name, new.kind)
            require(current)
            if current is not None and current.kind == refs.TAG:
                what = "is a tag, and tags do not move"
                raise Conflict(what, where=name, hint=call("remove", name))
            return [] if new == current else [RefMove(name, current, new, action)]

        choose_moves(self._catalog, choose)
        return lineage.ref(self._catalog, name)

    def reflog(self, name: str | None = None) -> list[ReflogReport]:
        """Return every move of one ref, or of all refs that ever existed, newest first.

        Position N of a name is NAME@{N}, also for a removed name.
        """
        return lineage.reflog(self._catalog, name)

    def remove(self, *names: str, dry_run: bool = False) -> RemoveReport:
        """Remove refs, all or none.  Their snapshots stay, and their reflogs can restore them.

        names: refs, or patterns such as `old/*`.
        dry_run: only report what would be removed.

        Raises NotFound, StorageFailed.
        """
        from mstore.store.transaction import RefMove, choose_moves

        index = self._catalog.index

        def choose(transaction: IndexTransaction) -> list[RefMove]:
            return [
                RefMove(name, refs_in(index, transaction).require(name), None, "rm")
                for name in refs.chosen(refs_in(index, transaction).names(), names)
            ]

        with index.env.read() as transaction:
            moves: Sequence[RefMove] = choose(transaction)
        unnamed = lineage.unnamed_without(self._catalog, {move.name for move in moves})
        if not dry_run:
            with for_a_full_disk(self._catalog.layout):
                moves = choose_moves(self._catalog, choose)
        # The reflog of a candidate keeps nothing.
        kept = any(not refs.is_candidate(move.name) for move in moves)
        return RemoveReport(
            removed=tuple(move.name for move in moves),
            kinds=tuple(m.expect.kind for m in moves if m.expect is not None),
            snapshots=tuple(SnapshotId(m.expect.snapshot) for m in moves if m.expect is not None),
            unnamed_snapshots=unnamed,
            reflog_days=self._catalog.config.reflog_days if kept else 0,
            dry_run=dry_run,
        )

    def rename(self, old: str, new: str) -> RefReport:
        """Rename a ref in one step; its kind stays.

        The reflog of `old` stays under that name, and its last line says where the ref went; the
        reflog of `new` continues.

        Raises NotFound, BadName, Conflict (`new` is taken).
        """
        from mstore.store.transaction import RefMove, choose_moves

        index = self._catalog.index

        def choose(transaction: IndexTransaction) -> list[RefMove]:
            ref = refs_in(index, transaction).require(old)
            refs.check(new)
            try:
                refs.check(new, ref.kind)
            except BadName as error:
                with suppress(BadName):
                    refs.check(new, refs.BRANCH)
                    error.advise(call("reset", new, old))
                raise
            if refs_in(index, transaction).get(new) is not None:
                raise Conflict("the name is taken", where=new, hint="choose another name")
            # Remove the old one first: one may be a directory of the other.
            return [
                RefMove(old, ref, None, f"rename to {new}"),
                RefMove(new, None, ref, f"rename from {old}"),
            ]

        choose_moves(self._catalog, choose)
        return lineage.ref(self._catalog, new)

    def note(
        self, revision: Revision, values: Mapping[str, Any], *, kind: str = "value"
    ) -> tuple[NoteReport, ...]:
        """Note values about a snapshot, by key.  The id of the snapshot does not change.

        values: what JSON can say, at most 64 KiB each.
        kind: value, evaluation, verdict or link.

        Of several values of a key the newest counts.  The notes tell the `author` of the store's
        opening.  Returns the notes that were written; a value that the author noted last is not
        written again.

        Raises NotFound, BadRequest, Conflict, StorageFailed.
        """

        snapshot = self._catalog.resolve(revision)
        written = notes.write(self._catalog, snapshot, values, kind)
        return self._noted_now(snapshot, written)

    def remove_notes(
        self, revision: Revision, ids: Sequence[NoteId | str]
    ) -> tuple[NoteReport, ...]:
        """Remove notes of a snapshot.  Signatures cannot be removed.

        Of the other values of a key the newest counts again.

        ids: of the notes, or the beginnings of these.

        The removal is a note, too, and removes only the notes that it names: what somebody else
        writes under the key at the same time stays.  Returns the removed notes.

        Raises NotFound, BadName, BadRequest (a signature), Conflict, StorageFailed.
        """

        snapshot = self._catalog.resolve(revision)
        return self._noted_now(snapshot, notes.remove(self._catalog, snapshot, [*map(str, ids)]))

    def _noted_now(self, snapshot: SnapshotId, ids: Collection[NoteId]) -> tuple[NoteReport, ...]:

        found = notes.reports(notes.notes_on(self._catalog, snapshot), {}, every=True)
        return tuple(one for one in found if one.note in ids)

    def digests(
        self, revision: Revision, *, progress: ProgressCallback | None = None
    ) -> tuple[FileDigest, ...]:
        """Return the SHA-256 of each single-file model of a snapshot.

        `add` noted that of what it stored. Of what was made here, virtual or not, it is computed
        now, and noted where this store can be written.

        Raises NotFound, BadName, Corrupt, StorageFailed.
        """
        from mstore.snapshots import digests

        id = self._catalog.resolve(revision)
        found = digests.completed(self._catalog, id, self._computing, progress)
        names = lineage.names_of(self._catalog)
        return tuple(digests.file_digest(id, path, one, names) for path, one in found.items())

    def find(self, digest: str | Path) -> tuple[FileDigest, ...]:
        """Return the single-file models that have a SHA-256; those that refs point at come first.

        digest: 64 hexadecimal digits, or the first of them, eight or more: AutoV2 has ten. A Path
        is a file, whose digest is computed first; if it is not known, the snapshot counts that its
        header names.

        Only digests that are noted are known: those of what was added, and what `digests` told.

        Raises BadName, NotFound (no such file), StorageFailed.
        """
        from mstore.snapshots import digests

        names = lineage.names_of(self._catalog)
        if not isinstance(digest, Path):
            return tuple(digests.found(self._catalog, digest, names))
        path = local_path(digest)
        own = digests.of_file(path)
        found = tuple(digests.found(self._catalog, own, names))
        named = None if found else digests.named_in(path)
        with suppress(NotFound, BadName):
            if named is not None:
                id = self._catalog.resolve(named)
                return (digests.file_digest(id, path.name, own, names),)
        return found

    def sign(
        self,
        revision: Revision,
        key: SigningKey,
        *,
        note: NoteId | str | None = None,
        signer: str | None = None,
    ) -> SignatureReport:
        """Sign a snapshot: every byte, its lineage and its plan.

        key: what `signing.load_key` returns.
        note: sign this note of the snapshot instead, named by its id or the beginning of it.
        signer: a name for people to read; the verifier decides whom a key belongs to.

        Raises NotFound, BadName, BadRequest, Conflict, StorageFailed.
        """
        from mstore.snapshots.signing import sign

        snapshot = self._catalog.resolve(revision)
        name = None if note is None else str(note)
        return sign(self._catalog, snapshot, key, note=name, signer=signer)

    def verify(
        self,
        revision: Revision,
        signers: Mapping[bytes, str],
        *,
        read_data: bool = False,
        progress: ProgressCallback | None = None,
    ) -> VerifyReport:
        """Check the signatures of a snapshot against the keys that you trust.

        signers: what `signing.read_signers` returns.
        read_data: also read and check every byte.

        A missing or unknown signature is not an error; `verified` is False then.  Signatures of
        notes are told, and vouch for no snapshot.

        Raises Corrupt (bytes that differ from what was signed), NotFound, Unavailable (no library
        to check with), StorageFailed.
        """
        from mstore.snapshots.signing import verify

        return verify(
            self._catalog,
            self._catalog.resolve(revision),
            signers,
            read_data=read_data,
            progress=progress,
        )
