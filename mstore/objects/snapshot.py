"""The snapshot record: an immutable commit."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from mstore.blocks.packs import Kind
from mstore.ids import CoverageId, ManifestId, PlanId, SnapshotId
from mstore.objects.canonical import Count, IdBytes, Record
from mstore.objects.limits import RecordLimits, too_long, too_many

PREVIOUS = "previous"
BASE = "base"
EXPERT = "expert"
ROLES = (PREVIOUS, BASE, EXPERT)
ADD = "add"
MERGE = "merge"


class Parent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An edge of the lineage; `role` is previous, base or expert."""

    role: str
    snapshot: IdBytes

    def snapshot_id(self) -> SnapshotId:
        """The parent."""
        return SnapshotId(self.snapshot)


class SnapshotRecord(Record, frozen=True, array_like=True, tag="snapshot/1"):
    """Manifest, parents in the order previous, base, experts; origin, message and time.

    origin: "add" or "merge". plan and coverage are set for merges; a merge without coverage is
    virtual: planned and not computed. time_ns: nanoseconds since the epoch, UTC. tool: name and
    version of the program that wrote it.
    """

    kind: ClassVar[Kind] = Kind.SNAPSHOT
    id_type: ClassVar[type[SnapshotId]] = SnapshotId

    manifest: IdBytes
    parents: tuple[Parent, ...]
    origin: str
    plan: IdBytes | None
    coverage: IdBytes | None
    message: str
    time_ns: Count
    tool: str

    def id(self) -> SnapshotId:
        return SnapshotId.of(self.encode())

    def problem(self, limits: RecordLimits) -> str | None:
        roles = [parent.role for parent in self.parents]
        if not set(roles) <= set(ROLES):
            return "a parent without a known role"
        if roles != sorted(roles, key=ROLES.index):
            return "its parents are out of order"
        if roles.count(PREVIOUS) > 1 or roles.count(BASE) > 1:
            return "two parents of a role that has one"
        if self.origin not in (ADD, MERGE):
            return "an unknown origin"
        if self.origin == ADD and self.plan is not None:
            return "a plan of what was not merged"
        if self.coverage is not None and self.plan is None:
            return "coverage without a plan"
        return (
            too_many("parents", len(roles), limits.parents)
            or too_long("a message", self.message, limits.text_bytes)
            or too_long("a tool", self.tool, limits.name_bytes)
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
