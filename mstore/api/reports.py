"""The return values of the public API: frozen, ready to print or to convert to JSON.

Field names are the JSON keys of the command line and are stable.  Sizes are bytes, times are
nanoseconds since the epoch (`*_ns`) or seconds of duration (`seconds`), ids have their types from
`mstore.terms.ids`.
"""

# Each report is defined beside what makes it; the text below a field is the meaning of its key.
# No other module imports this one: it loads the whole library.

from __future__ import annotations

from mstore.api.naming import RemoveReport
from mstore.exports.export import ExportedFile, ExportReport
from mstore.judging.evaluation import EvaluationReport
from mstore.judging.gate import (
    CandidateReport,
    CheckedScore,
    VerdictReport,
    VerdictRow,
)
from mstore.judging.guarded import GateReport
from mstore.judging.metrics import MetricsRow
from mstore.merge.analysis.blame import BlameReport, ExpertBlame, LayerBlame, TensorBlame
from mstore.merge.analysis.compatibility import CompatibilityFinding, CompatibilityReport
from mstore.merge.analysis.explain import (
    ExpertShare,
    Explanation,
    LayerExplanation,
    TensorExplanation,
)
from mstore.merge.analysis.sweep import SweepPoint, SweepReport
from mstore.merge.combination.combine import CombineReport
from mstore.merge.methods.registry import MethodReport, ParameterReport
from mstore.merge.planning.recipes import PreparedModel
from mstore.merge.planning.report import PlanReport
from mstore.merge.planning.warnings import MergeWarning
from mstore.merge.running.commit import MergeReport, ReplayReport
from mstore.merge.running.expert_masks import EmrModel, EmrReport
from mstore.merge.running.runners import WorkerReport
from mstore.merge.virtual.deferred import MaterializeReport
from mstore.models.adapters.convert import ConvertReport
from mstore.models.adapters.extract import ExtractReport
from mstore.models.adapters.truncation import TruncatedTensor
from mstore.models.cast import CastReport
from mstore.models.compare import ComparedModel, ComparedPair, ComparedPart, CompareReport
from mstore.models.neurons.permute import MovedKind, PermuteReport
from mstore.models.stats.analysis import AnalyzeReport
from mstore.models.vocabulary.align import AlignedModel, AlignReport
from mstore.models.vocabulary.transplant import NewToken, StandIn, TokenClass, TransplantReport
from mstore.origins.outdated import OriginState
from mstore.remotes.bundling import BundleReport
from mstore.remotes.check import RemoteCheckReport, RemoteProblem
from mstore.remotes.collect import RemoteGcReport
from mstore.remotes.copying import CopyReport
from mstore.remotes.fetch import FetchReport
from mstore.remotes.prefetch import DropReport, PrefetchReport
from mstore.remotes.push import PushReport
from mstore.remotes.registry import RemoteContents, RemoteRef, RemoteReport
from mstore.remotes.tracking import MovedRef
from mstore.remotes.usage import RemoteRefUsage, RemoteUsageReport
from mstore.search.bisect import BisectLog, BisectMark, BisectReport, CulpritReport
from mstore.search.search import (
    FreeNumber,
    IngredientReport,
    ReportedScore,
    SearchedReport,
    SearchReport,
    TrialReport,
    searched,
)
from mstore.snapshots.add import AddReport
from mstore.snapshots.checkout import CheckoutReport
from mstore.snapshots.diff import DiffReport, FileDiff, TensorDiff
from mstore.snapshots.digests import FileDigest
from mstore.snapshots.directory_diff import DirectoryDiffReport
from mstore.snapshots.lineage import (
    FileReport,
    OriginReport,
    ParentReport,
    ReflogReport,
    RefReport,
    SnapshotReport,
    TensorReport,
)
from mstore.snapshots.notes import (
    BAD_SIGNATURE,
    GOOD_SIGNATURE,
    UNCHECKED,
    UNKNOWN_KEY,
    NoteReport,
    SignatureReport,
)
from mstore.snapshots.signing import VerifyReport
from mstore.store.leaning import Leaning
from mstore.store.migrations import MigrateReport
from mstore.store.not_finite import NotFiniteTensor
from mstore.terms.report import Progress, ProgressCallback
from mstore.upkeep.backup.backup import BackupReport, CloneReport
from mstore.upkeep.check.findings import Affected, Problem
from mstore.upkeep.check.fsck import CheckReport
from mstore.upkeep.check.reindex import ReindexReport
from mstore.upkeep.check.repair import RepairReport
from mstore.upkeep.disk_usage import HeldBytes, RefUsage, SharedBytes, StoreReport, UsageReport
from mstore.upkeep.gc.collect import GcReport
from mstore.upkeep.gc.prune import PruneReport
from mstore.upkeep.pins.pin import PinReport, UnpinReport
from mstore.upkeep.reuse import ReusedBlocks, ReuseReport
from mstore.upkeep.sharings import CodecUsage

