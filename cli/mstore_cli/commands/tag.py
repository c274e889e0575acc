"""`mstore tag`: a name that does not move."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, MaybeRevision
from mstore_cli.output import Column, Screen, short, when
from mstore_cli.session import Session

COLUMNS = (Column("TAG", style="green"), Column("SNAPSHOT", style="yellow"), Column("MADE"))


@command(
    example="mstore tag v1 llama/merged",
    failure="the name is taken, or another error\n"
    "  3  a gate guards the tag, and the snapshot has not passed it",
)
def tag(
    session: Session,
    name: Annotated[
        str | None, Argument(metavar="NAME", help="The new tag; alone, a pattern of tags.")
    ] = None,
    revision: MaybeRevision = None,
) -> None:
    """Give a snapshot a fixed name; without REF, list the tags.

    `mstore tag` lists all tags, and `mstore tag 'v1.*'` those that match.
    """
    if revision is None or name is None:
        _list(session, name)
        return
    with session.open() as store:
        report = store.tag(name, revision)
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"tag {report.name} is {short(report.snapshot)}", style="green")

    session.output.emit(report, ids=[report.snapshot], human=human)


def _list(session: Session, pattern: str | None) -> None:
    from mstore.store.refs import is_pattern

    if pattern is not None and not is_pattern(pattern):
        raise UsageError(
            f"which snapshot is to be tagged {pattern}?", hint=f"mstore tag {pattern} REF"
        )
    with session.open() as store:
        refs = store.refs(pattern) if pattern else store.refs()
        found = [one for one in refs if one.kind == "tag"]

    def human(screen: Screen) -> None:
        if not found:
            screen.command("no tags; next", "mstore tag v1 REF")
        screen.table(COLUMNS, ((one.name, short(one.snapshot), when(one.time_ns)) for one in found))

    session.output.emit({"refs": found}, ids=[one.name for one in found], human=human)
