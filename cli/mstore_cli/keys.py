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
    """One key of a JSON object: its name, what kind of value it has, and what that means."""

    name: str
    kind: str
    meaning: str


_BOUND = (
    "certified bound on the norm of (merged - full-read merge) / norm of base, before rounding to "
    "the output dtype; null where the method has none"
)
_COMMON = {
    "name": "the ref",
    "snapshot": "the snapshot's id",
    "manifest": "id of the content: same bytes, same id",
    "plan": "the plan's id",
    "message": "the words given with -m",
    "seconds": "how long it took",
    "time_ns": "when, in nanoseconds since 1970 (UTC)",
    "method": "how deltas are combined",
    "budget_bytes": "most bytes that may be read from experts; null: no budget",
    "full_expert_bytes": "bytes that a merge without a budget would read from experts",
    "planned_expert_bytes": "bytes that the plan reads from experts",
    "analyze_bytes_read": "bytes read to make statistics that were missing",
    "bytes_written": "bytes added to the store",
    "blocks_total": "blocks in all",
    "error_bound": _BOUND,
    "error_estimate": "a guess at the same error, not certified; null where there is none",
    "error_share_estimate": "a guess at the norm of (merged - full-read merge) / norm of "
    "(full-read merge - base), the share of the change that is lost; null where not known",
    "overflow": "tensors of which elements became, or may become, infinite, worst first",
    "warnings": "what is allowed and mostly a slip: idle experts, overflow, licences that differ "
    "or forbid",
    "notes": "what the planner wants known, in words",
    "kept": "whether the plan is in the store; false where that can only be read",
    "plain_bytes": "size of the files as checked out",
    "files": "number of files",
    "tensors": "number of tensors",
    "refs": "number of branches and tags",
    "path": "path inside the snapshot",
    "weight": "the expert's weight",
    "blocks_equal_base": "chunks that are the base's own: nothing to read",
    "blocks_shared": "chunks that another expert has too: read once",
    "blocks_below_threshold": "chunks that the method would trim away whole",
}

