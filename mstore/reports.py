"""The return values of the public API: frozen, ready to print or to convert to JSON.

Field names are the JSON keys of the command line and are stable.  Sizes are bytes, times are
nanoseconds since the epoch (`*_ns`) or seconds of duration (`seconds`), ids have their types from
`mstore.ids`.  Nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mstore.ids import ManifestId, PackId, PlanId, SignatureId, SnapshotId


@dataclass(frozen=True, slots=True)
class Progress:
    """One tick of a long call: `done` of `total` bytes in the named phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class AddReport:
    """What `add` stored.  `new_snapshot` is False if the ref already held these bytes.

    `base` is the base that the snapshot records.  `base_reason` says why it has this base or none;
    it is None if the caller named the base or no search took place.  `excluded` lists what the
    directory holds besides the model: files, and directories, which end with a slash.  `previous`
    is the snapshot that the branch pointed at before, None for a new branch.
    """

    name: str
    snapshot: SnapshotId
    manifest: ManifestId
    new_snapshot: bool
    previous: SnapshotId | None
    files: int
    tensors: int
    plain_bytes: int
    bytes_written: int
    blocks_total: int
    blocks_new: int
    blocks_equal_base: int | None
    base: ParentReport | None
    base_reason: str | None
    excluded: tuple[str, ...]
    excluded_files: int
    excluded_bytes: int
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class AnalyzeReport:
    """What `analyze` measured.  Tensors with the same content count once."""

    expert: str
    base: str
    tensors_measured: int
    tensors_known: int
    tensors_equal: int
    expert_bytes_read: int
    statistics_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MergeWarning:
    """Something allowed that is usually a mistake; `kind` is one of a few words, `text` explains.

    `expert` is the expert concerned, as the caller named it; None if it concerns several models.
    """

    kind: str
    expert: str | None
    text: str


@dataclass(frozen=True, slots=True)
class TensorOverflow:
    """A tensor of a merge whose element type cannot hold all results.

    Counts elements that became infinite and are finite in the base; None if it is only known that
    some may.
    """

    tensor: str
    elements: int | None
    elements_total: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan's identity, costs and bounds.

    Counts are of (expert, chunk) pairs; if all dtypes are equal, a chunk is a block.  `error_bound`
    is certified: ||merged - full-read merge|| / ||base|| before rounding to the output dtype; None
    if the method has none.  `error_estimate` is only an estimate.  `error_share_estimate` estimates
    ||merged - full|| / ||full - base||: 0 if nothing was left out, 1 if everything was; None if it
    is unknown, or the full merge is the base.  `memo_expert_bytes` are those of the planned bytes
    that the memo table saves right now; None if nobody looked it up.  `kept` is False if this user
    may only read the store: then the plan is not stored and cannot be found by its id.
    """

    plan: PlanId
    method: str
    base: str
    experts: tuple[tuple[str, float], ...]
    parameters: dict[str, float | int | bool]
    score: str
    budget_bytes: int | None
    max_error: float | None
    expert_budget_bytes: int | None
    only: tuple[str, ...]
    skip: tuple[str, ...]
    top_p: float | None
    full_expert_bytes: int
    planned_expert_bytes: int
    memo_expert_bytes: int | None
    analyze_bytes_read: int
    blocks_total: int
    blocks_equal_base: int
    blocks_shared: int
    blocks_below_threshold: int
    blocks_selected: int
    blocks_omitted: int
    blocks_outside_top_p: int
    error_bound: float | None
    error_estimate: float | None
    error_share_estimate: float | None
    overflow: tuple[TensorOverflow, ...]
    warnings: tuple[MergeWarning, ...]
    notes: tuple[str, ...]
    kept: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The plan at one share of the full cost.

    Errors are relative to the base's norm, and `*_error_share*` to what the full merge changes.
    `unread_expert_bytes` are those of the plan that the memo table does not save.  `measured_error`
    is None if it was not measured, or is meaningless (NaN, no norm).
    """

    share: float
    budget_bytes: int
    planned_expert_bytes: int
    unread_expert_bytes: int
    error_bound: float | None
    error_estimate: float | None
    error_share_estimate: float | None
    measured_error: float | None
    measured_error_share: float | None


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Cost against error over many budgets of one request.

    `measure_bytes_read` is what measuring read from experts: all that matter, once.
    """

    method: str
    score: str
    parameters: dict[str, float | int | bool]
    base: str
    experts: tuple[tuple[str, float], ...]
    full_expert_bytes: int
    points: tuple[SweepPoint, ...]
    measure_bytes_read: int
    analyze_bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge read, wrote and published; `virtual` if it published only its plan.

    expert_bytes_read = planned_expert_bytes - memo_expert_bytes (not read because the output was
    known) - resumed_expert_bytes (read by an interrupted run whose work this one reused).
    """

    name: str
    plan: PlanId
    snapshot: SnapshotId
    manifest: ManifestId
    new_snapshot: bool
    virtual: bool
    method: str
    budget_bytes: int | None
    max_error: float | None
    full_expert_bytes: int
    planned_expert_bytes: int
    expert_bytes_read: int
    memo_expert_bytes: int
    resumed_expert_bytes: int
    analyze_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    blocks_total: int
    blocks_reused: int
    error_bound: float | None
    error_estimate: float | None
    error_share_estimate: float | None
    overflow: tuple[TensorOverflow, ...]
    warnings: tuple[MergeWarning, ...]
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MaterializeReport:
    """What computing a virtual merge in full read and wrote.

    `new_snapshot` is False if the branch already held stored bytes: then nothing was done, and
    `plan` is None if no merge made them.
    """

    name: str
    plan: PlanId | None
    snapshot: SnapshotId
    manifest: ManifestId
    new_snapshot: bool
    expert_bytes_read: int
    base_bytes_read: int
    bytes_written: int
    blocks_total: int
    blocks_reused: int
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
    """An edge of the lineage: `role` is previous, base or expert; `refs` point at it now."""

    role: str
    snapshot: SnapshotId
    refs: tuple[str, ...] = ()


