"""`mstore clone`: a new store with all that another one or a remote has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from mstore_cli import aws, completion
from mstore_cli.command import command
from mstore_cli.errors import UsageError
from mstore_cli.exchange import LAZY, left_out, rate_of
from mstore_cli.options import (
    JOBS,
    AddressingStyle,
    Argument,
    Endpoint,
    Jobs,
    Lazy,
    LimitRate,
    Region,
    Threads,
    parse_path,
)
from mstore_cli.output import Screen, near
from mstore_cli.session import Session, token
from mstore_cli.sizes import counted, format_seconds, format_size


def _word(word: str) -> str:
    """Refuse an empty word; a path would have one slash where an address has two."""
    parse_path(word)
    return word


@command(
    decodes=True,
    example="mstore clone /srv/models/store ./mine",
    failure="the source is damaged, or another error; no store was made",
)
def clone(
    session: Session,
    source: Annotated[
        str,
        Argument(
            metavar="SRC",
            help="A store, a backup, or the address of a remote: s3://..., file:///..., "
            "bundle:FILE, http://HOST/remote.",
            type=_word,
            shell_complete=completion.files,
        ),
    ],
    destination: Annotated[Path, Argument(metavar="DST", help="A new or empty directory.")],
    threads: Threads = None,
    endpoint: Endpoint = None,
    region: Region = None,
    addressing_style: AddressingStyle = None,
    lazy: Lazy = False,
    jobs: Jobs = JOBS,
    limit_rate: LimitRate = None,
) -> None:
    """Make an independent copy of a store or a remote.

    The copy has models, refs, reflogs, settings, and its own UUID. Later changes to one store do
    not affect the other. Others may use SRC meanwhile. Everything is copied, no file is linked, and
    every block is checked. Statistics, the memo table and remotes are not copied.

    From the address of a remote come its branches, its tags and what they need. The new store knows
    the remote as origin. With --lazy, no weights come: each block is brought when something reads
    it, and kept in a cache. --endpoint, --region, --addressing-style, --jobs and --limit-rate are
    for remotes, too. A web server gets the token in the variable MSTORE_TOKEN, if you have one.

    A store that is lazy itself is cloned with --lazy, too: the copy has what is stored in SRC, and
    reads the rest at the lazy remotes of SRC, whose settings come along. Without --lazy, SRC needs
    `mstore prefetch --all` first. A store without lazy remotes has all of its blocks, so --lazy
    refuses it.
    """
    given = session.given_store
    if given is not None and given.absolute() != Path(source).absolute():
        raise UsageError(f"two stores named: {source} and, by --store, {given}")
    from mstore import Store
    from mstore.remotes.address import is_address

    with session.progress() as tick:
        report = Store.clone(
            source,
            destination,
            endpoint=endpoint or "",
            region=region or "",
            addressing_style=addressing_style or "",
            token=token(),
            s3_credentials=aws.credentials(),
            lazy=lazy,
            threads=threads,
            jobs=jobs,
            limit_rate=rate_of(limit_rate),
            progress=tick,
        )
        session.trust(source, endpoint or "")
        session.settled()

    def human(screen: Screen) -> None:
        screen.line(f"{report.path} is a clone of {report.source}", style="green")
        screen.fields(
            [
                ("uuid", report.uuid),
                ("refs", report.refs),
                ("snapshots", report.snapshots),
                ("left out", left_out(report.without_contents)),
                (
                    "copied",
                    f"{counted(report.packs, 'pack')}, {format_size(report.bytes_copied)}",
                ),
                ("time", format_seconds(report.seconds)),
            ]
        )
        if is_address(source) and lazy:
            screen.line(f"origin is lazy: {LAZY}")
        if is_address(source):
            where = shlex.quote(near(report.path))
            screen.command("to get what comes later", f"mstore --store {where} pull origin")

    session.output.emit(report, ids=[report.uuid], human=human)
