"""Bisection: which position of a branch was the first bad one, or which expert or layer did it.

The protocol is that of git-bisect(1): somebody says of what is shown whether it is good, bad, or
cannot be judged, and is shown the next. What was said is a log (`runlog`); what to show next
follows from the log alone, so whoever comes back goes on where it was.

Over time, the positions of a branch are tried, newest first known to be bad. Over one merge, some
of its units are merged alone (`units`), as a virtual merge that a candidate names while it is
tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from mstore.merge.virtual.deferred import commit_virtual
from mstore.search.changes import changes, what
from mstore.search.culprits import Answer, Blamed, find, probes_left
from mstore.search.runlog import RunLog
from mstore.search.spelling import UnitName, of_culprits, of_probe
from mstore.search.units import Unit, plan_of_units, units_of
from mstore.snapshots import notes
from mstore.snapshots.lineage import positions
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.objects.note import VALUE
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import MERGE
from mstore.store.plans import plan_of, sources_of
from mstore.store.transaction import drop_ref
from mstore.terms.errors import BadRequest, CommandFailed, Conflict, NotFound
from mstore.terms.ids import Revision, SnapshotId
from mstore.terms.phrases import Option, call, joined, phrase
from mstore.terms.report import Report

RUN: Final = refs.BISECT
"""The name of the log, and of the run that its candidates are of."""
PROBE: Final = "probe"
CANDIDATE: Final = refs.below(refs.CANDIDATE, RUN, PROBE)
"""What is tried over the units of a merge."""
EXPERTS: Final = "experts"
LAYERS: Final = "layers"


class Start(msgspec.Struct, frozen=True):
    """What is bisected.

    snapshot: the bad one. name: how the user called it. by: nothing: the positions before it;
    "experts", "layers" or both: the units of this merge.
    """

    snapshot: str
    name: str
    by: tuple[str, ...] = ()


class Mark(msgspec.Struct, frozen=True):
    """What was said of a snapshot, or of some units: numbers of experts and layers."""

    answer: Answer
    snapshot: str | None = None
    units: tuple[tuple[int | None, str | None], ...] | None = None


class BisectStopped(CommandFailed):
    """The command said neither good nor bad nor that it cannot judge."""


class CulpritReport(Report, frozen=True):
    """Units that are bad together, without all others."""

    units: tuple[UnitName, ...]
    """the units: the expert's name and the layer, null for all of either"""
    alone: str
    """what the probe of these units alone was: bad, or skip"""

    def text(self) -> str:
        """Return the units in words."""
        together = " (only together)" if len(self.units) > 1 else ""
        return (
            of_culprits(self.units)
            + together
            + (" (alone: skipped)" if self.alone == "skip" else "")
        )


class BisectReport(Report, frozen=True):
    """Where a bisection stands."""

    name: str
    """what is bisected, as the user called it"""
    snapshot: SnapshotId
    """the bad snapshot that it began with"""
    by: tuple[str, ...]
    """empty: the positions of a branch; experts, layers or both: the units of a merge"""
    probes: int
    """how many marks there are"""
    skipped: int
    """how many of them are of what could not be judged"""
    next: str | None = None
    """the revision to try now: a snapshot, or a candidate; null: it has ended, or a mark lacks"""
    tried: tuple[UnitName, ...] = ()
    """over a merge: the units that the candidate has: expert and layer, null for all of either"""
    probe: str | None = None
    """over a merge: these units in words"""
    lacks: str | None = None
    """which mark must come first: good"""
    left: int = 0
    """over time: how many positions may be good or bad; over a merge: how many units there are"""
    steps: int = 0
    """about how many more marks it takes, that of what is tried now among them; 0: unknown"""
    first_bad: SnapshotId | None = None
    """over time: the first bad position, once it is known"""
    before: SnapshotId | None = None
    """over time: the position before it"""
    is_merge: bool = False
    """over time: whether it is a merge, whose experts and layers can be bisected"""
    what: str | None = None
    """over time: what it is, by how it was made"""
    changes: tuple[str, ...] = ()
    """over time: what is not as before in how it was made, in words"""
    suspects: tuple[SnapshotId, ...] = ()
    """over time: if only skipped positions are left, those that may be the first bad one"""
    culprits: tuple[CulpritReport, ...] = ()
    """over a merge: the units to blame, each set bad without all others"""
    rest: str | None = None
    """over a merge: what all units but the culprits together are; null if there are no others"""
    is_done: bool = False
    """whether it has ended"""

    def text(self) -> str:
        """Return what was found over a merge, in words."""
        if not self.culprits:
            good = f"{self.name} is good itself: nothing is to blame"
            return good if self.rest == "good" else "too much was skipped to tell what is to blame"
        found = "; ".join(one.text() for one in self.culprits)
        rest = {"good": "good", "bad": "bad, too", "skip": "not judged"}.get(self.rest or "")
        return found if rest is None else f"{found}; all else is {rest}"


