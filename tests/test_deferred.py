"""A virtual merge's life: committed as its plan, looked at, refused as an input, made real."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
from families import BLOCK

from mstore import MergeRequest, Store
from mstore.blocks.packs import Kind
from mstore.store.refs import BRANCH, Ref
from mstore.store.transaction import RefMove, Transaction, choose_moves
from mstore.terms.errors import BadRequest, Conflict, MstoreError, NotFound

FAMILY = families.layered(rows=150)


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


def plan_of(store: Store, **request: Any) -> Any:
    given: dict[str, Any] = {"method": "ties", "parameters": {"density": 0.4}} | request
    return store.plan(MergeRequest(base="base", experts=["e0", ("e1", 0.5)], **given))


def virtual(store: Store, name: str = "m", message: str = "", **request: Any) -> Any:
    return store.merge(plan_of(store, **request), name=name, message=message, virtual=True)


# -- looking at it ---------------------------------------------------------------------------------


def test_log_and_show(store: Store) -> None:
    """A virtual snapshot stands in the log with its method, parents and message, and is marked."""
    made = virtual(store, message="let us see")
    told = store.show("m")
    assert (told.snapshot, told.made, told.method) == (made.snapshot, "merge", "ties")
    assert (told.plan, told.message, told.virtual) == (made.plan, "let us see", True)
    assert [parent.role for parent in told.parents] == ["base", "expert", "expert"]
    assert [item.virtual for item in store.log("m")] == [True, False, False, False]
    sizes = [{file.path: file.size for file in store.files(name)} for name in ("m", "base")]
    assert sizes[0].pop("README.md") != sizes[1].pop("README.md")
    assert sizes[0].pop("mergekit_config.yml") > 0
    assert sizes[0] == sizes[1]
    assert told.tensors == store.show("base").tensors
    assert store.reflog("m")[0].action == "merge: ties, virtual: let us see"


def test_the_same_again_is_nothing_new(store: Store) -> None:
    """The same virtual merge again, or of a branch that holds the real one, publishes nothing."""
    plan = plan_of(store)
    first = store.merge(plan, name="m", virtual=True)
    again = store.merge(plan, name="m", virtual=True)
    assert (first.new_snapshot, again.new_snapshot) == (True, False)
    assert (again.snapshot, again.bytes_written) == (first.snapshot, 0)
    real = store.merge(plan, name="m")
    assert real.new_snapshot
    again = store.merge(plan, name="m", virtual=True)
    assert (again.snapshot, again.new_snapshot, again.virtual) == (real.snapshot, False, False)


def test_refs_of_a_virtual_merge(store: Store) -> None:
    """Tag, reset and rm work on it as on any snapshot."""
    made = virtual(store)
    assert store.tag("v1", "m").snapshot == made.snapshot
    assert store.reset("other", "m").snapshot == made.snapshot
    store.remove("m")
    assert store.show("v1").virtual
    assert store.show("m@{1}").snapshot == made.snapshot
    with pytest.raises(Conflict):
        store.merge(made.plan, name="v1", virtual=True)


def test_one_plan_gives_one_manifest(store: Store) -> None:
    """A virtual manifest is a function of the plan: the same whenever and under whatever name."""
    assert virtual(store, "one").manifest == virtual(store, "two").manifest
    assert virtual(store, "one").manifest != virtual(store, "three", budget=0.5).manifest


def test_nothing_to_merge(store: Store) -> None:
    """A virtual merge of what nobody changed is the base's content, and can be made real."""
    plan = store.plan(MergeRequest(base="base", experts=["base"], method="linear"), allow_noop=True)
    made = store.merge(plan, name="m", virtual=True)
    assert made.manifest == store["base"].manifest
    assert store.show("m").virtual
    real = store.materialize("m")
    assert (real.new_snapshot, real.manifest) == (True, made.manifest)
    assert not store.show("m").virtual


# -- comparing -------------------------------------------------------------------------------------


def test_diff_with_the_real_one(store: Store) -> None:
    """A virtual merge and the real one differ in ids and are equal in content: diff says equal."""
    plan = plan_of(store, dtype="float32")
    store.merge(plan, name="virtual", virtual=True)
    store.merge(plan, name="real")
    assert store["virtual"].manifest != store["real"].manifest
    for a, b in (("virtual", "real"), ("real", "virtual"), ("virtual", "virtual")):
        found = store.diff(a, b)
        assert (found.files, found.tensors) == ((), ())
        assert found.tensors_equal == len(FAMILY.base)
        assert (found.blocks_changed, found.files_equal) == (0, len(store.files("real")))


