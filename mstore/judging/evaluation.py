"""An evaluation: a command sees a snapshot as files, and says numbers; they become a note.

The command runs in a directory of its own, `$MSTORE_OUT`, which is empty when it begins, so no
result of an earlier run is read. The snapshot is at `$MSTORE_DIR`, read-only. In its words `{}` is
that directory, too. Nothing is noted unless the command ended by itself and every score was found.

What this store found out itself has a row in the index (`snapshots.notes`), so that a note from
elsewhere never passes for it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from mstore import fs
from mstore.blocks.schema import JUDGED
from mstore.checkpoint.paths import CONTROL
from mstore.checkpoint.reading import Stamp
from mstore.judging.process import Ended, run
from mstore.judging.scores import (
    Score,
    Written,
    number_at,
    parse_scores,
    read_result,
    samples_of,
    task_facts,
)
from mstore.snapshots import notes
from mstore.store.catalog import Catalog
from mstore.store.objects.note import COUNTS, EVALUATION, PASSED, Note, packed, states
from mstore.terms.errors import BadRequest, CommandFailed, WrongCommand
from mstore.terms.ids import NoteId, SnapshotId
from mstore.terms.phrases import Option, is_text
from mstore.terms.report import Report

DAY: Final = 86_400.0
"""Seconds that a command may take unless somebody says otherwise."""
_MAX_KEY_BYTES: Final = 200
_OUT: Final = "out"
_LOG: Final = "log"
_TAIL_BYTES: Final = 4000

Show = Callable[[SnapshotId, Path], AbstractContextManager[Path]]
"""Shows a snapshot as a directory for as long as the block lasts: a mount, or a checkout.

The path is that of a scratch directory, in which it may make a directory `model`.
"""


class EvaluationReport(Report, frozen=True):
    """What a command said of a snapshot."""

    snapshot: SnapshotId
    """the snapshot's id"""
    note: NoteId
    """the note that tells it"""
    key: str
    """the key of the note: a name, or the command"""
    command: tuple[str, ...]
    """the command; {} stands for the directory"""
    scores: dict[str, float]
    """the scores by name; without any, `passed` is 1 for the exit status 0, else 0"""
    exit_status: int
    """how the command ended"""
    seconds: float
    """how long the command took"""
    results: dict[str, str]
    """the BLAKE3 of each result file by name"""
    tasks: dict[str, Any]
    """what lm-evaluation-harness says of its tasks: hashes, versions, numbers of samples"""
    sampled: tuple[str, ...]
    """scores of which the note also has the values of single samples"""


class Command(msgspec.Struct, frozen=True):
    """What to run, and where its scores are found.

    words: the program and its arguments; `{}` in any stands for the snapshot's directory. key: of
    the note. timeout: in seconds.
    """

    words: tuple[str, ...]
    scores: tuple[Score, ...]
    key: str
    timeout: float = DAY

    @classmethod
    def of(
        cls,
        words: Sequence[str],
        scores: Sequence[str] = (),
        name: str | None = None,
        timeout: float | None = None,
    ) -> Command:
        """Return the command of these words.  Raises BadRequest."""
        if isinstance(words, str) or not words or not all(map(is_text, words)) or not words[0]:
            raise BadRequest("a command is a program and its arguments", where="command")
        limit = DAY if timeout is None else timeout
        if not 0 < limit <= 365 * DAY:
            raise BadRequest("a time limit is more than 0 seconds", where=Option("timeout"))
        if name is not None and not _is_key(name):
            what = f"a name is a line of text of at most {_MAX_KEY_BYTES} bytes"
            raise BadRequest(what, where=Option("name"))
        return cls(tuple(words), parse_scores(scores), name or _key_of(words), float(limit))

    def definition(self) -> dict[str, list[str]]:
        """Return what a note says of it: with other words or scores it is another command."""
        return {"command": list(self.words), "score": [str(one) for one in self.scores]}

    def in_directory(self, shown: Path) -> list[str]:
        """Return its words with the snapshot's directory in them."""
        return [word.replace("{}", str(shown)) for word in self.words]