class BisectMark(Report, frozen=True):
    """What was said of a snapshot."""

    answer: str
    """good, bad or skip"""
    snapshot: SnapshotId | None
    """the snapshot; null: the units of a merge that were tried then"""
    probe: str | None
    """over a merge: what was tried, in words"""


class BisectLog(Report, frozen=True):
    """What is bisected, and what was said so far."""

    name: str
    """what is bisected, as the user called it"""
    snapshot: SnapshotId
    """the bad snapshot that it began with"""
    by: tuple[str, ...]
    """empty: the positions of a branch; experts, layers or both: the units of a merge"""
    marks: tuple[BisectMark, ...]
    """the marks, in order"""


class _Subject(Protocol):
    """What is bisected, with what is known of it."""

    def mark(self, answer: Answer, revision: Revision | None) -> Mark:
        """Take the answer for a revision, or for what is tried now, and return its mark.

        Raises BadRequest, NotFound.
        """

    def told(self, report: BisectReport) -> BisectReport:
        """Return a report with where it stands.  Raises BadRequest for marks that contradict."""

    def good(self) -> SnapshotId:
        """Return a snapshot that is known to be good."""


# -- over time --------------------------------------------------------------------------------


def suspects_of(count: int, answers: Mapping[int, Answer]) -> list[int]:
    """Return which of `count` positions, oldest first, may be the first bad one.

    answers: of positions; one is good, and one is bad.

    Raises BadRequest if a good one is later than a bad one.
    """
    last_good = max(at for at, told in answers.items() if told is Answer.GOOD)
    first_bad = min(at for at, told in answers.items() if told is Answer.BAD)
    if last_good > first_bad:
        raise BadRequest("what is good comes after what is bad", hint=call("bisect_log"))
    return list(range(last_good + 1, first_bad + 1))


def next_of(suspects: Sequence[int], answers: Mapping[int, Answer]) -> int | None:
    """Return the position to try: in the middle, or as near to it as none was skipped."""
    middle = (suspects[0] + suspects[-1] - 1) / 2
    untried = (at for at in suspects if at not in answers)
    return min(untried, key=lambda at: (abs(at - middle), at), default=None)


