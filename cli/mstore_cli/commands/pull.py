"""`mstore pull`: get models from a remote, and move branches."""

from __future__ import annotations

from typing import Annotated

from mstore_cli.command import command
from mstore_cli.errors import FAILURE, Ended
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
    example="mstore pull origin 'llama/*'",
    failure="a branch diverged (all others have moved), or another error\n"
    "  3  a gate guards a ref, and has not passed its snapshot; nothing was kept",
)
def pull(
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
    """Fetch, and move the branches of the same names.

    A branch moves if its place here is an ancestor of its place there; a branch or tag that this
    store lacks is made. A branch with commits that the remote lacks stays. If the remote's has
    others, too, the two have diverged: it stays as well, the command says what you can do, and ends
    with status 1. A branch that the remote removed stays, and the command says so. Nothing is
    merged: `mstore merge` merges models.
    """
    with session.open_to_exchange() as store, session.progress() as tick, resumable():
        remote = remote_for(store, "pull", name)
        require_names("pull", remote, refs)
        report = store.pull(
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
        signatures = signed(store, (*report.fetched, *report.moved), signers)
        removed = removed_there(store, report)
        kinds = {one.name: one.kind for one in store.refs()} if report.diverged else {}
    session.warn_if_quiet(f"{one} diverged from {remote}'s, and stays" for one in report.diverged)

    def human(screen: Screen) -> None:
        show_fetched(screen, report, signatures)
        if lazy:
            screen.line(f"{remote} is lazy now: {LAZY}")
        for one in report.diverged:
            _show_diverged(screen, remote, one, kinds.get(one))
        show_removed(screen, remote, removed)

    session.output.emit(report, ids=[one.name for one in report.moved], human=human)
    if report.diverged:
        raise Ended(FAILURE)


def _show_diverged(screen: Screen, remote: str, ref: str, kind: str | None) -> None:
    if kind is None:
        why = "it would be above or below a ref of this store"
        screen.line(f"{ref} is not made here: {why}", style="red")
        screen.command("  to make a branch of it", f"mstore reset NAME {remote}/{ref}")
        return
    if kind == "tag":
        screen.line(f"{ref} is a tag here, and another one there: it stays", style="red")
        screen.command("  to take theirs", f"mstore rm {ref} && mstore pull {remote} {ref}")
        return
    screen.line(f"{ref} diverged from {remote}/{ref}, and stays", style="red")
    screen.command("  to compare them", f"mstore diff {ref} {remote}/{ref}")
    screen.command("  to take theirs", f"mstore reset {ref} {remote}/{ref}")
    screen.command("  to replace theirs", f"mstore push {remote} {ref} --force-with-lease")
