"""Notes: later facts about snapshots, which only grow, and mean the same in whatever order."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from cli_runs import Program
from families import BLOCK
from hypothesis import given, settings
from hypothesis import strategies as st

from mstore import Store
from mstore.blocks.packs import Kind
from mstore.blocks.schema import NOTES
from mstore.snapshots import notes as noting
from mstore.store.objects.canonical import MAX_COUNT
from mstore.store.objects.note import (
    COUNTS,
    EVALUATION,
    REMOVAL,
    REMOVED,
    REPLACED,
    SIGNATURE,
    STATING,
    VALUE,
    Note,
    packed,
    states,
)
from mstore.terms.errors import BadName, BadRequest, Conflict, NotFound
from mstore.terms.ids import NoteId, SnapshotId

OF = SnapshotId(b"\xaa" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with two snapshots."""
    for name in "ab":
        write_safetensors(
            tmp_path / name / "model.safetensors", [("w", "U8", (300,), name.encode() * 300)]
        )
    with Store.init(tmp_path / "store", block_size=BLOCK) as store:
        for name in "ab":
            store.add(tmp_path / name, name=name)
        yield store


def by_key(store: Store, name: str) -> dict[str, Any]:
    return {one.key: one.value for one in store.notes_of(name)}


def records(store: Store, name: str) -> dict[NoteId, Note]:
    return noting.notes_on(store._catalog, store[name].id)


def behind(store: Store, *, by_ns: int) -> None:
    """Let the last note of `a` be so much later than now."""
    last = list(records(store, "a").values())[-1]
    ahead = Note(OF, (), VALUE, last.key, packed("ahead"), "", last.time_ns + by_ns)
    noting.publish(store._catalog, [_about(ahead, store["a"].id)])


def _about(note: Note, id: SnapshotId) -> Note:
    return Note(id, note.notes, note.form, note.key, note.data, note.author, note.time_ns)


# -- what holds ----------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> dict[NoteId, Note]:
    """Notes of one snapshot, removals of some of them, and signatures."""
    found: dict[NoteId, Note] = {}
    signed = packed({"key": "bb" * 32, "signature": "cc" * 64})
    for _ in range(draw(st.integers(0, 9))):
        time_ns = draw(st.integers(0, 3))
        chosen = draw(st.lists(st.sampled_from(sorted(found)), max_size=3)) if found else []
        one = Note(OF, (), *draw(st.sampled_from([
            (VALUE, "k", packed(1)), (VALUE, "k", packed(2)), (VALUE, "l", packed(1)),
            (EVALUATION, "k", packed(1)), (SIGNATURE, "ed25519", signed),
        ])), "", time_ns)  # fmt: skip
        if chosen and draw(st.booleans()):
            one = Note(OF, tuple(sorted(set(chosen))), REMOVAL, "", packed(None), "", time_ns)
        found[one.id()] = one
    return found


@settings(max_examples=20)
@given(histories(), st.randoms())
def test_what_counts_depends_on_no_order(notes: dict[NoteId, Note], draw: Any) -> None:
    """The same notes mean the same in whatever order they came."""
    order = list(notes)
    draw.shuffle(order)
    assert states({id: notes[id] for id in order}) == states(notes)


@settings(max_examples=20)
@given(histories())
def test_the_newest_value_counts(notes: dict[NoteId, Note]) -> None:
    """Of the values of a key that are not removed, whatever their kinds, the last by (time, id)
    counts."""
    told = states(notes)
    hidden = {id for one in notes.values() if one.form == REMOVAL for id in one.notes}
    for id, one in notes.items():
        rivals = [
            (other.time_ns, key)
            for key, other in notes.items()
            if other.form in STATING and other.key == one.key and key not in hidden
        ]
        if one.form not in STATING:
            assert told[id] == COUNTS
        elif id in hidden:
            assert told[id] == REMOVED
        else:
            assert told[id] == (COUNTS if (one.time_ns, id) == max(rivals) else REPLACED)


@settings(max_examples=20)
@given(histories(), histories())
def test_stores_that_meet_agree(one: dict[NoteId, Note], other: dict[NoteId, Note]) -> None:
    """The union is one, whoever comes first; what was removed on one side stays removed, and what
    the other side wrote is there unless a removal names it."""
    both = states(one | other)
    assert both == states(other | one)
    assert both.keys() == one.keys() | other.keys()
    for side in (states(one), states(other)):
        assert all(both[id] == REMOVED for id, state in side.items() if state == REMOVED)
    named = {id for n in (one | other).values() if n.form == REMOVAL for id in n.notes}
    assert {id for id, state in both.items() if state == REMOVED} <= named


