"""What the keys of every `--json` object mean; the source of the tables in docs/cli.md.

Key names come from the reports themselves.  A report field without a meaning here, and a meaning
without a field, are both failures of the tests.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mstore import ids, reports
from mstore_fuse.mounts import MountInfo


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a JSON object: its name, the kind of its value, and its meaning."""

    name: str
    kind: str
    meaning: str


_BOUND = (
    "certified bound on the norm of (merged - full-read merge) / norm of base, before rounding to "
    "the output dtype; null if the method has none"
)
_COMMON = {
    "name": "the ref",
    "snapshot": "the snapshot's id",
    "manifest": "id of the content: same bytes, same id",
    "plan": "the plan's id",
    "message": "the message given with -m",
    "seconds": "how long it took",
    "time_ns": "when, in nanoseconds since 1970 (UTC)",
    "method": "the merge method",
    "budget_bytes": "most bytes that may be read from experts; null: no budget",
    "full_expert_bytes": "bytes that a merge without a budget would read from experts",
    "planned_expert_bytes": "bytes that the plan reads from experts",
    "analyze_bytes_read": "bytes read to compute missing statistics",
    "bytes_written": "bytes added to the store",
    "blocks_total": "blocks in all",
    "error_bound": _BOUND,
    "error_estimate": "estimate of the same error, not certified; null if there is none",
    "error_share_estimate": "estimate of the norm of (merged - full-read merge) / norm of "
    "(full-read merge - base), the share of the change that is lost; null if unknown",
    "overflow": "tensors with elements that became, or may become, infinite, worst first",
    "warnings": "likely mistakes: idle experts, overflow, licences that differ or forbid merging",
    "notes": "notes of the planner, as text",
    "kept": "whether the plan is stored; false if the store is read-only",
    "plain_bytes": "size of the files as checked out",
    "files": "number of files",
    "tensors": "number of tensors",
    "refs": "number of branches and tags",
    "path": "path inside the snapshot",
    "weight": "the expert's weight",
    "blocks_equal_base": "chunks equal to the base's: nothing to read",
    "blocks_shared": "chunks that another expert shares: read once",
    "blocks_below_threshold": "chunks that the method trims away entirely",
}