def _key_of(words: Sequence[str]) -> str:
    """Return a command as the key of a note: one line, a digest in place of what is too much."""
    text = shlex.join(words).replace("'{}'", "{}")
    if _is_key(text):
        return text
    return f"{CONTROL.sub(' ', text[:40])}... {blake3(text.encode()).hexdigest(4)}"


def _is_key(text: object) -> bool:
    return (
        isinstance(text, str)
        and is_text(text)
        and 0 < len(text.encode()) <= _MAX_KEY_BYTES
        and not CONTROL.search(text)
    )


class Judgement(msgspec.Struct, frozen=True):
    """What one run of a command gave."""

    command: Command
    scores: dict[str, float]
    status: int
    seconds: float
    results: dict[str, str] = {}
    tasks: dict[str, Any] = {}
    samples: dict[str, Any] = {}

    def value(self) -> dict[str, Any]:
        """Return the value of its note, without what makes it too long for one."""
        value = {
            **self.command.definition(),
            "scores": self.scores,
            "exit_status": self.status,
            "seconds": round(self.seconds, 3),
            "results": self.results,
        }
        for key, more in (("tasks", self.tasks), ("samples", self.samples)):
            longer = value | {key: more}
            if more and _fits(longer):
                value = longer
        return value


def _fits(value: object) -> bool:
    try:
        packed(value)
    except BadRequest:
        return False
    return True


def judgement_on(
    command: Command,
    snapshot: SnapshotId,
    show: Show,
    output: int | None = None,
    *,
    job: int | None = None,
) -> Judgement:
    """Run a command on a snapshot, and return what it said.

    output: a descriptor that gets what the command prints. job: its number among those that run
    side by side, from 0: the command's `$MSTORE_JOB`.

    Raises WrongCommand if it cannot be started, names a file of the caller's directory, or leaves
    other scores than were named; CommandFailed if it does not end by itself, fails though it was to
    leave scores, or changes the snapshot's files; and what `show` raises.
    """
    with fs.scratch() as scratch:
        written = Written(scratch / _OUT, command.scores)
        ended = _ended_on(command, snapshot, show, output, scratch, job)
        hint = _hint(command) if ended.status else None
        if ended.status < 0 or (ended.status and (command.scores or hint)):
            by = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
            kind = WrongCommand if hint else CommandFailed
            last = _last_words(scratch / _LOG)
            raise kind(f"ended with {by}{last}", where=command.words[0], hint=hint)
        if not command.scores:
            scores = {PASSED: float(ended.status == 0)}
            return Judgement(command, scores, ended.status, ended.seconds)
        files = {one.file: written.newest(one.file) for one in command.scores}
        results = {file: read_result(path, scratch / _OUT) for file, path in files.items()}
        samples = {one.name: samples_of(written, one) for one in command.scores}
        told = {name: found.to_note() for name, found in samples.items() if found is not None}
        return Judgement(
            command,
            {one.name: number_at(results[one.file], one) for one in command.scores},
            ended.status,
            ended.seconds,
            {one.name: one.digest for one in results.values()},
            task_facts(one.document for one in results.values()),
            {name: one for name, one in told.items() if one is not None},
        )


def status_on(command: Command, snapshot: SnapshotId, show: Show, output: int | None = None) -> int:
    """Run a command on a snapshot; return its exit status, negative for a signal.

    Raises WrongCommand if it cannot be started, CommandFailed if it does not end by itself or
    changes the snapshot's files, and what `show` raises.
    """
    with fs.scratch() as scratch:
        return _ended_on(command, snapshot, show, output, scratch).status


