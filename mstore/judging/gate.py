"""Gates: a command and the least scores that a snapshot needs before a branch moves to it.

A verdict is a note of the snapshot, and a row of `judged`: the row lets refs move that the gate
guards (`store.gates`), the note tells people why. Of a reference whose score is a minimum, this
store's own evaluation by the same command counts; if it has none, the command is run on it first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from mstore.blocks.schema import JUDGED
from mstore.checkpoint.paths import quoted
from mstore.judging.evaluation import (
    Command,
    EvaluationReport,
    Show,
    evaluate,
    judged,
    known,
)
from mstore.judging.pairing import ALPHA, p_value
from mstore.judging.scores import Samples, Score
from mstore.snapshots import lineage, notes, signing
from mstore.snapshots.notes import GOOD_SIGNATURE
from mstore.store import refs
from mstore.store.catalog import Catalog
from mstore.store.objects.note import VERDICT, Note, gate_of, verdict_key
from mstore.store.objects.snapshot import BASE, PREVIOUS
from mstore.terms.errors import BadRequest, CommandFailed, NotFound, WrongCommand
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.phrases import Option
from mstore.terms.report import Report, fields

_MINIMUM = re.compile(r"(?P<score>.+?)\s*(?P<sign>>=|<=|=)\s*(?P<limit>\S.*)")
_REFERENCE = re.compile(r"(?P<ref>.*?\S)\s*(?P<offset>[+-]\s*[0-9.]+(?:e[+-]?[0-9]+)?)?")
_SIGNS = re.compile(r"[<>=*]")
ROLES = (BASE, PREVIOUS)
"""Words that name a parent of the judged snapshot, where no ref has that name."""


class Minimum(msgspec.Struct, frozen=True):
    """What one score must be: at least (or at most) a number, or a reference's score and an offset.

    sign: >= or <=. reference: a revision, empty for none; then `offset` is the limit itself.
    """

    score: str
    sign: str
    reference: str
    offset: float

    def __str__(self) -> str:
        if not self.reference:
            return f"{self.score}{self.sign}{self.offset:g}"
        return f"{self.score}{self.sign}{self.reference}{self.offset:+g}"


def parse_minimum(text: str) -> Minimum:
    """Parse `acc=0.61`, `acc>=0.61`, `loss<=2`, `acc>=REF` or `acc>=REF-0.01`.

    A sign with a number at the end is an offset: a ref that ends so is written with +0. Raises
    BadRequest.
    """
    found = _MINIMUM.fullmatch(text.strip())
    is_clear = found is not None and not _SIGNS.search(found["score"] + found["limit"])
    if found is not None and is_clear:
        sign = ">=" if found["sign"] == "=" else found["sign"]
        number = _number(found["limit"])
        if number is not None:
            return Minimum(found["score"], sign, "", number)
        parts = _REFERENCE.fullmatch(found["limit"])
        offset = None if parts is None else _number((parts["offset"] or "0").replace(" ", ""))
        if parts is not None and offset is not None:
            return Minimum(found["score"], sign, parts["ref"], offset)
    raise BadRequest(
        f"not a limit: {quoted(text)}; its sign is =, >= or <=, and REF takes + or - a number",
        where=Option("min"),
        hint="write acc=0.61, 'loss<=2.5' or 'acc>=REF-0.01'",
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None


class Gate(msgspec.Struct, frozen=True):
    """A command that a snapshot must pass, and the scores that it needs.

    Without minimums, the command must end with 0 and leave its scores. A score of a minimum that
    no `scores` tell is read from the newest file of JSON that the command writes, under its name.
    """

    name: str
    command: Command
    minimums: tuple[Minimum, ...] = ()

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        *,
        name: str | None = None,
        scores: Sequence[str] = (),
        minimums: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Gate:
        """Return the gate of a command; arguments as for `Store.evaluate`.

        minimums: `SCORE=NUMBER`, `SCORE>=REF-NUMBER` and the like.  Raises BadRequest.
        """
        least = tuple(map(parse_minimum, minimums))
        wanted = Command.of(command, scores, name, timeout)
        told = {one.name for one in wanted.scores}
        more = dict.fromkeys(one.score for one in least if one.score not in told)
        own = tuple(Score(one, "**/*.json", one) for one in more)
        wanted = msgspec.structs.replace(wanted, scores=(*wanted.scores, *own))
        return cls(wanted.key, wanted, least)

    def definition(self) -> dict[str, list[str]]:
        """Return what decides, as a verdict has it: another command or limit is another gate."""
        return {**self.command.definition(), "minimums": [str(one) for one in self.minimums]}


class CheckedScore(Report, frozen=True):
    """One score of a snapshot, and what it had to be."""

    score: str
    """the score's name"""
    value: float
    """what it is"""
    sign: str
    """>=: it must be at least the limit; <=: at most"""
    limit: float | None
    """the limit; None, which every score holds, if there is no previous snapshot to compare with"""
    reference: str | None
    """the revision whose score the limit is made of; None for a number"""
    reference_value: float | None
    """the score of that; None without one"""
    held: bool
    """whether the score is within the limit"""
    samples: int | None
    """number of questions that both answered; None if that is not known"""
    p_value: float | None
    """probability of so large a difference by chance alone: McNemar's test for answers that are
    right or wrong, else a paired bootstrap; None if that is not known"""
    distinguishable: bool | None
    """whether that is less than 0.05; None if it is not known"""


