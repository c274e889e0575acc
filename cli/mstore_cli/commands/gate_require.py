"""`mstore gate require`: which gates guard which refs of the store."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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
    remove: Annotated[
        bool, Option("--remove", help="Need GATE no more; without it, none.")
    ] = False,
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
            unjudged = store.unjudged()
    else:
        with session.open() as store:
            if remove and gates:
                gates = _left(store.required_gates_by_pattern().get(pattern, ()), pattern, gates)
            required = store.require_gates(pattern, gates)
            session.settled()
            unjudged = store.unjudged()

    def human(screen: Screen) -> None:
        if not required:
            screen.line("no ref needs a gate")
        screen.fields((one, ", ".join(names)) for one, names in required.items())
        for ref, lacking in unjudged.items():
            checks = " ".join(f"--check {shlex.quote(one)}" for one in lacking)
            screen.command(
                f"{ref} was not judged by {', '.join(lacking)}",
                f"mstore gate run {shlex.quote(ref)} {checks}",
            )

    document = {"required_gates": required, "unjudged": unjudged}
    session.output.emit(document, ids=required, human=human)


def _left(required: Sequence[str], pattern: str, gates: Sequence[str]) -> tuple[str, ...]:
    """Return the gates that a pattern needs without these.  Raises NotFound."""
    from mstore.terms.errors import NotFound

    missing = next((one for one in gates if one not in required), None)
    if missing is not None:
        raise NotFound(f"{pattern} does not need it", where=missing, hint="mstore gate require")
    return tuple(one for one in required if one not in gates)
