"""Notes of snapshots: their rows in the index, what is reported of them, how they are written.

    notes    SnapshotId + NoteId             -> empty
    judged   SnapshotId + key of the note    -> NoteId, whether the snapshot passed

What notes mean follows from the records (`mstore.store.objects.note`).  A note is published like
everything else, in one transaction that finds its snapshot still stored.  It lives as long as the
snapshot's record does.  A row of `judged` says that this store wrote the note because it ran a
command: no copy, fetch or push has these rows, and a removal of the note takes its row along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.packs import Kind
from mstore.blocks.schema import JUDGED, NOTES
from mstore.checkpoint.paths import CONTROL, quoted
from mstore.store.catalog import Catalog, now_ns
from mstore.store.objects.canonical import MAX_COUNT
from mstore.store.objects.note import (
    COUNTS,
    EVALUATION,
    PASSED,
    REMOVAL,
    STATING,
    VALUE,
    VERDICT,
    Note,
    gate_of,
    packed,
    states,
)
from mstore.terms.errors import BadName, BadRequest, Conflict, Corrupt, NotFound
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.phrases import Call, call, few, is_text
from mstore.terms.report import Report

GOOD_SIGNATURE = "good"
UNKNOWN_KEY = "unknown key"
BAD_SIGNATURE = "bad"
UNCHECKED = "unchecked"


class SignatureReport(Report, frozen=True):
    """One signature of a snapshot, or of a note.

    `state` is GOOD_SIGNATURE, UNKNOWN_KEY, BAD_SIGNATURE, or UNCHECKED if the library for checking
    is missing.
    """

    signature: NoteId
    """the signature's id"""
    snapshot: SnapshotId
    """the snapshot's id"""
    state: str
    """good (by a trusted key), unknown key, bad (not made by its key), or unchecked"""
    key: str
    """fingerprint of the key, as ssh-keygen -l prints it"""
    signer: str | None
    """the name under which the key is trusted; None: it is not trusted"""
    claimed_signer: str | None
    """the signer that the signature claims, which proves nothing"""
    time_ns: int
    """when, as the signature claims"""


def signature_report(
    id: NoteId, record: Note, *, made_by_key: bool | None, key: str, signer: str | None
) -> SignatureReport:
    """Report a signature; made_by_key: whether the key in the record made it, None: unchecked."""
    if made_by_key is None:
        state = UNCHECKED
    elif not made_by_key:
        state = BAD_SIGNATURE
    else:
        state = UNKNOWN_KEY if signer is None else GOOD_SIGNATURE
    return SignatureReport(
        signature=id,
        snapshot=record.snapshot_id(),
        state=state,
        key=key,
        signer=signer,
        claimed_signer=record.author or None,
        time_ns=record.time_ns,
    )


MIN_DIGITS = 4
NotesById = Mapping[NoteId, Note]
"""All notes of one snapshot."""


class NoteReport(Report, frozen=True):
    """One note of a snapshot: a key and a value that somebody gave it later."""

    note: NoteId
    """the note's id"""
    snapshot: SnapshotId
    """the snapshot's id"""
    kind: str
    """value, evaluation, verdict or link"""
    key: str
    """what the value is of"""
    value: Any
    """what it says"""
    author: str
    """who wrote it, as they tell; empty if nobody said"""
    time_ns: int
    """when, as the author tells"""
    state: str
    """counts, replaced (a newer note has this key), or removed"""
    signatures: tuple[SignatureReport, ...] = ()
    """signatures of this note"""

    def subject(self) -> str:
        """Return what it is of: a gate by its name, else the key."""
        gate = gate_of(self.key)
        return self.key if gate is None else gate

    def told(self) -> str:
        """Return its value in a line: of an evaluation its scores, of a verdict what it says."""
        import json  # late: few snapshots have notes

        value = self.value
        scores = value.get("scores") if isinstance(value, dict) else None
        if self.kind in (EVALUATION, VERDICT) and isinstance(scores, dict):
            is_verdict = self.kind == VERDICT
            # Without other scores, the score `passed` says what the verdict says.
            told = {k: v for k, v in scores.items() if not (is_verdict and k == "passed")}
            said = [f"{name} {_number(score)}" for name, score in told.items()]
            if is_verdict:
                said.insert(0, "passed" if value.get("passed") is True else "did not pass")
            return ", ".join(said)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(score: object) -> str:
    return f"{score:.6g}" if isinstance(score, int | float) else "?"


# -- reading -------------------------------------------------------------------------------------

SEARCH: Final = "search"
"""The key of what a search tried to find its winner (`mstore.search.search`)."""
_DIGEST: Final = "sha256 of "
"""How the keys of digests of files begin (`mstore.snapshots.digests`)."""
SHORT_DIGITS: Final = 10
"""Digits of AutoV2."""
CULPRIT: Final = "culprit: "
"""How the keys begin of what bisections found of a merge, in words."""


def digest_key(path: str) -> str:
    """Return the key under which the SHA-256 of a file is noted."""
    return f"{_DIGEST}{path}"