# Only meanings that are missing in `_COMMON` or differ from it.
_OWN: dict[type, dict[str, str]] = {
    reports.AddReport: {
        "new_snapshot": "false if the ref already held these bytes",
        "previous": "what the branch pointed at before; null: it is new",
        "blocks_new": "blocks that the store did not have",
        "blocks_equal_base": "blocks equal to the base's; null without a base",
        "base": "the base that the snapshot records; null: none",
        "base_reason": "why this base or none; null: it was named, or no search took place",
        "excluded": "files and directories (ending with a slash) that are not part of the model",
        "excluded_files": "number of excluded files",
        "excluded_bytes": "size of the excluded files",
        "notes": "what was not done, as text",
    },
    reports.PlanReport: {
        "base": "the model merged into",
        "experts": "pairs of ref and weight",
        "parameters": "every parameter of the method, defaults included",
        "score": "how blocks were ranked",
        "max_error": "the requested error limit; null: none",
        "expert_budget_bytes": "most bytes that may be read from any one expert; null: no limit",
        "only": "patterns of the tensors to merge; empty: all",
        "skip": "patterns of the tensors left as they are in the base",
        "top_p": "share of the output's blocks that may differ from the base's; null: all",
        "memo_expert_bytes": "planned bytes that the memo table saves; null if not looked up",
        "blocks_total": "expert chunks in total; if all dtypes are equal, a chunk is a block",
        "blocks_selected": "chunks to read, or shared",
        "blocks_omitted": "chunks left out because of the budget",
        "blocks_outside_top_p": "chunks left out because of --top-p",
    },
    reports.TensorOverflow: {
        "tensor": "its name",
        "elements": "how many became infinite and are finite in the base; null: some may",
        "elements_total": "number of elements",
    },
    reports.MergeWarning: {
        "kind": "expert is the base, expert given twice, expert without weight, expert equals the "
        "base, expert over budget, expert trimmed away, or licences",
        "expert": "the expert concerned, as it was named; null: several models",
        "text": "the warning, as text",
    },
    reports.SweepReport: {
        "base": "the model merged into",
        "experts": "pairs of ref and weight",
        "parameters": "every parameter of the method, defaults included",
        "score": "how blocks were ranked",
        "points": "the plan at each budget, the smallest first",
        "measure_bytes_read": "bytes read from experts to measure errors; 0 without --measure",
    },
    reports.SweepPoint: {
        "share": "the budget as a share of the full cost",
        "budget_bytes": "the budget in bytes",
        "unread_expert_bytes": "planned bytes that the memo table does not save",
        "measured_error": "the real error, before rounding to the output dtype; null: not measured",
        "measured_error_share": "the same as a share of what the full merge changes; null: not "
        "measured, or it changes nothing, or the method scales the base",
    },
    reports.MergeReport: {
        "new_snapshot": "false if the ref already held this merge",
        "virtual": "whether only the plan was committed; blocks are computed on read",
        "max_error": "the requested error limit; null: none",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "memo_expert_bytes": "planned bytes not read because an earlier merge computed the output",
        "resumed_expert_bytes": "planned bytes that an interrupted run had already read",
        "base_bytes_read": "bytes read from the base",
        "blocks_reused": "output blocks that the store already had",
    },
    reports.AnalyzeReport: {
        "expert": "the expert, as it was named",
        "base": "the base, as it was named",
        "tensors_measured": "tensors whose statistics were computed now",
        "tensors_known": "tensors whose statistics already existed",
        "tensors_equal": "tensors equal to the base's: nothing to measure",
        "expert_bytes_read": "bytes read from the expert",
        "statistics_bytes": "size of the statistics computed now",
    },
    reports.MaterializeReport: {
        "plan": "the plan that was run; null if there was none",
        "new_snapshot": "false if the branch already held stored bytes",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "base_bytes_read": "bytes read from the base",
        "blocks_reused": "output blocks that the store already had",
    },
    reports.TensorReport: {
        "name": "the tensor",
        "dtype": "as safetensors spells it",
        "shape": "elements in each dimension",
        "nbytes": "bytes of its data",
        "file": "the file that holds it",
    },
    reports.FileReport: {"size": "bytes", "tensors": "tensors in it; 0 if not safetensors"},
    reports.ParentReport: {
        "role": "previous, base or expert",
        "refs": "branches and tags that point at it",
    },
    reports.SnapshotReport: {
        "signatures": "every signature, with its state",
        "parents": "what it was made from",
        "origin": "add or merge",
        "plan": "id of its merge plan; null if it was added",
        "method": "the plan's method; null if it was added",
        "virtual": "whether its merged tensors are computed on read",
        "pruned": "whether its contents were dropped",
        "missing": "whether its record or manifest is lost; then what is unknown is empty or null",
        "refs": "branches and tags that point at it",
    },
    reports.RefReport: {
        "kind": "branch or tag",
        "time_ns": "when it last moved, in nanoseconds since 1970 (UTC)",
        "missing": "whether the snapshot it points at is lost",
    },
    reports.RemoveReport: {
        "removed": "the refs",
        "kinds": "branch or tag, for each",
        "snapshots": "where each pointed",
        "unnamed_snapshots": "snapshots that no ref reaches any more",
        "reflog_days": "number of days for which reflogs keep them from gc",
    },
    reports.GcReport: {
        "dry_run": "whether this only reports what would be dropped",
        "snapshots_dropped": "ids of unreachable snapshots",
        "blocks_dropped": "unreachable blocks",
        "records_dropped": "unreachable records, including snapshots and plans",
        "plans_dropped": "plans whose inputs are gone",
        "dropped_bytes": "their size in packs",
        "packs_removed": "packs deleted because nothing in them is live",
        "packs_rewritten": "packs whose live blocks were copied elsewhere",
        "packs_joined": "those rewritten only to join many small packs",
        "copied_bytes": "bytes copied out of rewritten packs",
        "freed_bytes": "size of deleted packs minus the copies",
        "joined_bytes": "the part of freed_bytes that joining small packs freed",
        "dead_bytes": "dead payload bytes that stay, in packs with too little dead to rewrite",
        "leftover_files": "deleted files that interrupted commands left in tmp/",
        "leftover_bytes": "their size, not included in freed_bytes",
        "waiting_bytes": "the part that becomes free when running operations have ended",
        "waiting_for": "those operations",
        "left": "what was not done, and why",
        "put_aside": "packs that the index does not know, moved to lost+found/",
        "lost_found_bytes": "size of lost+found/ afterwards",
        "emptied_bytes": "bytes removed from lost+found/",
    },
    reports.PruneReport: {
        "dry_run": "whether this only reports what would be pruned",
        "snapshots": "ids of the snapshots whose contents were dropped, newest first",
        "tags_removed": "tags that named some of them",
        "held": "those of them that a reflog or a running operation still keeps",
    },
    reports.ReflogReport: {
        "name": "the ref, possibly a removed one",
        "position": "N of NAME@{N}; 0 is the latest",
        "old": "where it pointed before; null if the move created it",
        "new": "where it pointed afterwards; null if the move removed it",
        "action": "what moved it",
    },
    reports.TensorDiff: {
        "name": "the tensor",
        "status": "added, removed, changed or equal",
        "dtype": "in b, as safetensors spells it; in a if b lacks it",
        "shape": "elements in each dimension in b; in a if b lacks it",
        "dtype_a": "in a; null if a lacks it",
        "shape_a": "in a; null if a lacks it",
        "blocks_changed": "blocks that differ",
        "relative_l2": "norm of (b - a) / norm of a; null if that is undefined",
        "changed_blocks": "their numbers; null without --blocks",
    },
    reports.FileDiff: {
        "status": "added, removed or changed",
        "size_a": "bytes in a; null if a lacks it",
        "size_b": "bytes in b; null if b lacks it",
    },
    reports.DiffReport: {
        "a": "first snapshot",
        "b": "second snapshot",
        "files": "files that differ",
        "tensors": "tensors that differ",
        "files_equal": "number of equal files",
        "tensors_equal": "number of equal tensors",
        "blocks_changed": "blocks that differ",
    },
    reports.DirectoryDiffReport: {
        "directory": "the directory, as it was named",
        "files": "files that differ; removed: the directory lacks it, added: only it has it",
        "tensors": "tensors that differ; relative_l2 is null",
        "files_equal": "number of equal files",
        "tensors_equal": "number of equal tensors",
        "blocks_changed": "blocks that differ",
        "excluded": "files and directories (ending with a slash) that are not part of a model",
        "notes": "files whose headers cannot be read, and why",
    },
    reports.ExpertShare: {
        "expert": "the ref or id it was given by",
        "blocks_read": "chunks read; if all dtypes are equal, a chunk is a block",
        "blocks_over_budget": "chunks left out because of the budget",
        "blocks_outside_top_p": "chunks left out because of --top-p",
        "omitted_norm": "norm of the deltas left out; null if unknown",
        "blocks": "one word per chunk; null unless a TENSOR was named",
    },
    reports.TensorExplanation: {
        "name": "the tensor",
        "layer": "its layer",
        "treatment": "how the merge treated it",
        "tied_to": "the tied tensor that it was merged as; null if it was merged by itself",
        "method": "the method that merged it; null if it was not merged",
        "parameters": "of that method; null if it was not merged",
        "sources": "the tensors that it is made of, in the base and in each expert; empty if all "
        "have its name",
        "blocks_reused": "blocks reused from the base",
        "experts": "what each expert contributed",
    },
    reports.LayerExplanation: {
        "name": "the layer",
        "blocks_reused": "blocks reused from the base",
        "experts": "what each expert contributed",
    },
    reports.Explanation: {
        "plan": "the merge plan",
        "tensors": "where each tensor came from",
        "layers": "the same, summed by layer; a tied tensor counts once",
        "experts": "the same, summed over all requested tensors",
    },
    reports.ExpertBlame: {
        "expert": "the ref or id it was given by",
        "share": "<contribution, merged delta> / norm of the merged delta squared; null if "
        "nothing changed",
        "norm": "norm of its contribution to the merged delta",
        "moved": "elements where its contribution is not 0",
    },
    reports.TensorBlame: {
        "name": "the tensor",
        "layer": "its layer",
        "tied": "other names of this tensor",
        "elements": "number of elements",
        "changed": "elements where the merged delta is not 0",
        "not_finite": "elements where it is NaN or infinite, counted nowhere else",
        "norm": "norm of the merged delta",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's share",
    },
    reports.LayerBlame: {
        "name": "the layer",
        "elements": "number of elements",
        "changed": "elements where the merged delta is not 0",
        "not_finite": "elements where it is NaN or infinite, counted nowhere else",
        "norm": "norm of the merged delta",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's share",
    },
    reports.BlameReport: {
        "tensors": "shares by tensor; tensors equal to the base's only on request",
        "layers": "the same, summed by layer; a tied tensor counts once",
        "norm": "norm of the merged delta, over all requested tensors",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's share of the whole",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "base_bytes_read": "bytes read from the base",
    },
    reports.ReplayReport: {
        "manifest": "the recorded content",
        "replayed": "the content of this run",
        "same": "whether the two are equal",
        "first_difference": "where they first differ; null if they do not",
    },
    reports.CheckoutReport: {
        "directory": "where the files were written",
        "bytes_written": "bytes written there",
    },
    reports.Problem: {
        "kind": "kind of problem",
        "where": "the object or file",
        "what": "what is wrong",
    },
    reports.CheckReport: {
        "read_data": "whether every block was read",
        "index_only": "whether only the index was checked, because it cannot be trusted",
        "packs": "packs checked",
        "blocks": "blocks checked",
        "records": "records checked",
        "snapshots": "snapshots checked",
        "refs": "refs checked",
        "sample": "with --sample, the share of blocks that was read",
        "seed": "with --sample, the seed: the same seed selects the same blocks",
        "bytes_read": "stored bytes of the blocks read",
        "bytes_total": "stored bytes of all blocks",
        "garbage": "what interrupted work left behind; harmless",
        "problems": "what is wrong; empty in a sound store",
        "hurt": "every tensor and file that cannot be read as it is",
        "hint": "the next command; null in a sound store",
    },
    reports.Hurt: {
        "refs": "the refs of that snapshot; empty if it has none",
        "path": "the file; null: the whole snapshot",
        "tensor": "the tensor; null: a header or a plain file",
        "blocks": "how many of its blocks are lost; 0: its record is lost",
    },
    reports.RepairReport: {
        "before": "the check before the repair",
        "healed": "kind and id of what was restored from a good copy",
        "dropped": "kind and id of what had no good copy; not in the index until it is added again",
        "condemned": "damaged packs with nothing good left in them; gc deletes them",
        "kept": "damaged packs that stay, because the disk could not read them",
        "after": "the check after the repair",
    },
    reports.ReindexReport: {
        "packs": "packs read",
        "blocks": "blocks in the new index",
        "records": "records in the new index",
        "snapshots": "snapshots in the new index",
        "refs": "branches and tags in the new index",
        "pruned": "snapshots marked as pruned",
        "old_index": "whether names and history were taken from the old index",
        "reflog_moves": "moves of refs taken from the old index",
        "index_bytes": "size of the new index",
        "recovered": "branches created for snapshots that nothing led to",
        "notes": "what could not be read, and which source was used on disagreement, as text",
        "kept_index": "path of the old index; null if it did not disagree",
    },
    reports.BackupReport: {
        "path": "the backup",
        "uuid": "the store's UUID, which the backup shares",
        "generation": "number of commits that the store had published: the state of the backup",
        "snapshots": "snapshots in the backup",
        "packs": "packs in the backup",
        "packs_copied": "packs that the backup lacked",
        "bytes_copied": "size of the copied packs",
        "packs_removed": "packs that the store no longer has, removed from the backup",
        "freed_bytes": "size of the removed packs",
        "waiting_bytes": "size of packs that may still be read; a later backup removes them",
        "put_aside": "packs that no index knows, now in the backup's lost+found/",
        "problems": "what is damaged in the store; empty: nothing that was copied is damaged",
        "hurt": "files and tensors that the damage makes unreadable",
        "hint": "the next command if something is damaged; null: nothing is",
    },
    reports.CloneReport: {
        "path": "the new store",
        "uuid": "its UUID",
        "source": "the store that was copied",
        "snapshots": "snapshots in it",
        "packs": "packs in it",
        "bytes_copied": "size of these packs",
    },
    reports.MigrateReport: {
        "path": "the store",
        "found": "format version found",
        "target": "format version that this program writes",
        "steps": "steps done, or to do, in order",
        "done": "false with --dry-run",
    },
    reports.StoreReport: {
        "path": "the store",
        "uuid": "the store's UUID",
        "format_version": "version of the format on disk",
        "block_size": "bytes",
        "snapshots": "number of snapshots",
        "packs": "number of packs",
        "blocks": "number of distinct blocks",
        "tensors": "number of distinct tensors",
        "plain_bytes": "size of all snapshots that refs reach, as plain files",
        "unique_bytes": "the same with every block counted once",
        "stored_bytes": "size of the packs",
        "index_bytes": "size of the index",
        "statistics_bytes": "size of the cached statistics, which can be discarded",
        "memo_bytes": "size of the memo table, which can be discarded",
        "codecs": "blocks by how they are stored",
        "unreachable_bytes": "stored bytes of blocks that nothing keeps: gc drops them",
        "dead_bytes": "bytes of payloads in packs that no index row names",
        "overhead_bytes": "bytes of headers, tables and padding in packs",
        "condemned_bytes": "bytes of further packs that are deleted once their last readers end",
        "leftover_bytes": "bytes of files in tmp/ that interrupted commands left",
        "lost_found_bytes": "bytes that gc and reindex put aside in lost+found/",
    },
    reports.CodecUsage: {
        "codec": "raw, constant, planes, or a delta",
        "blocks": "number of blocks",
        "plain_bytes": "their size as plain bytes",
        "stored_bytes": "their size at rest",
    },
    reports.SharedBytes: {
        "name": "the other ref",
        "stored_bytes": "stored bytes that both use",
    },
    reports.RefUsage: {
        "stored_bytes": "stored bytes of its snapshot's blocks and of their delta bases",
        "unique_bytes": "of these, bytes that no other ref uses",
        "shared_bytes": "of these, bytes that other refs also use",
        "portion_bytes": "stored bytes, where a block that n refs share counts as 1/n",
        "freed_bytes": "what gc frees once the ref and its reflog are gone",
        "shared_with": "the refs it shares blocks with, most shared first; empty without REF",
        "unique": "bytes that no other ref uses, by codec",
        "shared": "bytes that other refs also use, by codec",
    },
    reports.HeldBytes: {
        "refs": "stored bytes of the snapshots that refs name",
        "virtual_inputs": "stored bytes of the inputs of virtual merges among these",
        "lineage": "stored bytes of their ancestors: earlier versions, bases and experts",
        "reflog": "stored bytes of what refs named in the last days, with its lineage",
        "running": "stored bytes that running operations are reading",
    },
    reports.UsageReport: {
        "refs": "each requested ref, or all",
        "stored_bytes": "stored bytes of all of them, shared blocks counted once",
        "freed_bytes": "what gc frees once all of them and their reflogs are gone",
        "codecs": "their blocks by how they are stored",
        "live_bytes": "stored bytes of all kept blocks: the sum of `held`",
        "held": "why they are kept, each block for the first reason that applies",
        "unreachable_bytes": "stored bytes of blocks that nothing keeps: gc drops them",
        "reflog_days": "number of days for which the reflog keeps what refs named",
    },
    reports.SignatureReport: {
        "signature": "the signature's id",
        "state": "good (by a trusted key), unknown key, bad (not made by its key), or unchecked",
        "key": "fingerprint of the key, as ssh-keygen -l prints it",
        "signer": "the name under which the key is trusted; null: it is not trusted",
        "claimed_signer": "the signer that the signature claims, which proves nothing",
        "time_ns": "when, as the signature claims",
    },
    reports.VerifyReport: {
        "verified": "whether a trusted key made a good signature",
        "signatures": "every signature of the snapshot",
        "bytes_read": "bytes of blocks read and checked; 0 without --read-data",
    },
    MountInfo: {
        "mountpoint": "the directory",
        "store": "the store",
        "revision": "what is shown; null: the whole store",
        "pid": "the process that serves it; null if that has ended",
        "alive": "whether it answers; a dead one is cleared by `mstore unmount`",
        "user": "the number of the user who mounted it",
    },
}

