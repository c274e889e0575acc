"""A writer that was killed between LMDB's last write and its word that the write is done.

LMDB writes a commit's data and its head, and then moves the transaction number of its lock file.
Readers go by that number.  A kill in between leaves a commit that nobody sees while another
process has the index open, until the next writer takes the dead one's lock and it surfaces.
`die_unseen` makes that state in a process of its own: a commit, then a second write transaction
(whose lock dies with the process), then the number as it was before.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_models import BLOCK, small_model

from mstore import MergeRequest, Store, fs
from mstore.store import refs
from mstore.store.transaction import RefMove, Transaction, choose_moves
from mstore.terms.errors import Conflict
from mstore.terms.report import Progress

TESTS = Path(__file__).parent.parent
NUMBER = struct.Struct("<Q")
NUMBER_AT = 48
"""Where the lock file of LMDB 0.9 has the number of the last transaction."""
MODELS = ("model0", "model1", "model2")


# -- in a process of its own -------------------------------------------------------------------


def die_unseen(root: str, name: str, action: str, *arguments: str) -> None:
    """Run a method of a store, and end in the commit that moves the ref `name`."""
    store = Store.open(root)
    env = store._catalog.index.env
    before = store._catalog.ref(name)

    def look(operation: fs.Operation) -> None:
        if operation.kind != "committed" or operation.path != str(env.path):
            return
        if store._catalog.ref(name) == before:
            return
        locked = env._files.env.begin(write=True)
        last = env._files.env.info()["last_txnid"]
        with (env.path / "lock.mdb").open("r+b", buffering=0) as lock:
            lock.seek(NUMBER_AT)
            assert NUMBER.unpack(lock.read(NUMBER.size)) == (last,)
            lock.seek(NUMBER_AT)
            lock.write(NUMBER.pack(last - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        locked.abort()

    with fs.observed(look):
        match action:
            case "add":
                store.add(arguments[0], name=name, threads=1)
            case _:
                getattr(store, action)(name, *arguments)


# -- outside -----------------------------------------------------------------------------------


def killed_unseen(store: Store, name: str, action: str, *arguments: str | Path) -> None:
    """Have a process die so; `store` is open meanwhile, and sees nothing of it."""
    before = store._catalog.ref(name)
    done = subprocess.run(
        [sys.executable, __file__, store.path, name, action, *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert store._catalog.ref(name) == before, "the commit is to be one that nobody sees"


def build(root: Path) -> None:
    """Three checkpoints of the same tensors, and a store of two of them."""
    for name in MODELS:
        small_model(root / name, "same", changed=name)
    with Store.init(root / "store", block_size=BLOCK) as store:
        store.add(root / MODELS[0], name="base")
        store.add(root / MODELS[0], name="llama")
        store.add(root / MODELS[1], name="other")


@pytest.fixture
def models(template: Path) -> list[Path]:
    return [template / name for name in MODELS]


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Iterator[Store]:
    shutil.copytree(template / "store", tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        yield store


def actions(store: Store, name: str) -> list[str]:
    """What the reflog of a name says, oldest first."""
    return [move.action for move in reversed(store.reflog(name))]


@pytest.mark.rest
def test_an_add_goes_on_from_what_surfaced(store: Store, models: list[Path]) -> None:
    """An add that is alone in the store succeeds, and what surfaced is its previous snapshot."""
    killed_unseen(store, "llama", "add", models[1])
    added = store.add(models[2], name="llama")
    assert store["llama"].id == added.snapshot
    assert actions(store, "llama") == ["add"] * 3
    assert store["llama~1"].manifest == store["other"].manifest
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_an_add_of_what_surfaced_finds_it_there(store: Store, models: list[Path]) -> None:
    """The user who runs the killed add again gets its snapshot, and no second one."""
    killed_unseen(store, "llama", "add", models[1])
    again = store.add(models[1], name="llama")
    assert not again.new_snapshot
    assert actions(store, "llama") == ["add"] * 2


@pytest.mark.rest
@pytest.mark.parametrize("virtual", [False, True])
def test_a_merge_goes_on_from_what_surfaced(
    store: Store, models: list[Path], *, virtual: bool
) -> None:
    """A merge into a ref of which a commit surfaces is made, on top of that."""
    expert = store.add(models[1], name="expert", base="base")
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear"))
    killed_unseen(store, "llama", "reset", "expert")
    merged = store.merge(plan, name="llama", virtual=virtual)
    assert store["llama"].id == merged.snapshot
    assert store["llama"].parents[0].snapshot == expert.snapshot
    assert len(actions(store, "llama")) == 3


@pytest.mark.rest
def test_materializing_reads_what_surfaced(store: Store, models: list[Path]) -> None:
    """A branch that surfaces as something real needs no materializing; a virtual merge gets it."""
    expert = store.add(models[1], name="expert", base="base")
    plan = store.plan(MergeRequest(base="base", experts=["expert"], method="linear"))
    virtual = store.merge(plan, name="virtual", virtual=True).snapshot
    store.reset("llama", "virtual")
    killed_unseen(store, "llama", "reset", "expert")
    assert store.materialize("llama").snapshot == expert.snapshot
    killed_unseen(store, "llama", "reset", "virtual")
    assert store.materialize("llama").new_snapshot
    assert store["llama~1"].id == virtual


@pytest.mark.rest
def test_names_move_from_what_surfaced(store: Store, models: list[Path]) -> None:
    """reset and rm take a ref from what it surfaced as; tag says that a surfaced name is taken."""
    expert = store.add(models[1], name="expert").snapshot
    killed_unseen(store, "llama", "reset", "expert")
    assert store.reset("llama", "base").snapshot == store["base"].id
    assert actions(store, "llama")[1:] == ["reset: expert", "reset: base"]
    killed_unseen(store, "llama", "reset", "expert")
    assert store.remove("llama").snapshots == (expert,)
    killed_unseen(store, "v1", "tag", "expert")
    with pytest.raises(Conflict, match="the name is taken"):
        store.tag("v1", "base")
    assert store["v1"].id == expert


@pytest.mark.rest
def test_pruning_and_collecting_after_one_surfaced(store: Store, models: list[Path]) -> None:
    """prune and gc see the commit before they choose: nothing that it needs goes."""
    killed_unseen(store, "v1", "tag", "llama")
    store.prune(keep_last=1, keep_tagged=False)
    killed_unseen(store, "llama", "add", models[1])
    store.gc(reflog_days=0)
    assert actions(store, "llama") == ["add"] * 2
    assert store.fsck(read_data=True).problems == ()


@pytest.mark.rest
def test_an_add_that_was_overtaken_runs_again(store: Store, models: list[Path]) -> None:
    """Where somebody who is gone moved the ref while an add read, the add runs again by itself."""
    killed: list[Progress] = []

    def kill(progress: Progress) -> None:
        if not killed:
            killed.append(progress)
            killed_unseen(store, "llama", "add", models[1])

    added = store.add(models[2], name="llama", progress=kill)
    assert actions(store, "llama") == ["add"] * 3
    assert store["llama"].id == added.snapshot
    assert list((store.path / "tmp").iterdir()) == []
    assert store.fsck(read_data=True).problems == ()


def test_an_add_that_is_overtaken_each_time_gives_up(store: Store, models: list[Path]) -> None:
    """It does not go on for ever: after some tries it is a Conflict, and nothing of it is there."""
    tips = [ref(store, name) for name in ("base", "llama")]
    others = [ref(store, "other"), *tips]

    def move(progress: Progress) -> None:
        # Once an attempt: it begins at nothing.
        if progress.done:
            return
        now = ref(store, "llama")
        then = others[(others.index(now) + 1) % len(others)]
        choose_moves(store._catalog, lambda _: [RefMove("llama", now, then, "test")])

    with pytest.raises(Conflict, match="moved while"):
        store.add(models[2], name="llama", progress=move)
    assert "add" not in actions(store, "llama")[1:]
    assert list((store.path / "tmp").iterdir()) == []


def ref(store: Store, name: str) -> refs.Ref:
    found = store._catalog.ref(name)
    assert found is not None
    return found


def test_an_add_that_others_overtake_while_they_work_does_not_run_again(
    store: Store, models: list[Path]
) -> None:
    """Where another writer is at work, the second of two is a Conflict: people say who is last."""
    now, then = ref(store, "llama"), ref(store, "other")
    ticks = []

    def move(progress: Progress) -> None:
        ticks.append(progress.done)
        if len(ticks) == 1:
            choose_moves(store._catalog, lambda _: [RefMove("llama", now, then, "test")])

    with Transaction(store._catalog, "at work"), pytest.raises(Conflict, match="moved while"):
        store.add(models[2], name="llama", progress=move)
    assert ticks == sorted(ticks)


if __name__ == "__main__":
    die_unseen(*sys.argv[1:])
