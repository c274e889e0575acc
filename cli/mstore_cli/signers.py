"""Trusted signers, names for signature states, and where a passphrase comes from.

The only module that knows the path of the user's own list of signers.
"""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli.errors import UsageError
from mstore_cli.options import Option

if TYPE_CHECKING:
    from mstore.api.reports import SignatureReport, SnapshotReport, VerifyReport

SIGNERS_NAME = "allowed_signers"
SignersOption = Annotated[
    Path | None,
    Option(
        "--signers",
        metavar="FILE",
        help=f"Trusted keys [default: {SIGNERS_NAME} in the user's own mstore configuration].",
    ),
]


def trusted_signers(path: Path | None) -> Mapping[bytes, str]:
    """Return the keys in `path`, or in the user's own file; without either, none.

    Raises BadRequest, NotFound (only for a file that was named), StorageFailed.
    """
    if path is None:
        path = own_signers()
        # This also covers a home directory that belongs to another user, as sudo may leave it.
        if not os.access(path, os.R_OK):
            return {}
    from mstore.snapshots.signing import read_signers

    return read_signers(path)


def own_signers() -> Path:
    """Return the path of the user's own list of signers; it need not exist."""
    from platformdirs import user_config_path

    return user_config_path("mstore") / SIGNERS_NAME


def how_to_trust(path: Path | None) -> tuple[str, ...]:
    """Return lines that explain how to add a key to the list at `path`, or to the user's own."""
    path = path or own_signers()
    made = "" if path.parent.is_dir() else f"mkdir -p {shlex.quote(str(path.parent))} && "
    return (
        f"to trust a key, add a line to {path}: NAME and the text of its .pub file",
        f'  {made}echo "NAME $(cat KEY.pub)" >> {shlex.quote(str(path))}',
    )


def signatures_of(report: SnapshotReport | VerifyReport) -> Iterator[SignatureReport]:
    """Yield the signatures of a snapshot and those of its notes."""
    yield from report.signatures
    for note in report.notes:
        yield from note.signatures


def lines_on_unknown_keys(signatures: Iterable[SignatureReport]) -> Iterator[str]:
    """Yield lines that name untrusted keys and explain how to trust them; none if all are."""
    from mstore.snapshots.notes import UNKNOWN_KEY

    unknown = dict.fromkeys(one.key for one in signatures if one.state == UNKNOWN_KEY)
    yield from (f"unknown key: {key}" for key in unknown)
    if unknown:
        yield from how_to_trust(None)


def state_of(signature: SignatureReport) -> str:
    """Describe one signature in a few words."""
    from mstore.snapshots.notes import BAD_SIGNATURE, GOOD_SIGNATURE, UNKNOWN_KEY

    return {
        GOOD_SIGNATURE: f"signed by {signature.signer}",
        UNKNOWN_KEY: "signed by an unknown key",
        BAD_SIGNATURE: "BAD",
    }.get(signature.state, "signed; not checked: pip install 'mstore[sign]'")


def states_of(signatures: Iterable[SignatureReport]) -> str | None:
    """Describe all signatures of a snapshot in a few words; None if there are none."""
    return ", ".join(dict.fromkeys(map(state_of, signatures))) or None


def ask_passphrase(key: Path) -> str:
    """Ask for the passphrase of a key on the terminal.  Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"{key} is encrypted, and there is no terminal to ask for its passphrase on",
            hint="mstore sign REF --key FILE --passphrase-file FILE",
        )
    return getpass.getpass(f"passphrase of {key}: ")


def read_passphrase(path: Path) -> str:
    """Return the first line of a file.  Raises OSError, UnicodeDecodeError."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removesuffix("\n")