# Objects inside other objects, by their name in docs/cli.md.
OBJECTS: dict[str, type] = {
    "added checkpoint": reports.AddReport,
    "snapshot": reports.SnapshotReport,
    "parent": reports.ParentReport,
    "file": reports.FileReport,
    "tensor": reports.TensorReport,
    "ref": reports.RefReport,
    "move": reports.ReflogReport,
    "file difference": reports.FileDiff,
    "tensor difference": reports.TensorDiff,
    "plan": reports.PlanReport,
    "merge warning": reports.MergeWarning,
    "tensor overflow": reports.TensorOverflow,
    "sweep point": reports.SweepPoint,
    "tensor explanation": reports.TensorExplanation,
    "layer explanation": reports.LayerExplanation,
    "expert share": reports.ExpertShare,
    "tensor blame": reports.TensorBlame,
    "layer blame": reports.LayerBlame,
    "expert blame": reports.ExpertBlame,
    "codec usage": reports.CodecUsage,
    "held bytes": reports.HeldBytes,
    "shared bytes": reports.SharedBytes,
    "ref usage": reports.RefUsage,
    "signature": reports.SignatureReport,
    "verification": reports.VerifyReport,
    "problem": reports.Problem,
    "hurt tensor": reports.Hurt,
    "check": reports.CheckReport,
    "mount": MountInfo,
}
_WORDS = {kind: word for word, kind in OBJECTS.items()}
_SIMPLE: dict[object, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "text",
    type(None): "null",
}


