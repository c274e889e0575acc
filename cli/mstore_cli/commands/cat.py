"""`mstore cat`: the bytes of one file of a snapshot."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from mstore_cli.command import Mistakes, command
from mstore_cli.errors import UsageError
from mstore_cli.options import Argument
from mstore_cli.output import Mode, printing
from mstore_cli.session import Session


def _joined(values: Mapping[str, Any], loose: list[str]) -> str | None:
    target = values["target"]
    return f"mstore cat {shlex.quote(f'{target}:{loose[0]}')}" if ":" not in target else None


@command(
    example="mstore cat llama/merged:config.json",
    mistakes=Mistakes(arguments=_joined),
    has_json=False,
    failure="an error; the bytes written before it are correct but incomplete",
)
def cat(
    session: Session,
    target: Annotated[str, Argument(metavar="REF:PATH", help="A snapshot and a file in it.")],
) -> None:
    """Write one file of a snapshot to standard output.

    The bytes are those that were added. Every block is checked before it is written. There is no
    JSON form.
    """
    revision, colon, path = target.partition(":")
    files = f"mstore ls {shlex.quote(revision) if revision else 'REF'}"
    if session.output.mode is Mode.JSON:
        raise UsageError("cat writes bytes and has no JSON form", hint=f"{files} --json")
    if not (revision and colon and path):
        raise UsageError(f"not REF:PATH: {target!r}", hint=files)
    with session.open() as store:
        for chunk in store.read_file(revision, path):
            with printing():
                sys.stdout.buffer.write(chunk)
    with printing():
        sys.stdout.buffer.flush()
