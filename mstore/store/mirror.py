"""The text mirror of the refs: for people, and for recovery when the index is wrong.

    mstore refs 2
    generation <decimal>
    <kind> <SnapshotId> <name>       a line a ref, sorted by name
    blake3 <64 hex digits>           (`mstore.store.sealed_text`)

`refs/mirror` is written after each commit. So it states the refs of that commit or, after a crash,
of an earlier one; never of a later one. Up to KEPT earlier mirrors with other refs stay as
`refs/mirror.<generation>`, and a damaged one as `refs/mirror.damaged`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from mstore import fs
from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.store import refs, sealed_text
from mstore.store.layout import Layout
from mstore.store.refs import Ref, refs_in
from mstore.terms.errors import BadName, Corrupt, StorageFailed
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import call

KEPT: Final = 8
_HEAD: Final = "mstore refs 2"


class Mirror(msgspec.Struct, frozen=True):
    """The content of one mirror: the refs as they were when `generation` was published."""

    generation: int
    refs: Mapping[str, Ref]


def write(layout: Layout, index: Index) -> None:
    """Write the mirror from all refs of the index, if its content changes.

    Call with the writer lock held. Never overwrites a later generation. Raises Corrupt if refs of
    the index are unreadable, and leaves the mirror alone: it may have what a damaged row said.
    Raises StorageFailed.
    """
    with index.env.read() as transaction:
        generation = index.generation(transaction)
        named = sorted(refs_in(index, transaction).walk(), key=lambda one: one[0].encode())
    lines = [_line(name, ref) for name, ref in named]
    _replace(layout, sealed_text.read(layout.mirror), generation, lines)


def follow(layout: Layout, index: Index, moved: Collection[str]) -> None:
    """Update the mirror after a commit that moved these refs and no others.

    If the mirror is of the preceding commit, changes only the lines of these refs: reads no other
    ref, so a damaged row cannot enter the mirror. Otherwise writes the whole mirror. Call it like
    `write`; raises like `write`.
    """
    before = sealed_text.read(layout.mirror)
    with index.env.read() as transaction:
        generation = index.generation(transaction)
        now = {name: refs_in(index, transaction).get(name) for name in moved}
        count = index.count(transaction, "refs")
    lines = [] if before is None else _lines_of(layout.mirror, before, generation - 1)
    for name, ref in now.items():
        key = name.encode()
        at = bisect_left(lines, key, key=_name_in)
        end = at + (at < len(lines) and _name_in(lines[at]) == key)
        lines[at:end] = [] if ref is None else [_line(name, ref)]
    if before is None or len(lines) != count:
        write(layout, index)
    else:
        _replace(layout, before, generation, lines)


def _line(name: str, ref: Ref) -> bytes:
    return f"{ref.kind} {ref.snapshot_id()} {name}\n".encode()


def _name_in(line: bytes) -> bytes:
    return line[:-1].split(b" ", 2)[2]


def _lines_of(path: Path, data: bytes, generation: int) -> list[bytes]:
    """Return the ref lines of a mirror of this generation; none if it is of another."""
    with suppress(Corrupt):
        told, lines = _decoded(path, data)
        if told == generation:
            return lines
    return []


def _decoded(path: Path, data: bytes) -> tuple[int, list[bytes]]:
    return sealed_text.decode(path, data, _HEAD, "ref mirror")


def _replace(layout: Layout, before: bytes | None, generation: int, lines: list[bytes]) -> None:
    """Replace the mirror by one with these lines, which are sorted by name."""
    data = sealed_text.encode(_HEAD, generation, lines)
    if before == data:
        return
    if before is None and fs.make_directory(layout.mirror.parent, exist_ok=True):
        fs.sync_directory(layout.root)
    if before is not None:
        _keep(layout, before, lines, generation)
    fs.replace_file(layout.mirror, data, staging=layout.tmp)
    sealed_text.drop_old(layout.mirror, KEPT)


def _keep(layout: Layout, before: bytes, lines: list[bytes], generation: int) -> None:
    """Keep the old mirror under another name, if its refs differ."""
    try:
        old, old_lines = _decoded(layout.mirror, before)
    except Corrupt:
        target = layout.mirror.with_name("mirror.damaged")
        with suppress(StorageFailed):
            fs.unlink(target, missing_ok=True)
    else:
        if old > generation:
            raise Corrupt(
                f"the mirror of the refs is of generation {old}, the index of {generation}",
                where=str(layout.mirror),
                hint=call("reindex"),
            )
        if old_lines == lines:
            return
        target = layout.mirror.with_name(f"mirror.{old}")
    # If the filesystem has no hard links, keep one mirror less.
    with suppress(StorageFailed):
        fs.link(layout.mirror, target)


def read(layout: Layout) -> Mirror:
    """Read the mirror. Raises Corrupt, StorageFailed."""
    return read_file(layout.mirror)


def read_file(path: Path) -> Mirror:
    """Read the mirror at this path. Raises Corrupt (also if it is missing), StorageFailed."""
    told, lines = sealed_text.read_lines(path, _HEAD, "ref mirror")
    return Mirror(told, _refs(path, lines))


def generation(layout: Layout) -> int | None:
    """Return the mirror's generation; None if it is missing or damaged."""
    with suppress(Corrupt):
        return sealed_text.read_lines(layout.mirror, _HEAD, "ref mirror")[0]
    return None


def replaced_by(layout: Layout) -> int:
    """Return the first generation by which the latest kept mirror can have been replaced; else 0.

    Reads file names only. A mirror is kept after the commit of a later generation, so that an index
    of the kept one's generation is not the newest, even if `mirror` is of this generation, too.
    """
    return max((number + 1 for number, _ in sealed_text.kept(layout.mirror)), default=0)


def earlier(layout: Layout) -> list[tuple[Path, Mirror]]:
    """Return the replaced mirrors that are readable, newest first."""
    found = []
    for _, path in sealed_text.kept(layout.mirror):
        with suppress(Corrupt):
            found.append((path, read_file(path)))
    return found


def _refs(path: Path, lines: list[bytes]) -> dict[str, Ref]:
    found = {}
    for whole in lines:
        line = whole[:-1].decode(errors="replace")
        kind, _, rest = line.partition(" ")
        id, _, name = rest.partition(" ")
        try:
            refs.check(name, kind)
            found[name] = Ref(kind, SnapshotId.parse(id))
        except BadName as error:
            raise Corrupt(f"not a line of a ref mirror: {line!r}", where=str(path)) from error
    return found


def differences(mirror: Mirror, index: Index, transaction: IndexTransaction) -> list[str]:
    """Return the names that differ between mirror and index without an explanation.

    The mirror may be some commits behind: then the index's reflog has the moves since. Raises
    Corrupt if rows of the index are unreadable.
    """
    named = dict(refs_in(index, transaction).walk())
    behind = mirror.generation < index.generation(transaction)
    found = []
    for name in sorted(named.keys() | mirror.refs.keys()):
        now = named.get(name)
        if now == mirror.refs.get(name):
            continue
        last = refs_in(index, transaction).reflog(name)[-1:]
        since = bool(last) and last[0].generation > mirror.generation
        if not (behind and since and last[0].new == (None if now is None else now.snapshot)):
            found.append(name)
    return found
