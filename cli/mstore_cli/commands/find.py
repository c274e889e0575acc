"""`mstore find`: which model a digest, or a file, is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mstore.terms.errors import NotFound
from mstore_cli.command import command
from mstore_cli.options import Argument
from mstore_cli.output import Column, Screen, named, short
from mstore_cli.session import Session

COLUMNS = (
    Column("SNAPSHOT", style="yellow"),
    Column("AUTOV2"),
    Column("FILE", sentence=True),
    Column("REFS", sentence=True),
)


@command(example="mstore find 6ce0161689")
def find(
    session: Session,
    asked: Annotated[
        str,
        Argument(
            metavar="DIGEST|FILE",
            help="A SHA-256, or its first digits (AutoV2 has ten); or a file to look for.",
        ),
    ],
) -> None:
    """Find a single-file model by its SHA-256.

    A1111 and Civitai name one so. `add` notes the digest of each such file. `mstore show REF
    --digest` computes that of a model that was made here.
    """
    from mstore.snapshots.digests import DIGITS

    is_file = Path(asked).exists() or DIGITS.fullmatch(asked) is None
    with session.open_to_look() as store:
        found = store.find(Path(asked) if is_file else asked)
    if not found:
        raise NotFound(
            "no file with this SHA-256 is known",
            where=asked,
            hint="mstore show REF --digest computes that of a model that was made here",
        )

    def human(screen: Screen) -> None:
        rows = ([short(one.snapshot), one.autov2, one.path, named(one.refs)] for one in found)
        screen.table(COLUMNS, rows)

    session.output.emit({"found": found}, ids=[one.snapshot for one in found], human=human)