__all__ = [
    "BAD_SIGNATURE",
    "GOOD_SIGNATURE",
    "UNCHECKED",
    "UNKNOWN_KEY",
    "AddReport",
    "Affected",
    "AlignReport",
    "AlignedModel",
    "AnalyzeReport",
    "BackupReport",
    "BisectLog",
    "BisectMark",
    "BisectReport",
    "BlameReport",
    "BundleReport",
    "CandidateReport",
    "CastReport",
    "CheckReport",
    "CheckedScore",
    "CheckoutReport",
    "CloneReport",
    "CodecUsage",
    "CombineReport",
    "CompareReport",
    "ComparedModel",
    "ComparedPair",
    "ComparedPart",
    "CompatibilityFinding",
    "CompatibilityReport",
    "ConvertReport",
    "CopyReport",
    "CulpritReport",
    "DiffReport",
    "DirectoryDiffReport",
    "DropReport",
    "EmrModel",
    "EmrReport",
    "EvaluationReport",
    "ExpertBlame",
    "ExpertShare",
    "Explanation",
    "ExportReport",
    "ExportedFile",
    "ExtractReport",
    "FetchReport",
    "FileDiff",
    "FileDigest",
    "FileReport",
    "FreeNumber",
    "GateReport",
    "GcReport",
    "HeldBytes",
    "IngredientReport",
    "LayerBlame",
    "LayerExplanation",
    "Leaning",
    "MaterializeReport",
    "MergeReport",
    "MergeWarning",
    "MethodReport",
    "MetricsRow",
    "MigrateReport",
    "MovedKind",
    "MovedRef",
    "NewToken",
    "NotFiniteTensor",
    "NoteReport",
    "OriginReport",
    "OriginState",
    "ParameterReport",
    "ParentReport",
    "PermuteReport",
    "PinReport",
    "PlanReport",
    "PrefetchReport",
    "PreparedModel",
    "Problem",
    "Progress",
    "ProgressCallback",
    "PruneReport",
    "PushReport",
    "RefReport",
    "RefUsage",
    "ReflogReport",
    "ReindexReport",
    "RemoteCheckReport",
    "RemoteContents",
    "RemoteGcReport",
    "RemoteProblem",
    "RemoteRef",
    "RemoteRefUsage",
    "RemoteReport",
    "RemoteUsageReport",
    "RemoveReport",
    "RepairReport",
    "ReplayReport",
    "ReportedScore",
    "ReuseReport",
    "ReusedBlocks",
    "SearchReport",
    "SearchedReport",
    "SharedBytes",
    "SignatureReport",
    "SnapshotReport",
    "StandIn",
    "StoreReport",
    "SweepPoint",
    "SweepReport",
    "TensorBlame",
    "TensorDiff",
    "TensorExplanation",
    "TensorReport",
    "TokenClass",
    "TransplantReport",
    "TrialReport",
    "TruncatedTensor",
    "UnpinReport",
    "UsageReport",
    "VerdictReport",
    "VerdictRow",
    "VerifyReport",
    "WorkerReport",
    "searched",
]