# -- writing and reading -------------------------------------------------------------------------


def test_notes_are_no_part_of_the_snapshot(store: Store) -> None:
    """A note is shown with its snapshot, and nobody else's; ids and contents stay."""
    before = store["a"].id
    value = {"mmlu": [0.62, {"n": 300}], "ok": True, "who": "wörd", "none": None}
    written = store.note("a", value, kind="evaluation")
    assert {one.key: one.value for one in written} == value
    assert store["a"].id == before
    assert by_key(store, "a") == value
    assert store.show("a").notes == store.notes_of("a")
    assert {one.snapshot: len(one.notes) for one in store.log()} == {before: 4, store["b"].id: 0}
    assert [one.key for one in store.notes_of("a")] == sorted(value)
    assert store.fsck(read_data=True).problems == ()


def test_a_newer_value_replaces(store: Store) -> None:
    """The newest value counts; removing it lets the one before count, by id and by beginning."""
    (first,) = store.note("a", {"k": 1})
    (second,) = store.note("a", {"k": 2})
    store.note("a", {"l": 3})
    assert by_key(store, "a") == {"k": 2, "l": 3}
    (gone,) = store.remove_notes("a", [second.note])
    assert (gone.note, gone.state) == (second.note, REMOVED)
    assert by_key(store, "a") == {"k": 1, "l": 3}
    store.remove_notes("a", [first.note.hex()[:10]])
    assert by_key(store, "a") == {"l": 3}
    assert [one.state for one in store.notes_of("a", every=True)] == [REMOVED, REMOVED, COUNTS]
    store.note("a", {"k": 1})
    assert by_key(store, "a") == {"k": 1, "l": 3}


def test_a_key_has_one_value_whatever_its_kind(store: Store) -> None:
    """A value of another kind replaces the one before it, also with the same words."""
    store.note("a", {"k": 1, "a": 1})
    (verdict,) = store.note("a", {"k": 1}, kind="verdict")
    assert [(one.kind, one.key) for one in store.notes_of("a")] == [
        ("value", "a"),
        ("verdict", "k"),
    ]
    (again,) = store.note("a", {"k": 1}, kind="verdict")
    assert again == verdict
    store.remove_notes("a", [verdict.note])
    assert [(one.kind, one.key) for one in store.notes_of("a")] == [("value", "a"), ("value", "k")]


def test_saying_it_again_writes_nothing(store: Store) -> None:
    """A value that the author noted last, and a removal of what is removed, are not written."""
    (first,) = store.note("a", {"k": 1})
    (again, new) = store.note("a", {"k": 1, "l": 2})
    assert again == first
    store.remove_notes("a", [new.note])
    store.remove_notes("a", [new.note])
    assert len(records(store, "a")) == 3
    store.note("a", {})
    store._catalog.author = lambda: "ada"
    (hers,) = store.note("a", {"k": 1})
    assert (hers.author, hers.note == first.note) == ("ada", False)
    assert [one.note for one in store.notes_of("a")] == [hers.note]


def test_a_clock_that_ran_ahead_hides_nothing(store: Store) -> None:
    """What is noted counts at once, also after a note with a later time; but for the last time."""
    store.note("a", {"k": 1})
    behind(store, by_ns=10**18)
    assert by_key(store, "a") == {"k": "ahead"}
    store.note("a", {"k": 2})
    assert by_key(store, "a") == {"k": 2}
    behind(store, by_ns=MAX_COUNT - list(records(store, "a").values())[-1].time_ns)
    with pytest.raises(Conflict, match="end of time") as refused:
        store.note("a", {"k": 3})
    assert repr(store["a"].id.short) in str(refused.value.hint)
    (last,) = store.notes_of("a")
    store.remove_notes("a", [last.note])
    store.note("a", {"k": 3})
    assert by_key(store, "a") == {"k": 3}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"k": math.nan}, "value"),
        ({"k": b"bytes"}, "value"),
        ({"k": "x" * 70_000}, "value"),
        ({"": 1}, "value"),
        ({"a\nb": 1}, "value"),
        ({"x" * 5000: 1}, "value"),
        ({"\ud800": 1}, "value"),
        ({1: 1}, "value"),
        ({"k": 1}, "opinion"),
        ({"k": 1}, "signature"),
        ({"k": 1}, "removal"),
        ({"fine": 1, "k": {1: 2}}, "value"),
    ],
)
def test_what_is_no_note_is_refused(store: Store, values: Any, kind: str) -> None:
    """A value that JSON cannot say, a key that is no line of text, another kind: all is refused."""
    with pytest.raises(BadRequest):
        store.note("a", values, kind=kind)
    assert records(store, "a") == {}


