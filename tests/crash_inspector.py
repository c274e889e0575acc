"""Holds disks that lost power against what the life of the store on them had promised by then.

Knows the promises: what was acknowledged is whole, refs are true, what must not be gone is not,
fsck is clean, the next write works and clears up, and gc then leaves nothing that nobody needs.
Knows nothing of stories.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from crash_disk import Crash
from crash_stories import Life
from small_models import BLOCK

from mstore.api import Store
from mstore.store import mirror
from mstore.terms.errors import Corrupt, MstoreError, NotFound


class Inspector:
    """Builds crashed disks and says what is wrong with them."""

    def __init__(self, life: Life, extra: Path, scratch: Path) -> None:
        self._life = life
        self._extra = extra
        self._scratch = scratch
        self.states = 0

    def violations(self, each: int | None = None) -> Iterator[str]:
        """Everything that is wrong after any crash; each different disk is looked at once.

        each: of every kind of crash (what was done last, and where) so many disks are looked at,
        drawn by a fixed seed, in the order in which they occur.
        """
        crashes = self._crashes()
        for crash in crashes if each is None else self._drawn(crashes, each):
            self.states += 1
            root = self._scratch / f"disk{self.states}"
            crash.build(root)
            for what in self._inspect(root / "store", crash.after):
                yield f"after {crash.after} operations, {self._last(crash)}: {what}"
            shutil.rmtree(root)

    def _crashes(self) -> Iterator[Crash]:
        """Each different disk at each stage."""
        seen = set()
        for crash in self._life.recording.crashes():
            key = (crash.digest(), self._life.stage(crash.after))
            if key not in seen:
                seen.add(key)
                yield crash

    def _drawn(self, crashes: Iterable[Crash], each: int) -> list[Crash]:
        kinds: dict[object, list[Crash]] = defaultdict(list)
        for crash in crashes:
            kinds[self._kind(crash)].append(crash)
        draw = random.Random(1)
        chosen = [
            one for alike in kinds.values() for one in draw.sample(alike, min(each, len(alike)))
        ]
        return sorted(chosen, key=lambda crash: crash.after)

    def _kind(self, crash: Crash) -> object:
        """What was done last, and where."""
        if not crash.after:
            return None
        event = self._life.recording.events[crash.after - 1]
        return event.kind, *event.path.split("/")[:2]

    def _last(self, crash: Crash) -> str:
        events = self._life.recording.events[: crash.after]
        return f"{events[-1].kind} {events[-1].path}" if events else "nothing"

    def _inspect(self, root: Path, after: int) -> Iterator[str]:
        try:
            try:
                store = Store.open(root)
            except NotFound:
                if self._life.is_there is not None and after >= self._life.is_there:
                    raise
                store = Store.init(root, block_size=BLOCK)
            with store:
                yield from self._promises(store, after)
                if self._life.hurt:
                    yield from self._next_repair(store)
                yield from self._next_write(store)
                yield from self._next_gc(store, after)
        except MstoreError as error:
            yield f"{type(error).__name__}: {error}"

    def _promises(self, store: Store, after: int) -> Iterator[str]:
        life = self._life
        found = store.ref_ids()
        promised, in_flight = life.promised(after), life.in_flight(after)
        for name in promised.keys() | in_flight.keys() | found.keys() - {"afterwards"}:
            allowed = {promised.get(name), in_flight.get(name, promised.get(name))}
            if found.get(name) not in allowed:
                yield f"ref {name} is {found.get(name)!r} instead of one of {allowed}"
        yield from self._contents(store, after)
        for number, plan in life.plans:
            if number <= after:
                store.export_plan(str(plan))
        for number, snapshot in life.signed:
            if number <= after and not store.show(str(snapshot)).signatures:
                yield f"the signature of {snapshot!r} is lost"
        for number, snapshot, values in life.notes:
            # The last one that was acknowledged, or the next, which was in flight.
            later = [one for when, of, one in life.notes if of == snapshot and when > after][:1]
            last = [one for when, of, one in life.notes if of == snapshot and when <= after][-1:]
            noted = {one.key: one.value for one in store.notes_of(snapshot)}
            if number <= after and noted not in (*last, *later):
                yield f"{snapshot!r} has the notes {noted} instead of {values}"
        for number, snapshot, is_pinned in life.pins:
            if number <= after and store.show(str(snapshot)).pinned != is_pinned:
                yield f"{snapshot!r} is not as it was pinned or unpinned"
        if life.healed <= after:
            for problem in store.fsck(read_data=True).problems:
                yield f"fsck: {problem.kind} {problem.where}: {problem.what}"

    def _contents(self, store: Store, after: int) -> Iterator[str]:
        life = self._life
        there = set(store.snapshot_ids())
        for id in life.kept(after) - there:
            yield f"the acknowledged snapshot {id!r} is lost"
        for id in there:
            if id not in life.contents:
                continue
            try:
                view = store.view(id)
                contents = {path: b"".join(view.stream(path)) for path in view.files}
            except MstoreError as error:
                forgiven = id in life.pruned and life.goes[id] <= after
                forgiven |= id in life.hurt and life.healed > after and isinstance(error, Corrupt)
                if not forgiven:
                    yield f"snapshot {id!r} cannot be read: {error}"
                continue
            if contents != life.contents[id]:
                yield f"snapshot {id!r} has other contents"

    def _next_repair(self, store: Store) -> Iterator[str]:
        sources = sorted((self._scratch / "dense").iterdir())
        store.repair(sources=sources, read_data=True, threads=1)
        for problem in store.fsck(read_data=True).problems:
            yield f"repaired again, fsck: {problem.kind} {problem.where}: {problem.what}"

    def _next_write(self, store: Store) -> Iterator[str]:
        report = store.add(self._extra, name="afterwards", threads=1)
        if store["afterwards"].tensor("x").tobytes() != b"xyz":
            yield "the next add is not what was added"
        if left := sorted(path.name for path in (store.path / "tmp").iterdir()):
            yield f"the next add left {left} in tmp/"
        if mirror.read(store._catalog.layout).refs != store._catalog.refs():
            yield "the next add left the mirror behind"
        if found := store.fsck().problems:
            yield f"after the next add ({report.snapshot.short}), fsck: {found[0].what}"

    def _next_gc(self, store: Store, after: int) -> Iterator[str]:
        store.gc()
        catalog = store._catalog
        with catalog.index.env.read() as transaction:
            known = {pack.hex() for pack, _ in catalog.index.packs(transaction)}
            condemned = catalog.index.count(transaction, "condemned")
        on_disk = {path.stem for path in catalog.layout.packs.glob("*/*")}
        if on_disk != known:
            yield f"after gc there are packs {on_disk - known} too many, {known - on_disk} too few"
        if condemned:
            yield f"{condemned} packs are condemned after gc, and nobody is at work"
        report = store.fsck(read_data=True)
        if report.problems:
            yield f"after gc, fsck: {report.problems[0]}"
        if report.garbage:
            yield f"gc leaves {report.garbage}"
        for what in self._contents(store, after):
            yield f"after gc, {what}"
