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

from mstore.terms.errors import BadRequest, MstoreError, Unavailable
from mstore.terms.phrases import Option, call, phrase
from mstore_fuse.options import MountOptions

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


_BY_FUSE = frozenset({Verify.ONCE, Verify.ALWAYS})
_BY_EROFS = frozenset({Verify.ONCE, Verify.NEVER})


def choose(
    driver: str, options: MountOptions, revision: str | None, *, foreground: bool
) -> tuple[Driver, ...]:
    """Return the drivers to try, in order. Raises BadRequest for what no driver can do."""
    wanted = _one_of(Driver, "driver", driver)
    checks = _one_of(Verify, "verify", options.verify)
    against = _against_erofs(checks, options, revision, foreground=foreground)
    if wanted is Driver.AUTO and against is None and checks in _BY_FUSE:
        return (Driver.EROFS, Driver.FUSE)
    if wanted is Driver.EROFS:
        if against is not None:
            raise BadRequest(against, hint=Option("driver", "fuse"))
        return (Driver.EROFS,)
    if checks not in _BY_FUSE:
        raise BadRequest(
            f"only driver erofs can mount without checking, not driver {wanted}",
            hint=Option("verify", "once"),
        )
    return (Driver.FUSE,)


def _against_erofs(
    checks: Verify, options: MountOptions, revision: str | None, *, foreground: bool
) -> str | None:
    """Return why EROFS cannot do it, if so."""
    if checks not in _BY_EROFS:
        return "the kernel reads packs itself, so driver erofs cannot check blocks at each read"
    if revision is None:
        return "driver erofs shows one snapshot, not the whole store"
    if options.follow:
        return "driver erofs shows one snapshot, and cannot follow a ref"
    if options.show_meta:
        return "driver erofs shows only the files of the snapshot"
    if foreground or options.log is not None:
        return "driver erofs has no process, which could stay in the foreground or write a log"
    return None


def _one_of(kind: type[Choice], name: str, value: str) -> Choice:
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(kind)
        what = f"{name} is one of {names}, not {value!r}"
        raise BadRequest(what, where=Option(name)) from error


def neither(erofs: MstoreError, fuse: MstoreError) -> Unavailable:
    """Return the error where no driver works."""
    return Unavailable(
        f"nothing can be mounted here: by EROFS, {erofs.what}; by FUSE, {fuse.what}",
        where=fuse.where,
        hint=WITHOUT_MOUNT,
    )