@pytest.mark.rest
def test_diff_with_the_base(store: Store) -> None:
    """Against the base, or another virtual merge, a virtual merge differs as the real one does."""
    for name, density in (("one", 0.4), ("two", 0.8)):
        plan = plan_of(store, parameters={"density": density})
        store.merge(plan, name=f"{name}/virtual", virtual=True)
        store.merge(plan, name=f"{name}/real")

    def told(a: str, b: str) -> Any:
        found = store.diff(a, b, blocks=True, exact=True)
        return found.files, found.tensors, found.tensors_equal, found.blocks_changed

    wanted = told("base", "one/real")
    assert told("base", "one/virtual") == wanted
    assert {item.status for item in wanted[1]} == {"changed"}
    assert any(item.relative_l2 for item in wanted[1])
    assert told("one/virtual", "base") == told("one/real", "base")
    assert told("one/virtual", "two/virtual") == told("one/real", "two/real")
    assert told("one/virtual", "two/real") == told("one/real", "two/real")


def test_fsck(store: Store) -> None:
    """A virtual snapshot is sound where its plan and inputs are there; nothing is computed."""
    virtual(store)
    before = store._computing().first_expert_bytes
    assert store.fsck().problems == ()
    assert store.fsck(read_data=True).problems == ()
    assert store._computing().first_expert_bytes == before == 0


def test_fsck_finds_what_is_missing(store: Store) -> None:
    """A block of an input that is not there is named, also where no snapshot has that input any
    more; and so is the snapshot whose plan is not there."""
    made = virtual(store)
    index = store._catalog.index
    expert = store["e1"].id
    block = store.view("e1").record("model.embed.weight").block(2)
    store.remove("e1")
    with index.env.write() as rows:
        rows.delete(expert, db=index.db("snapshots"))
        rows.delete(block, db=index.db("blocks"))
    assert str(block) in {problem.where for problem in store.fsck().problems}
    with index.env.write() as rows:
        rows.delete(bytes([Kind.PLAN]) + made.plan, db=index.db("records"))
    path = store.path
    store.close()
    with Store.open(path) as again:
        found = {(problem.kind, problem.where) for problem in again.fsck().problems}
    assert ("snapshot", str(made.snapshot)) in found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", ["block", "tensor", "manifest"])