def digested_path(key: str) -> str | None:
    """Return the path of a file from the key of its digest; None for another key."""
    return key.removeprefix(_DIGEST) if key.startswith(_DIGEST) else None


def culprit_key(by: Sequence[str]) -> str:
    """Return the key of what a bisection by experts, layers or both found."""
    return f"{CULPRIT}{' and '.join(by)}"


def culprit_on(catalog: Catalog, snapshot: SnapshotId) -> str | None:
    """Return what the finest bisection of a merge found, in words; None if there was none."""
    return culprit_of(reports(notes_on(catalog, snapshot), {}))


def culprit_of(told: Iterable[NoteReport]) -> str | None:
    """Return what the finest bisection found, as the notes of a merge tell; None for none."""
    found = {
        one.key: one.value
        for one in told
        if one.kind == VALUE and one.key.startswith(CULPRIT) and one.state == COUNTS
    }
    # The longest key is that of the layers of experts.
    text = found[max(found, key=len)] if found else None
    return text if isinstance(text, str) else None


def notes_on(catalog: Catalog, snapshot: SnapshotId) -> dict[NoteId, Note]:
    """Return all notes of a snapshot, oldest first.  Raises Corrupt, NotFound."""
    with catalog.index.env.read() as transaction:
        ids = [id for (_, id), _ in catalog.index.walk(transaction, NOTES, snapshot)]
    records = {id: catalog.record(Note, id) for id in ids}
    for id, record in records.items():
        if record.snapshot_id() != snapshot:
            raise Corrupt(
                "the index gives it to another snapshot than it is about",
                where=f"note {id}",
                hint=call("fsck"),
            )
    return dict(sorted(records.items(), key=lambda one: (one[1].time_ns, one[0])))


def reports(
    notes: NotesById,
    signatures: Mapping[NoteId | None, tuple[SignatureReport, ...]],
    *,
    every: bool = False,
) -> tuple[NoteReport, ...]:
    """Report the values of a snapshot by key, oldest first; every: also replaced, removed ones."""
    state_of = states(notes)
    listed = [
        NoteReport(
            note=id,
            snapshot=one.snapshot_id(),
            kind=one.form,
            key=one.key,
            value=one.value,
            author=one.author,
            time_ns=one.time_ns,
            state=state_of[id],
            signatures=signatures.get(id, ()),
        )
        for id, one in notes.items()
        if one.form in STATING and (every or state_of[id] == COUNTS)
    ]
    return tuple(sorted(listed, key=lambda one: one.key))


def scores_of(catalog: Catalog, id: SnapshotId) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the scores of the evaluations that count, each by the note's key and its name.

    Raises Corrupt, NotFound.
    """
    found = notes_on(catalog, id)
    state_of = states(found)
    for one, note in found.items():
        if note.form == EVALUATION and state_of[one] == COUNTS:
            for name, score in _scores(note):
                yield (note.key, name), score


def _scores(note: Note) -> Iterator[tuple[str, float]]:
    """Yield scores by name; a bare number, and what the exit status says, by the note's key."""
    value = note.value
    scores = value.get("scores") if isinstance(value, dict) else {note.key: value}
    for name, score in scores.items() if isinstance(scores, dict) else ():
        if isinstance(score, int | float) and not isinstance(score, bool):
            yield note.key if name == PASSED else name, float(score)


def named(
    notes: NotesById, name: str, snapshot: SnapshotId, again: Callable[[str], Call]
) -> NoteId:
    """Return the note of this id, or of its beginning; again: the same call with another name.

    Raises BadName, NotFound.
    """
    chosen = [id for id in notes if id.hex().startswith(name)] if len(name) >= MIN_DIGITS else []
    if len(chosen) == 1:
        return chosen[0]
    where, listed = quoted(name), call("notes_of", snapshot.short, every=True)
    state_of = states(notes)
    under = [id for id, one in notes.items() if one.form in STATING and one.key == name][::-1]
    if not chosen and under:
        shown = few([f"{id.short} ({state_of[id]})" for id in under])
        counting = next((id for id in under if state_of[id] == COUNTS), None)
        hint = listed if counting is None else again(counting.short)
        what = f"a key, and a note is named by its id; under this key are {shown}"
        raise BadName(what, where=where, hint=hint)
    if chosen or len(name) < MIN_DIGITS:
        what = "names no single note; give more digits of its id"
        raise BadName(what, where=where, hint=listed)
    raise NotFound("the snapshot has no note with this id", where=where, hint=listed)


# -- writing -------------------------------------------------------------------------------------


def value_of(catalog: Catalog, snapshot: SnapshotId, key: str, value: object) -> Note:
    """Return a note of a value, for who stores it.  Raises BadRequest."""
    data = packed(value, quoted(key))
    return Note(snapshot, (), VALUE, key, data, catalog.author(), now_ns())


