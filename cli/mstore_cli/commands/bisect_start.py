"""`mstore bisect start`: begin to search for what made a snapshot bad."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.bisecting import tell
from mstore_cli.command import command
from mstore_cli.options import Option, Revision
from mstore_cli.session import Session

Experts = Annotated[
    bool, Option("--experts", help="Search for the experts of this merge that are to blame.")
]
Layers = Annotated[
    bool,
    Option(
        "--layers",
        help="Search for the layers of this merge; with --experts for layers of experts.",
    ),
]
Good = Annotated[
    tuple[str, ...],
    Option("--good", metavar="REF", help="An earlier position that is good. Repeatable."),
]


@command(
    example="mstore bisect start llama/merged --good llama/merged~9",
    failure="an error; no bisection was begun",
)
def bisect_start(
    session: Session,
    revision: Revision,
    good: Good = (),
    experts: Experts = False,
    layers: Layers = False,
) -> None:
    """Begin to search for what made a snapshot bad.

    Without --experts and --layers, the earlier positions of the branch are searched for the first
    bad one. With them, the snapshot is a merge: some of its experts or layers are merged without
    the others, as virtual merges of which only what you read is computed.
    """
    with session.open() as store:
        report = store.bisect_start(revision, good=good, experts=experts, layers=layers)
        session.settled()
    tell(session, report)
