"""What refs take at a remote, and what they share there."""

from __future__ import annotations

from collections import Counter

from mstore.blocks.location import Key
from mstore.remotes.layout import PackState
from mstore.remotes.needs import Needs, gather
from mstore.remotes.places import RemotePlaces
from mstore.remotes.records import AllRecords, lacks, placed
from mstore.remotes.state import Remote, RemoteState
from mstore.store.catalog import Catalog
from mstore.terms.ids import SnapshotId
from mstore.terms.report import Report


class RemoteRefUsage(Report, frozen=True):
    """What one ref takes at a remote."""

    name: str
    """the branch or tag"""
    bytes: int
    """bytes at rest that its snapshot needs"""
    own_bytes: int
    """the part that no other ref needs"""


class RemoteUsageReport(Report, frozen=True):
    """What the refs of a remote take."""

    remote: str
    """the remote's name"""
    url: str
    """its address"""
    refs: tuple[RemoteRefUsage, ...]
    """its branches and tags"""
    needed_bytes: int
    """bytes at rest that refs need; each once"""
    pack_bytes: int
    """size of all packs"""
    condemned_bytes: int
    """size of those that nothing needs any more, and that wait for a later gc"""


def usage(catalog: Catalog, remote: Remote) -> RemoteUsageReport:
    """Return what the refs of a remote take. Raises Corrupt, Unavailable."""
    remote.make_directory()
    return remote.with_state(lambda state: _usage(catalog, remote, state))


def _usage(catalog: Catalog, remote: Remote, state: RemoteState) -> RemoteUsageReport:
    places = RemotePlaces(remote, state)
    source = AllRecords(catalog, remote, places, state)
    refs = {
        name: _lengths(gather(source, [head], {head}.__contains__), remote, places)
        for name, row in state.refs().items()
        if row.snapshot is not None
        for head in [SnapshotId(row.snapshot)]
    }
    users = Counter(key for lengths in refs.values() for key in lengths)
    packs = [row for row in state.packs().values() if row.state <= PackState.CONDEMNED]
    remote.remember(state)
    return RemoteUsageReport(
        remote=remote.name,
        url=remote.where,
        refs=tuple(
            RemoteRefUsage(
                name,
                sum(lengths.values()),
                sum(length for key, length in lengths.items() if users[key] == 1),
            )
            for name, lengths in refs.items()
        ),
        needed_bytes=sum(
            {key: n for lengths in refs.values() for key, n in lengths.items()}.values()
        ),
        pack_bytes=sum(row.size for row in packs),
        condemned_bytes=sum(row.size for row in packs if row.state == PackState.CONDEMNED),
    )


def _lengths(needs: Needs, remote: Remote, places: RemotePlaces) -> dict[Key, int]:
    """Return the bytes at rest of each thing that is needed, and of bases."""
    lengths: dict[Key, int] = {}
    for (kind, id), at, _ in placed(needs, places):
        if at is None:
            raise lacks(remote, kind, id)
        lengths.setdefault((kind, id), at.stored_length)
    return lengths
