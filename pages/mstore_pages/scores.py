"""What notes say of how good a snapshot is: verdicts of gates, and scores beside its parents'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mstore.api.reports import searched
from mstore.snapshots.notes import culprit_of
from mstore.store.objects.note import EVALUATION, VERDICT
from mstore.terms.sizes import counted
from mstore_pages import figures
from mstore_pages.document import Cell, table
from mstore_pages.figures import number
from mstore_pages.markup import Child, Markup, join, tag

if TYPE_CHECKING:
    from mstore.api.reports import NoteReport, SnapshotReport
    from mstore_pages.summary import Ancestor

_LONGEST = 500
"""Letters of a value that a page shows."""
_SIGNS = {">=": "≥", "<=": "≤"}


def told(note: NoteReport) -> str:
    """Return what a note says in a line: of a verdict each score with its limit; of a search what
    it tried, and its best score."""
    search = searched([note])
    if search is not None:
        return search.text()
    limits = _limits(note)
    if not limits:
        whole = note.told()
        # A note may have 64 KiB, which nobody reads in a table.
        return whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]}…"
    passed = "passed" if note.value.get("passed") is True else "did not pass"
    own = _scores(note)
    limited = {one.get("score") for one in limits}
    rest = [f"{name} {number(score)}" for name, score in own.items() if name not in limited]
    return f"{passed}: {'; '.join([*map(_limit, limits), *rest])}"


def _limits(note: NoteReport) -> list[Mapping[str, object]]:
    """Return the scores of a verdict that had a limit; notes may come from anybody."""
    if note.kind != VERDICT or not isinstance(note.value, dict):
        return []
    found = note.value.get("comparisons")
    if not isinstance(found, list):
        return []
    return [one for one in found if isinstance(one, dict)]


def _limit(one: Mapping[str, object]) -> str:
    sign = _SIGNS.get(str(one.get("sign")), "?")
    held = sign if one.get("held") is True else f"is not {sign}"
    limit = f"{held} {_number(one.get('limit'))}".replace(" ", figures.NO_BREAK)
    words = f"{one.get('score')} {_number(one.get('value'))} {limit}"
    if one.get("reference") is not None:
        words += f" ({one['reference']} has {_number(one.get('reference_value'))})"
    return words


def _number(value: object) -> str:
    return number(value) if isinstance(value, int | float) else "?"


def _scores(note: NoteReport) -> dict[str, float]:
    value = note.value.get("scores") if isinstance(note.value, dict) else None
    if note.kind not in (EVALUATION, VERDICT) or not isinstance(value, dict):
        return {}
    return {
        str(name): float(one)
        for name, one in value.items()
        if isinstance(one, int | float) and not isinstance(one, bool)
    }


def command(note: NoteReport) -> str:
    """Return the name of what was run: a gate's or an evaluation's own, or the command's."""
    words = note.value.get("command") if isinstance(note.value, dict) else None
    key = note.subject()
    if not isinstance(words, list) or key != " ".join(map(str, words)):
        return key
    # Of `python path/score.py {}` the file, of others the program.
    names = [str(one).rpartition("/")[2] for one in words if not str(one).startswith(("-", "{"))]
    return next((one for one in names if "." in one), names[0] if names else key)


def beside_parents(shown: SnapshotReport, lineage: tuple[Ancestor, ...]) -> Iterator[Markup]:
    """Yield a table of scores of a snapshot and of its parents, if a parent has one of them too."""
    by_id = {one.snapshot.snapshot: one.snapshot for one in lineage}
    parents = [(one.role, by_id.get(one.snapshot)) for one in shown.parents]
    models = [("", shown), *((role, one) for role, one in parents if one is not None)]
    scores = [_by_key(one) for _, one in models]
    columns = [key for key in scores[0] if any(key in other for other in scores[1:])]
    if not columns:
        return
    keys = {one.subject(): command(one) for one in shown.notes}
    many = len({key for key, _ in columns}) > 1
    heads: list[tuple[str, str]] = [("Model", "name"), ("Role", "")]
    heads += [(f"{keys[key]}: {name}" if many else name, "n") for key, name in columns]
    rows: list[list[Child | Cell]] = []
    for (role, model), own in zip(models, scores, strict=True):
        values = [own.get(column) for column in columns]
        if any(one is not None for one in values) or not role:
            name = ", ".join(model.refs) or model.snapshot.short
            rows.append([name, role or "this one", *(Cell(number(v), "n", v) for v in values)])
    told = "Scores beside those of its parents" + ("" if many else f", by {keys[columns[0][0]]}")
    yield table(told, heads, rows)
    if len(rows) < len(models):
        others = len(models) - len(rows)
        yield tag(
            "p",
            f"{counted(others, 'parent')} without such a score "
            f"{'is' if others == 1 else 'are'} left out.",
            class_="caption",
        )


def _by_key(shown: SnapshotReport) -> dict[tuple[str, str], float]:
    """Return scores by the key and name that they were noted under."""
    return {
        (note.subject(), name): score
        for note in shown.notes
        for name, score in _scores(note).items()
    }


def written(note: NoteReport) -> Markup:
    """Return a note's value in a line, and the whole command where its key does not tell it."""
    line = told(note)
    # Words are no code, as what anybody noted may be.
    is_words = searched([note]) is not None or culprit_of([note]) is not None
    shown: list[Child] = [line if is_words else tag("code", line)]
    words = note.value.get("command") if isinstance(note.value, dict) else None
    if isinstance(words, list) and note.kind in (EVALUATION, VERDICT):
        line = " ".join(map(str, words))
        if line != note.subject():
            shown += [tag("br"), "by ", tag("code", line)]
    return join(shown)