def test_what_it_needs_is_relied_on(
    store: Store, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something of an input that is collected while a virtual merge is being committed makes it a
    conflict: what is published can be computed."""
    plan = plan_of(store)
    index = store._catalog.index
    view = store.view("e0")
    record = view.record("model.embed.weight")
    rows_of = {
        "block": ("blocks", record.block(1)),
        "tensor": ("records", bytes([Kind.TENSOR]) + record.id()),
        "manifest": ("records", bytes([Kind.MANIFEST]) + view.manifest_id),
    }
    commit = Transaction.commit

    def late(self: Transaction, **given: Any) -> None:
        with index.env.write() as rows:
            database, key = rows_of[what]
            assert rows.delete(key, db=index.db(database))
        commit(self, **given)

    monkeypatch.setattr(Transaction, "commit", late)
    with pytest.raises(Conflict, match="collected"):
        store.merge(plan, name="m", virtual=True)
    assert store._catalog.ref("m") is None


# -- as an input -----------------------------------------------------------------------------------


def test_it_is_no_input(store: Store, template: Path) -> None:
    """Planning with a virtual base or expert, or adding with such a base, is refused with the next
    command; after materialize it works."""
    virtual(store)
    asks: list[Callable[[], object]] = [
        lambda: store.plan(MergeRequest(base="m", experts=["e0"], method="linear")),
        lambda: store.plan(MergeRequest(base="base", experts=["e0", "m"], method="linear")),
        lambda: store.add(template / "e2", name="x", base="m"),
    ]
    for ask in asks:
        with pytest.raises(BadRequest) as refused:
            ask()
        assert (refused.value.where, refused.value.hint) == ("m", "store.materialize('m')")
    store.materialize("m")
    for ask in asks:
        ask()


# -- making it real --------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("request_", [{}, {"budget": 0.5}, {"dtype": "float32"}])
def test_materialize(store: Store, request_: dict[str, Any]) -> None:
    """The branch moves to the real merge: the content of an ordinary merge of the plan, the parents
    and the message of the virtual one, which is the previous."""
    plan = plan_of(store, **request_)
    made = store.merge(plan, name="m", message="why", virtual=True)
    found = store.materialize("m")
    assert (found.name, found.plan, found.new_snapshot) == ("m", plan.plan, True)
    assert found.expert_bytes_read == plan.planned_expert_bytes
    real = store.merge(plan, name="real")
    assert found.manifest == real.manifest
    told = store.show("m")
    assert (told.snapshot, told.virtual, told.message) == (found.snapshot, False, "why")
    assert [(p.role, p.snapshot) for p in told.parents] == [
        ("previous", made.snapshot),
        *((p.role, p.snapshot) for p in store.show("real").parents),
    ]
    moves = store.reflog("m")
    assert [move.action for move in moves] == [
        "materialize: ties: why",
        "merge: ties, virtual: why",
    ]
    assert (moves[0].old, moves[0].new) == (made.snapshot, found.snapshot)
    assert store.fsck(read_data=True).problems == ()
    assert store.show("m~1").virtual


def test_materialize_after_reading(store: Store) -> None:
    """What was read of a virtual merge before does not change what is stored; it is compared."""
    virtual(store)
    read = {f.path: b"".join(store.read_file("m", f.path)) for f in store.files("m")}
    store.materialize("m")
    stored = {f.path: b"".join(store.read_file("m", f.path)) for f in store.files("m")}
    assert stored == read


def test_nothing_to_materialize(store: Store) -> None:
    """What is stored already stays as it is: a real merge, an added model."""
    virtual(store)
    first = store.materialize("m")
    again = store.materialize("m")
    assert (again.new_snapshot, again.snapshot) == (False, first.snapshot)
    assert again.bytes_written == again.expert_bytes_read == 0
    added = store.materialize("base")
    assert (added.new_snapshot, added.plan) == (False, None)


def test_only_branches(store: Store) -> None:
    """A tag or a bare id is refused with the way round it, an unknown name as not found."""
    made = virtual(store)
    store.tag("v1", "m")
    for name, kind in (("v1", Conflict), (str(made.snapshot), BadRequest), ("m~0", BadRequest)):
        with pytest.raises(kind) as refused:
            store.materialize(name)
        assert refused.value.where == name
        assert f"store.reset(NAME, {name!r}), then store.materialize(NAME)" == refused.value.hint
    with pytest.raises(NotFound):
        store.materialize("nothing")
    store.reset("branch", "v1")
    assert store.materialize("branch").new_snapshot
    assert store.show("m").virtual


def test_a_branch_that_moves_meanwhile(store: Store) -> None:
    """Compare and swap: a branch that moved while its merge was computed stays where it is now."""
    made = virtual(store)
    current = store._catalog.ref("m")
    elsewhere = Ref(BRANCH, store["e0"].id)
    moved = []

    def move(tick: object) -> None:
        if not moved:
            moved.append(tick)
            choose_moves(store._catalog, lambda _: [RefMove("m", current, elsewhere, "test")])

    with pytest.raises(MstoreError) as refused:
        store.materialize("m", progress=move)
    assert isinstance(refused.value, Conflict)
    assert store["m"].id == store["e0"].id != made.snapshot


def test_replay_needs_a_real_one(store: Store) -> None:
    """A virtual merge has nothing to compare a replay with, and the error says what next."""
    virtual(store)
    with pytest.raises(BadRequest) as refused:
        store.replay("m")
    assert refused.value.hint == "store.materialize('m')"
    store.materialize("m")
    assert store.replay("m").same


def test_explain(store: Store) -> None:
    """Explain tells of a virtual merge what it tells of the real one, but for what only the bytes
    can show."""
    plan = plan_of(store)
    store.merge(plan, name="virtual", virtual=True)
    store.merge(plan, name="real")
    ours, theirs = store.explain("virtual"), store.explain("real")
    assert ours.plan == theirs.plan
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    assert [t.experts for t in ours.tensors] == [t.experts for t in theirs.tensors]
    assert [t.blocks_total for t in ours.tensors] == [t.blocks_total for t in theirs.tensors]
    one = store.explain("virtual", "model.parts.weight")
    assert one.tensors[0].experts == store.explain("real", "model.parts.weight").tensors[0].experts