def test_what_is_not_there_is_not_removed(store: Store) -> None:
    """Only values of this snapshot are removed, each named by one beginning of four digits."""
    (note,) = store.note("a", {"k": 1})
    for name, error in ((note.note.hex()[:3], BadName), ("0" * 64, NotFound), ("", BadName)):
        with pytest.raises(error):
            store.remove_notes("a", [name])
    with pytest.raises(NotFound):
        store.remove_notes("b", [note.note])
    store.remove_notes("a", [note.note])
    (removal,) = [id for id, one in records(store, "a").items() if one.form == REMOVAL]
    with pytest.raises(BadRequest, match="a removal is not removed"):
        store.remove_notes("a", [removal])


def test_a_key_is_no_name_of_a_note(store: Store) -> None:
    """Who gives the key is told the notes under it, and the call that removes the one that counts;
    an id comes before a key of the same letters."""
    (old,) = store.note("a", {"k": 1})
    (new,) = store.note("a", {"k": 2})
    id = store["a"].id.short
    with pytest.raises(BadName) as refused:
        store.remove_notes("a", ["k"])
    told = [f"{new.note.short} (counts)", f"{old.note.short} (replaced)"]
    assert all(one in refused.value.what for one in told)
    assert refused.value.hint == f"store.remove_notes('{id}', ids=['{new.note.short}'])"
    store.remove_notes("a", [old.note, new.note])
    with pytest.raises(BadName) as refused:
        store.remove_notes("a", ["k"])
    assert f"{new.note.short} (removed)" in refused.value.what
    assert refused.value.hint == f"store.notes_of('{id}', every=True)"
    store.note("a", {old.note.hex()[:8]: 3})
    assert [one.note for one in store.remove_notes("a", [old.note.hex()[:8]])] == [old.note]


def test_signatures_are_not_removed(store: Store) -> None:
    """No call removes a signature, and one that a removal names all the same still counts."""
    id = store["a"].id
    value = packed({"key": "bb" * 32, "signature": "cc" * 64})
    signed = Note(id, (), SIGNATURE, "ed25519", value, "", 5)
    noting.publish(store._catalog, [signed])
    with pytest.raises(BadRequest, match="a signature is not removed"):
        store.remove_notes("a", [signed.id()])
    removal = Note(id, (signed.id(),), REMOVAL, "", packed(None), "", 6)
    noting.publish(store._catalog, [removal])
    assert [one.signature for one in store.show("a").signatures] == [signed.id()]


def test_a_collected_snapshot_is_not_noted(store: Store) -> None:
    """A snapshot that goes while it is being noted gets no note."""
    id = store["a"].id
    with store._catalog.index.env.write() as rows:
        rows.delete(b"\x03" + id, db=store._catalog.index.db("records"))
    with pytest.raises(Conflict):
        noting.write(store._catalog, id, {"k": 1}, VALUE)
    with store._catalog.index.env.read() as rows:
        assert store._catalog.index.count(rows, "notes") == 0


# -- how long notes live -------------------------------------------------------------------------


def stored(store: Store) -> set[bytes]:
    with store._catalog.index.env.read() as rows:
        return set(store._catalog.index.record_ids(rows, Kind.NOTE))


def test_notes_live_with_their_snapshot(store: Store) -> None:
    """gc keeps all notes of what it keeps, removals too, and drops those of what it drops."""
    (kept, removed) = store.note("a", {"k": 1, "l": 2})
    store.remove_notes("a", [removed.note])
    before = records(store, "a")
    (gone,) = store.note("b", {"k": 1})
    store.remove("b")
    store.gc(reflog_days=0)
    assert records(store, "a") == before
    assert stored(store) == set(before)
    assert gone.note not in stored(store)
    with store._catalog.index.env.read() as rows:
        assert store._catalog.index.count(rows, "notes") == len(before)
    assert [one.note for one in store.notes_of("a")] == [kept.note]


