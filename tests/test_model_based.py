"""The store against a model of it: a dict of files a snapshot, of refs, and of every ref's moves.

hypothesis draws stories of commands, reopenings and crashes, and shortens one that fails.  A crash
ends an operation at any of its file operations, and everything after it, as `kill -9` does; whether
it had taken effect is then read from the ref, and what the ref holds must be one of the two.  What
merges contain comes from the numpy reference (`proof_models.merged_files`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from printed import by_ids
from proof_models import BLOCK, MODEL, Files, merged_files, model_files, tensors_in, write_files

from mstore import MergeRequest, fs
from mstore.api import Store
from mstore.checkpoint.declared import CARD, MERGEKIT
from mstore.terms.errors import BadRequest, Conflict, MstoreError
from mstore.terms.ids import SnapshotId

NAMES = ("a", "b", "team/c")
TAGS = ("v1", "v2")
RUN = "candidates/run/"
CONTENTS = [(seed, tuned) for seed in (1, 2) for tuned in (0, 1, 2)]


class Killed(BaseException):
    """The process is gone: no handler of the library may catch this."""


class Killer:
    """An observer that ends the process at operation number `at`, and each that comes after.

    Directories do not count: which ones of packs are new depends on the packs' random ids, and a
    story must be the same each time that it is told.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self.hit = False

    def __call__(self, operation: fs.Operation) -> None:
        self._left -= operation.kind not in {"mkdir", "syncdir"}
        if self._left < 0:
            self.hit = True
            raise Killed(operation.kind, operation.path)


@dataclass
class Model:
    """What the store should hold."""

    files: dict[SnapshotId, Files] = field(default_factory=dict)
    virtual: set[SnapshotId] = field(default_factory=set)
    parents: dict[SnapshotId, dict[SnapshotId, str]] = field(default_factory=dict)
    pruned: set[SnapshotId] = field(default_factory=set)
    gone: set[SnapshotId] = field(default_factory=set)
    refs: dict[str, SnapshotId] = field(default_factory=dict)
    moves: dict[str, list[SnapshotId | None]] = field(default_factory=dict)
    held: dict[str, SnapshotId] = field(default_factory=dict)
    """Candidates that the open store made."""

    def move(self, name: str, snapshot: SnapshotId | None) -> None:
        """A ref moves; where it already is there, nothing does."""
        if self.refs.get(name) == snapshot:
            return
        self.moves.setdefault(name, []).append(snapshot)
        self.held.pop(name, None)
        if snapshot is not None and name.startswith(RUN):
            self.held[name] = snapshot
        if snapshot is None:
            del self.refs[name]
        else:
            self.refs[name] = snapshot

    def named(self, *, reflog: bool) -> set[SnapshotId]:
        """What refs name, and their moves; what an earlier gc took, no move brings back."""
        named = set(self.refs.values())
        if reflog:
            logs = [moves for name, moves in self.moves.items() if not name.startswith(RUN)]
            moved = {id for moves in logs for id in moves if id is not None}
            named |= moved - self.gone
        return named

    def expired(self) -> set[str]:
        """Candidates that only days keep."""
        held = self.held.values()
        return {name for name, id in self.refs.items() if name.startswith(RUN) and id not in held}

    def known(self, *, reflog: bool = False) -> set[SnapshotId]:
        """What gc leaves in the lineage: what is named, and all that it came from."""
        told = self.named(reflog=reflog)
        waiting = list(told)
        while waiting:
            for parent in self.parents[waiting.pop()]:
                if parent not in told:
                    told.add(parent)
                    waiting.append(parent)
        return told

    def kept(self, *, reflog: bool) -> set[SnapshotId]:
        """The snapshots whose contents gc must keep."""
        named = self.named(reflog=reflog)
        known = self.known(reflog=reflog)
        # What a virtual merge is computed from is needed whatever was pruned.
        inputs = {
            id
            for merge in self.virtual & known
            if merge in named or merge not in self.pruned
            for id, role in self.parents[merge].items()
            if role != "previous"
        }
        return {id for id in known if id in named | inputs or id not in self.pruned} - self.gone

    def collected(self, *, reflog: bool) -> None:
        """A gc was called: what it need not keep may be gone."""
        self.gone |= self.files.keys() - self.kept(reflog=reflog)


@dataclass(frozen=True)
class Step:
    """A command that moves one ref: what to call, and what the ref then holds.

    `call` returns the snapshot, None for a removal; `files` are its contents, None where the
    snapshot is one that the model knows.
    """

    name: str
    call: Callable[[Store], SnapshotId | None]
    files: Files | None = None
    virtual: bool = False
    merges: bool = False