def write(
    catalog: Catalog,
    snapshot: SnapshotId,
    values: Mapping[str, object],
    kind: str,
    *,
    judged: bool | None = None,
) -> list[NoteId]:
    """Publish a note for each key, all or none; a value that counts already is not written again.

    judged: whether the snapshot passed, if running a command says so; then all are written.

    Each is newer than the one that it replaces, whatever the clock says. Raises BadRequest,
    Conflict, StorageFailed.
    """
    if kind not in STATING:
        known = ", ".join(STATING)
        raise BadRequest(f"no kind of value; the kinds are {known}", where=quoted(kind))
    notes = notes_on(catalog, snapshot)
    state_of = states(notes)
    counting = {
        one.key: (id, one)
        for id, one in notes.items()
        if one.form in STATING and state_of[id] == COUNTS
    }
    author, now = catalog.author(), now_ns()
    written, new = [], []
    for key, value in values.items():
        if not key or not is_text(key) or CONTROL.search(key):
            raise BadRequest("a key is a line of text", where=quoted(str(key)))
        data = packed(value, quoted(key))
        id, last = counting.get(key, (None, None))
        same = (kind, data, author)
        is_same = last is not None and (last.form, last.data, last.author) == same
        if id is not None and is_same and judged is None:
            written.append(id)
            continue
        time_ns = now if last is None else max(now, last.time_ns + 1)
        if id is not None and time_ns > MAX_COUNT:
            raise Conflict(
                "a note stands at the end of time, so that no other can be newer",
                where=f"note {id}",
                hint=call("remove_notes", snapshot.short, ids=(str(id),)),
            )
        new.append(Note(snapshot, (), kind, key, data, author, time_ns))
        written.append(new[-1].id())

    def mark(rows: IndexTransaction) -> None:
        for one in new:
            if judged is not None:
                catalog.index.put(rows, JUDGED, (snapshot, one.key), (one.id(), int(judged)))

    publish(catalog, new, also=mark)
    return written


def remove(catalog: Catalog, snapshot: SnapshotId, names: Sequence[str]) -> list[NoteId]:
    """Publish a removal of these notes, named by ids or their beginnings.

    Raises BadName, NotFound, BadRequest (not a value), Conflict, StorageFailed.
    """
    notes = notes_on(catalog, snapshot)

    def again(id: str) -> Call:
        return call("remove_notes", snapshot.short, ids=(id,))

    chosen = sorted({named(notes, name, snapshot, again) for name in names})
    for id in chosen:
        if notes[id].form not in STATING:
            raise BadRequest(f"a {notes[id].form} is not removed", where=f"note {id}")
    hidden = {id for one in notes.values() if one.form == REMOVAL for id in one.notes}
    if chosen and not hidden.issuperset(chosen):
        author, data = catalog.author(), packed(None)
        removal = Note(snapshot, tuple(chosen), REMOVAL, "", data, author, now_ns())

        def unmark(rows: IndexTransaction) -> None:
            for key, (id, _) in list(catalog.index.walk(rows, JUDGED, snapshot)):
                if id in chosen:
                    catalog.index.delete(rows, JUDGED, key)

        publish(catalog, [removal], also=unmark)
    return chosen


def publish(
    catalog: Catalog,
    records: Collection[Note],
    also: Callable[[IndexTransaction], None] = lambda rows: None,
) -> None:
    """Publish notes; `also` changes rows in the same commit.

    Raises BadRequest, Conflict (a snapshot is gone), StorageFailed.
    """
    from mstore.store.transaction import Transaction  # late: reading needs none

    if not records:
        return
    with Transaction(catalog, "note") as transaction:
        transaction.put_records(list(records))

        def insert_rows(rows: IndexTransaction) -> None:
            for record in records:
                if not catalog.index.has_record(rows, Kind.SNAPSHOT, record.snapshot):
                    raise Conflict(
                        "the snapshot was collected while this command was running",
                        where=record.snapshot.hex(),
                        hint=call("log"),
                    )
                insert(catalog.index, rows, record)
            also(rows)

        transaction.commit(also=insert_rows)


# -- rows ----------------------------------------------------------------------------------------


def insert(index: Index, transaction: IndexTransaction, record: Note) -> None:
    """Link a stored note to its snapshot."""
    index.put(transaction, NOTES, (record.snapshot_id(), record.id()), None)


def stored(catalog: Catalog) -> dict[NoteId, Note]:
    """Return all notes whose records can be read."""
    with catalog.index.env.read() as transaction:
        ids = [NoteId(id) for id in catalog.index.record_ids(transaction, Kind.NOTE)]
    records = {}
    for id in ids:
        try:
            records[id] = catalog.record(Note, id)
        except (Corrupt, NotFound):
            continue
    return records


def list_again(index: Index, transaction: IndexTransaction, records: Iterable[Note]) -> None:
    """Make the rows say what stored records say; others' snapshots, and lost notes, have none."""
    about = {one.id(): one.snapshot_id() for one in records}
    rows = {key for key, _ in index.walk(transaction, NOTES)}
    for snapshot, note in rows | {(snapshot, note) for note, snapshot in about.items()}:
        is_whole = (
            about.get(note, snapshot) == snapshot
            and index.has_record(transaction, Kind.NOTE, note)
            and index.has_record(transaction, Kind.SNAPSHOT, snapshot)
        )
        if is_whole:
            index.put(transaction, NOTES, (snapshot, note), None)
        else:
            index.delete(transaction, NOTES, (snapshot, note))
