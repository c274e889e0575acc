"""`mstore gate`: candidates that no branch shows yet, rules of the store, gates of the user."""

from __future__ import annotations

import shlex

from mstore_cli import user_config
from mstore_cli.command import command
from mstore_cli.output import Column, Screen, short, when
from mstore_cli.session import Session

COLUMNS = (
    Column("CANDIDATE", style="green"),
    Column("SNAPSHOT", style="yellow"),
    Column("MADE"),
    Column("PART OF"),
    Column("PASSED", sentence=True),
    Column("DID NOT PASS", sentence=True),
)


@command(example="mstore gate")
def gate(session: Session) -> None:
    """List candidates, rules and gates.

    A gate is a command that a snapshot must pass before a branch moves to it: see --check of merge,
    add and push. The list has the refs of the store that need gates, the gates of your settings
    with their commands, and candidates with the gates that they passed. Those that are part of a
    search, a bisection or a download are no results, and go when it ends. Other candidates stay
    until they are dropped, or for the days that `mstore config reflog_days` says. The second words
    are commands of their own.
    """
    with session.open_to_look() as store:
        found = store.candidates()
        required = store.required_gates_by_pattern()
    own = {name: told._asdict() for name, told in user_config.gates().items()}

    def human(screen: Screen) -> None:
        if required:
            screen.line("refs that need gates")
            screen.fields((pattern, ", ".join(names)) for pattern, names in required.items())
        if own:
            screen.line("gates of your settings")
            screen.fields((name, _told(one)) for name, one in user_config.gates().items())
        if not found:
            screen.line("no candidates")
            return
        rows = (
            (
                one.candidate,
                short(one.snapshot),
                when(one.time_ns),
                one.part_of or "-",
                ", ".join(one.passed) or "-",
                ", ".join(one.failed) or "-",
            )
            for one in found
        )
        screen.table(COLUMNS, rows)
        screen.command("to drop one", "mstore gate drop CANDIDATE")

    document = {"candidates": found, "required_gates": required, "gates": own}
    session.output.emit(document, ids=[one.candidate for one in found], human=human)


def _told(gate: user_config.GateConfig) -> str:
    """Return what a gate runs, and its limits, in a line."""
    limits = f", with {', '.join(gate.min)}" if gate.min else ""
    return shlex.join(gate.command).replace("'{}'", "{}") + limits