class Stories(RuleBasedStateMachine):
    """Commands, and what must hold between them."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Path(tempfile.mkdtemp())
        self._numbers = itertools.count()
        self._model = Model()
        self._sources: dict[tuple[int, int], Path] = {}
        self._store: Store

    @initialize()
    def init(self) -> None:
        """A store with a family in it: most commands need one to be about something."""
        self._store = Store.init(self._scratch / "store", block_size=BLOCK)
        for number, name in enumerate(NAMES):
            step = self._adding(name, (1, number), None if number == 0 else NAMES[0])
            self._took_effect(step, step.call(self._store))

    def teardown(self) -> None:
        if hasattr(self, "_store"):
            try:
                self._look_at_everything()
            finally:
                self._store.close()
        shutil.rmtree(self._scratch)

    # -- commands that move a ref --------------------------------------------------------------

    def _add(self, data: Any) -> Step:
        name = data.draw(st.sampled_from(NAMES), "name")
        content = data.draw(st.sampled_from(CONTENTS), "content")
        base = data.draw(st.sampled_from([None, *self._real_names()]), "base")
        codec = data.draw(st.sampled_from(["auto", "raw", "dense"]), "codec")
        return self._adding(name, content, base, codec)

    def _adding(
        self, name: str, content: tuple[int, int], base: str | None, codec: str | None = None
    ) -> Step:
        if content not in self._sources:
            directory = self._scratch / "-".join(map(str, content))
            self._sources[content] = write_files(directory, model_files(*content))
        source = self._sources[content]

        def call(store: Store) -> SnapshotId:
            return store.add(source, name=name, base=base, codec=codec, threads=1).snapshot

        return Step(name, call, model_files(*content))

    def _merge(self, data: Any) -> Step:
        real = self._real_names()
        name = data.draw(st.sampled_from(NAMES), "name")
        base, first, second = (data.draw(st.sampled_from(real), "input") for _ in range(3))
        virtual = data.draw(st.booleans(), "virtual")
        candidate = data.draw(st.sampled_from([None, "run"]), "candidate")
        weights = [1.0, data.draw(st.sampled_from([0.5, -0.25]), "weight")]

        def call(store: Store) -> SnapshotId:
            plan = store.plan(
                MergeRequest(
                    base=base,
                    experts=list(zip((first, second), weights, strict=True)),
                    method="task_arithmetic",
                    skip=["i"],
                ),
                allow_noop=True,
                threads=1,
            )
            return store.merge(
                plan, name=name, candidate=candidate, virtual=virtual, threads=1
            ).snapshot

        return Step(
            name if candidate is None else RUN + name,
            call,
            merged_files(self._at(base), [self._at(first), self._at(second)], weights),
            virtual,
            merges=True,
        )

    def _materialize(self, data: Any) -> Step:
        name = data.draw(st.sampled_from([n for n in NAMES if n in self._model.refs]), "name")

        def call(store: Store) -> SnapshotId:
            return store.materialize(name, threads=1).snapshot

        return Step(name, call, self._at(name))

    def _tag(self, data: Any) -> Step:
        name = data.draw(st.sampled_from(TAGS), "tag")
        revision = data.draw(st.sampled_from(sorted(self._model.refs)), "of")
        return Step(name, lambda store: store.tag(name, revision).snapshot)

    def _reset(self, data: Any) -> Step:
        name = data.draw(st.sampled_from(NAMES), "name")
        revision = data.draw(st.sampled_from(self._revisions()), "to")
        if data.draw(st.booleans(), "expect"):
            expect = self._model.refs.get(name)
            return Step(name, lambda store: store.move(name, expect, revision).snapshot)
        return Step(name, lambda store: store.reset(name, revision).snapshot)

    def _remove(self, data: Any) -> Step:
        name = data.draw(st.sampled_from(sorted(self._model.refs)), "name")

        def call(store: Store) -> None:
            store.remove(name)

        return Step(name, call)

    COMMANDS = (_add, _add, _merge, _materialize, _tag, _reset, _remove)

    def _step(self, data: Any, draw: Callable[[Stories, Any], Step]) -> Step | None:
        """A command of this kind, or None where there is nothing that it could be about."""
        needs_real = draw in (Stories._merge,)
        if draw is not Stories._add and not self._model.refs:
            return None
        if needs_real and not self._real_names():
            return None
        if draw is Stories._materialize and not set(NAMES) & set(self._model.refs):
            return None
        return draw(self, data)

    @rule(data=st.data(), command=st.sampled_from(COMMANDS))
    def do(self, data: Any, command: Callable[[Stories, Any], Step]) -> None:
        """A command is done, or refused for a reason that the model knows."""
        step = self._step(data, command)
        if step is None:
            return
        refused = self._refused(step, command)
        if refused is not None:
            with pytest.raises(refused):
                step.call(self._store)
            return
        self._took_effect(step, step.call(self._store))

    @rule(data=st.data(), command=st.sampled_from(COMMANDS), at=st.integers(0, 60))
    def die(self, data: Any, command: Callable[[Stories, Any], Step], at: int) -> None:
        """A command is cut off at a file operation: it happened, or it did not."""
        step = self._step(data, command)
        if step is None or self._refused(step, command) is not None:
            return
        killer = Killer(at)
        try:
            with fs.observed(killer):
                snapshot = step.call(self._store)
        except Killed:
            self._die()
            now = self._names().get(step.name)
            if now != self._model.refs.get(step.name):
                self._took_effect(step, now)
                self._model.held.clear()
            return
        assert not killer.hit, "a handler swallowed the end of the process"
        self._took_effect(step, snapshot)

    def _die(self) -> None:
        """What the kernel does for a process that is gone, and a new process after that."""
        self._store.close()
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(str(self._scratch)):
                    os.close(int(name))
        self._store = Store.open(self._scratch / "store")
        self._model.held.clear()

    def _refused(
        self, step: Step, command: Callable[[Stories, Any], Step]
    ) -> type[MstoreError] | None:
        if command is Stories._tag:
            return Conflict if step.name in self._model.refs else None
        if command is Stories._materialize:
            return None
        return None

    def _took_effect(self, step: Step, snapshot: SnapshotId | None) -> None:
        if snapshot is not None:
            self._model.gone.discard(snapshot)
            known = self._model.files.get(snapshot)
            if step.files is not None:
                files = self._with_papers(snapshot, step.files) if step.merges else step.files
                assert known is None or known == files
                self._model.files[snapshot] = files
                if self._store.show(str(snapshot)).virtual:
                    self._model.virtual.add(snapshot)
            else:
                assert known is not None
            parents = self._store.show(str(snapshot)).parents
            self._model.parents[snapshot] = {parent.snapshot: parent.role for parent in parents}
        self._model.move(step.name, snapshot)
        if snapshot is not None:
            self._look_at(snapshot)

    def _with_papers(self, snapshot: SnapshotId, files: Files) -> Files:
        """A merge's files: a card and a recipe of its own.

        The recipe is the one that the store tells. If none can state the merge, there is none: that
        of a base that is a merge itself is never this merge's.
        """
        view = self._store.view(snapshot)
        files = {path: data for path, data in files.items() if path != MERGEKIT}
        if MERGEKIT in view.files:
            recipe = by_ids(self._store.recipe(str(snapshot))).encode()
            assert b"".join(view.stream(MERGEKIT)) == recipe
            files[MERGEKIT] = recipe
        else:
            with pytest.raises(BadRequest, match="no recipe can state this merge"):
                self._store.recipe(str(snapshot))
        if CARD not in view.files:
            assert CARD not in files
            return files
        card = b"".join(view.stream(CARD))
        assert card == files.get(CARD) or b"base_model_relation: merge" in card
        return files | {CARD: card}

    # -- the rest ------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        """The store is closed and opened again."""
        self._store.close()
        self._store = Store.open(self._scratch / "store")
        self._model.held.clear()

    @precondition(lambda self: self._model.refs)
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        """Files, tensors and a checkout of any revision are those of the model."""
        revision = data.draw(st.sampled_from(self._revisions()), "revision")
        wanted = self._at(revision)
        way = data.draw(st.sampled_from(["checkout", "files", "tensors"]), "way")
        if way == "checkout":
            target = self._scratch / f"out{next(self._numbers)}"
            self._store.checkout(revision, target, threads=1)
            found = {
                str(path.relative_to(target)): path.read_bytes()
                for path in target.rglob("*")
                if path.is_file()
            }
            assert found == wanted
            shutil.rmtree(target)
        elif way == "files":
            for path, contents in wanted.items():
                assert b"".join(self._store.read_file(revision, path)) == contents
        else:
            for name, array in tensors_in(wanted[MODEL]).items():
                assert self._store[revision].tensor(name).tobytes() == array.tobytes()

    @precondition(lambda self: self._model.refs)
    @rule(data=st.data())
    def compare(self, data: Any) -> None:
        """diff finds the files that differ, and no others."""
        revisions = st.sampled_from(self._revisions())
        a, b = data.draw(revisions, "a"), data.draw(revisions, "b")
        report = self._store.diff(a, b, threads=1)
        before, after = self._at(a), self._at(b)
        assert {file.path for file in report.files} == {
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        }

    @rule(keep_last=st.integers(1, 2), unnamed_inputs=st.booleans())
    def prune(self, keep_last: int, unnamed_inputs: bool) -> None:
        """Old contents may go with the next gc; what a ref names never does."""
        pruned = self._store.prune(keep_last=keep_last, unnamed_inputs=unnamed_inputs)
        assert not set(pruned.snapshots) & set(self._model.refs.values())
        self._model.pruned |= set(pruned.snapshots)

    @rule(at=st.integers(0, 60) | st.none(), days=st.sampled_from([0, 0, 30]))
    def gc(self, at: int | None, days: int) -> None:
        """Nothing that is kept goes, and nothing else stays; also if it is cut off somewhere."""
        killer = Killer(1 << 30 if at is None else at)
        expired = self._model.expired() if days == 0 else set()
        try:
            with fs.observed(killer):
                self._store.gc(reflog_days=days)
        except Killed:
            self._die()
        for name in sorted(expired - self._names().keys() if killer.hit else expired):
            self._model.move(name, None)
        self._model.collected(reflog=days > 0)
        if not killer.hit:
            there = set(self._store.snapshot_ids())
            assert self._model.kept(reflog=days > 0) <= there
            assert self._store.fsck().garbage == ()
            if days == 0:
                assert there == self._model.known(), "what nobody knows stays"

    @rule(data=st.data(), at=st.integers(0, 60) | st.none())
    def pin(self, data: Any, at: int | None) -> None:
        """How blocks lie is nothing that the model knows; pinned or not pinned, also if cut off."""
        names = self._real_names()
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        was_pinned = self._store.show(name).pinned
        killer = Killer(1 << 30 if at is None else at)
        try:
            with fs.observed(killer):
                if was_pinned:
                    self._store.unpin(name, threads=1)
                else:
                    self._store.pin(name, raw=True, threads=1)
        except Killed:
            self._die()
            assert self._store.show(name).pinned in (True, False)
        else:
            assert self._store.show(name).pinned != was_pinned

    @rule()
    def check(self) -> None:
        """fsck finds nothing."""
        assert self._store.fsck(read_data=True).problems == ()

    # -- what holds at any time ----------------------------------------------------------------

    @invariant()
    def refs_are_true(self) -> None:
        if hasattr(self, "_store"):
            assert self._names() == self._model.refs

    def _look_at(self, snapshot: SnapshotId) -> None:
        view = self._store.view(snapshot)
        found = {path: b"".join(view.stream(path)) for path in view.files}
        assert found == self._model.files[snapshot]

    def _look_at_everything(self) -> None:
        self.refs_are_true()
        for name, moves in self._model.moves.items():
            told = [move.new for move in reversed(self._store.reflog(name))]
            assert told == moves
        for snapshot in self._model.kept(reflog=True):
            self._look_at(snapshot)
        self.check()

    # -- words ---------------------------------------------------------------------------------

    def _names(self) -> dict[str, SnapshotId]:
        return self._store.ref_ids()

    def _real_names(self) -> list[str]:
        model = self._model
        return sorted(name for name, id in model.refs.items() if id not in model.virtual)

    def _revisions(self) -> list[str]:
        """Names, and positions of their reflogs that are kept."""
        model = self._model
        found = []
        for name, moves in model.moves.items():
            for position, snapshot in enumerate(reversed(moves)):
                if snapshot is not None and snapshot not in model.gone:
                    found.append(f"{name}@{{{position}}}")
        return sorted([*model.refs, *found])

    def _at(self, revision: str) -> Files:
        return self._model.files[self._snapshot(revision)]

    def _snapshot(self, revision: str) -> SnapshotId:
        name, _, position = revision.partition("@{")
        if not position:
            return self._model.refs[name]
        snapshot = self._model.moves[name][-1 - int(position.removesuffix("}"))]
        assert snapshot is not None
        return snapshot


SHORT = settings(
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@pytest.mark.parametrize("stories", [4, pytest.param(40, marks=pytest.mark.rest)])
def test_the_store_does_what_the_model_does(stories: int) -> None:
    """Any story of commands, reopenings and crashes leaves the store as the model says."""
    run_state_machine_as_test(Stories, settings=settings(SHORT, max_examples=stories))


@pytest.mark.slow
def test_the_store_does_what_the_model_does_for_long() -> None:
    """The same, with many and longer stories."""
    run_state_machine_as_test(
        Stories, settings=settings(SHORT, max_examples=600, stateful_step_count=60)
    )
