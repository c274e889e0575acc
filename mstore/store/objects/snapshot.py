"""The snapshot record: an immutable commit."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import astuple

from mstore.blocks.packs import Kind
from mstore.checkpoint.origin import Origin
from mstore.store.objects.canonical import Count, IdBytes, Record, RecordLimits, too_long, too_many
from mstore.terms.ids import CoverageId, ManifestId, PlanId, SnapshotId

PREVIOUS = "previous"
BASE = "base"
EXPERT = "expert"
COMPANION = "companion"
ROLES = (PREVIOUS, BASE, EXPERT, COMPANION)

ADD = "add"
MERGE = "merge"
PREPARE = "prepare"
CAST = "cast"
ALIGN = "align"
EXTRACT = "extract"
COMBINE = "combine"
MADE = (ADD, MERGE, PREPARE, CAST, ALIGN, EXTRACT, COMBINE)
"""By what snapshots come to be."""
PLANNED = (MERGE, PREPARE)
"""What runs a plan."""


class Parent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An edge of the lineage; `role` is previous, base, expert or companion."""

    role: str
    snapshot: IdBytes

    def snapshot_id(self) -> SnapshotId:
        """The parent."""
        return SnapshotId(self.snapshot)


class SnapshotRecord(Record, frozen=True, array_like=True, tag="snapshot/1"):
    """Manifest, parents in the order of `ROLES`; by what it was made, from where, by whom, when.

    made: one of `MADE`. origin: set if it came from elsewhere. author: who made it, empty if nobody
    said. plan is set if it was made by one of `PLANNED`, and coverage too unless it is virtual:
    planned and not computed. time_ns: nanoseconds since the epoch, UTC. tool: name and version of
    the program that wrote it.
    """

    kind: ClassVar[Kind] = Kind.SNAPSHOT
    id_type: ClassVar[type[SnapshotId]] = SnapshotId

    manifest: IdBytes
    parents: tuple[Parent, ...]
    made: str
    origin: Origin | None
    author: str
    plan: IdBytes | None
    coverage: IdBytes | None
    message: str
    time_ns: Count
    tool: str

    def id(self) -> SnapshotId:
        return SnapshotId.of(self.encode())

    def of_role(self, role: str) -> list[SnapshotId]:
        """Return its parents of a role."""
        return [one.snapshot_id() for one in self.parents if one.role == role]

    def problem(self, limits: RecordLimits) -> str | None:
        roles = [parent.role for parent in self.parents]
        if not set(roles) <= set(ROLES):
            return "a parent without a known role"
        if roles != sorted(roles, key=ROLES.index):
            return "its parents are out of order"
        if roles.count(PREVIOUS) > 1 or roles.count(BASE) > 1:
            return "two parents of a role that has one"
        if self.made not in MADE:
            return "made by what is not known"
        if (self.plan is not None) != (self.made in PLANNED):
            return "a merge without a plan, or a plan of what was not merged"
        if self.coverage is not None and self.plan is None:
            return "coverage without a plan"
        origin = () if self.origin is None else astuple(self.origin)
        named = (*(("an origin", one) for one in origin), ("an author", self.author))
        for what, text in (*named, ("a tool", self.tool)):
            if (problem := too_long(what, text, limits.name_bytes)) is not None:
                return problem
        return too_many("parents", len(roles), limits.parents) or too_long(
            "a message", self.message, limits.text_bytes
        )

    def manifest_id(self) -> ManifestId:
        """Its content."""
        return ManifestId(self.manifest)

    def plan_id(self) -> PlanId | None:
        """The plan that was run, for a merge."""
        return None if self.plan is None else PlanId(self.plan)

    @property
    def is_virtual(self) -> bool:
        """Whether its merged tensors are computed on read."""
        return self.plan is not None and self.coverage is None

    def coverage_id(self) -> CoverageId | None:
        """Which experts contributed where, for a merge."""
        return None if self.coverage is None else CoverageId(self.coverage)