# Only what `_COMMON` does not say, or says differently, stands here.
_OWN: dict[type, dict[str, str]] = {
    reports.AddReport: {
        "new_snapshot": "false where the ref held these bytes already",
        "blocks_new": "blocks that the store did not have",
        "blocks_equal_base": "blocks that are the base's own; null without a base",
        "base": "the base that the snapshot records; null: none",
        "base_reason": "why this base or none; null: it was named, or none was looked for",
        "excluded": "files and directories (with a slash) that are no part of the model",
        "excluded_files": "number of files in them",
        "excluded_bytes": "size of these files",
        "notes": "what did not come to pass, in words",
    },
    reports.PlanReport: {
        "base": "the model merged into",
        "experts": "pairs of ref and weight",
        "parameters": "every parameter of the method, defaults included",
        "score": "what blocks were ranked by",
        "max_error": "the error that was asked for; null: none",
        "expert_budget_bytes": "most bytes that may be read from any one expert; null: no limit",
        "only": "patterns of the tensors to merge; empty: all",
        "skip": "patterns of the tensors left as they are in the base",
        "top_p": "share of the output's blocks that may differ from the base's; null: all",
        "memo_expert_bytes": "planned bytes that the memo table saves; null where not looked up",
        "blocks_total": "chunks of experts in all; where all dtypes are one, a chunk is a block",
        "blocks_selected": "chunks that will be read, or are shared",
        "blocks_omitted": "chunks left out for the budget",
        "blocks_outside_top_p": "chunks left out for --top-p",
    },
    reports.TensorOverflow: {
        "tensor": "its name",
        "elements": "how many are infinite and finite in the base; null: some may become so",
        "elements_total": "how many there are",
    },
    reports.MergeWarning: {
        "kind": "expert is the base, expert given twice, expert without weight, expert equals the "
        "base, expert over budget, expert trimmed away, or licences",
        "expert": "the expert it is about, as it was named; null: several models",
        "text": "what to know, in words",
    },
    reports.SweepReport: {
        "base": "the model merged into",
        "experts": "pairs of ref and weight",
        "parameters": "every parameter of the method, defaults included",
        "score": "what blocks were ranked by",
        "points": "the plan at each budget, the smallest first",
        "measure_bytes_read": "bytes read from experts to measure errors; 0 without --measure",
    },
    reports.SweepPoint: {
        "share": "of the full cost",
        "budget_bytes": "the same in bytes",
        "unread_expert_bytes": "those of the planned bytes that the memo table does not save",
        "measured_error": "the real error, before rounding to the output dtype; null: not measured",
        "measured_error_share": "the same as a share of what the full merge changes; null: not "
        "measured, or it changes nothing, or the method scales the base",
    },
    reports.MergeReport: {
        "new_snapshot": "false where the ref held this merge already",
        "virtual": "whether only the plan was committed, to be computed when it is read",
        "max_error": "the error that was asked for; null: none",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "memo_expert_bytes": "planned bytes not read because an earlier merge made the output",
        "resumed_expert_bytes": "planned bytes that an interrupted run had read already",
        "base_bytes_read": "bytes read from the base",
        "blocks_reused": "output blocks that the store had already",
    },
    reports.AnalyzeReport: {
        "expert": "the expert, as it was named",
        "base": "the base, as it was named",
        "tensors_measured": "tensors whose statistics were taken now",
        "tensors_known": "tensors whose statistics were there",
        "tensors_equal": "tensors that are the base's own: nothing to measure",
        "expert_bytes_read": "bytes read from the expert",
        "statistics_bytes": "size of the statistics that were taken now",
    },
    reports.MaterializeReport: {
        "plan": "the plan that was run; null where there was none",
        "new_snapshot": "false where the branch held stored bytes already",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "base_bytes_read": "bytes read from the base",
        "blocks_reused": "output blocks that the store had already",
    },
    reports.TensorReport: {
        "name": "the tensor",
        "dtype": "as safetensors spells it",
        "shape": "elements in each dimension",
        "nbytes": "bytes of its data",
        "file": "the file that holds it",
    },
    reports.FileReport: {"size": "bytes", "tensors": "tensors in it; 0 where it is no safetensors"},
    reports.ParentReport: {
        "role": "previous, base or expert",
        "refs": "branches and tags that point at it",
    },
    reports.SnapshotReport: {
        "signatures": "every signature, with its state",
        "parents": "what it was made from",
        "origin": "add or merge",
        "plan": "id of the plan it was merged by; null where it was added",
        "method": "the plan's method; null where it was added",
        "virtual": "whether its merged tensors are computed when they are read",
        "pruned": "whether its contents were let go",
        "missing": "whether its record or manifest is lost; then what is unknown is empty or null",
        "refs": "branches and tags that point at it",
    },
    reports.RefReport: {
        "kind": "branch or tag",
        "time_ns": "when it moved last, in ns since 1970",
        "missing": "whether the snapshot that it points at is lost",
    },
    reports.RemoveReport: {
        "removed": "the refs",
        "kinds": "of each, whether it was a branch or a tag",
        "snapshots": "of each, where it pointed",
        "unnamed_snapshots": "snapshots that no ref leads to any more",
        "reflog_days": "for how many days reflogs keep them from gc",
    },
    reports.GcReport: {
        "dry_run": "whether it only says what would go",
        "snapshots_dropped": "ids of the snapshots that nothing reaches",
        "blocks_dropped": "blocks that nothing reaches",
        "records_dropped": "records that nothing reaches, snapshots and plans among them",
        "plans_dropped": "plans whose inputs are gone",
        "dropped_bytes": "what all these take in packs",
        "packs_removed": "packs in which nothing is needed",
        "packs_rewritten": "packs out of which what is needed was copied",
        "packs_joined": "those of them that only were many and small",
        "copied_bytes": "bytes that were copied out of them",
        "freed_bytes": "size of the packs that go, less the copies",
        "joined_bytes": "of it, what comes of putting small packs together",
        "dead_bytes": "dead payloads that stay, in packs of which too little is dead",
        "leftover_files": "files in tmp/ that interrupted commands left, and that go",
        "leftover_bytes": "their size, which does not count in freed_bytes",
        "waiting_bytes": "of it, what comes free when running operations have ended",
        "waiting_for": "these operations",
        "left": "what was not done, and why",
        "put_aside": "packs that the index does not know, which move to lost+found/",
        "lost_found_bytes": "what lies in lost+found/ then",
        "emptied_bytes": "what was removed from lost+found/",
    },
    reports.PruneReport: {
        "dry_run": "whether it only says what would be pruned",
        "snapshots": "ids of the snapshots whose contents were let go, newest first",
        "tags_removed": "tags that named some of them",
        "held": "those of them that a reflog or a running operation still keeps",
    },
    reports.ReflogReport: {
        "name": "the ref, also one that was removed",
        "position": "N of NAME@{N}; 0 is the latest",
        "old": "where it pointed before; null where it was created",
        "new": "where it pointed then; null where it was removed",
        "action": "what moved it",
    },
    reports.TensorDiff: {
        "name": "the tensor",
        "status": "added, removed, changed or equal",
        "dtype": "in b, as safetensors writes it; in a where b has it not",
        "shape": "lengths of the axes in b; in a where b has it not",
        "dtype_a": "in a; null where a has it not",
        "shape_a": "in a; null where a has it not",
        "blocks_changed": "blocks that differ",
        "relative_l2": "norm of (b - a) / norm of a; null where that means nothing",
        "changed_blocks": "their numbers; null without --blocks",
    },
    reports.FileDiff: {
        "status": "added, removed or changed",
        "size_a": "bytes in a; null where it is not there",
        "size_b": "bytes in b; null where it is not there",
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
        "excluded": "files and directories (with a slash) that are no part of a model",
        "notes": "files whose headers cannot be read, and why",
    },
    reports.ExpertShare: {
        "expert": "the ref or id it was given by",
        "blocks_read": "chunks read; where all dtypes are one, a chunk is a block",
        "blocks_over_budget": "chunks left out for the budget",
        "blocks_outside_top_p": "chunks left out for --top-p",
        "omitted_norm": "norm of the deltas that were left out; null where it is not known",
        "blocks": "one word a chunk; null unless a TENSOR was named",
    },
    reports.TensorExplanation: {
        "name": "the tensor",
        "layer": "the layer it is of",
        "treatment": "how the merge dealt with it",
        "tied_to": "the tensor that it is one with, and was merged as; null where it stands alone",
        "blocks_reused": "blocks that are the base's own",
        "experts": "what each expert gave",
    },
    reports.LayerExplanation: {
        "name": "the layer",
        "blocks_reused": "blocks that are the base's own",
        "experts": "what each expert gave",
    },
    reports.Explanation: {
        "plan": "the plan it was merged by",
        "tensors": "where each tensor came from",
        "layers": "the same, summed by layer; a tied tensor counts once",
        "experts": "the same, summed over all that was asked for",
    },
    reports.ExpertBlame: {
        "expert": "the ref or id it was given by",
        "share": "<contribution, merged delta> / norm of the merged delta squared; null where "
        "nothing changed",
        "norm": "norm of its contribution to the merged delta",
        "moved": "elements where its contribution is not 0",
    },
    reports.TensorBlame: {
        "name": "the tensor",
        "layer": "the layer it is of",
        "tied": "other names of this tensor",
        "elements": "number of elements",
        "changed": "elements where the merged delta is not 0",
        "not_finite": "elements where it is NaN or infinite, left out of all else",
        "norm": "norm of the merged delta",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's part",
    },
    reports.LayerBlame: {
        "name": "the layer",
        "elements": "number of elements",
        "changed": "elements where the merged delta is not 0",
        "not_finite": "elements where it is NaN or infinite, left out of all else",
        "norm": "norm of the merged delta",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's part",
    },
    reports.BlameReport: {
        "tensors": "shares by tensor; those that are the base's own only where asked for",
        "layers": "the same, summed by layer; a tied tensor counts once",
        "norm": "norm of the merged delta, over all that was asked for",
        "base_share": "share of the base itself: 0 unless linear without normalize scales it",
        "experts": "each expert's part in all of it",
        "expert_bytes_read": "bytes read from experts, counted at pread",
        "base_bytes_read": "bytes read from the base",
    },
    reports.ReplayReport: {
        "manifest": "the content that was recorded",
        "replayed": "the content that came out now",
        "same": "whether the two are one",
        "first_difference": "where they part first; null where they do not",
    },
    reports.CheckoutReport: {
        "directory": "where the files are now",
        "bytes_written": "bytes written there",
    },
    reports.Problem: {
        "kind": "sort of problem",
        "where": "the object or file",
        "what": "what is wrong",
    },
    reports.CheckReport: {
        "read_data": "whether every block was read",
        "index_only": "whether only the index was checked, because it cannot be believed",
        "packs": "packs checked",
        "blocks": "blocks checked",
        "records": "records checked",
        "snapshots": "snapshots checked",
        "refs": "refs checked",
        "sample": "with --sample, the share of blocks that was drawn",
        "seed": "with --sample, what drew them: the same seed reads the same blocks again",
        "bytes_read": "stored bytes of blocks that were read",
        "bytes_total": "stored bytes of all blocks",
        "garbage": "what interrupted work left behind; harmless",
        "problems": "what is wrong; empty in a sound store",
        "hurt": "every tensor and file that cannot be read as it is",
        "hint": "the next command; null in a sound store",
    },
    reports.Hurt: {
        "refs": "the names of that snapshot; empty where it has none",
        "path": "the file; null: the whole snapshot",
        "tensor": "the tensor; null: a header or a file that is no tensor",
        "blocks": "how many of its blocks are lost; 0: its record is",
    },
    reports.RepairReport: {
        "before": "what was found",
        "healed": "kind and id of what has a good copy again",
        "dropped": "kind and id of what had none and left the index until it is added again",
        "condemned": "damaged packs that hold nothing good any more; gc removes them",
        "kept": "damaged packs that stay, because the disk would not let them be read",
        "after": "what is found now",
    },
    reports.ReindexReport: {
        "packs": "packs read",
        "blocks": "blocks in the new index",
        "records": "records in the new index",
        "snapshots": "snapshots in the new index",
        "refs": "branches and tags in the new index",
        "pruned": "snapshots that are marked as pruned",
        "old_index": "whether names and history were taken over from the old index",
        "reflog_moves": "moves of refs that were taken over",
        "index_bytes": "size of the new index",
        "recovered": "branches that were made for snapshots that nothing led to",
        "notes": "what could not be read, and who was believed where two differed, in words",
        "kept_index": "where the index that was replaced lies now; null where it told nothing else",
    },
    reports.BackupReport: {
        "path": "the backup",
        "uuid": "the store's own name, which the backup has too",
        "generation": "how often the store had published something: the state that the backup has",
        "snapshots": "snapshots in the backup",
        "packs": "packs in the backup",
        "packs_copied": "packs that the backup had not",
        "bytes_copied": "size of these packs",
        "packs_removed": "packs that the store has no more, removed from the backup",
        "freed_bytes": "size of these packs",
        "waiting_bytes": "size of packs that a later backup removes: somebody reads the backup",
        "put_aside": "packs that no index knows, now in the backup's lost+found/",
        "problems": "what is damaged in the store; empty: nothing of what was copied",
        "hurt": "files and tensors that this damage makes unreadable",
        "hint": "the next command where something is damaged; null: all is well",
    },
    reports.CloneReport: {
        "path": "the new store",
        "uuid": "its own name",
        "source": "the store that was copied",
        "snapshots": "snapshots in it",
        "packs": "packs in it",
        "bytes_copied": "size of these packs",
    },
    reports.MigrateReport: {
        "path": "the store",
        "found": "format version that was there",
        "target": "format version that this program writes",
        "steps": "what was done, or is to be done, in order",
        "done": "false with --dry-run",
    },
    reports.StoreReport: {
        "path": "the store",
        "uuid": "the store's own name",
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
        "statistics_bytes": "size of the cached statistics, which may be thrown away",
        "memo_bytes": "size of the table of what merges made, which may be thrown away",
        "codecs": "blocks by how they are stored",
        "unreachable_bytes": "stored bytes of blocks that nothing keeps: gc drops them",
        "dead_bytes": "bytes of payloads in packs that no index row names",
        "overhead_bytes": "bytes of headers, tables and padding in packs",
        "condemned_bytes": "bytes of packs beside these that go once their last readers are gone",
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
        "stored_bytes": "stored bytes that both take",
    },
    reports.RefUsage: {
        "stored_bytes": "stored bytes of its snapshot's blocks and of their delta bases",
        "unique_bytes": "of these, what no other ref takes",
        "shared_bytes": "of these, what other refs take too",
        "portion_bytes": "stored bytes, with what n refs share counted as an n-th",
        "freed_bytes": "what gc frees once the ref and its reflog are gone",
        "shared_with": "the refs it shares blocks with, the most first; empty without REF",
        "unique": "what no other ref takes, by codec",
        "shared": "what other refs take too, by codec",
    },
    reports.HeldBytes: {
        "refs": "stored bytes of the snapshots that refs name",
        "virtual_inputs": "of what virtual merges among these are computed from",
        "lineage": "of what these came from: earlier versions, bases and experts",
        "reflog": "of what refs named in the last days, with its lineage",
        "running": "of what operations that run now are reading",
    },
    reports.UsageReport: {
        "refs": "each ref that was asked for, or all",
        "stored_bytes": "what they take together, shared blocks counted once",
        "freed_bytes": "what gc frees once all of them and their reflogs are gone",
        "codecs": "their blocks by how they are stored",
        "live_bytes": "stored bytes of all blocks that are kept: the sum of `held`",
        "held": "why they are kept, each block for the first reason that applies",
        "unreachable_bytes": "stored bytes of blocks that nothing keeps: gc drops them",
        "reflog_days": "a move of a ref keeps what it names for so many days",
    },
    reports.SignatureReport: {
        "signature": "the signature's id",
        "state": "good (by a trusted key), unknown key, bad (not made by its key), or unchecked",
        "key": "fingerprint of the key, as ssh-keygen -l prints it",
        "signer": "the name that the key is trusted under; null: it is not",
        "claimed_signer": "what the signature says of itself, which proves nothing",
        "time_ns": "when, by its own account",
    },
    reports.VerifyReport: {
        "verified": "whether there is a good signature of a trusted key",
        "signatures": "every signature of the snapshot",
        "bytes_read": "bytes of blocks that were read and checked; 0 without --read-data",
    },
    MountInfo: {
        "mountpoint": "the directory",
        "store": "the store",
        "revision": "what is shown; null: the whole store",
        "pid": "the process that serves it; null where none does any more",
        "alive": "whether it answers; a dead one is cleared by `mstore unmount`",
        "user": "the number of the user who mounted it",
    },
}