def keys_of(report: type) -> tuple[Key, ...]:
    """Return the keys of a report, in the order in which they are printed."""
    hints = typing.get_type_hints(report)
    meanings = _COMMON | _OWN.get(report, {})
    return tuple(
        Key(field.name, _kind(hints[field.name]), meanings[field.name])
        for field in dataclasses.fields(report)
    )


def has_words(report: type) -> bool:
    """Return whether the fields of this class have meanings here."""
    return report in _OWN


def unused_meanings() -> list[str]:
    """Return meanings of fields that no report has."""
    found = [
        f"{report.__name__}.{name}"
        for report, meanings in _OWN.items()
        for name in meanings.keys() - {field.name for field in dataclasses.fields(report)}
    ]
    everywhere = {field.name for report in _OWN for field in dataclasses.fields(report)}
    return found + sorted(_COMMON.keys() - everywhere)


def _kind(hint: object) -> str:
    """Describe a type in words: `integer or null`, `list of snapshot`."""
    if isinstance(hint, type) and issubclass(hint, ids.Id):
        return "id"
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and hint in _WORDS:
        return _WORDS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(one) for one in arguments)
    if origin is Sequence or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(_kind(one) for one in arguments)}]"
    if origin is dict:
        return "object"
    raise TypeError(f"no words for {hint!r}")


