"""`mstore drop`: forget local copies of what a lazy remote has."""

from __future__ import annotations

from typing import Annotated

from mstore_cli import completion
from mstore_cli.command import command
from mstore_cli.options import Argument, Option
from mstore_cli.output import Screen, short
from mstore_cli.session import Session
from mstore_cli.sizes import counted, format_size


@command(
    decodes=True,
    example="mstore drop llama/base llama/math",
    failure="no lazy remote has it, or another error; nothing was dropped",
)
def drop(
    session: Session,
    refs: Annotated[
        tuple[str, ...],
        Argument(metavar="[REF]...", help="Snapshots to drop.", shell_complete=completion.named),
    ] = (),
    every: Annotated[
        bool, Option("--all", help="All that branches and tags name and the remote has.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would be dropped.")] = False,
) -> None:
    """Forget local copies of what a lazy remote has.

    The snapshots stay, and reads go to the remote again. Blocks stay that another snapshot needs
    which the remote does not have, or a difference that stays. `mstore gc` then frees the space.
    """
    with session.open() as store:
        report = store.drop(refs, every=every, dry_run=dry_run)
        session.settled()

    def human(screen: Screen) -> None:
        verb = "would drop" if report.dry_run else "dropped"
        what = f"{counted(report.blocks, 'block')}, {format_size(report.bytes)}"
        of = counted(len(report.snapshots), "snapshot")
        screen.line(f"{verb} {what} of {of}", style="green")
        kept = counted(report.kept_blocks, "block") if report.kept_blocks else None
        only_here = ", ".join(map(short, report.only_here))
        screen.fields([("kept", kept), ("at no lazy remote", only_here or None)])
        if report.kept_blocks:
            screen.advice(
                "what stays is needed by something that the remote does not have: a snapshot that "
                "was not pushed, or one that only the reflog keeps (mstore gc --reflog-days 0)"
            )
        if report.blocks and not report.dry_run:
            screen.command("to free the space", "mstore gc")

    session.output.emit(report, ids=list(report.snapshots), human=human)
