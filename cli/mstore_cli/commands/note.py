"""`mstore note`: what is found out about a snapshot later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option, Revision
from mstore_cli.output import Column, Screen, noted, short, when
from mstore_cli.session import Session
from mstore_cli.signers import lines_on_unknown_keys, states_of, trusted_signers

if TYPE_CHECKING:
    from mstore.api.reports import NoteReport

COLUMNS = (
    Column("NOTE", style="yellow"),
    Column("MADE"),
    Column("BY", sentence=True),
    Column("SIGNED", sentence=True),
    Column("WHAT", sentence=True),
)
STATE = Column("STATE")


@command(
    example="mstore note llama/merged mmlu=0.62 'reviewed by=ada'",
    failure="an error; nothing was noted",
)
def note(
    session: Session,
    revision: Revision,
    values: Annotated[
        tuple[str, ...],
        Argument(
            metavar="KEY=VALUE", help="What to note; VALUE is JSON if it reads as JSON, else text."
        ),
    ] = (),
    kind: Annotated[
        str | None,
        Option(
            "--kind",
            metavar="KIND",
            help="What the values are: value, evaluation, verdict or link [default: value].",
        ),
    ] = None,
    remove: Annotated[
        tuple[str, ...],
        Option(
            "--remove",
            metavar="NOTE",
            help="Remove a note, by its id or the beginning of it. Repeatable.",
        ),
    ] = (),
    every: Annotated[bool, Option("--all", help="List replaced and removed notes, too.")] = False,
) -> None:
    """Note something about a snapshot, or list its notes.

    A note does not change the snapshot. The newest value of a key counts; older ones stay, and
    count again when newer ones are removed.
    """
    if bool(values) + bool(remove) + every > 1:
        raise UsageError(
            "values, --remove and --all are for different calls", hint="mstore note --help"
        )
    if kind is not None and not values:
        raise UsageError(
            "--kind says what values are, and none is given",
            hint=f"mstore note {revision} KEY=VALUE",
        )
    counting: list[NoteReport] = []
    if values:
        settings = _settings(revision, values)
        with session.open() as store:
            notes = store.note(revision, settings, kind=kind or "value")
            session.settled()
    elif remove:
        with session.open() as store:
            notes = store.remove_notes(revision, remove)
            session.settled()
            keys = {one.key for one in notes}
            counting = [one for one in store.notes_of(revision) if one.key in keys]
    else:
        with session.open_to_look() as store:
            notes = store.notes_of(revision, every=every)
            if any(one.signatures for one in notes):
                trusted = trusted_signers(None)
                notes = store.notes_of(revision, every=every, signers=trusted)

    def human(screen: Screen) -> None:
        if values or remove:
            for one in notes:
                verb = "noted" if values else "removed"
                screen.line(f"{verb} {short(one.note)}: {noted(one)}", style="green")
            for one in counting:
                screen.line(f"counts now, {short(one.note)}: {noted(one)}")
        elif not notes:
            screen.command("no notes; next", f"mstore note {revision} KEY=VALUE")
        else:
            _table(screen, notes, every=every)

    session.output.emit({"notes": notes}, ids=[one.note for one in notes], human=human)


def _table(screen: Screen, notes: Sequence[NoteReport], *, every: bool) -> None:
    columns = (*COLUMNS[:-1], STATE, COLUMNS[-1]) if every else COLUMNS
    screen.table(columns, (_row(one, every=every) for one in notes))
    for line in lines_on_unknown_keys(one for note in notes for one in note.signatures):
        screen.line(line)


def _row(note: NoteReport, *, every: bool) -> Sequence[str]:
    return (
        short(note.note),
        when(note.time_ns),
        note.author or "-",
        states_of(note.signatures) or "-",
        *((note.state,) if every else ()),
        noted(note),
    )


def _settings(revision: str, values: Iterable[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for one in values:
        key, equals, value = one.partition("=")
        if not equals or not key:
            raise UsageError(
                f"not KEY=VALUE: {one!r}", hint=f"mstore note {revision} {key or 'KEY'}=VALUE"
            )
        if key in settings:
            raise UsageError(f"{key} is given twice", hint=f"mstore note {revision} {key}=VALUE")
        settings[key] = _read(value)
    return settings


def _read(text: str) -> Any:
    """Return what a value says as JSON; else the text itself."""
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return text


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object.  Raises ValueError for a key that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found
