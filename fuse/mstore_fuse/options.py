"""How a mount is made: the options that cross from the caller to the daemon's command line.

Owns their names, defaults and checks. Does not own what they do.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import msgspec
from msgspec.structs import replace

from mstore.terms.errors import BadRequest, StorageFailed, Unavailable
from mstore.terms.phrases import Option

FUSE_CONF = Path("/etc/fuse.conf")
"""Where the administrator lets users show their mounts to others (mount.fuse3(8))."""

_ALLOWED_LINE = "user_allow_other"


class MountOptions(msgspec.Struct, frozen=True):
    """How one mount behaves.

    cache_bytes: the most decoded blocks to keep, in bytes; None is the library's default.
    verify: "once" or "always", see `Store.open`.
    """

    allow_other: bool = False
    log: Path | None = None
    cache_bytes: int | None = None
    verify: str = "once"
    follow: bool = False
    show_meta: bool = False

    def checked(self, revision: str | None, mountpoint: Path) -> MountOptions:
        """Return these options with an absolute `log`, or raise what is wrong with them.

        Raises BadRequest, StorageFailed (the log cannot be written), Unavailable (this user may not
        let others in).
        """
        if self.follow and revision is None:
            what = "a mount of the whole store follows all its refs anyway"
            raise BadRequest(what, where=Option("follow"))
        if self.allow_other:
            _require_allowed()
        log = None if self.log is None else Path(os.path.realpath(self.log))
        if log is not None:
            if log.is_relative_to(mountpoint):
                # The daemon would wait for itself.
                raise BadRequest(f"the log lies in the mount: {log}", where=Option("log"))
            _require_writable(log)
        return replace(self, log=log)

    def arguments(self) -> list[str]:
        """Return them as words of the daemon's command line."""
        words = [f"--verify={self.verify}"]
        if self.log is not None:
            words.append(f"--log={self.log}")
        if self.cache_bytes is not None:
            words.append(f"--cache-bytes={self.cache_bytes}")
        switches = {"allow-other": self.allow_other, "follow": self.follow}
        switches["show-meta"] = self.show_meta
        return words + [f"--{name}" for name, is_on in switches.items() if is_on]

    @staticmethod
    def declare(parser: ArgumentParser) -> None:
        """Add the words of `arguments` to the daemon's parser."""
        parser.add_argument("--verify", default="once")
        parser.add_argument("--log", type=Path, metavar="FILE")
        parser.add_argument("--cache-bytes", type=int, metavar="N")
        for name in ("--allow-other", "--follow", "--show-meta"):
            parser.add_argument(name, action="store_true")

    @classmethod
    def of(cls, given: Namespace) -> MountOptions:
        """Return what the daemon's command line says."""
        return cls(
            allow_other=given.allow_other,
            log=given.log,
            cache_bytes=given.cache_bytes,
            verify=given.verify,
            follow=given.follow,
            show_meta=given.show_meta,
        )


def _require_allowed() -> None:
    """Raise Unavailable unless this user may let other users into a mount."""
    if os.geteuid() == 0:
        return
    try:
        lines = FUSE_CONF.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if not any(line.strip() == _ALLOWED_LINE for line in lines):
        raise Unavailable(
            "only root may let other users into a mount, unless the administrator allows it",
            where=Option("allow_other"),
            hint=f"add the line {_ALLOWED_LINE} to {FUSE_CONF}",
        )


def _require_writable(log: Path) -> None:
    try:
        os.close(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise StorageFailed(
            f"the log cannot be written: {error.strerror}", where=str(log), errno=error.errno
        ) from error
