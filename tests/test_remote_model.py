"""Three stores and a remote against a model: a dict of files a snapshot, and of refs a place.

A seed draws a story. After each step, every ref of the store that acted, and at the end every ref
of every store and of the remote, reads byte for byte; refs are where the model has them.
"""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from exchanges import REMOTE, Place, files, placed, sound
from proof_models import Files, merged_files, model_files
from test_model_based import Killed, Killer

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.checkpoint.declared import CARD, MERGEKIT
from mstore.remotes import outgoing
from mstore.snapshots.notes import notes_on
from mstore.store.leases import HOLD, LOCK
from mstore.terms.errors import Conflict, NotFound
from mstore.terms.ids import SnapshotId

STEPS = 40
BRANCHES = ("a", "b", "team/c")
TAGS = ("v1", "v2")
STORES = ("one", "two", "three")
BEGIN = f"remotes/{REMOTE}/"
Refs = dict[str, tuple[str, SnapshotId]]
"""Kind and snapshot by name."""


class Story:
    """Stores, the remote, and what they should hold."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.draw = random.Random(seed)
        self.stores = {name: place.store(name) for name in STORES}
        self.files: dict[SnapshotId, Files] = {}
        self.parents: dict[SnapshotId, set[SnapshotId]] = {}
        self.refs: dict[str, Refs] = {name: {} for name in STORES}
        self.seen: dict[str, dict[str, SnapshotId]] = {name: {} for name in STORES}
        self.there: Refs = {}
        self.is_made = False
        self.told: list[str] = []

    def step(self) -> None:
        """One command in one store."""
        name = self.draw.choice(STORES)
        act = self.draw.choice(ACTS)
        self.told.append(f"{name}: {act.__name__}")
        act(self, name)
        self.look(name)

    # -- commands of one store -------------------------------------------------------------------

    def add(self, name: str) -> None:
        branch = self.draw.choice(BRANCHES)
        seed, tuned = self.draw.choice((1, 2)), self.draw.choice((0, 1, 2))
        base = self.draw.choice([None, *self.real(name)])
        codec = self.draw.choice(["auto", "raw", "dense"])
        if self.refs[name].get(branch, ("branch",))[0] != "branch":
            return
        id = self.stores[name].add(
            self.place.model(seed, tuned), name=branch, base=base, codec=codec, threads=1
        )
        self.moved(name, branch, id.snapshot, model_files(seed, tuned))

    def merge(self, name: str) -> None:
        real = self.real(name)
        if not real:
            return
        branch = self.draw.choice(BRANCHES)
        base, expert = self.draw.choice(real), self.draw.choice(real)
        store = self.stores[name]
        request = MergeRequest(
            base=base, experts=[(expert, 0.5)], method="task_arithmetic", skip=["i"]
        )
        plan = store.plan(request, allow_noop=True, threads=1)
        virtual = self.draw.random() < 0.4
        made = store.merge(plan, name=branch, virtual=virtual, allow_noop=True, threads=1)
        inputs = [self.files[self.refs[name][one][1]] for one in (base, expert)]
        wanted = merged_files(inputs[0], inputs[1:], [0.5])
        # The card and the recipe of a merge are its own.
        found = files(store, str(made.snapshot))
        own = {path: found[path] for path in (CARD, MERGEKIT) if path in found}
        wanted = {path: data for path, data in wanted.items() if path not in (CARD, MERGEKIT)}
        self.moved(name, branch, made.snapshot, wanted | own)

    def real(self, name: str) -> list[str]:
        """Refs of a store whose bytes are stored."""
        return [one for one in self.refs[name] if not self.stores[name].show(one).virtual]

    def tag(self, name: str) -> None:
        tag = self.draw.choice(TAGS)
        if self.refs[name] and tag not in self.refs[name]:
            of = self.draw.choice(sorted(self.refs[name]))
            self.stores[name].tag(tag, of)
            self.refs[name][tag] = "tag", self.refs[name][of][1]

    def note(self, name: str) -> None:
        if self.refs[name]:
            ref = self.draw.choice(sorted(self.refs[name]))
            self.stores[name].note(ref, {self.draw.choice("ab"): self.draw.random()})

    def remove(self, name: str) -> None:
        if self.refs[name]:
            gone = self.draw.choice(sorted(self.refs[name]))
            self.stores[name].remove(gone)
            del self.refs[name][gone]

    def gc(self, name: str) -> None:
        self.stores[name].gc(reflog_days=self.draw.choice((0, 30)))

    def prune(self, name: str) -> None:
        self.stores[name].prune(keep_last=1)

    def reindex(self, name: str) -> None:
        self.stores[name].close()
        Store.reindex(self.place.path / name)
        self.stores[name] = self.place.open(name)

    def moved(self, name: str, ref: str, id: SnapshotId, contents: Files) -> None:
        assert self.files.setdefault(id, contents) == contents
        self.parents[id] = {one.snapshot for one in self.stores[name].show(str(id)).parents}
        self.refs[name][ref] = "branch", id

    # -- commands about the remote ---------------------------------------------------------------

    def push(self, name: str) -> None:
        self.pushed(name, dies=False)

    def die_in_push(self, name: str) -> None:
        self.pushed(name, dies=True)

    def pushed(self, name: str, *, dies: bool) -> None:
        if not self.refs[name]:
            return
        some = self.draw.sample(sorted(self.refs[name]), self.draw.randint(1, len(self.refs[name])))
        force = self.draw.random() < 0.3
        allowed = all(self.may_push(name, one, force=force) for one in some)
        options = {"ancestors": self.draw.random() < 0.3, "force_with_lease": force}

        def call() -> None:
            self.stores[name].push(REMOTE, some, **options)

        if not allowed:
            with pytest.raises(Conflict):
                call()
            return
        new = {one: self.refs[name][one] for one in some}
        seen = self.seen[name] | {one: id for one, (_, id) in new.items()}
        if not dies:
            call()
            again = self.stores[name].push(REMOTE, some, **options)
            assert (again.packs, again.moved) == (0, ()), self.told
            there = self.notes_there()
            for _, id in new.values():
                assert notes_on(self.stores[name]._catalog, id).keys() <= there.get(id, set())
        if not dies or not self.died(name, call):
            self.is_made, self.there, self.seen[name] = True, self.there | new, seen
            return
        there = self.refs_there()
        assert there in (self.there, self.there | new), self.told
        self.there = there
        if self.refs_now(name).items() >= {(BEGIN + n, ("remote", id)) for n, id in seen.items()}:
            self.seen[name] = seen

    def died(self, name: str, call: Callable[[], object]) -> bool:
        """End a command at one of its file operations, here or at the remote; return whether."""
        killer = Killer(self.draw.randrange(self.draw.choice((5, 20, 60, 150))))
        try:
            with fs.observed(killer):
                call()
        except Killed:
            self.stores[name].close()
            self.drop_locks(name)
            self.stores[name] = self.place.open(name)
            return True
        assert not killer.hit, "a handler swallowed the end of the process"
        return False

    def drop_locks(self, name: str) -> None:
        """What the kernel does for a process that is gone."""
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                path = os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")
                if path.startswith(f"{self.place.path}/{name}/") and path.endswith((LOCK, HOLD)):
                    fcntl.flock(int(number), fcntl.LOCK_UN)

    def notes_there(self) -> dict[SnapshotId, set[bytes]]:
        found: dict[SnapshotId, set[bytes]] = {}
        for row in self.place.state().notes():
            found.setdefault(row.snapshot_id(), set()).add(row.note)
        return found

    def refs_there(self) -> Refs:
        try:
            rows = self.place.state().refs().values()
        except NotFound:
            assert not self.is_made
            return {}
        self.is_made = True
        return {
            row.name: (row.kind, SnapshotId(row.snapshot))
            for row in rows
            if row.snapshot is not None
        }

    def refs_now(self, name: str) -> Refs:
        found = self.stores[name]._catalog.refs().items()
        return {ref: (told.kind, told.snapshot_id()) for ref, told in found}

    def may_push(self, name: str, ref: str, *, force: bool) -> bool:
        kind, new = self.refs[name][ref]
        old_kind, old = self.there.get(ref, (None, None))
        if old is None or old == new:
            return True
        if old_kind != kind or kind == "tag":
            return False
        if force:
            return self.seen[name].get(ref) == old
        return self.is_ancestor(old, new)

    def delete(self, name: str) -> None:
        if self.there and self.draw.random() < 0.4:
            gone = self.draw.choice(sorted(self.there))
            self.stores[name].push(REMOTE, delete=[gone])
            del self.there[gone]
            self.seen[name].pop(gone, None)

    def collect(self, name: str) -> None:
        """Collect at the remote; sometimes without any time of grace, which nobody needs here."""
        if self.is_made:
            days, hours = self.draw.choice((0, 30)), self.draw.choice((0.0, 24.0))
            self.stores[name].remote_gc(REMOTE, reflog_days=days, grace_hours=hours)

    def fetch(self, name: str) -> None:
        self.fetched(name, pulls=False)

    def pull(self, name: str) -> None:
        self.fetched(name, pulls=True)

    def die_in_pull(self, name: str) -> None:
        self.fetched(name, pulls=True, dies=True)

    def fetched(self, name: str, *, pulls: bool, dies: bool = False) -> None:
        store = self.stores[name]
        call = store.pull if pulls else store.fetch
        if not self.is_made:
            with pytest.raises(NotFound, match="no remote"):
                call(REMOTE)
            return
        some: list[str] = []
        if self.there and self.draw.random() < 0.5:
            some = self.draw.sample(sorted(self.there), self.draw.randint(1, len(self.there)))
        asked = {one: self.there[one] for one in some or self.there}
        seen = (self.seen[name] if some else {}) | {one: id for one, (_, id) in asked.items()}
        refs = dict(self.refs[name])
        apart = set()
        for ref, (kind, id) in asked.items() if pulls else ():
            own_kind, own = refs.get(ref, (None, None))
            if own == id and own_kind == kind:
                continue
            if own is None or (own_kind == kind == "branch" and self.is_ancestor(own, id)):
                refs[ref] = kind, id
            elif not (own_kind == kind == "branch" and self.is_ancestor(id, own)):
                apart.add(ref)
        if dies:
            # All of it, or nothing: `look` refuses anything between.
            if self.died(name, lambda: call(REMOTE, some)) and self.refs_now(name) != refs | {
                BEGIN + one: ("remote", id) for one, id in seen.items()
            }:
                return
        else:
            report = call(REMOTE, some)
            assert set(report.diverged) == apart, self.told
            again = call(REMOTE, some)
            assert (again.bytes_received, again.fetched, again.moved) == (0, (), ()), self.told
            there = self.notes_there()
            for _, id in asked.values():
                assert notes_on(store._catalog, id).keys() >= there.get(id, set())
        self.refs[name], self.seen[name] = refs, seen

    def is_ancestor(self, old: SnapshotId, new: SnapshotId) -> bool:
        waiting, known = [new], {new}
        while waiting:
            for parent in self.parents[waiting.pop()] - known:
                known.add(parent)
                waiting.append(parent)
        return old in known

    # -- what must hold --------------------------------------------------------------------------

    def look(self, name: str) -> None:
        """Every ref of a store is where it should be, and reads."""
        store = self.stores[name]
        found = self.refs_now(name)
        seen = {BEGIN + ref: ("remote", id) for ref, id in self.seen[name].items()}
        assert found == self.refs[name] | seen, self.told
        for id in {id for _, id in found.values()}:
            assert files(store, str(id)) == self.files[id], self.told

    def end(self) -> None:
        """Everything reads, here, there, and in a new clone."""
        for name, store in self.stores.items():
            self.look(name)
            sound(store)
        if self.is_made:
            assert self.refs_there() == self.there
            clone = self.place.clone("clone")
            for ref, (_, id) in self.there.items():
                assert clone.show(ref).snapshot == id
                assert files(clone, ref) == self.files[id], self.told
            sound(clone)


Act = Callable[[Story, str], None]
ACTS: tuple[Act, ...] = (
    *(Story.add, Story.add, Story.merge, Story.tag, Story.remove, Story.gc, Story.prune),
    *(Story.push, Story.push, Story.push, Story.delete, Story.fetch, Story.pull, Story.pull),
    *(
        Story.collect,
        Story.collect,
        Story.reindex,
        Story.note,
        Story.note,
        Story.die_in_push,
        Story.die_in_push,
        Story.die_in_pull,
        Story.die_in_pull,
    ),
)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(12))
def test_stories(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever three stores do with one remote, nothing is lost, and refs are as the rules say."""
    # Stories of few large packs, and of many small ones.
    monkeypatch.setattr(outgoing, "PACK_BYTES", (128 << 20, 32 << 10)[seed % 2])
    with placed() as place:
        story = Story(place, seed)
        for _ in range(STEPS):
            story.step()
        story.end()


def test_the_model_bites() -> None:
    """A story that is told wrongly is noticed."""
    with placed() as place:
        story = Story(place, 0)
        story.add("one")
        story.push("one")
        [branch] = story.refs["one"]
        story.files[story.refs["one"][branch][1]] = {}
        with pytest.raises(AssertionError):
            story.end()
