"""`mstore refs`: branches, tags and remote refs."""

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

    Branches, tags and remote refs; candidates only if a pattern begins like them: 'candidates/*'.
    Without a pattern, a last line tells how many candidates there are.
    """
    from mstore.store.refs import is_candidate

    with session.open_to_look() as store:
        found = store.refs(*names)
        removed = [one for one in store.reflog() if one.new is None] if not found else []
        candidates = 0 if names else sum(map(is_candidate, store.ref_ids()))

    def human(screen: Screen) -> None:
        if not found and not removed:
            screen.command("no refs yet; next", "mstore add PATH --name REF")
        elif not found:
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
        if candidates:
            screen.command(counted(candidates, "candidate"), "mstore refs 'candidates/*'")

    session.output.emit({"refs": found}, ids=[one.name for one in found], human=human)


def _snapshot(ref: RefReport) -> str:
    if ref.missing:
        return f"{short(ref.snapshot)} (missing)"
    return f"{short(ref.snapshot)} (pinned)" if ref.pinned else short(ref.snapshot)