class _Positions:
    """The positions of a branch, up to the bad snapshot."""

    def __init__(self, catalog: Catalog, start: Start, marks: Sequence[Mark]) -> None:
        self._catalog = catalog
        newest = SnapshotId.fromhex(start.snapshot)
        self._positions = positions(catalog, newest)[::-1]
        self._at = {one: number for number, one in enumerate(self._positions)}
        self._answers = {len(self._at) - 1: Answer.BAD}
        for mark in marks:
            if mark.snapshot is not None:
                self._answers[self._at[SnapshotId.fromhex(mark.snapshot)]] = mark.answer

    def _tried(self) -> int | None:
        if Answer.GOOD not in self._answers.values():
            return None
        return next_of(suspects_of(len(self._positions), self._answers), self._answers)

    def _place(self, revision: Revision | None) -> int:
        """Return the number of a position."""
        if revision is None:
            tried = self._tried()
            if tried is None:
                raise BadRequest("nothing is tried now: name what is meant", where="REF")
            return tried
        snapshot = self._catalog.resolve(revision)
        if snapshot not in self._at:
            raise BadRequest(
                "is no earlier position of what is bisected",
                where=str(revision),
                hint=call("reflog"),
            )
        return self._at[snapshot]

    def mark(self, answer: Answer, revision: Revision | None) -> Mark:
        at = self._place(revision)
        self._answers[at] = answer
        return Mark(answer, snapshot=self._positions[at].hex())

    def told(self, report: BisectReport) -> BisectReport:
        if Answer.GOOD not in self._answers.values():
            return replace(report, lacks="good", left=len(self._positions) - 1)
        suspects = suspects_of(len(self._positions), self._answers)
        tried = next_of(suspects, self._answers)
        named = tuple(self._positions[at] for at in suspects)
        if tried is None and len(named) > 1:
            return replace(report, is_done=True, suspects=named)
        if tried is None:
            first, before = named[0], self._positions[suspects[0] - 1]
            return replace(
                report,
                is_done=True,
                first_bad=first,
                before=before,
                is_merge=self._catalog.snapshot(first).made == MERGE,
                what=what(self._catalog, first),
                changes=changes(self._catalog, before, first),
            )
        left = len(suspects) - 1
        return replace(
            report,
            next=str(self._positions[tried]),
            left=left,
            steps=max(1, math.ceil(math.log2(left + 1))),
        )

    def good(self) -> SnapshotId:
        goods = [at for at, told in self._answers.items() if told is Answer.GOOD]
        return self._positions[max(goods)]


# -- over the units of a merge ----------------------------------------------------------------


class _Untried(Exception):
    """These units must be tried first."""

    def __init__(self, units: frozenset[Unit]) -> None:
        super().__init__()
        self.units = units


class _Units:
    """The units of a merge."""

    def __init__(self, catalog: Catalog, start: Start, marks: Sequence[Mark]) -> None:
        self._catalog = catalog
        id = SnapshotId.fromhex(start.snapshot)
        plan = plan_of(id, catalog.snapshot(id), so="it has no experts and layers to tell apart")
        self._plan = catalog.record(Plan, plan)
        self._sources = sources_of(catalog, plan, self._plan)
        self._units = units_of(self._plan, experts=EXPERTS in start.by, layers=LAYERS in start.by)
        self._answers = {
            frozenset(Unit(*one) for one in mark.units): mark.answer
            for mark in marks
            if mark.units is not None
        }

    def _found(self) -> Blamed[Unit] | frozenset[Unit]:
        """Return what was found, or which units to try next."""

        def ask(units: frozenset[Unit]) -> Answer:
            if units not in self._answers:
                raise _Untried(units)
            return self._answers[units]

        try:
            return find(self._units, ask)
        except _Untried as untried:
            return untried.units

    def mark(self, answer: Answer, revision: Revision | None) -> Mark:
        found = self._found()
        if isinstance(found, Blamed):
            raise BadRequest("what is to blame is found already", hint=call("bisect_status"))
        if revision is not None and str(revision) != CANDIDATE:
            raise BadRequest(
                "over the units of a merge, a mark is of what is tried now", where=str(revision)
            )
        self._answers[found] = answer
        return Mark(answer, units=tuple(one for one in self._units if one in found))

    def told(self, report: BisectReport) -> BisectReport:
        found = self._found()
        if isinstance(found, Blamed):
            drop_ref(self._catalog, CANDIDATE, RUN)
            if self._answers.get(frozenset()) is Answer.BAD:
                raise BadRequest(
                    "the base alone is bad by this test, so it cannot tell which part of the "
                    "merge is to blame",
                    where=self._sources.base.name,
                    hint=joined("find a test that the base passes", call("bisect_reset")),
                )
            culprits = tuple(
                CulpritReport(tuple(map(self._named, units)), alone.value)
                for units, alone in zip(found.culprits, found.alone, strict=True)
            )
            rest = None if found.rest is None else found.rest.value
            return replace(report, is_done=True, culprits=culprits, rest=rest)
        self._show(found)
        return replace(
            report,
            next=CANDIDATE,
            left=len(self._units),
            steps=probes_left(self._units, self._answers),
            tried=tuple(self._named(one) for one in self._units if one in found),
            probe=self.probe(found),
        )

    def probe(self, units: Iterable[Unit]) -> str:
        """Return in words what is tried with these units."""
        return of_probe(map(self._named, units), [self._named(one) for one in self._units])

    def _named(self, unit: Unit) -> tuple[str | None, str | None]:
        expert = None if unit.expert is None else self._sources.experts[unit.expert].name
        return expert, unit.layer

    def _show(self, units: frozenset[Unit]) -> None:
        """Let the candidate be the merge of these units."""
        commit_virtual(
            self._catalog,
            plan_of_units(self._catalog, self._plan, units),
            self._sources,
            name=PROBE,
            # Its recipe is that of the whole merge: what is left out is in the plan only.
            message=f"a probe of a bisection: {self.probe(units)}",
            candidate=RUN,
        )

    def good(self) -> SnapshotId:
        return self._sources.base.snapshot_id()