_MERGE_TO_COME = (
    Key("snapshot", "null", "none before the merge"),
    Key("manifest", "null", "none before the merge"),
    Key("expert_bytes_read", "integer", "0: the merge has not read yet"),
    Key("resumed_expert_bytes", "integer", "0: the merge has not begun yet"),
    Key("base_bytes_read", "integer", "0: the merge has not read yet"),
    Key("bytes_written", "integer", "0: the merge has not written yet"),
    Key("blocks_reused", "null", "known after the merge"),
    Key("file", "text or null", "where -o wrote the plan"),
)

DOCUMENTS: dict[str, tuple[Key, ...]] = {
    "init": (
        Key("path", "text", "the store"),
        Key("uuid", "text", "the store's UUID"),
        Key("block_size", "integer", "bytes"),
        Key("codec", "text", "how new blocks are stored: auto, raw or dense"),
        Key("shared", "text", "who besides its owner may use its files: umask, group or all"),
        Key("group", "text or null", "the group that it is shared with; null if not shared"),
    ),
    "config": (
        Key("codec", "text", "how new blocks are stored: auto, raw or dense"),
        Key(
            "reflog_days",
            "integer",
            "number of days for which the reflog keeps what refs pointed at",
        ),
        Key("shared", "text", "who besides its owner may use its files: umask, group or all"),
    ),
    "add": keys_of(reports.AddReport),
    "add PATH PATH": (Key("added", "list of added checkpoint", "in the order of storing"),),
    "analyze": keys_of(reports.AnalyzeReport),
    "plan": (*keys_of(reports.PlanReport), *_MERGE_TO_COME),
    "plan --sweep": keys_of(reports.SweepReport),
    "plans": (Key("plans", "list of plan", "by base, method and cost"),),
    "merge": keys_of(reports.MergeReport),
    "materialize": keys_of(reports.MaterializeReport),
    "log": (Key("snapshots", "list of snapshot", "newest first"),),
    "show": keys_of(reports.SnapshotReport),
    "ls": (
        Key("files", "list of file or null", "every file; null with --tensors"),
        Key("tensors", "list of tensor or null", "every tensor, with --tensors"),
    ),
    "diff": keys_of(reports.DiffReport),
    "diff REF DIR": keys_of(reports.DirectoryDiffReport),
    "explain": keys_of(reports.Explanation),
    "blame": keys_of(reports.BlameReport),
    "replay": keys_of(reports.ReplayReport),
    "checkout": keys_of(reports.CheckoutReport),
    "mount": keys_of(MountInfo),
    "mounts": (
        Key(
            "mounts",
            "list of mount",
            "every mount of this user; for root, or with --all, of all users",
        ),
    ),
    "unmount": (Key("unmounted", "text", "the directory"),),
    "refs": (Key("refs", "list of ref", "branches and tags"),),
    "tag": keys_of(reports.RefReport),
    "tag [PATTERN]": (Key("refs", "list of ref", "tags"),),
    "reset": keys_of(reports.RefReport),
    "rename": keys_of(reports.RefReport),
    "reflog": (
        Key("name", "text or null", "the ref; null for all"),
        Key("entries", "list of move", "newest first"),
    ),
    "rm": keys_of(reports.RemoveReport),
    "prune": keys_of(reports.PruneReport),
    "gc": keys_of(reports.GcReport),
    "backup": keys_of(reports.BackupReport),
    "clone": keys_of(reports.CloneReport),
    "sign": keys_of(reports.SignatureReport),
    "verify": (Key("snapshots", "list of verification", "in the order of the command line"),),
    "fsck": keys_of(reports.CheckReport),
    "fsck --repair": keys_of(reports.RepairReport),
    "reindex": keys_of(reports.ReindexReport),
    "migrate": keys_of(reports.MigrateReport),
    "stats": keys_of(reports.StoreReport),
    "du": keys_of(reports.UsageReport),
}