class VerdictReport(Report, frozen=True):
    """Whether a snapshot passed a gate, and why."""

    snapshot: SnapshotId
    """the snapshot's id"""
    gate: str
    """the gate's name, or its command"""
    passed: bool
    """whether it passed"""
    reason: str | None
    """why not, where the command gave no scores; else None"""
    comparisons: tuple[CheckedScore, ...]
    """the scores that had a limit"""
    scores: dict[str, float]
    """all scores by name"""
    note: NoteId
    """the note that tells the verdict"""
    evaluation: NoteId | None
    """the note that tells the scores; None without them"""
    signed: bool
    """whether the verdict was signed now"""
    seconds: float
    """how long it took"""


class CandidateReport(Report, frozen=True):
    """A candidate that no branch shows yet."""

    candidate: str
    """its name: candidates/RUN/BRANCH"""
    name: str
    """the branch that it is for"""
    part_of: str | None
    """what goes on that made it: a search, a bisection, a download; None: a merge or an add"""
    snapshot: SnapshotId
    """its snapshot"""
    time_ns: int
    """when it was made, in nanoseconds since 1970 (UTC)"""
    passed: tuple[str, ...]
    """gates that it has passed in this store"""
    failed: tuple[str, ...]
    """gates that it has not passed"""


class VerdictRow(Report, frozen=True):
    """Whether a snapshot passed a gate when this store last ran it."""

    gate: str
    """the gate"""
    passed: bool
    """whether it passed"""
    note: NoteId
    """the note that tells the verdict"""


def verdicts_on(catalog: Catalog, snapshot: SnapshotId) -> list[VerdictRow]:
    """Return what this store's own runs of gates say of a snapshot."""
    with catalog.index.env.read() as transaction:
        rows = list(catalog.index.walk(transaction, JUDGED, snapshot))
    told = ((gate_of(key), note, passed) for (_, key), (note, passed) in rows)
    return [VerdictRow(gate, bool(passed), note) for gate, note, passed in told if gate is not None]


def candidates(catalog: Catalog) -> list[CandidateReport]:
    """Return all candidates, by time."""
    found = []
    for one in lineage.refs(catalog):
        if one.kind == refs.CANDIDATE:
            told = verdicts_on(catalog, one.snapshot)
            found.append(
                CandidateReport(
                    candidate=one.name,
                    name=refs.branch_of(one.name),
                    part_of=refs.part_of(one.name),
                    snapshot=one.snapshot,
                    time_ns=one.time_ns,
                    passed=tuple(row.gate for row in told if row.passed),
                    failed=tuple(row.gate for row in told if not row.passed),
                )
            )
    return sorted(found, key=lambda one: one.time_ns)


