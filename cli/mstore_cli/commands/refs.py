"""`mstore refs`: branches and tags, and with patterns other refs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstore_cli.command import command
from mstore_cli.options import RefNames
from mstore_cli.output import Column, Screen, short, when
from mstore_cli.session import Session
from mstore_cli.sizes import counted

if TYPE_CHECKING:
    from mstore.api.reports import RefReport

COLUMNS = (
    Column("NAME", style="green"),
    Column("KIND"),
    Column("SNAPSHOT", style="yellow"),
    Column("MOVED"),
)


@command(example="mstore refs 'llama/*'")
def refs(
    session: Session,
    names: RefNames = (),
) -> None:
    """List refs and what they point at.

    Branches and tags; remote refs and candidates only if a pattern begins like them: 'remotes/*',
    'candidates/*'. Without a pattern, last lines tell how many of these there are.
    """
    from mstore.store.refs import CANDIDATE, DIRECTORIES, REMOTE

    with session.open_to_look() as store:
        found = store.refs(*names)
        removed = [one for one in store.reflog() if one.new is None] if not found else []
        others = () if names else tuple(store.ref_ids())

    def human(screen: Screen) -> None:
        if not found and not removed and not others:
            screen.command("no refs yet; next", "mstore add PATH --name REF")
        elif not found and removed:
            name = removed[0].name
            screen.line(f"no refs: all were removed, {name} last")
            screen.command("to restore it", f"mstore reset {name} '{name}@{{1}}'")
            screen.command("to list all that were removed", "mstore reflog")
        screen.table(
            COLUMNS, ((one.name, one.kind, _snapshot(one), when(one.time_ns)) for one in found)
        )
        lost = next((one.name for one in found if one.missing), None)
        # For an untrusted index, another command was already suggested.
        if lost is not None and not session.is_doubted:
            screen.command("missing: for what to do", "mstore fsck")
            screen.command("to remove it", f"mstore rm {lost}")
        for kind, noun in ((REMOTE, "remote ref"), (CANDIDATE, "candidate")):
            begin = f"{DIRECTORIES[kind]}/"
            count = sum(name.startswith(begin) for name in others)
            if count:
                screen.command(counted(count, noun), f"mstore refs '{begin}*'")

    session.output.emit({"refs": found}, ids=[one.name for one in found], human=human)


def _snapshot(ref: RefReport) -> str:
    if ref.missing:
        return f"{short(ref.snapshot)} (missing)"
    return f"{short(ref.snapshot)} (pinned)" if ref.pinned else short(ref.snapshot)
