"""Where things lie in a store directory, and its one-line format file.

STORE/
  format      "mstore 1 <uuid> <block size>"
  lock        held (flock) by the one writer that is publishing
  packs/      sealed packs
  index/      LMDB: where things are, refs, reflog, leases
  stats/      LMDB: statistics of deltas, can be thrown away
  refs/       text mirror of the refs
  tmp/        one directory a running operation; garbage when its owner is gone
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from mstore import fs
from mstore.errors import BadRequest, Conflict, Corrupt, Incompatible, NotFound

FORMAT_VERSION = 1
MIN_BLOCK_SIZE = 1 << 16
MAX_BLOCK_SIZE = 1 << 24
DEFAULT_BLOCK_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths and fixed facts of one store."""

    root: Path
    uuid: uuid.UUID
    block_size: int

    @property
    def packs(self) -> Path:
        """Sealed packs, two hex digits a directory."""
        return self.root / "packs"

    @property
    def index(self) -> Path:
        """The LMDB index."""
        return self.root / "index"

    @property
    def stats(self) -> Path:
        """The LMDB environment of statistics."""
        return self.root / "stats"

    @property
    def mirror(self) -> Path:
        """The text mirror of the refs."""
        return self.root / "refs" / "mirror"

    @property
    def tmp(self) -> Path:
        """What is being written."""
        return self.root / "tmp"

    @property
    def lock(self) -> Path:
        """The writer lock."""
        return self.root / "lock"


def _format_line(layout: Layout) -> str:
    return f"mstore {FORMAT_VERSION} {layout.uuid} {layout.block_size}\n"


def create(root: Path, block_size: int) -> Layout:
    """Lay out a new store.  The format file comes last: without it there is no store.

    Raises Conflict if `root` holds a store or anything else, BadRequest for a bad block size,
    Incompatible on a network filesystem.
    """
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise BadRequest(
            f"block size {block_size} is not a power of two between 64 KiB and 16 MiB",
            hint="mstore init --block-size 1MiB",
        )
    if (root / "format").exists():
        raise Conflict(
            "there is a store already", where=str(root), hint=f"mstore --store {root} stats"
        )
    fs.require_local(root)
    fs.require_empty(root)
    layout = Layout(root, uuid.uuid4(), block_size)
    fs.make_directories(root)
    fs.make_directory(layout.packs, exist_ok=True)
    fs.make_directory(layout.index, exist_ok=True)
    fs.make_directory(layout.stats, exist_ok=True)
    fs.make_directory(layout.mirror.parent, exist_ok=True)
    fs.make_directory(layout.tmp, mode=0o700, exist_ok=True)
    fs.replace_text(root / "format", _format_line(layout))
    fs.sync_directory(root.parent)
    return layout


def locate(root: Path) -> Layout:
    """Read the format file.  Raises NotFound, Incompatible (newer version, network), Corrupt."""
    path = root / "format"
    try:
        with fs.translated(path), path.open("rb") as file:
            line = file.read(4096)
    except Exception as error:
        if not path.exists():
            raise NotFound(
                "no store here", where=str(root), hint=f"mstore --store {root} init"
            ) from error
        raise
    fields = line.decode("ascii", "replace").split()
    if len(fields) < 2 or fields[0] != "mstore" or not fields[1].isdigit():
        raise Corrupt("not a format file", where=str(path))
    if int(fields[1]) != FORMAT_VERSION:
        raise Incompatible(
            f"store format {fields[1]}; this mstore reads format {FORMAT_VERSION}",
            where=str(root),
            hint="pip install -U mstore",
        )
    try:
        layout = Layout(root, uuid.UUID(fields[2]), int(fields[3]))
    except (IndexError, ValueError) as error:
        raise Corrupt("not a format file", where=str(path)) from error
    if line.decode("ascii", "replace") != _format_line(layout):
        raise Corrupt("not a format file", where=str(path))
    fs.require_local(root)
    return layout