def judge(
    catalog: Catalog,
    snapshot: SnapshotId,
    gate: Gate,
    show: Show,
    *,
    key: signing.SigningKey | None = None,
    output: int | None = None,
) -> VerdictReport:
    """Run a gate's command on a snapshot, compare its scores, and note the verdict.

    A command that fails or hangs gives a verdict, too: not passed. key: signs it. Raises
    WrongCommand (then nothing is noted), NotFound (a reference), BadRequest, and what `show` and
    notes raise.
    """
    began = time.monotonic()
    references = {
        one.reference: found
        for one in gate.minimums
        if one.reference and (found := _reference(catalog, snapshot, one.reference)) is not None
    }
    evaluation, reason = None, None
    comparisons: tuple[CheckedScore, ...] = ()
    try:
        theirs = {
            name: known(catalog, id, gate.command)
            or evaluate(catalog, id, gate.command, show, output)
            for name, id in references.items()
        }
        evaluation = evaluate(catalog, snapshot, gate.command, show, output)
        comparisons = tuple(_compared(catalog, one, evaluation, theirs) for one in gate.minimums)
        if evaluation.exit_status:
            reason = f"the command ended with status {evaluation.exit_status}"
    except WrongCommand:
        raise
    except CommandFailed as failed:
        reason = str(failed)
    passed = reason is None and all(one.held for one in comparisons)
    value = {
        "passed": passed,
        **gate.definition(),
        "scores": {} if evaluation is None else evaluation.scores,
        "comparisons": [fields(one) for one in comparisons],
        "reason": None if reason is None else reason[:1000],
        "evaluation": None if evaluation is None else evaluation.note.hex(),
    }
    note = judged(catalog, snapshot, verdict_key(gate.name), value, VERDICT, passed=passed)
    if key is not None:
        signing.sign(catalog, snapshot, key, note=str(note))
    return VerdictReport(
        snapshot=snapshot,
        gate=gate.name,
        passed=passed,
        reason=reason,
        comparisons=comparisons,
        scores={} if evaluation is None else evaluation.scores,
        note=note,
        evaluation=None if evaluation is None else evaluation.note,
        signed=key is not None,
        seconds=time.monotonic() - began,
    )


def _reference(catalog: Catalog, snapshot: SnapshotId, name: str) -> SnapshotId | None:
    """Return the snapshot that a minimum names; None for the previous one of a branch's first.

    Raises NotFound, BadName.
    """
    try:
        return catalog.resolve(name)
    except NotFound:
        parents = catalog.snapshot(snapshot).parents if name in ROLES else ()
        found = next((one.snapshot_id() for one in parents if one.role == name), None)
        if found is None and name != PREVIOUS:
            raise
        return found


def _compared(
    catalog: Catalog,
    minimum: Minimum,
    evaluation: EvaluationReport,
    theirs: Mapping[str, EvaluationReport],
) -> CheckedScore:
    value, other = evaluation.scores[minimum.score], theirs.get(minimum.reference)
    limit: float | None = minimum.offset
    p, count = None, None
    if other is None and minimum.reference:
        limit = None
    elif other is not None:
        limit = minimum.offset + other.scores[minimum.score]
        mine, its = (_samples(catalog, one, minimum.score) for one in (evaluation, other))
        if mine is not None and its is not None:
            p, count = p_value(mine, its), len(mine.values)
    return CheckedScore(
        score=minimum.score,
        value=value,
        sign=minimum.sign,
        limit=limit,
        reference=minimum.reference or None,
        reference_value=None if other is None else other.scores[minimum.score],
        held=limit is None or (value >= limit if minimum.sign == ">=" else value <= limit),
        samples=None if p is None else count,
        p_value=p,
        distinguishable=None if p is None else p < ALPHA,
    )


def _samples(catalog: Catalog, evaluation: EvaluationReport, score: str) -> Samples | None:
    note = notes.notes_on(catalog, evaluation.snapshot)[evaluation.note]
    return Samples.of_note(note.value.get("samples", {}).get(score))


def is_current(
    catalog: Catalog, gate: str, note: NoteId, *, defined: Callable[[str], Gate | None]
) -> bool:
    """Return whether a verdict is of the gate as it is defined now; of one without, any is."""
    own = defined(gate)
    if own is None:
        return True
    value = catalog.record(Note, note).value
    return isinstance(value, dict) and own.definition().items() <= value.items()


def is_vouched(catalog: Catalog, snapshot: SnapshotId, gate: str, trusted: signing.Trusted) -> bool:
    """Return whether the verdict of a gate that counts is a pass, signed by a trusted signer.

    Only a verdict that counts: a later one, by whomever, takes an earlier pass away.
    """
    found = notes.notes_on(catalog, snapshot)
    signed = signing.by_subject(found, trusted)
    return any(
        one.key == verdict_key(gate)
        and one.kind == VERDICT
        and isinstance(one.value, dict)
        and one.value.get("passed") is True
        and any(signature.state == GOOD_SIGNATURE for signature in one.signatures)
        for one in notes.reports(found, signed)
    )
