"""Ways to mount, and what each checks.

driver   shows                     blocks are checked            runs
fuse     anything                  at first read (`once`)        a process for each mount
erofs    one snapshot stored raw   when mounting (`once`),       nothing: the kernel reads the
         (root, Linux 6.12)        or not at all (`never`)       packs
auto     erofs where it can, else fuse
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from mstore.errors import BadRequest, MstoreError, Unavailable
from mstore.phrases import Option, call, phrase

Choice = TypeVar("Choice", bound=StrEnum)

WITHOUT_MOUNT = phrase(
    "{checkout} writes the same files (by reflink, on XFS and btrfs, they share the store's "
    "space), and in Python store[REF].load() and .safe_open() read tensors without files",
    checkout=call("checkout", "REF", "DIR"),
)
"""The hint where nothing can be mounted."""


class Driver(StrEnum):
    """What serves a mount."""

    FUSE = "fuse"
    EROFS = "erofs"
    AUTO = "auto"


class Verify(StrEnum):
    """When blocks are checked against their ids.

    once: each block, before its bytes are shown. never: not at all; a damaged pack shows wrong
    bytes. always: at each read of a pack.
    """

    ONCE = "once"
    NEVER = "never"
    ALWAYS = "always"


_BY_FUSE = frozenset({Verify.ONCE})
_BY_EROFS = frozenset({Verify.ONCE, Verify.NEVER})


def choose(
    driver: str, verify: str, revision: str | None, *, foreground: bool
) -> tuple[tuple[Driver, ...], Verify]:
    """Return the drivers to try, in order, and what they shall check.

    Raises BadRequest for what no driver can do.
    """
    wanted, checks = _one_of(Driver, "driver", driver), _one_of(Verify, "verify", verify)
    against = _against_erofs(checks, revision, foreground=foreground)
    if wanted is Driver.EROFS and against is not None:
        raise BadRequest(against, hint=Option("driver", "fuse"))
    if wanted is Driver.AUTO and against is None:
        return (Driver.EROFS, Driver.FUSE), checks
    if wanted is not Driver.EROFS:
        if checks not in _BY_FUSE and wanted is Driver.FUSE:
            raise BadRequest(
                f"driver fuse checks blocks {', '.join(sorted(_BY_FUSE))}, not {checks}",
                hint=Option("verify", "once"),
            )
        return (Driver.FUSE,), checks
    return (Driver.EROFS,), checks


def _against_erofs(checks: Verify, revision: str | None, *, foreground: bool) -> str | None:
    """Return why EROFS cannot do it, if so."""
    if checks not in _BY_EROFS:
        return "the kernel reads packs itself, so driver erofs cannot check blocks at each read"
    if revision is None:
        return "driver erofs shows one snapshot, not the whole store"
    if foreground:
        return "driver erofs has no process that could stay in the foreground"
    return None


def _one_of(kind: type[Choice], name: str, value: str) -> Choice:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(kind)
        raise BadRequest(f"{name} is one of {names}, not {value!r}") from error


def neither(erofs: MstoreError, fuse: MstoreError) -> Unavailable:
    """Return the error where no driver works."""
    return Unavailable(
        f"nothing can be mounted here: by EROFS, {erofs.what}; by FUSE, {fuse.what}",
        where=fuse.where,
        hint=WITHOUT_MOUNT,
    )
