"""Candidates: merges that no branch shows yet, how long they are kept, how a branch moves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import families
import pytest
from cli_runs import Program
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.store.refs import BRANCH, CANDIDATE, REMOTE, Ref
from mstore.store.transaction import RefMove, choose_moves
from mstore.terms.errors import BadName, Conflict, MstoreError, NotFound
from mstore.terms.ids import SnapshotId

FAMILY = families.layered(rows=40)
NAME = "candidates/run/m"


def build(root: Path) -> None:
    """The family's checkpoints, and a store that has them."""
    FAMILY.write(root)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / "base", name="base")
        for name in FAMILY.names:
            store.add(root / name, name=name, base="base")


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store, open."""
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def merge(
    store: Store,
    candidate: str | None = "run",
    *,
    weight: float = 0.5,
    virtual: bool = False,
    name: str = "m",
) -> SnapshotId:
    """A merge to the branch `m`, or to a candidate for it."""
    plan = store.plan(MergeRequest(base="base", experts=["e0", ("e1", weight)], method="linear"))
    report = store.merge(plan, name=name, candidate=candidate, virtual=virtual)
    assert report.name == (name if candidate is None else f"candidates/{candidate}/{name}")
    return report.snapshot


def names(store: Store) -> list[str]:
    return [one.name for one in store.refs()]


# -- the merge -------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", [False, True])
def test_no_branch_moves(store: Store, virtual: bool) -> None:
    """The result has a candidate's name and no other; lists and the log do not show it."""
    before = names(store)
    made = merge(store, virtual=virtual)
    assert names(store) == before
    assert made not in [one.snapshot for one in store.log()]
    (listed,) = store.refs("candidates/*")
    assert (listed.name, listed.kind, listed.snapshot) == (NAME, CANDIDATE, made)
    assert store[NAME].id == made
    assert store.ref_ids()[NAME] == made
    assert not store.fsck().problems


@pytest.mark.parametrize("virtual", [False, True])
def test_it_follows_the_branch(store: Store, virtual: bool) -> None:
    """Its previous snapshot is the branch's; moved to it, the branch is as if merged directly."""
    first = merge(store, None)
    plan = store.plan(MergeRequest(base="base", experts=["e0", ("e1", 0.25)], method="linear"))
    report = store.merge(plan, name="m", candidate="run", virtual=virtual)
    assert report.was == first
    assert store.show(NAME).parents[0].snapshot == first
    assert store.show(NAME).parents[0].role == "previous"
    assert store["m"].id == first
    moved = store.move("m", report.was, NAME)
    assert (moved.kind, moved.snapshot) == (BRANCH, report.snapshot)
    assert [one.snapshot for one in store.log("m", limit=2)] == [report.snapshot, first]
    again = store.merge(plan, name="m", virtual=virtual)
    assert (again.new_snapshot, again.snapshot) == (False, report.snapshot)


@pytest.mark.parametrize("virtual", [False, True])
def test_the_same_again_is_nothing_new(store: Store, virtual: bool) -> None:
    """A run that merges again gets the candidate that it has, until the branch has moved."""
    made = merge(store, virtual=virtual)
    assert merge(store, virtual=virtual) == made
    assert len(store.reflog(NAME)) == 1
    store.reset("m", "e0")
    other = merge(store, virtual=virtual)
    assert other != made
    assert store.show(NAME).parents[0].snapshot == store["e0"].id


@pytest.mark.parametrize("virtual", [False, True])
def test_of_what_the_branch_is_already(store: Store, virtual: bool) -> None:
    """If the branch is the merge that is asked for, the candidate points at the same snapshot."""
    made = merge(store, None, virtual=virtual)
    assert merge(store, virtual=virtual) == made
    assert store[NAME].id == made


def test_runs_do_not_meet(store: Store) -> None:
    """Two runs have candidates of their own for one branch; the first that moves it wins."""
    one, two = merge(store, "one"), merge(store, "two", weight=0.25)
    assert store.move("m", None, "candidates/one/m").snapshot == one
    with pytest.raises(Conflict) as refused:
        store.move("m", None, "candidates/two/m")
    assert (refused.value.where, store["m"].id) == ("m", one)
    assert store.move("m", one, two).snapshot == two


@pytest.mark.parametrize("run", ["", "a/b", "-x", "x" * 65, "..", "a b"])
def test_words_that_are_no_run(store: Store, run: str) -> None:
    """A run is one part of a name; the error comes before anything is read."""
    with pytest.raises(BadName):
        merge(store, run)
    assert names(store) == ["base", *FAMILY.names]


def test_only_what_can_move(store: Store) -> None:
    """A candidate for a tag, or one that would be a directory of another, is refused before
    anything is computed."""
    store.tag("v1", "base")
    with pytest.raises(Conflict):
        merge(store, name="v1")
    merge(store)
    plan = store.plan(MergeRequest(base="base", experts=["e0", "e1"], method="linear"))
    ticks: list[object] = []
    with pytest.raises(Conflict, match="is a ref"):
        store.merge(plan, name="m/x", candidate="run", progress=ticks.append)
    assert ticks == []