def test_notes_of_pruned_snapshots_stay(store: Store, tmp_path: Path) -> None:
    """A pruned snapshot keeps its record, and so its notes."""
    store.note("a", {"k": 1})
    store.add(tmp_path / "b", name="a")
    store.prune(keep_last=1)
    store.gc(reflog_days=0)
    assert by_key(store, "a~1") == {"k": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_old_index", [True, False])
def test_notes_come_back_with_the_index(store: Store, use_old_index: bool) -> None:
    """A rebuilt index finds all notes in the packs, and none of a snapshot that is gone."""
    (first, second) = store.note("a", {"k": 1, "l": 2})
    store.remove_notes("a", [second.note])
    before = records(store, "a")
    stray = Note(OF, (), VALUE, "k", packed(1), "", 5)
    from mstore.store.transaction import Transaction

    with Transaction(store._catalog, "test") as transaction:
        transaction.put_record(stray)
        transaction.commit()
    store.close()
    Store.reindex(store.path, use_old_index=use_old_index)
    with Store.open(store.path) as again:
        assert records(again, "a") == before
        assert [one.note for one in again.notes_of("a")] == [first.note]
        assert again.fsck(read_data=True).problems == ()
        again.gc(reflog_days=0)
        assert stored(again) == set(before)


def test_copies_have_the_notes(store: Store, tmp_path: Path) -> None:
    """A clone and a backup hold all notes; a backup that is brought up to date, new ones too."""
    store.note("a", {"k": 1})
    store.backup(tmp_path / "backup")
    store.note("a", {"k": 2})
    store.backup(tmp_path / "backup")
    Store.clone(store.path, tmp_path / "clone")
    for path in ("backup", "clone"):
        with Store.open(tmp_path / path) as copy:
            assert records(copy, "a") == records(store, "a")
            assert by_key(copy, "a") == {"k": 2}


def test_two_stores_that_meet_have_the_union(store: Store, tmp_path: Path) -> None:
    """Notes that were written apart come together in either order, and then tell the same."""
    (shared,) = store.note("a", {"k": 1})
    Store.clone(store.path, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as other:
        store.note("a", {"k": 2, "here": 1})
        other.remove_notes("a", [shared.note])
        other.note("a", {"k": 3, "there": 1})
        mine, theirs = (list(records(one, "a").values()) for one in (store, other))
        for one, more in ((store, theirs), (other, reversed(mine))):
            for note in more:
                noting.publish(one._catalog, [note])
        assert store.notes_of("a", every=True) == other.notes_of("a", every=True)
        assert by_key(store, "a") == {"k": 3, "here": 1, "there": 1}


def test_packs_that_meet_bring_the_union(store: Store, tmp_path: Path) -> None:
    """The packs of another store, put beside one's own, bring its notes with the next index."""
    (shared,) = store.note("a", {"k": 1})
    Store.clone(store.path, tmp_path / "clone")
    with Store.open(tmp_path / "clone") as other:
        store.note("a", {"here": 1})
        other.remove_notes("a", [shared.note])
        other.note("a", {"there": 1})
    store.close()
    for pack in (tmp_path / "clone").glob("packs/*/*.pack"):
        place = store.path / "packs" / pack.parent.name / pack.name
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copy(pack, place)
    Store.reindex(store.path)
    with Store.open(store.path) as again:
        assert by_key(again, "a") == {"here": 1, "there": 1}
        assert again.fsck(read_data=True).problems == ()


# -- damage --------------------------------------------------------------------------------------


def change(store: Store, *, add: Any = None, drop: Any = None, lose: Any = None) -> None:
    index = store._catalog.index
    with index.env.write() as rows:
        if drop is not None:
            index.delete(rows, NOTES, drop)
        if add is not None:
            index.put(rows, NOTES, add, None)
        if lose is not None:
            rows.delete(bytes([Kind.NOTE]) + lose, db=index.db("records"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", ["no row", "another's row", "only another's row"])
def test_rows_are_proved_by_the_records(store: Store, damage: str) -> None:
    """fsck finds a note that its snapshot does not list, or that another does; repair mends it."""
    (note,) = store.note("a", {"k": 1})
    a, b = (store[name].id for name in "ab")
    if damage != "another's row":
        change(store, drop=(a, note.note))
    if damage != "no row":
        change(store, add=(b, note.note))
    report = store.fsck()
    assert {one.kind for one in report.problems} == {"note"}
    assert store.repair().after.problems == ()
    assert (by_key(store, "a"), by_key(store, "b")) == ({"k": 1}, {})


def test_a_lost_note_is_told_and_healed(store: Store, tmp_path: Path) -> None:
    """A note whose record is gone is a problem, and a copy of the store heals it."""
    (note, _) = store.note("a", {"k": 1, "l": 2})
    Store.clone(store.path, tmp_path / "clone")
    change(store, lose=note.note)
    assert [(one.kind, one.where) for one in store.fsck().problems] == [("note", str(note.note))]
    assert store.repair(sources=[tmp_path / "clone"]).after.problems == ()
    assert by_key(store, "a") == {"k": 1, "l": 2}


def test_a_damaged_note_without_a_copy_is_dropped(store: Store) -> None:
    """Repair drops a note whose bytes are wrong everywhere, and the other notes stay."""
    (note,) = store.note("a", {"k": 1})
    store.note("a", {"l": 2})
    with store._catalog.index.env.read() as rows:
        place = store._catalog.index.record(rows, Kind.NOTE, note.note)
    assert place is not None
    path = Path(store._catalog.packs.where(place.pack))
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place.offset + 8)
        file.write(b"damage")
    assert any(one.kind == "note" for one in store.fsck(read_data=True).problems)
    report = store.repair(read_data=True)
    assert report.dropped == (f"note {note.note}",)
    assert report.after.problems == ()
    assert by_key(store, "a") == {"l": 2}


# -- the command line ----------------------------------------------------------------------------


@pytest.fixture
def mstore(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Program(store.path)


def test_noting_and_listing(mstore: Program, store: Store) -> None:
    """Values are JSON or else text; what counts is listed, shown and logged."""
    assert "no notes; next: mstore" in mstore.succeed("note", "a").out
    given = ["n=0.62", "t=true", 'o={"b": [1]}', "x=a=b", "e=", "nan=NaN", 'twice={"a":1,"a":2}']
    written = mstore.succeed("note", "a", *given, "--json").document["notes"]
    assert {one["key"]: one["value"] for one in written} == {
        "n": 0.62, "t": True, "o": {"b": [1]}, "x": "a=b", "e": "", "nan": "NaN",
        "twice": '{"a":1,"a":2}',
    }  # fmt: skip
    mstore.succeed("note", "a", "loss=1.5", "--kind", "evaluation")
    listed = mstore.succeed("note", "a").out
    assert "n = 0.62" in listed
    assert "evaluation loss = 1.5" in listed
    assert 'o = {"b": [1]}' in mstore.succeed("show", "a").out
    assert "n = 0.62" in mstore.succeed("log", "--notes").out
    assert "n = 0.62" not in mstore.succeed("log").out
    assert "n = 0.62" in mstore.succeed("log", "--notes", "--graph").out
    assert len(mstore.succeed("log", "a", "--json").document["snapshots"][0]["notes"]) == 8
    assert mstore.succeed("note", "a", "-q").lines == [str(n.note) for n in store.notes_of("a")]


def test_removing(mstore: Program, store: Store) -> None:
    """--remove takes the beginning of an id, and --all lists what was removed."""
    (note,) = store.note("a", {"k": 1})
    done = mstore.succeed("note", "a", "--remove", note.note.hex()[:12])
    assert done.out == f"removed {note.note.hex()[:12]}: k = 1\n"
    assert "no notes" in mstore.succeed("note", "a").out
    assert "removed" in mstore.succeed("note", "a", "--all").out


def test_what_counts_after_a_removal_is_told(mstore: Program, store: Store) -> None:
    """An older value of the key, which counts again, stands below the one that was removed."""
    (old,) = store.note("a", {"k": 1})
    (new,) = store.note("a", {"k": 2})
    refused = mstore("note", "a", "--remove", "k")
    again = f"note {store['a'].id.short} --remove {new.note.hex()[:12]}"
    assert f"hint: mstore --store {store.path} {again}" in refused.err
    assert mstore.succeed("note", "a", "--remove", new.note).lines == [
        f"removed {new.note.hex()[:12]}: k = 2",
        f"counts now, {old.note.hex()[:12]}: k = 1",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("a", "k"),
        ("a", "=1"),
        ("a", "k=1", "k=2"),
        ("a", "k=1", "--remove", "aaaa"),
        ("a", "--all", "k=1"),
        ("a", "--remove", "abcd"),
        ("a", "k=1", "--kind", "opinion"),
        ("a", "--kind", "verdict"),
        ("a", "--all", "--kind", "verdict"),
        ("a", "k=1e999"),
        ("a", "k=" + "9" * 30),
        ("nothing", "k=1"),
    ],
)
def test_what_the_command_refuses(mstore: Program, store: Store, words: tuple[str, ...]) -> None:
    """What is no KEY=VALUE, contradicts itself or names nothing fails, and notes nothing."""
    assert mstore("note", *words).status != 0
    assert stored(store) == set()
