"""`mstore gate require`: which gates guard which refs of the store."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen
from mstore_cli.session import Session


@command(
    example="mstore gate require 'prod/*' quality",
    failure="an error; nothing was changed",
)
def gate_require(
    session: Session,
    pattern: Annotated[
        str | None,
        Argument(metavar="PATTERN", help="Branches and tags; `*` also matches `/`."),
    ] = None,
    gates: Annotated[
        tuple[str, ...], Argument(metavar="GATE", help="Names of gates that they need.")
    ] = (),
    remove: Annotated[bool, Option("--remove", help="Need none any more.")] = False,
) -> None:
    """Let refs move only to snapshots that passed gates.

    Without PATTERN, show what is required. What a gate runs is in the settings of each user, under
    [gates.NAME]: a store makes nobody run a command. Clones and fetches do not copy this.
    """
    if pattern is None or not (gates or remove):
        if pattern is not None:
            raise UsageError("no gate is named", hint=f"mstore gate require '{pattern}' GATE")
        with session.open_to_look() as store:
            required = store.required_gates_by_pattern()
    else:
        if gates and remove:
            raise UsageError("--remove goes without gates", hint="mstore gate require --help")
        with session.open() as store:
            required = store.require_gates(pattern, gates)
            session.settled()

    def human(screen: Screen) -> None:
        if not required:
            screen.line("no ref needs a gate")
        screen.fields((one, ", ".join(names)) for one, names in required.items())

    session.output.emit({"required_gates": required}, ids=required, human=human)
