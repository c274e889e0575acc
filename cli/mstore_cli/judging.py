"""The common part of commands that judge snapshots: their options, and how a command sees files."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mstore_cli import user_config
from mstore_cli.errors import remarks
from mstore_cli.options import Option
from mstore_cli.output import Mode
from mstore_cli.session import Session, own_endpoints

if TYPE_CHECKING:
    from mstore.judging.evaluation import Show
    from mstore.terms.ids import SnapshotId

FAILED = 3
"""The exit status where the command judged, and says no."""
_STDERR = 2
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


def parse_duration(text: str) -> str:
    """Refuse what is no duration, for an option; the text stays as it is."""
    seconds_of(text)
    return text


def seconds_of(text: str) -> float:
    """Return the seconds of a duration: 90, 90s, 30m, 2h or 1d.  Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"a time such as 90s, 30m or 2h, not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


Timeout = Annotated[
    str | None,
    Option(
        "--timeout",
        metavar="TIME",
        type=parse_duration,
        help="End the command after this time: 90s, 30m, 2h [default: 1d].",
    ),
]
Checkout = Annotated[
    bool,
    Option(
        "--checkout",
        help="Show the snapshot by a checkout in $TMPDIR, not by a mount; also done where there "
        "is no FUSE.",
    ),
]


def show_of(session: Session, *, checkout: bool) -> Show | None:
    """Return what shows snapshots to commands: a mount, or None for a checkout.

    Says so where there is no FUSE.
    """
    from mstore.terms.errors import Unavailable
    from mstore_fuse.fuse_driver import require_fuse
    from mstore_fuse.mounts import shown

    if checkout:
        return None
    try:
        require_fuse()
    except Unavailable as missing:
        remarks([f"checked out, as nothing can be mounted: {missing.what}"])
        return None
    store = session.store_path()
    endpoints, cache_size = own_endpoints(), user_config.cache_size()

    def show(snapshot: SnapshotId) -> AbstractContextManager[Path]:
        return shown(store, str(snapshot), endpoints=endpoints, cache_size=cache_size)

    return show


def output_of(session: Session) -> int | None:
    """Return the descriptor that gets what a command prints: standard error, if people read."""
    if session.output.mode is not Mode.HUMAN:
        return None
    try:
        os.fstat(_STDERR)
    except OSError:
        return None
    return _STDERR
