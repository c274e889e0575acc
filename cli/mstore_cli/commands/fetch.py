"""`mstore fetch`: get models from a remote, and move no branch."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.exchange import (
    LAZY,
    rate_of,
    remote_for,
    removed_there,
    require_names,
    resumable,
    show_fetched,
    show_removed,
    signed,
    signers_for,
)
from mstore_cli.options import JOBS, Jobs, Lazy, LimitRate, MaybeRemote, Option, RemoteRefs
from mstore_cli.output import Screen
from mstore_cli.session import Session
from mstore_cli.signers import SignersOption


@command(
    decodes=True,
    example="mstore fetch origin",
    failure="the remote does not answer, or another error; no ref moved",
)
def fetch(
    session: Session,
    name: MaybeRemote = None,
    refs: RemoteRefs = (),
    ancestors: Annotated[
        bool, Option("--ancestors", help="Also get contents of ancestors that the remote has.")
    ] = False,
    lazy: Lazy = False,
    signers: SignersOption = None,
    jobs: Jobs = JOBS,
    limit_rate: LimitRate = None,
) -> None:
    """Get what the refs of a remote need, and move no branch.

    The refs below remotes/NAME/ move, and `mstore pull` also moves branches. REMOTE/REF names what
    came, as in `mstore diff llama origin/llama`. Without REF all refs come; those below
    remotes/NAME/ that the remote removed go, and your branches stay. Every block is checked before
    it is published.

    An interrupted fetch goes on when it is run again.
    """
    with session.open_to_exchange() as store, session.progress() as tick, resumable():
        remote = remote_for(store, "fetch", name)
        require_names("fetch", remote, refs)
        report = store.fetch(
            remote,
            refs,
            ancestors=ancestors,
            lazy=lazy,
            signers=signers_for(store, signers),
            jobs=jobs,
            limit_rate=rate_of(limit_rate),
            progress=tick,
        )
        session.settled()
        signatures = signed(store, report.fetched, signers)
        removed = removed_there(store, report)

    def human(screen: Screen) -> None:
        show_fetched(screen, report, signatures)
        if lazy:
            screen.line(f"{remote} is lazy now: {LAZY}")
        show_removed(screen, remote, removed)

    session.output.emit(report, ids=[one.name for one in report.fetched], human=human)