# -- the move --------------------------------------------------------------------------------------


def test_a_move_is_a_compare_and_swap(store: Store) -> None:
    """A branch moves only from where it is expected; None: only if it does not exist."""
    base, e0, e1 = (store[name].id for name in ("base", "e0", "e1"))
    for expect, told in ((None, "no ref"), ("e1", f"at {e1.short}"), (base.hex(), "at ")):
        with pytest.raises(Conflict, match=f"is at {e0.short}; expected: {told}"):
            store.move("e0", expect, "e1")
    with pytest.raises(Conflict, match=f"is no ref; expected: at {e0.short}"):
        store.move("missing", e0, "e1")
    assert store["e0"].id == e0
    assert store.move("e0", e0, "e1").snapshot == e1
    assert store.reflog("e0")[0].action == "move: e1"
    with pytest.raises(Conflict):
        store.move("e0", e0, "e1")
    assert store.move("new", None, base).kind == BRANCH
    for expect in (base, None):
        with pytest.raises(Conflict):
            store.move("new" if expect is None else "missing", expect, e0)
    with pytest.raises(NotFound):
        store.move("e0", e1, "nothing")
    store.tag("v1", base)
    with pytest.raises(Conflict):
        store.move("v1", base, e0)


def test_a_candidate_is_not_renamed_to_a_branch(store: Store) -> None:
    """The error names the call that makes a branch of a candidate."""
    merge(store)
    with pytest.raises(BadName) as refused:
        store.rename(NAME, "better")
    assert refused.value.hint == f"store.reset('better', '{NAME}')"
    for name in ("a b", "0123456789abcdef"):
        with pytest.raises(BadName) as refused:
            store.rename(NAME, name)
        assert "use letters" in str(refused.value.hint)
    with pytest.raises(BadName) as refused:
        store.rename("e0", "a b")
    assert "use letters" in str(refused.value.hint)
    assert store.rename(NAME, "candidates/other/m").kind == CANDIDATE


# -- how long it is kept ---------------------------------------------------------------------------


def test_the_process_that_made_it_keeps_it(store: Store) -> None:
    """While its store is open, gc keeps a candidate, whatever the days; then it goes at once."""
    made = merge(store)
    with Store.open(store.path) as other:
        assert other.gc(reflog_days=0).candidates_dropped == ()
        assert other[NAME].id == made
    store.close()
    with Store.open(store.path) as other:
        assert other.gc(dry_run=True).candidates_dropped == ()
        promised = other.gc(reflog_days=0, dry_run=True)
        report = other.gc(reflog_days=0)
        assert report.candidates_dropped == promised.candidates_dropped == (NAME,)
        assert report.snapshots_dropped == promised.snapshots_dropped == (made,)
        assert NAME not in other.ref_ids()
        assert not other.fsck(read_data=True).problems
        assert other.reflog(NAME)[0].action == "gc"
        assert other.gc(reflog_days=0).candidates_dropped == ()