# -- both -------------------------------------------------------------------------------------


def _require_no_good(good: Sequence[Revision], by: Sequence[str]) -> None:
    if by and good:
        raise BadRequest("over a merge, the base is what is good", where=Option("good"))


class Bisection:
    """The bisection of a store that goes on.

    Every call raises Corrupt, StorageFailed, and NotFound if none goes on.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._log = RunLog(catalog.layout, RUN, Start, Mark)

    def begin(
        self, revision: Revision, *, good: Sequence[Revision] = (), by: Sequence[str] = ()
    ) -> BisectReport:
        """Begin one.

        by: EXPERTS, LAYERS or both: over a merge.

        Raises Conflict (one goes on already), NotFound, BadRequest.
        """
        if self._going() is not None:
            raise Conflict("a bisection goes on already", hint=call("bisect_reset"))
        snapshot = self._catalog.resolve(revision)
        start = Start(snapshot.hex(), str(revision), tuple(sorted(by)))
        subject = self._subject(start, [])
        _require_no_good(good, by)
        marks = [subject.mark(Answer.GOOD, one) for one in good]
        told = self._told(subject, start, marks)
        self._log.write(start, marks)
        return told

    def go_on(
        self, revision: Revision, *, good: Sequence[Revision] = (), by: Sequence[str] = ()
    ) -> BisectReport:
        """Begin one, or go on with it: then `good` are marked that were not.

        Arguments as for `begin`.  Raises Conflict if another one goes on, NotFound, BadRequest.
        """
        going = self._going()
        if going is None:
            return self.begin(revision, good=good, by=by)
        _require_no_good(good, by)
        start, marks = going
        snapshot = self._catalog.resolve(revision).hex()
        if (snapshot, tuple(sorted(by))) != (start.snapshot, start.by):
            what = f" by {' and '.join(start.by)}" if start.by else ""
            raise Conflict(
                f"another bisection goes on, of {start.name}{what}", hint=call("bisect_reset")
            )
        marked = {one.snapshot for one in marks if one.answer is Answer.GOOD}
        for one in good:
            if self._catalog.resolve(one).hex() not in marked:
                self.mark(Answer.GOOD, one)
        return self.status()

    def _going(self) -> tuple[Start, list[Mark]] | None:
        """Return what goes on, and its marks; None if nothing does, or what did has ended."""
        found = self._log.read()
        return None if found is None or self.status().is_done else found

    def mark(self, answer: Answer, revision: Revision | None = None) -> BisectReport:
        """Say what a revision is, or what is tried now.

        Raises BadRequest for one that is not in question, and for a mark that contradicts others;
        then it does not count.
        """
        start, marks = self._read()
        subject = self._subject(start, marks)
        marks.append(subject.mark(answer, revision))
        told = self._told(subject, start, marks)
        self._log.write(start, marks)
        if told.culprits:
            key = notes.culprit_key(told.by)
            notes.write(self._catalog, told.snapshot, {key: told.text()}, VALUE)
        return told

    def status(self) -> BisectReport:
        """Return where it stands."""
        start, marks = self._read()
        return self._told(self._subject(start, marks), start, marks)

    def run(
        self,
        revision: Revision,
        try_: Callable[[SnapshotId], int],
        tell: Callable[[BisectReport, int], None],
        *,
        good: Sequence[Revision] = (),
        by: Sequence[str] = (),
    ) -> BisectReport:
        """Begin one, or go on with it (`go_on`), and try what is to be tried until the end.

        try_: runs a command on a snapshot and returns its exit status: 0 is good, 125 cannot be
        judged, others to 127 are bad. tell: is called with the report of what was tried, and the
        status.

        Raises BisectStopped for other statuses, and for 126 and 127 if a good snapshot gives the
        same: then what was marked stays. Raises what `try_` raises, and Conflict if another process
        goes on with it.
        """
        with self._log.held():
            told = self.go_on(revision, good=good, by=by)
            is_first = True
            while told.next is not None:
                snapshot = self._catalog.resolve(told.next)
                status = try_(snapshot)
                if is_first and status in (126, 127):
                    start, marks = self._read()
                    known = self._subject(start, marks).good()
                    if try_(known) == status:
                        raise BisectStopped(
                            f"the command ends with {status} on what is good, too",
                            where=known.short,
                        )
                is_first = False
                if not 0 <= status < 128:
                    ended = f"status {status}" if status > 0 else f"signal {-status}"
                    raise BisectStopped(f"the command ended with {ended}", where=snapshot.short)
                answer = {0: Answer.GOOD, 125: Answer.SKIPPED}.get(status, Answer.BAD)
                tell(told, status)
                told = self.mark(answer)
            newest = told.snapshot
            # That it is bad, only the caller said so far.
            is_believed = told.first_bad == newest and not self.is_marked(newest)
            if is_believed and try_(newest) == 0:
                raise BadRequest(
                    "is good: no position is bad", where=told.name, hint=call("bisect_reset")
                )
            if told.lacks is not None:
                raise BadRequest(
                    "no earlier position is known to be good",
                    where=told.name,
                    hint=phrase(
                        "{good} names one; {log} lists those there are",
                        good=Option("good", ("REF",)),
                        log=call("log", told.name),
                    ),
                )
        return told

    def is_marked(self, snapshot: SnapshotId) -> bool:
        """Return whether somebody said what a snapshot is."""
        return any(one.snapshot == snapshot.hex() for one in self._read()[1])

    def log(self) -> BisectLog:
        """Return what is bisected, and the marks."""
        start, marks = self._read()
        subject = _Units(self._catalog, start, marks) if start.by else None
        return BisectLog(
            name=start.name,
            snapshot=SnapshotId.fromhex(start.snapshot),
            by=start.by,
            marks=tuple(
                BisectMark(
                    one.answer.value,
                    None if one.snapshot is None else SnapshotId.fromhex(one.snapshot),
                    None
                    if subject is None
                    else subject.probe(Unit(*unit) for unit in one.units or ()),
                )
                for one in marks
            ),
        )

    def reset(self) -> bool:
        """End it; return whether one went on."""
        drop_ref(self._catalog, CANDIDATE, RUN)
        return self._log.remove()

    def _read(self) -> tuple[Start, list[Mark]]:
        found = self._log.read()
        if found is None:
            raise NotFound("no bisection goes on", hint=call("bisect_start", "REF"))
        return found

    def _subject(self, start: Start, marks: Sequence[Mark]) -> _Subject:
        kind = _Units if start.by else _Positions
        return kind(self._catalog, start, marks)

    @staticmethod
    def _told(subject: _Subject, start: Start, marks: Sequence[Mark]) -> BisectReport:
        report = BisectReport(
            name=start.name,
            snapshot=SnapshotId.fromhex(start.snapshot),
            by=start.by,
            probes=len(marks),
            skipped=sum(one.answer is Answer.SKIPPED for one in marks),
        )
        return subject.told(report)
