"""What push, fetch and pull share: how a transfer is limited, and how its report looks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from mstore_cli.errors import Interrupted, UsageError
from mstore_cli.output import Column, Screen, short
from mstore_cli.signers import states_of, trusted_signers
from mstore_cli.sizes import counted, format_seconds, format_size, parse_rate

if TYPE_CHECKING:
    from mstore import SnapshotId, Store
    from mstore.api.reports import FetchReport, MovedRef

COLUMNS = (Column("REF", style="green"), Column("SNAPSHOT", style="yellow"))
SIGNED = Column("SIGNED", sentence=True)

Signed = Mapping["SnapshotId", str]
"""What the signatures of snapshots are worth, in words; nothing of those without."""

LAZY: Final = "its weights come when something reads them"
"""What follows from a remote being lazy."""


def rate_of(text: str | None) -> int | None:
    """Parse the value of --limit-rate.  Raises BadRequest."""
    return None if text is None else parse_rate(text, option="--limit-rate")


@contextmanager
def resumable() -> Iterator[None]:
    """Say how to go on, if the transfer is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted("the same command goes on from what was transferred") from stop


def remote_for(store: Store, verb: str, name: str | None) -> str:
    """Return the remote that a line names; else the only one, else origin.

    verb: the command, for hints. Raises UsageError, NotFound.
    """
    from mstore.remotes.registry import ORIGIN
    from mstore.terms.errors import NotFound

    known = [one.name for one in store.remotes()]
    usual = known[0] if len(known) == 1 else ORIGIN if ORIGIN in known else None
    if name is not None:
        if usual is not None and name not in known and name in store.ref_ids():
            hint = f"mstore {verb} {usual} {shlex.quote(name)}"
            raise NotFound("is a ref; the remote stands before it", where=name, hint=hint)
        return name
    if usual is not None:
        return usual
    if not known:
        raise NotFound("the store has no remote", hint="mstore remote add NAME URL")
    raise UsageError(
        f"there are several remotes: {', '.join(known)}", hint=f"mstore {verb} {known[0]}"
    )


def require_names(verb: str, remote: str, refs: Sequence[str]) -> None:
    """Raise UsageError for a refspec of git, with what does the same here."""
    for ref in refs:
        if ":" in ref or ref.startswith("+"):
            what = f"{ref!r} is no name: a ref has the same name here and at a remote"
            raise UsageError(what, hint=_without_refspec(verb, remote, ref))


def _without_refspec(verb: str, remote: str, refspec: str) -> str:
    left, _, right = refspec.removeprefix("+").partition(":")
    begin = re.compile(r"^refs/(heads|tags|remotes/[^/]*)/")
    left, right = (shlex.quote(begin.sub("", one)) if one else "" for one in (left, right))
    name = right or left or "REF"
    if verb != "push":
        if left in ("", name):
            return f"mstore {verb} {remote} {name}"
        return f"mstore fetch {remote} {left}, then mstore reset {name} {remote}/{left}"
    if not left:
        return f"mstore push {remote} --delete {name}"
    option = " --force-with-lease" if refspec.startswith("+") else ""
    push = f"mstore push {remote} {name}{option}"
    return push if left == name else f"mstore reset {name} {left}, then {push}"


def removed_there(store: Store, report: FetchReport) -> list[str]:
    """Return the branches and tags that a remote removed, and that stay in this store."""
    gone = [one.name for one in report.fetched if one.new is None]
    own = {one.name for one in store.refs()} if gone else set()
    return [name for name in gone if name in own]


def show_removed(screen: Screen, remote: str, removed: Sequence[str]) -> None:
    """Print which refs of this store a remote removed, and how to do the same here."""
    if removed:
        screen.line(f"{remote} has no {', '.join(removed)} any more; here they stay")
        command = f"mstore rm {' '.join(map(shlex.quote, removed))}"
        screen.command("  to remove them here, too", command)


def signers_for(store: Store, path: Path | None) -> Mapping[bytes, str] | None:
    """Return the trusted keys for a transfer that may need them; None where it does not.

    path: what --signers names. Raises as `trusted_signers`.
    """
    is_needed = path is not None or store.config["require_signed"]
    return trusted_signers(path) if is_needed else None


def signed(store: Store, moved: Sequence[MovedRef], path: Path | None) -> Signed:
    """Return what the signatures of snapshots to which refs moved are worth.

    path: what --signers names.
    """
    ids = dict.fromkeys(one.new for one in moved if one.new is not None)
    found = [id for id in ids if store.signatures_of(id)]
    # Most have none, and it takes longer to find the user's list of signers.
    signers = trusted_signers(path) if found else {}
    return {id: states_of(store.signatures_of(id, signers=signers)) or "" for id in found}


def show_fetched(screen: Screen, report: FetchReport, signatures: Signed) -> None:
    """Print what a fetch or a pull brought."""
    if not (report.fetched or report.moved or report.snapshots):
        screen.line(f"nothing new at {report.remote}", style="green")
        return
    screen.line(f"fetched from {report.remote}, {report.url}", style="green")
    show_moved(screen, report.fetched, f"{report.remote}/", signatures)
    if report.moved:
        screen.line("moved here", style="green")
        show_moved(screen, report.moved, signatures=signatures)
    screen.fields(
        [
            ("snapshots", report.snapshots),
            ("left out", left_out(report.without_contents)),
            ("blocks", report.blocks),
            ("size", format_size(report.bytes_received)),
            ("time", format_seconds(report.seconds)),
        ]
    )


def left_out(ancestors: Sequence[SnapshotId]) -> str | None:
    """Return what was left out of snapshots of which only records moved; None for nothing."""
    return f"the contents of {counted(len(ancestors), 'ancestor')}" if ancestors else None


def show_moved(
    screen: Screen,
    moved: Sequence[MovedRef],
    begin: str = "",
    signatures: Signed = MappingProxyType({}),
) -> None:
    """Print a table of refs that moved; begin: what stands before their names."""
    rows = [
        (f"{begin}{one.name}", _move(one), signatures.get(one.new, "-") if one.new else "-")
        for one in moved
    ]
    if signatures:
        screen.table((*COLUMNS, SIGNED), rows)
    else:
        screen.table(COLUMNS, (row[:2] for row in rows))


def _move(one: MovedRef) -> str:
    if one.old is None:
        return f"{short(one.new)} (new)"
    return (
        f"{short(one.old)} (removed)" if one.new is None else f"{short(one.old)}..{short(one.new)}"
    )