GOOD_SIGNATURE = "good"
UNKNOWN_KEY = "unknown key"
BAD_SIGNATURE = "bad"
UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """One signature of a snapshot.

    state: GOOD_SIGNATURE by a trusted key, good by an UNKNOWN_KEY, BAD_SIGNATURE (the key did not
    make it), or UNCHECKED if the library for checking is missing. signer is the name under which
    the key is trusted. claimed_signer and the time are what the signature says of itself; they
    prove nothing.
    """

    signature: SignatureId
    snapshot: SnapshotId
    state: str
    key: str
    signer: str | None
    claimed_signer: str | None
    time_ns: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Whether a trusted key signed a snapshot, and what was read of its blocks."""

    snapshot: SnapshotId
    verified: bool
    signatures: tuple[SignatureReport, ...]
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One snapshot as `log` and `show` print it.

    `virtual`: its bytes are not computed yet.  `pruned`: its contents were dropped.  `missing`: its
    record or manifest is lost; then `manifest` may be None, and unknown fields are empty or zero.
    """

    snapshot: SnapshotId
    manifest: ManifestId | None
    parents: tuple[ParentReport, ...]
    origin: str
    plan: PlanId | None
    method: str | None
    virtual: bool
    message: str
    time_ns: int
    refs: tuple[str, ...]
    plain_bytes: int
    files: int
    tensors: int
    signatures: tuple[SignatureReport, ...] = ()
    pruned: bool = False
    missing: bool = False
    overflow: tuple[TensorOverflow, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """Removed refs, and what they pointed at.

    unnamed_snapshots: how many snapshots no ref reaches any more; their contents stay while the
    reflog keeps them, for `reflog_days`.
    """

    removed: tuple[str, ...]
    kinds: tuple[str, ...]
    snapshots: tuple[SnapshotId, ...]
    unnamed_snapshots: int
    reflog_days: int


@dataclass(frozen=True, slots=True)
class RefReport:
    """A name and what it points at; `kind` is branch or tag.  `missing` if the snapshot is lost."""

    name: str
    kind: str
    snapshot: SnapshotId
    manifest: ManifestId | None
    time_ns: int
    missing: bool = False


@dataclass(frozen=True, slots=True)
class ReflogReport:
    """One move of a ref.  `old` is None if the ref was created, `new` if it was removed."""

    name: str
    position: int
    old: SnapshotId | None
    new: SnapshotId | None
    action: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor on both sides: `status` is added, removed, changed or equal.

    dtype, shape: those in b, or in a if b lacks the tensor; dtype_a, shape_a: those in a, None if a
    lacks it.

    `relative_l2` is ||b - a|| / ||a|| in float64, None if dtypes or shapes differ, the dtype is not
    floating point, or ||a|| is 0.
    """

    name: str
    status: str
    dtype: str
    shape: tuple[int, ...]
    dtype_a: str | None
    shape_a: tuple[int, ...] | None
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
class DirectoryDiffReport:
    """How a directory differs from a snapshot; the lists are empty if it matches.

    A file or tensor that the directory lacks is `removed`, one that only it has is `added`.
    `excluded` lists what the directory holds that is neither part of a model nor stored.  `notes`
    name files whose headers cannot be read.
    """

    snapshot: SnapshotId
    directory: str
    files: tuple[FileDiff, ...]
    tensors: tuple[TensorDiff, ...]
    files_equal: int
    tensors_equal: int
    blocks_total: int
    blocks_changed: int
    excluded: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What one expert contributed, and what was left out of it and why.

    Counts are chunks of this expert; if all dtypes are equal, a chunk is a block.  `omitted_norm`
    is the norm of the part of its (sparsified) delta that was left out, None if unknown.  `blocks`
    has one word per chunk, if a single tensor was requested.
    """

    expert: str
    weight: float
    blocks_read: int
    blocks_shared: int
    blocks_equal_base: int
    blocks_below_threshold: int
    blocks_over_budget: int
    blocks_outside_top_p: int
    omitted_norm: float | None
    blocks: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """Where one merged tensor came from; `blocks_reused` of its blocks are the base's own.

    `tied_to` is the name under which it was merged, None if that is its own. `method` and
    `parameters` are those of this tensor, None if it was not merged; `sources` are the names of the
    tensors that it is made of, in the base and in each expert, if one of them is another name.
    """

    name: str
    layer: str
    treatment: str
    tied_to: str | None
    method: str | None
    parameters: dict[str, bool | int | float] | None
    sources: tuple[str, ...]
    blocks_total: int
    blocks_reused: int
    experts: tuple[ExpertShare, ...]


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """Sums over the tensors of one layer.  A tied tensor's blocks count where it was merged."""

    name: str
    tensors: int
    blocks_total: int
    blocks_reused: int
    experts: tuple[ExpertShare, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a merge came from: by tensor, by layer, and by expert over all requested tensors."""

    snapshot: SnapshotId
    plan: PlanReport
    tensors: tuple[TensorExplanation, ...]
    layers: tuple[LayerExplanation, ...]
    experts: tuple[ExpertShare, ...]


@dataclass(frozen=True, slots=True)
class ExpertBlame:
    """One expert's part in a merged delta.

    With m the merged delta and m_k the expert's contribution to it, `share` is <m_k, m> / ||m||^2
    (None where ||m|| is 0), `norm` is ||m_k||, and `moved` counts the elements where m_k is not 0.
    """

    expert: str
    weight: float
    share: float | None
    norm: float
    moved: int


@dataclass(frozen=True, slots=True)
class TensorBlame:
    """Each expert's share of one merged tensor.  Their shares and `base_share` add up to 1.

    `tied` are the other names of this tensor.  `norm` is ||m||; `changed` counts the elements where
    m is not 0; an element where m is not finite counts only in `not_finite`.  `base_share` is
    nonzero only if a method scales the base (linear without normalize).
    """

    name: str
    layer: str
    tied: tuple[str, ...]
    elements: int
    changed: int
    not_finite: int
    norm: float
    base_share: float | None
    experts: tuple[ExpertBlame, ...]


@dataclass(frozen=True, slots=True)
class LayerBlame:
    """As `TensorBlame`, over the tensors of one layer; tied tensors count once."""

    name: str
    tensors: int
    elements: int
    changed: int
    not_finite: int
    norm: float
    base_share: float | None
    experts: tuple[ExpertBlame, ...]


@dataclass(frozen=True, slots=True)
class BlameReport:
    """Each expert's share of what a merge changed, by tensor, by layer, and over all.

    Measured by running the plan's blocks again; the bytes read are counted as for a merge.
    """

    snapshot: SnapshotId
    plan: PlanId
    method: str
    tensors: tuple[TensorBlame, ...]
    layers: tuple[LayerBlame, ...]
    norm: float
    base_share: float | None
    experts: tuple[ExpertBlame, ...]
    expert_bytes_read: int
    base_bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A recorded plan run again: `same` if the ManifestIds agree."""

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
    """One finding of `fsck`: what is wrong, and in which object or file."""

    kind: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Hurt:
    """A tensor of a snapshot that cannot be read as it is; None: a file's plain bytes.

    `blocks` is how many of its blocks are lost, 0 if its record is lost; without a path the whole
    snapshot is hurt.
    """

    snapshot: SnapshotId
    refs: tuple[str, ...]
    path: str | None
    tensor: str | None
    blocks: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `fsck`; the store is sound if `problems` is empty.

    The check read `bytes_read` of the `bytes_total` stored bytes of blocks.  For a sample, `sample`
    is the share that `seed` selected.  `hint` is the next command if something is wrong.
    `index_only`: the index is damaged or not the newest, so the check did not use it to judge
    anything, and all counts are 0.
    """

    read_data: bool
    index_only: bool
    sample: float | None
    seed: int | None
    packs: int
    blocks: int
    records: int
    snapshots: int
    refs: int
    bytes_read: int
    bytes_total: int
    garbage: tuple[str, ...]
    problems: tuple[Problem, ...]
    hurt: tuple[Hurt, ...]
    hint: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `fsck --repair`; `after` is the check of the repaired store.

    healed: restored from a good copy; dropped: not restored, and out of the index until good files
    are added again; both as `kind id`. condemned: damaged packs whose good payloads were all saved.
    kept: damaged packs that stay, because the disk could not be read.  `after.hurt` lists what the
    dropped objects make unreadable.
    """

    before: CheckReport
    healed: tuple[str, ...]
    dropped: tuple[str, ...]
    bytes_written: int
    condemned: tuple[PackId, ...]
    kept: tuple[PackId, ...]
    after: CheckReport
    seconds: float


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """The result of `reindex`.

    `old_index`: whether refs, reflogs, plans and prunings were taken from the existing index.
    `notes` names what could not be read, and which source was used if two disagreed; then
    `kept_index` is the path of the old index.  `recovered` are branches created for complete
    snapshots that nothing led to.
    """

    packs: int
    blocks: int
    records: int
    snapshots: int
    refs: int
    pruned: int
    old_index: bool
    reflog_moves: int
    index_bytes: int
    recovered: tuple[str, ...]
    notes: tuple[str, ...]
    kept_index: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class BackupReport:
    """The result of `backup`: what the directory holds now, and what this run did.

    `problems` lists what is damaged in the source, of what was copied now, and what the source
    lacks; `hurt` lists what that makes unreadable; `hint` is then the next command.  In that case
    nothing was removed.  `waiting_bytes` are packs that the source no longer has and that a reader
    may still use: a later backup removes them.  `put_aside` are packs that no index knows, now in
    lost+found/.
    """

    path: str
    uuid: str
    generation: int
    refs: int
    snapshots: int
    packs: int
    packs_copied: int
    bytes_copied: int
    packs_removed: tuple[str, ...]
    freed_bytes: int
    waiting_bytes: int
    put_aside: tuple[str, ...]
    problems: tuple[Problem, ...]
    hurt: tuple[Hurt, ...]
    hint: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class CloneReport:
    """The result of `clone`: a new store, `uuid`, with everything that `source` had."""

    path: str
    uuid: str
    source: str
    refs: int
    snapshots: int
    packs: int
    bytes_copied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MigrateReport:
    """The result of `migrate`: the steps between format versions, done or still to do."""

    path: str
    found: int
    target: int
    steps: tuple[str, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class CodecUsage:
    """Blocks stored with one codec: how many, and their bytes."""

    codec: str
    blocks: int
    plain_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Stored bytes that another ref's snapshot uses as well."""

    name: str
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RefUsage:
    """What one ref takes: the blocks of its snapshot, and the bases of those that are deltas.

    stored_bytes = unique_bytes + shared_bytes.  `portion_bytes` counts a block that n refs share as
    1/n.  `freed_bytes` is what gc frees once this ref and its reflog are gone.  `shared_with` is
    computed on first access.
    """

    name: str
    snapshot: SnapshotId
    plain_bytes: int
    stored_bytes: int
    unique_bytes: int
    shared_bytes: int
    portion_bytes: int
    freed_bytes: int
    shared_with: Sequence[SharedBytes]
    unique: tuple[CodecUsage, ...]
    shared: tuple[CodecUsage, ...]


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Why blocks are kept, in stored bytes: each counts for the first reason that applies.

    refs: snapshots that refs name. virtual_inputs: the inputs of virtual merges among these.
    lineage: ancestors of these. reflog: what refs named in the last days, with its lineage.
    running: what running operations are reading.
    """

    refs: int
    virtual_inputs: int
    lineage: int
    reflog: int
    running: int


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What refs take and share, in stored bytes of blocks, and what gc would free without them.

    `stored_bytes` counts shared blocks once; `freed_bytes` is for the removal of all of them
    together.  `live_bytes` are kept for any reason (refs, their history, reflogs not older than
    `reflog_days`): the sum of `held`.  `unreachable_bytes` are kept for none: gc drops them.
    """

    refs: tuple[RefUsage, ...]
    stored_bytes: int
    freed_bytes: int
    codecs: tuple[CodecUsage, ...]
    live_bytes: int
    held: HeldBytes
    unreachable_bytes: int
    reflog_days: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Sizes and counts of a whole store.

    `plain_bytes` is the sum over all snapshots that refs reach, as checked-out copies would take.
    `stored_bytes` is the size of the packs; of these, `unreachable_bytes` belong to blocks that
    nothing keeps, `dead_bytes` to payloads that no index row names, and `overhead_bytes` to
    headers, footers and padding.  Not included: `condemned_bytes` of packs that are deleted after
    their last readers end, `leftover_bytes` of files that interrupted commands left, and
    `lost_found_bytes` of what gc and reindex put aside.
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
    memo_bytes: int
    codecs: tuple[CodecUsage, ...]
    unreachable_bytes: int
    dead_bytes: int
    overhead_bytes: int
    condemned_bytes: int
    leftover_bytes: int
    lost_found_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """What garbage collection dropped, or with `dry_run` would drop.

    snapshots, blocks, records: unreachable ones (`records` includes snapshots and plans), with
    their size in packs, `dropped_bytes`. packs_removed: packs without live payloads, or that no row
    names. packs_rewritten: packs whose live payloads were copied out, `copied_bytes` in all;
    `packs_joined` of them only because there were many small ones.  `freed_bytes` is the size of
    the deleted packs minus the copies; `joined_bytes` of it come from joining.  `dead_bytes` stay
    in packs that are not dead enough to be rewritten. leftover_files, leftover_bytes: files that
    interrupted commands left in tmp/, also deleted; `waiting_bytes` of it become free when the
    operations in `waiting_for` have ended.  `left` says what was not done and why. put_aside: packs
    that the index does not know, which moved to lost+found/; everything there takes
    `lost_found_bytes`.  `emptied_bytes` were removed there.
    """

    dry_run: bool
    snapshots_dropped: tuple[SnapshotId, ...]
    blocks_dropped: int
    records_dropped: int
    plans_dropped: int
    dropped_bytes: int
    packs_removed: tuple[str, ...]
    packs_rewritten: tuple[str, ...]
    packs_joined: tuple[str, ...]
    copied_bytes: int
    freed_bytes: int
    joined_bytes: int
    dead_bytes: int
    leftover_files: int
    leftover_bytes: int
    waiting_bytes: int
    waiting_for: tuple[str, ...]
    left: tuple[str, ...]
    put_aside: tuple[str, ...]
    lost_found_bytes: int
    emptied_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The snapshots whose contents were dropped, or with `dry_run` would be; newest first.

    tags_removed: tags that named some of them. held: those whose contents a reflog or a running
    operation still keeps.  Garbage collection frees their space.
    """

    dry_run: bool
    snapshots: tuple[SnapshotId, ...]
    tags_removed: tuple[str, ...]
    held: tuple[SnapshotId, ...]
    seconds: float
