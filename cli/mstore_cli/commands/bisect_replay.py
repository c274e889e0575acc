"""`mstore bisect replay`: say again what a log has."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.bisecting import tell
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument
from mstore_cli.session import Session

if TYPE_CHECKING:
    from mstore import Store
    from mstore.api.reports import BisectReport

_MARKS = ("good", "bad", "skip")


@command(
    example="mstore bisect replay bisect.log",
    failure="an error; marks before the wrong line count\n  2  too much was skipped to tell",
)
def bisect_replay(
    session: Session,
    file: Annotated[
        Path, Argument(metavar="FILE", help="What `mstore bisect log` printed; - is the input.")
    ],
) -> None:
    """Begin the bisection of a log, and say again what it says."""
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    with session.open() as store:
        report = None
        for number, line in enumerate(text.splitlines(), 1):
            words = shlex.split(line, comments=True)
            if words:
                report = _said(store, words, f"{file}:{number}")
        session.settled()
    if report is None:
        raise UsageError(f"{file} has no command", hint="mstore bisect log > FILE")
    tell(session, report)


def _said(store: Store, words: list[str], where: str) -> BisectReport:
    """Do what a line of a log says."""
    match words:
        case ["start", revision, *options] if set(options) <= {
            "--experts",
            "--layers",
        }:
            return store.bisect_start(
                revision, experts="--experts" in options, layers="--layers" in options
            )
        case [answer, *of] if answer in _MARKS and len(of) < 2:
            return store.bisect_mark(answer, *of)
    raise UsageError(f"{where} is no line of a log: {shlex.join(words)}", hint="mstore bisect log")
