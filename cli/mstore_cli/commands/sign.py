"""`mstore sign`: vouch for a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.options import Option, Revision
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.signers import ask_passphrase, read_passphrase


@command(
    example="mstore sign llama/merged --key ~/.ssh/id_ed25519",
    failure="an error; nothing was signed",
)
def sign(
    session: Session,
    revision: Revision,
    key: Annotated[
        Path | None,
        Option(
            "--key",
            metavar="FILE",
            help="The private key that signs, ed25519, of ssh-keygen or openssl.  [required]",
        ),
    ] = None,
    note: Annotated[
        str | None,
        Option(
            "--note",
            metavar="NOTE",
            help="Sign this note of the snapshot instead: its id, or the beginning of it.",
        ),
    ] = None,
    signer: Annotated[
        str | None,
        Option("--as", metavar="NAME", help="Who signs, for people to read [default: the author]."),
    ] = None,
    passphrase_file: Annotated[
        Path | None,
        Option(
            "--passphrase-file",
            metavar="FILE",
            help="The key's passphrase [default: asked for on the terminal].",
        ),
    ] = None,
) -> None:
    """Sign a snapshot: every byte, its lineage and its plan.

    The store keeps the signature. Signing again with the same key changes nothing.
    """
    if key is None:
        raise UsageError(
            "missing: --key, the private key that signs",
            hint=f"mstore sign {revision} --key FILE, as ~/.ssh/id_ed25519; "
            "ssh-keygen -t ed25519 -f FILE makes one",
        )
    from mstore.snapshots.signing import load_key

    def passphrase() -> str:
        if passphrase_file is not None:
            return read_passphrase(passphrase_file)
        return ask_passphrase(key)

    with session.open() as store:
        report = store.sign(revision, load_key(key, passphrase), note=note, signer=signer)
        session.settled()

    def human(screen: Screen) -> None:
        what = "" if note is None else f"note {note[:12]} of "
        screen.line(f"signed {what}{short(report.snapshot)} with {report.key}", style="green")

    session.output.emit(report, ids=[report.signature], human=human)
