"""The interface of a driver: one way to mount.

driver   shows                     blocks are checked            runs
fuse     anything                  at first read (`once`), or    a process for each mount
                                   at each (`always`)
erofs    one snapshot stored raw   when mounting (`once`),       nothing: the kernel reads the
         (root, Linux 6.12)        or not at all (`never`)       packs
auto     erofs where it can, else fuse

`mounts` has the table of drivers and chooses; nothing else asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from mstore.terms.errors import BadRequest
from mstore_fuse import mount_table
from mstore_fuse.mount_table import TableEntry

EVERY: Final = "*"
"""The pattern of all branches and tags."""


class DriverName(StrEnum):
    """What a caller may ask for."""

    FUSE = "fuse"
    EROFS = "erofs"
    AUTO = "auto"


class FolderName(StrEnum):
    """What kind of models a folder shows, in the form in which programs look for them."""

    ADAPTERS = "adapters"
    MODELS = "models"


class Verify(StrEnum):
    """When blocks are checked against their ids.

    once: each block, before its bytes are shown. never: not at all; a damaged pack shows wrong
    bytes. always: at each read of a pack.
    """

    ONCE = "once"
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class MountRequest:
    """What to mount, where and how; the fields are the arguments of `mounts.mount`.

    revision: None for the whole store; a pattern of refs, for a folder.
    """

    store: Path
    revision: str | None
    mountpoint: Path
    driver: DriverName = DriverName.FUSE
    foreground: bool = False
    timeout: float = 30.0
    allow_other: bool = False
    log: Path | None = None
    cache_bytes: int | None = None
    verify: str = Verify.ONCE
    follow: bool = False
    folder: FolderName | None = None
    served_base: str | None = None
    show_meta: bool = False
    endpoints: tuple[str, ...] = ()
    cache_size: int | None = None
    keep_again: bool = False

    @property
    def shown(self) -> str | None:
        """What is shown, as `MountInfo.revision` tells it."""
        return self.revision if self.folder is None else f"{self.folder} {self.revision}"


class MountInfo(msgspec.Struct, frozen=True):
    """One mount.

    A mount that is not `alive` crashed: reading it fails with ENOTCONN until it is unmounted.
    `user` and root may unmount it.
    """

    mountpoint: Path
    """the directory"""
    store: Path
    """the store"""
    revision: str | None
    """what is shown; `adapters PATTERN`, `models PATTERN`: of these refs; None: the whole store"""
    pid: int | None
    """the process that serves it; None if that has ended, or if the kernel does"""
    alive: bool
    """whether it answers; a dead one is cleared by `mstore unmount`"""
    user: int
    """the number of the user who mounted it"""
    driver: str
    """what serves it: `fuse`, or `erofs`, the kernel"""


class Driver(ABC):
    """One way to mount. Keeps no state: the kernel's table of mounts has it."""

    name: ClassVar[DriverName]

    @abstractmethod
    def refusal(self, request: MountRequest) -> BadRequest | None:
        """Return why this driver can never do what is asked for; None if it can."""

    @abstractmethod
    def require(self) -> None:
        """Raise Unavailable, naming what to change, if this machine or user cannot mount so."""

    @abstractmethod
    def serve(self, request: MountRequest, answered: Callable[[], None]) -> None:
        """Mount at an empty directory, and call `answered` once the mount answers.

        Returns then; in the foreground, when the mount has ended. Nothing stays mounted if this or
        `answered` raises. Raises Unavailable and Incompatible if another driver may succeed.
        """

    @abstractmethod
    def status(self, entry: TableEntry) -> MountInfo | None:
        """Return what a mount of this driver shows; None for any other, or for a part of one."""

    def _mounted(
        self, at: Path, store: Path, revision: str | None, user: int, pid: int | None, alive: bool
    ) -> MountInfo:
        return MountInfo(at, store, revision, pid, alive, user, self.name.value)

    def stop(self, mounted: MountInfo, *, lazy: bool) -> None:
        """Unmount; `lazy` keeps open files readable. Raises OSError as `mount_table.detach`."""
        mount_table.detach(mounted.mountpoint, lazy=lazy or not mounted.alive)
