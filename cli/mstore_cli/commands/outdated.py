"""`mstore outdated`: which models have newer revisions where they are from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended
from mstore_cli.options import Argument
from mstore_cli.output import Column, Screen
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import OriginState
    from mstore.terms.ids import SnapshotId

COLUMNS = (
    Column("REF", style="green"),
    Column("FROM"),
    Column("ADDED"),
    Column("NOW"),
    Column("", sentence=True),
)
_DIGITS = 12


@command(
    example="mstore outdated",
    failure="an error; or a place could not be asked: its line says why",
)
def outdated(
    session: Session,
    names: Annotated[
        tuple[str, ...],
        Argument(
            metavar="REF",
            help="Branches, tags or other revisions [default: all branches that came from "
            "elsewhere].",
            shell_complete=completion.refs,
        ),
    ] = (),
) -> None:
    """Show which models have newer revisions.

    Asks the Hub, or the registry, what the branch or tag is now that a snapshot was added from; the
    exit status is 0 whatever it is (-q prints the names of what is outdated). A model that was
    added by its commit stays what it is: pinned. The origins of a REF that was made here are those
    of the models that it was made of.
    """
    with session.open() as store:
        states = store.outdated(names)
        called = {id: ref for ref, id in store.ref_ids().items()}
        session.settled()
    session.output.emit(
        {"origins": states},
        ids=[one.name for one in states if one.state == "outdated"],
        human=lambda screen: _show(screen, states, called),
    )
    if any(one.state == "unknown" for one in states):
        raise Ended(FAILURE)


def _show(screen: Screen, states: Sequence[OriginState], called: Mapping[SnapshotId, str]) -> None:
    if not states:
        screen.line("no model came from elsewhere")
        return
    screen.table(
        COLUMNS,
        (
            (
                one.name,
                one.address.replace(one.commit, _cut(one.commit)),
                _cut(one.commit),
                _cut(one.newest or "-"),
                f"{one.state}: {screen.typed(one.reason)}" if one.reason else one.state,
            )
            for one in states
        ),
    )
    behind = [one for one in states if one.state == "outdated"]
    if behind:
        screen.line(f"{counted(len(behind), 'model')} with newer revisions")
        one = behind[0]
        ref = shlex.quote(called.get(one.snapshot, "REF"))
        screen.command("to add one", f"mstore add {shlex.quote(one.address)} --name {ref}")


def _cut(text: str) -> str:
    kind, colon, digits = text.rpartition(":")
    return kind + colon + digits[:_DIGITS] if len(digits) in (40, 64) else text
