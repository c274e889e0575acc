"""Revisions: how a person names a snapshot.

NAME          a branch or tag; another ref by its name in full
REMOTE/NAME   where no branch or tag has that name: the ref remotes/REMOTE/NAME
PREFIX        at least four hex digits of a SnapshotId
MANIFEST      a ManifestId in full: the newest snapshot with that content
REV~N         N steps along the first parent (parents are in the order previous, base, experts)
NAME@{N}      where the ref pointed N moves ago; @{0} is now
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from mstore.blocks.index import Index
from mstore.blocks.lmdb_types import IndexTransaction
from mstore.blocks.schema import PLANS
from mstore.store import listing, refs
from mstore.store.objects.snapshot import SnapshotRecord
from mstore.store.refs import refs_in
from mstore.terms.errors import BadName, BadRequest, NotFound, did_you_mean
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import Text, call, joined, phrase

_SUFFIX = re.compile(r"(?P<name>.+?)(?:@\{(?P<back>[0-9]{1,9})\})?(?P<steps>(?:~[0-9]{0,9})*)")
_ODD_SUFFIX = re.compile(r".(~|@\{)")
MAX_LENGTH = 1000
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_TOO_SHORT = re.compile(r"[0-9a-f]{1,3}")
_HINT: Final = phrase(
    "{refs} lists the names, {log} the snapshots", refs=call("refs"), log=call("log")
)


class Revision(msgspec.Struct, frozen=True):
    """A parsed revision: a name or id prefix, a reflog position, steps to the first parent."""

    name: str
    back: int | None
    steps: int


def parse(text: str) -> Revision:
    """Split a revision into its parts. Raises BadName, and BadRequest if it is not text."""
    if not isinstance(text, str):
        raise BadRequest(
            f"a revision is text, a SnapshotId or a Snapshot, not {type(text).__name__}"
        )
    found = _SUFFIX.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None:
        raise BadName(f"{text[:MAX_LENGTH]!r} does not name a snapshot", hint=_HINT)
    steps = sum(int(step or "1") for step in found["steps"].split("~")[1:])
    back = None if found["back"] is None else int(found["back"])
    return Revision(found["name"], back, steps)


def start(index: Index, transaction: IndexTransaction, revision: Revision) -> SnapshotId:
    """Resolve name and reflog position.  Raises NotFound or BadName (ambiguous prefix)."""
    if revision.back is not None:
        return _from_reflog(index, transaction, revision)
    ref = refs_in(index, transaction).meant(revision.name)
    if ref is not None:
        return ref.snapshot_id()
    is_prefix = _PREFIX.fullmatch(revision.name) is not None
    ids = listing.with_prefix(index, transaction, revision.name) if is_prefix else []
    if not ids and is_prefix and any(index.keys_with(transaction, PLANS, revision.name)):
        raise NotFound(
            "no such ref or snapshot",
            where=revision.name,
            hint=phrase(
                "this is a plan\n{merge} runs it\n{plans} lists all",
                merge=call("merge", plan=revision.name, name="REF"),
                plans=call("plans"),
            ),
        )
    if not ids:
        if refs_in(index, transaction).removed(revision.name) is not None:
            back = f"{revision.name}@{{1}}"
            raise NotFound(
                "no such ref: it was removed",
                where=revision.name,
                hint=call("reset", revision.name, back),
            )
        hint: Text | None
        if ":" in revision.name:
            hint = "REF:MODEL names one model, and this takes a whole snapshot: REF"
        elif _ODD_SUFFIX.search(revision.name):
            hint = "REF~N and REF@{N} take a whole number"
        else:
            hint = did_you_mean(revision.name, refs_in(index, transaction).names(), _HINT)
        if _TOO_SHORT.fullmatch(revision.name):
            hint = joined("the beginning of an id has at least 4 digits", hint)
        raise NotFound("no such ref or snapshot", where=revision.name, hint=hint)
    if len(ids) > 1:
        listed = ", ".join(id.short for id in ids[:5])
        raise BadName(f"{revision.name!r} is the prefix of several snapshots: {listed}", hint=_HINT)
    return ids[0]


def _from_reflog(index: Index, transaction: IndexTransaction, revision: Revision) -> SnapshotId:
    moves = refs_in(index, transaction).reflog(revision.name)
    moves = moves or refs_in(index, transaction).reflog(refs.of_remote(revision.name))
    assert revision.back is not None
    if not moves:
        raise refs_in(index, transaction).missing(revision.name)
    if revision.back >= len(moves):
        raise NotFound(
            f"the reflog has only {len(moves)} entries",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    new = moves[-1 - revision.back].new
    if new is None:
        raise NotFound(
            "the ref was removed at that move",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    if not listing.is_listed(index, transaction, SnapshotId(new)):
        raise NotFound(
            f"snapshot {SnapshotId(new).short}, where the ref was then, was collected",
            where=f"{revision.name}@{{{revision.back}}}",
            hint=call("reflog", revision.name),
        )
    return SnapshotId(new)


def walk_back(
    snapshot: SnapshotId, steps: int, load: Callable[[SnapshotId], SnapshotRecord], text: str
) -> SnapshotId:
    """Return the `steps`-th ancestor along first parents. Raises NotFound if there are fewer."""
    for _ in range(steps):
        parents = load(snapshot).parents
        if not parents:
            raise NotFound(
                "the lineage ends before that", where=text, hint=call("log", text.partition("~")[0])
            )
        snapshot = parents[0].snapshot_id()
    return snapshot
