"""The driver EROFS, as far as it needs no numpy: `showing` does the work.

A mount has no process. Its source in the kernel's table is the path that its image had, in the
store's tmp/:

    <store>/tmp/<lease>/mstore:<revision>
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from mstore.terms.errors import BadRequest, Unavailable
from mstore.terms.phrases import Option
from mstore_fuse import mount_table
from mstore_fuse.driver import Driver, DriverName, MountInfo, MountRequest, Verify
from mstore_fuse.mount_table import TableEntry, escaped, unescaped

_TYPE = "erofs"
_SOURCE = re.compile(r"(?P<store>/.*)/tmp/[0-9a-f]{16}/mstore:(?P<revision>[^/]+)", re.DOTALL)


class Erofs(Driver):
    """Mounts that the kernel itself serves from packs."""

    name: ClassVar = DriverName.EROFS

    def refusal(self, request: MountRequest) -> BadRequest | None:
        what = _refused(request)
        return None if what is None else BadRequest(what, hint=Option("driver", "fuse"))

    def require(self) -> None:
        if os.geteuid() != 0:
            raise Unavailable(
                "only root may mount with driver erofs", hint="run as root, or use driver fuse"
            )

    def serve(self, request: MountRequest, answered: Callable[[], None]) -> None:
        from mstore_fuse.erofs import showing  # late: needs numpy, and programs start without

        assert request.revision is not None
        showing.show(
            request.store,
            request.revision,
            request.mountpoint,
            checked=request.verify != Verify.NEVER,
            everyone=request.allow_other,
        )
        try:
            answered()
        except BaseException:
            with suppress(OSError):
                mount_table.detach(request.mountpoint, lazy=True)
            raise

    def status(self, entry: TableEntry) -> MountInfo | None:
        found = _SOURCE.fullmatch(entry.source)
        if not entry.whole or entry.type != _TYPE or found is None:
            return None
        store, revision = Path(found["store"]), unescaped(found["revision"])
        # Only root mounts by the kernel, which always answers.
        return self._mounted(entry.mountpoint, store, revision, 0, None, True)


def _refused(request: MountRequest) -> str | None:
    if request.verify == Verify.ALWAYS:
        return "the kernel reads packs itself, so driver erofs cannot check blocks at each read"
    if request.folder is not None:
        return f"driver erofs shows one snapshot, not the {request.folder} of a store"
    if request.revision is None:
        return "driver erofs shows one snapshot, not the whole store"
    if request.follow:
        return "driver erofs shows one snapshot, and cannot follow a ref"
    if request.show_meta:
        return "driver erofs shows only the files of the snapshot"
    if request.foreground or request.log is not None:
        return "driver erofs has no process, which could stay in the foreground or write a log"
    return None


def image_name(revision: str) -> str:
    """Return the name of the image of a mount of this revision."""
    return f"mstore:{escaped(revision, also='/')}"