@pytest.mark.rest
def test_a_killed_process_keeps_nothing(store: Store) -> None:
    """A candidate of a process that was killed is as one whose store was closed."""
    program = (
        "import os, sys\n"
        "from mstore import MergeRequest, Store\n"
        "store = Store.open(sys.argv[1])\n"
        "plan = store.plan(MergeRequest(base='base', experts=['e0', 'e1'], method='linear'))\n"
        "store.merge(plan, name='m', candidate='run')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store.path)], check=False)
    assert done.returncode == -9
    assert NAME in store.ref_ids()
    assert store.gc().candidates_dropped == ()
    assert store.gc(reflog_days=0).candidates_dropped == (NAME,)


def test_one_that_a_branch_has_goes_alone(store: Store) -> None:
    """gc drops an old candidate also where its snapshot stays, and nothing else with it."""
    made = merge(store)
    store.move("m", None, NAME)
    store.close()
    with Store.open(store.path) as other:
        report = other.gc(reflog_days=0)
        assert (report.candidates_dropped, report.snapshots_dropped) == ((NAME,), ())
        assert other["m"].id == made


def test_a_reader_keeps_it(store: Store) -> None:
    """Whoever holds an old candidate's snapshot keeps it."""
    made = merge(store)
    store.close()
    with Store.open(store.path) as other:
        with other.hold(made):
            assert other.gc(reflog_days=0).candidates_dropped == ()
        assert other.gc(reflog_days=0).candidates_dropped == (NAME,)


def test_a_dropped_one_goes_with_the_next_gc(store: Store) -> None:
    """Removed, it keeps nothing: neither its reflog nor the process that made it; before gc a reset
    brings it back, as a candidate."""
    made = merge(store)
    store.remove("candidates/run/*")
    assert store.reset(NAME, f"{NAME}@{{1}}").kind == CANDIDATE
    removed = store.remove(NAME)
    assert (removed.unnamed_snapshots, removed.reflog_days) == (1, 0)
    assert store.remove("e1", dry_run=True).reflog_days == 30
    assert store.gc().snapshots_dropped == (made,)
    with pytest.raises(MstoreError, match="collected"):
        store.reset(NAME, f"{NAME}@{{1}}")


def test_a_candidate_that_moved_on(store: Store) -> None:
    """What a candidate pointed at before is not kept; what it points at is."""
    old = merge(store)
    new = merge(store, weight=0.25)
    assert store.gc().snapshots_dropped == (old,)
    assert store[NAME].id == new


def test_prune_keeps_its_contents(store: Store) -> None:
    """A candidate names its snapshot, so prune drops nothing of it."""
    merge(store, None)
    merge(store, None, weight=0.25)
    old = store["m~1"].id
    store.reset("m", "m~1")
    assert merge(store) == old
    store.reset("m", "m@{1}")
    assert old not in store.prune(keep_last=1).snapshots


@pytest.mark.rest
def test_copies_and_rebuilt_indexes_have_them(store: Store, tmp_path: Path) -> None:
    """Backups, clones and a rebuilt index have candidates and remote refs, as those."""
    made = merge(store)
    remote = RefMove("remotes/origin/main", None, Ref(REMOTE, made), "fetch")
    choose_moves(store._catalog, lambda _: [remote])
    expected = {one.name: one for one in store.refs("candidates/*", "remotes/*")}
    store.backup(tmp_path / "backup")
    Store.clone(store.path, tmp_path / "clone")
    (store.path / "index" / "data.mdb").unlink()
    store.close()
    Store.reindex(store.path)
    for path in (store.path, tmp_path / "backup", tmp_path / "clone"):
        with Store.open(path) as other:
            found = {one.name: one for one in other.refs("candidates/*", "remotes/*")}
            assert {name: (one.kind, one.snapshot) for name, one in found.items()} == {
                name: (one.kind, one.snapshot) for name, one in expected.items()
            }
            assert not other.fsck().problems


# -- the command line ------------------------------------------------------------------------------


def test_refs_counts_them(store: Store) -> None:
    """`refs` says how many candidates there are and what lists them, and does not list them."""
    mstore = Program(store.path)
    assert "candidate" not in mstore.succeed("refs").out
    made = merge(store)
    listing = f"mstore --store {store.path} refs 'candidates/*'"
    assert mstore.succeed("refs").lines[-1] == f"1 candidate: {listing}"
    store.merge(store.show(made).plan, name="m", candidate="two")
    assert mstore.succeed("refs").lines[-1] == f"2 candidates: {listing}"
    for pattern in ("e*", "candidates/*"):
        assert "2 candidates" not in mstore.succeed("refs", pattern).out
    assert NAME not in mstore.succeed("refs", "-q").out
    store.remove("base", "e*")
    assert mstore.succeed("refs").lines[-1] == f"2 candidates: {listing}"


def test_rm_says_how_long_it_can_be_restored(store: Store) -> None:
    """A removed candidate is restored before the next gc; one whose snapshot a branch has, later,
    too. A branch that is removed with it stays for the days of its reflog."""
    mstore = Program(store.path)
    merge(store)
    assert f"to restore it before the next gc: mstore --store {store.path} reset {NAME}" in (
        mstore.succeed("rm", NAME).out
    )
    store.reset(NAME, f"{NAME}@{{1}}")
    told = mstore.succeed("rm", NAME, "e1").out
    assert f"to restore it before the next gc: mstore --store {store.path} reset {NAME}" in told
    assert f"to restore it: mstore --store {store.path} reset e1" in told
    assert "after 30 days, and what only candidates named the next time" in told
    store.move("m", None, f"{NAME}@{{1}}")
    store.reset(NAME, "m")
    assert "before the next gc" not in mstore.succeed("rm", NAME).out


def test_the_commands_say_what_becomes_of_it(store: Store) -> None:
    """A merge says which candidate it replaced, a reset that the candidate stays."""
    mstore = Program(store.path)
    again = ("merge", "--base", "base", "--expert", "e0", "--method", "linear", "--name", "m")
    first = merge(store)
    told = mstore.succeed(*again, "--candidate", "run").out
    assert re.search(rf"^replaces +{first.short}, the candidate before this one$", told, re.M)
    assert "replaces" not in mstore.succeed(*again, "--candidate", "run").out
    drop = f"the candidate stays; to drop it: mstore --store {store.path} rm {NAME}"
    assert drop in mstore.succeed("reset", "m", NAME, "--expect", "").out
    assert "the candidate stays" not in mstore.succeed("reset", "m", "e0").out