def _ended_on(
    command: Command,
    snapshot: SnapshotId,
    show: Show,
    output: int | None,
    scratch: Path,
    job: int | None = None,
) -> Ended:
    """Run a command on a snapshot in `scratch`, which gets what it leaves."""
    directory = scratch / _OUT
    fs.make_directory(directory, private=True)
    own = {} if job is None else {"MSTORE_JOB": str(job)}
    with show(snapshot, scratch) as shown:
        try:
            return run(
                command.in_directory(shown),
                directory=directory,
                environment={"MSTORE_DIR": str(shown), "MSTORE_OUT": str(directory), **own},
                timeout=command.timeout,
                log=scratch / _LOG,
                output=output,
                scratch=scratch,
            )
        except WrongCommand as error:
            error.advise(_hint(command))
            raise


def _last_words(log: Path) -> str:
    """Return the end of what a command printed, if that is known."""
    try:
        data = log.read_bytes()[-_TAIL_BYTES:]
    except OSError:
        return ""
    lines = data.decode(errors="replace").strip().splitlines()[-5:]
    return "; it said:\n" + "\n".join(lines) if lines else ""


def _hint(command: Command) -> str | None:
    """Say where the command ran, if it names a file that is elsewhere."""
    relative = (one for one in command.words if not os.path.isabs(one) and os.path.isfile(one))
    named = next(relative, None)
    if named is None:
        return None
    return f'it runs in a directory of its own: write "$PWD/{named}" for {named}'


@contextmanager
def checked_out(checkout: Callable[[Path], object], directory: Path) -> Iterator[Path]:
    """Show a snapshot by a checkout into a new directory.

    Raises CommandFailed at the end if a file was changed, which a checkout cannot prevent.
    """
    checkout(directory)
    before = _stamps(directory)
    yield directory
    if _stamps(directory) != before:
        raise CommandFailed("the command changed the files that it was to judge")


def _stamps(directory: Path) -> dict[str, Stamp]:
    return {str(path): Stamp.of(path.lstat()) for path in directory.rglob("*")}


# -- notes ---------------------------------------------------------------------------------------


def evaluate(
    catalog: Catalog,
    snapshot: SnapshotId,
    command: Command,
    show: Show,
    output: int | None = None,
) -> EvaluationReport:
    """Run a command on a snapshot, and note what it said.

    Raises as `judgement_on`, and Conflict.
    """
    judgement = judgement_on(command, snapshot, show, output)
    value = judgement.value()
    note = judged(catalog, snapshot, command.key, value, EVALUATION, passed=False)
    return report_of(snapshot, note, command.key, value)


def report_of(
    snapshot: SnapshotId, note: NoteId, key: str, value: Mapping[str, Any]
) -> EvaluationReport:
    """Report an evaluation as its note tells it."""
    return EvaluationReport(
        snapshot=snapshot,
        note=note,
        key=key,
        command=tuple(value["command"]),
        scores=value["scores"],
        exit_status=value["exit_status"],
        seconds=value["seconds"],
        results=value["results"],
        tasks=value.get("tasks", {}),
        sampled=tuple(value.get("samples", {})),
    )


def judged(
    catalog: Catalog,
    snapshot: SnapshotId,
    key: str,
    value: object,
    kind: str,
    *,
    passed: bool,
) -> NoteId:
    """Note what this store found out itself: the note and its row, in one commit."""

    return notes.write(catalog, snapshot, {key: value}, kind, judged=passed)[0]


def own_note(catalog: Catalog, snapshot: SnapshotId, key: str) -> tuple[NoteId, Note] | None:
    """Return the note under a key, if it counts and this store made it by running a command."""
    with catalog.index.env.read() as transaction:
        row = catalog.index.get(transaction, JUDGED, (snapshot, key))
    if row is None:
        return None
    id, _ = row
    found = notes.notes_on(catalog, snapshot)
    return (id, found[id]) if id in found and states(found)[id] == COUNTS else None


def known(catalog: Catalog, snapshot: SnapshotId, command: Command) -> EvaluationReport | None:
    """Return this store's own evaluation by the same command and scores, if there is one."""
    own = own_note(catalog, snapshot, command.key)
    if own is None or own[1].form != EVALUATION:
        return None
    id, note = own
    if not command.definition().items() <= note.value.items():
        return None
    return report_of(snapshot, id, command.key, note.value)