# Objects that stand inside others, by the word that docs/cli.md has for them.
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
    """The keys of a report, in the order in which they are printed."""
    hints = typing.get_type_hints(report)
    meanings = _COMMON | _OWN.get(report, {})
    return tuple(
        Key(field.name, _kind(hints[field.name]), meanings[field.name])
        for field in dataclasses.fields(report)
    )


def has_words(report: type) -> bool:
    """Whether the fields of this class have meanings here."""
    return report in _OWN


def unused_meanings() -> list[str]:
    """Meanings of fields that no report has (any more)."""
    found = [
        f"{report.__name__}.{name}"
        for report, meanings in _OWN.items()
        for name in meanings.keys() - {field.name for field in dataclasses.fields(report)}
    ]
    everywhere = {field.name for report in _OWN for field in dataclasses.fields(report)}
    return found + sorted(_COMMON.keys() - everywhere)


def _kind(hint: object) -> str:
    """A type in words: `integer or null`, `list of snapshot`."""
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
    Key("snapshot", "null", "there is none before the merge"),
    Key("manifest", "null", "there is none before the merge"),
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
        Key("uuid", "text", "the store's own name"),
        Key("block_size", "integer", "bytes"),
        Key("codec", "text", "how new blocks are stored: auto, raw or dense"),
        Key("shared", "text", "who besides its maker may use its files: umask, group or all"),
        Key("group", "text or null", "the group that it is shared with; null where it is not"),
    ),
    "config": (
        Key("codec", "text", "how new blocks are stored: auto, raw or dense"),
        Key("reflog_days", "integer", "for how many days the reflog keeps what refs pointed at"),
        Key("shared", "text", "who besides its maker may use its files: umask, group or all"),
    ),
    "add": keys_of(reports.AddReport),
    "add PATH PATH": (
        Key("added", "list of added checkpoint", "in the order in which they were stored"),
    ),
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
            "every mount of this user; for root, or with --all, of everybody",
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
