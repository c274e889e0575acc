"""What the keys of every `--json` object mean; the source of the tables in docs/cli.md.

Keys and meanings come from the reports: the text below a field says what its key means.  Owns which
report each command prints, and the meanings of keys that no report has.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mstore.api import reports
from mstore.terms import ids
from mstore.terms.phrases import Call, Option, Phrase
from mstore_cli.commands.doctor import DoctorReport, StoreState
from mstore_cli.user_config import KEYS as USER_KEYS
from mstore_fuse.driver import MountInfo
from mstore_pages import summary
from mstore_serve import documents
from mstore_serve.serving import ServeInfo


class Key(msgspec.Struct, frozen=True):
    """One key of a JSON object: its name, the kind of its value, and its meaning."""

    name: str
    kind: str
    meaning: str


# Objects inside other objects, by their name in docs/cli.md.
OBJECTS: dict[str, type] = {
    "added checkpoint": reports.AddReport,
    "snapshot": reports.SnapshotReport,
    "parent": reports.ParentReport,
    "origin": reports.OriginReport,
    "file": reports.FileReport,
    "file with a digest": reports.FileDigest,
    "tensor": reports.TensorReport,
    "ref": reports.RefReport,
    "move": reports.ReflogReport,
    "moved ref": reports.MovedRef,
    "exported file": reports.ExportedFile,
    "state of an origin": reports.OriginState,
    "remote": reports.RemoteReport,
    "ref of a remote": reports.RemoteRef,
    "usage at a remote": reports.RemoteRefUsage,
    "problem of a remote": reports.RemoteProblem,
    "file difference": reports.FileDiff,
    "tensor difference": reports.TensorDiff,
    "compatibility finding": reports.CompatibilityFinding,
    "compared part": reports.ComparedPart,
    "compared model": reports.ComparedModel,
    "compared pair": reports.ComparedPair,
    "aligned model": reports.AlignedModel,
    "model of an expert": reports.EmrModel,
    "class of tokens": reports.TokenClass,
    "new token": reports.NewToken,
    "stand-in": reports.StandIn,
    "moved kind": reports.MovedKind,
    "truncated tensor": reports.TruncatedTensor,
    "method": reports.MethodReport,
    "parameter": reports.ParameterReport,
    "plan": reports.PlanReport,
    "merge warning": reports.MergeWarning,
    "tensor not finite": reports.NotFiniteTensor,
    "blocks elsewhere": reports.Leaning,
    "worker": reports.WorkerReport,
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
    "note": reports.NoteReport,
    "row of scores": reports.MetricsRow,
    "verdict": reports.VerdictReport,
    "checked score": reports.CheckedScore,
    "candidate": reports.CandidateReport,
    "culprit": reports.CulpritReport,
    "mark": reports.BisectMark,
    "free number": reports.FreeNumber,
    "trial": reports.TrialReport,
    "ingredient": reports.IngredientReport,
    "reported score": reports.ReportedScore,
    "search": reports.SearchedReport,
    "signature": reports.SignatureReport,
    "verification": reports.VerifyReport,
    "problem": reports.Problem,
    "affected tensor": reports.Affected,
    "check": reports.CheckReport,
    "ancestor": summary.Ancestor,
    "layer map": summary.LayerMap,
    "model map": summary.ModelMap,
    "shares in a layer": summary.LayerShare,
    "changed tensor": summary.ChangedTensor,
    "expert of a merge": summary.ExpertSummary,
    "reused blocks": reports.ReusedBlocks,
    "blocks of a snapshot": reports.ReuseReport,
    "sweep": reports.SweepReport,
    "difference": reports.DiffReport,
    "comparison": reports.CompareReport,
    "mount": MountInfo,
    "store state": StoreState,
}
# The same, of documents that `mstore serve` gives, by their name in docs/serving.md.
SERVED: dict[str, type] = {
    "served parent": documents.ServedParent,
    "served file": documents.ServedFile,
    "entry": documents.ServedEntry,
    "error": documents.ErrorReport,
}
_WORDS = {kind: word for word, kind in (OBJECTS | SERVED).items()}
_SIMPLE: dict[object, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    typing.Any: "any value",
    **dict.fromkeys((Call, Option, Phrase), "text"),
    Path: "text",
    type(None): "null",
}


def fields_of(kind: typing.Any) -> tuple[str, ...]:
    """Return the names of a report's fields, or of a request's."""
    if dataclasses.is_dataclass(kind):
        return tuple(one.name for one in dataclasses.fields(kind))
    return tuple(kind.__struct_fields__)


def keys_of(report: type) -> tuple[Key, ...]:
    """Return the keys of a report, in the order in which they are printed."""
    hints = typing.get_type_hints(report)
    told = meanings(report)
    return tuple(
        Key(name, _kind(hints[name]), re.sub(r"\bNone\b", "null", told[name]))
        for name in fields_of(report)
    )


@functools.cache
def meanings(report: type) -> dict[str, str]:
    """Return the texts below the fields of a class, by field, read from its source.

    Raises ValueError for a text that stands below no field.
    """
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(report))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, node in itertools.pairwise(body.body):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if not isinstance(before, ast.AnnAssign) or not isinstance(before.target, ast.Name):
            raise ValueError(f"{report.__name__}, line {node.lineno}: text below no field")
        found[before.target.id] = " ".join(str(node.value.value).split())
    return found


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
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments))
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
    Key("remote_bytes", "integer", "0: the merge has not read yet"),
    Key("remote_requests", "integer", "0: the merge has not read yet"),
    Key("bytes_written", "integer", "0: the merge has not written yet"),
    Key("blocks_total", "null", "known after the merge"),
    Key("blocks_reused", "null", "known after the merge"),
    Key("file", "text or null", "where -o wrote the plan"),
)

_VERDICTS = (
    Key("verdicts", "list of verdict", "what the gates of --check said; empty without it"),
    Key("moved", "true or false", "whether the branch moved; false: a gate said no"),
    Key("kept", "true or false", "whether a candidate that did not pass is still a ref"),
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
        Key("filesystem", "text", "a type of filesystem that it may be on, too; empty for none"),
        Key(
            "require_signed",
            "true or false",
            "whether fetch and pull move refs only to snapshots that a trusted key signed",
        ),
    ),
    "config --user": tuple(
        Key(one.name, "text" if one.kind is str else "list of text", one.help)
        for one in USER_KEYS.values()
    ),
    "add": (*keys_of(reports.AddReport), *_VERDICTS),
    "add PATH PATH": (
        Key("added", "list of added checkpoint", "in the order of storing, each as of `add`"),
    ),
    "analyze": keys_of(reports.AnalyzeReport),
    "check-merge": keys_of(reports.CompatibilityReport),
    "align": keys_of(reports.AlignReport),
    "align --transplant": keys_of(reports.TransplantReport),
    "permute": keys_of(reports.PermuteReport),
    "cast": keys_of(reports.CastReport),
    "shuffle": (Key("recipe", "text", "YAML, as mergekit reads it"),),
    "moe": (Key("made", "list of merge", "the mixture, or its experts; each as of `merge`"),),
    "emr": keys_of(reports.EmrReport),
    "extract-lora": keys_of(reports.ExtractReport),
    "combine-adapters": keys_of(reports.CombineReport),
    "convert-adapter": keys_of(reports.ConvertReport),
    "plan": (*keys_of(reports.PlanReport), *_MERGE_TO_COME),
    "plan --sweep": keys_of(reports.SweepReport),
    "methods": (Key("methods", "list of method", "all of them, or the named one"),),
    "plans": (Key("plans", "list of plan", "by base, method and cost"),),
    "merge": (*keys_of(reports.MergeReport), *_VERDICTS),
    "materialize": keys_of(reports.MaterializeReport),
    "log": (Key("snapshots", "list of snapshot", "newest first"),),
    "show": keys_of(reports.SnapshotReport),
    "find": (Key("found", "list of file with a digest", "those that refs point at come first"),),
    "ls": (
        Key("files", "list of file or null", "every file; null with --tensors"),
        Key("tensors", "list of tensor or null", "every tensor, with --tensors"),
    ),
    "diff": keys_of(reports.DiffReport),
    "diff REF DIR": keys_of(reports.DirectoryDiffReport),
    "compare": keys_of(reports.CompareReport),
    "explain": keys_of(reports.Explanation),
    "blame": keys_of(reports.BlameReport),
    "recipe": (Key("recipe", "text", "YAML, as mergekit reads it"),),
    "report": keys_of(summary.SnapshotSummary),
    "report REF OTHER": keys_of(summary.ComparisonSummary),
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
    "unmount --all": (
        Key("unmounted", "list of text", "the directories that are mounts no more"),
        Key("failed", "list of text", "those that still are; standard error says why"),
    ),
    "serve": keys_of(ServeInfo),
    "refs": (Key("refs", "list of ref", "what the patterns match [default: branches and tags]"),),
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
    "pin": keys_of(reports.PinReport),
    "unpin": keys_of(reports.UnpinReport),
    "remote": (Key("remotes", "list of remote", "by name"),),
    "remote add": keys_of(reports.RemoteReport),
    "remote show": keys_of(reports.RemoteContents),
    "remote rename": keys_of(reports.RemoteReport),
    "remote rm": keys_of(reports.RemoteReport),
    "remote du": keys_of(reports.RemoteUsageReport),
    "remote gc": keys_of(reports.RemoteGcReport),
    "remote fsck": keys_of(reports.RemoteCheckReport),
    "push": (*keys_of(reports.PushReport), _VERDICTS[0]),
    "export": keys_of(reports.ExportReport),
    "outdated": (Key("origins", "list of state of an origin", "the origins, by ref"),),
    "fetch": keys_of(reports.FetchReport),
    "pull": keys_of(reports.FetchReport),
    "prefetch": keys_of(reports.PrefetchReport),
    "drop": keys_of(reports.DropReport),
    "backup": keys_of(reports.BackupReport),
    "clone": keys_of(reports.CloneReport),
    "copy": keys_of(reports.CopyReport),
    "bundle create": keys_of(reports.BundleReport),
    "eval": keys_of(reports.EvaluationReport),
    "search": keys_of(reports.SearchReport),
    "bisect": keys_of(reports.BisectReport),
    **{
        f"bisect {word}": keys_of(reports.BisectReport)
        for word in ("start", "good", "bad", "skip", "run", "replay")
    },
    "bisect log": keys_of(reports.BisectLog),
    "bisect reset": (Key("ended", "true or false", "whether a bisection went on"),),
    "gate": (
        Key("candidates", "list of candidate", "by time"),
        Key("required_gates", "object", "names of gates by pattern of refs"),
        Key("gates", "object", "the gates of your settings: command, score, min, timeout by name"),
    ),
    "gate run": (
        Key("passed", "true or false", "whether the snapshot passed all"),
        Key("verdicts", "list of verdict", "what the gates said, until one said no"),
    ),
    "gate drop": keys_of(reports.RemoveReport),
    "gate require": (
        Key("required_gates", "object", "names of gates by pattern of refs"),
        Key("unjudged", "object", "refs whose snapshots lack gates that guard them, with these"),
    ),
    "metrics": (Key("metrics", "list of row of scores", "by ref, or as --sort says"),),
    "note": (
        Key("notes", "list of note", "those that count; else those that were written or removed"),
    ),
    "sign": keys_of(reports.SignatureReport),
    "verify": (Key("snapshots", "list of verification", "in the order of the command line"),),
    "fsck": keys_of(reports.CheckReport),
    "fsck --repair": keys_of(reports.RepairReport),
    "doctor": keys_of(DoctorReport),
    "version": (Key("version", "text", "the version of mstore"),),
    "reindex": keys_of(reports.ReindexReport),
    "migrate": keys_of(reports.MigrateReport),
    "stats": keys_of(reports.StoreReport),
    "du": keys_of(reports.UsageReport),
}
