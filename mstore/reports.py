"""What the calls of the public face return: frozen values, ready to print or to turn into JSON.

Field names are the JSON keys of the command line and are stable.  Sizes are bytes, times are
nanoseconds since the epoch (`*_ns`) or seconds of duration (`seconds`), ids are their types
from `mstore.ids`.  Nothing here touches a disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstore.ids import ManifestId, PlanId, SnapshotId


@dataclass(frozen=True, slots=True)
class Progress:
    """One tick of a long call: `done` of `total` bytes in the named phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AddReport:
    """What `add` stored.  `new_snapshot` is False where the ref already held these bytes."""

    name: str
    snapshot: SnapshotId
    manifest: ManifestId
    new_snapshot: bool
    files: int
    tensors: int
    plain_bytes: int
    bytes_written: int
    blocks_total: int
    blocks_new: int
    blocks_equal_base: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan's identity, costs and bounds.

    `error_bound` is certified: ||merged - full-read merge|| / ||base|| before rounding to the
    output dtype; None where the method has none.  `error_estimate` is only that.
    """

    plan: PlanId
    method: str
    base: str
    experts: tuple[tuple[str, float], ...]
    parameters: dict[str, float | int | bool]
    budget_bytes: int | None
    full_expert_bytes: int
    planned_expert_bytes: int
    analyze_bytes_read: int
    blocks_total: int
    blocks_equal_base: int
    blocks_shared: int
    blocks_below_threshold: int
    blocks_selected: int
    blocks_omitted: int
    error_bound: float | None
    error_estimate: float | None
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge read, wrote and published."""

    name: str
    plan: PlanId
    snapshot: SnapshotId
    manifest: ManifestId
    new_snapshot: bool
    method: str
    budget_bytes: int | None
    full_expert_bytes: int
    planned_expert_bytes: int
    expert_bytes_read: int
    analyze_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    blocks_total: int
    blocks_reused: int
    error_bound: float | None
    error_estimate: float | None
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a snapshot."""

    path: str
    size: int
    tensors: int


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of a snapshot: safetensors dtype, shape, bytes, and the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True)
class ParentReport:
    """An edge of the lineage: `role` is previous, base or expert."""

    role: str
    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One snapshot as `log` and `show` print it."""

    snapshot: SnapshotId
    manifest: ManifestId
    parents: tuple[ParentReport, ...]
    origin: str
    plan: PlanId | None
    method: str | None
    message: str
    time_ns: int
    refs: tuple[str, ...]
    plain_bytes: int
    files: int
    tensors: int


@dataclass(frozen=True, slots=True)
class RefReport:
    """A name and what it points at; `kind` is branch or tag."""

    name: str
    kind: str
    snapshot: SnapshotId
    manifest: ManifestId
    time_ns: int


@dataclass(frozen=True, slots=True)
class ReflogReport:
    """One move of a ref.  `old` is None where it was created, `new` where it was removed."""

    position: int
    old: SnapshotId | None
    new: SnapshotId | None
    action: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor on both sides: `status` is added, removed, changed or equal.

    `relative_l2` is ||b - a|| / ||a|| in float64, None where dtypes or shapes differ, where the
    dtype is not floating point, or where ||a|| is 0.
    """

    name: str
    status: str
    dtype: str
    shape: tuple[int, ...]
    blocks_total: int
    blocks_changed: int
    relative_l2: float | None
    changed_blocks: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file on both sides: `status` is added, removed or changed."""

    path: str
    status: str
    size_a: int | None
    size_b: int | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How snapshot b differs from snapshot a; equal files and tensors are counted, not listed."""

    a: SnapshotId
    b: SnapshotId
    files: tuple[FileDiff, ...]
    tensors: tuple[TensorDiff, ...]
    files_equal: int
    tensors_equal: int
    blocks_total: int
    blocks_changed: int


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What one expert gave to a tensor, and what was left out of it and why (block counts)."""

    expert: str
    weight: float
    blocks_read: int
    blocks_equal_base: int
    blocks_shared: int
    blocks_below_threshold: int
    blocks_over_budget: int
    omitted_norm: float
    blocks: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """Where one merged tensor came from; `blocks_reused` of its blocks are the base's own."""

    name: str
    treatment: str
    blocks_total: int
    blocks_reused: int
    experts: tuple[ExpertShare, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a snapshot came from.  For an added one, `plan` is None and `tensors` is empty."""

    snapshot: SnapshotId
    origin: str
    plan: PlanReport | None
    tensors: tuple[TensorExplanation, ...]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A recorded plan run again: `same` where the ManifestIds agree."""

    snapshot: SnapshotId
    plan: PlanId
    manifest: ManifestId
    replayed: ManifestId
    same: bool
    first_difference: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckoutReport:
    """What `checkout` wrote."""

    snapshot: SnapshotId
    directory: str
    files: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of `fsck`: what is wrong and which object or file it is about."""

    kind: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `fsck`; sound where `problems` is empty."""

    read_data: bool
    packs: int
    blocks: int
    records: int
    snapshots: int
    refs: int
    bytes_read: int
    garbage: tuple[str, ...]
    problems: tuple[Problem, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Sizes and counts of a whole store.

    `plain_bytes` is the sum over all snapshots that refs reach, as checked-out copies would take;
    `stored_bytes` is what the packs take.
    """

    path: str
    uuid: str
    format_version: int
    block_size: int
    refs: int
    snapshots: int
    packs: int
    blocks: int
    tensors: int
    plain_bytes: int
    unique_bytes: int
    stored_bytes: int
    index_bytes: int
    statistics_bytes: int
