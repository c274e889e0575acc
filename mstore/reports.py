"""The return values of the public API: frozen, ready to print or to convert to JSON.

Field names are the JSON keys of the command line and are stable.  Sizes are bytes, times are
nanoseconds since the epoch (`*_ns`) or seconds of duration (`seconds`), ids have their types from
`mstore.ids`.
"""

# Each report is defined beside what makes it; the text below a field is the meaning of its key.
# No other module imports this one: it loads the whole library.

from __future__ import annotations

from mstore.adapters.extract import ExtractReport
from mstore.adapters.truncation import TruncatedTensor
from mstore.add import AddReport
from mstore.api.naming import RemoveReport
from mstore.backup.backup import BackupReport
from mstore.backup.clone import CloneReport
from mstore.casting.cast import CastReport
from mstore.check.findings import Affected, Problem
from mstore.check.fsck import CheckReport
from mstore.check.reindex import ReindexReport
from mstore.check.repair import RepairReport
from mstore.checkout import CheckoutReport
from mstore.combination.combine import CombineReport
from mstore.compare import ComparedModel, ComparedPair, ComparedPart, CompareReport
from mstore.diff import DiffReport, FileDiff, TensorDiff
from mstore.directory_diff import DirectoryDiffReport
from mstore.disk_usage import CodecUsage, HeldBytes, RefUsage, SharedBytes, UsageReport
from mstore.gc.collect import GcReport
from mstore.gc.prune import PruneReport
from mstore.lineage import (
    FileReport,
    OriginReport,
    ParentReport,
    ReflogReport,
    RefReport,
    SnapshotReport,
    TensorReport,
)
from mstore.merge.analysis.blame import BlameReport, ExpertBlame, LayerBlame, TensorBlame
from mstore.merge.analysis.compatibility import CompatibilityFinding, CompatibilityReport
from mstore.merge.analysis.explain import (
    ExpertShare,
    Explanation,
    LayerExplanation,
    TensorExplanation,
)
from mstore.merge.analysis.sweep import SweepPoint, SweepReport
from mstore.merge.methods.report import MethodReport, ParameterReport
from mstore.merge.planning.recipes import PreparedModel
from mstore.merge.planning.report import PlanReport
from mstore.merge.planning.warnings import MergeWarning
from mstore.merge.running.commit import MergeReport
from mstore.merge.running.replay import ReplayReport
from mstore.merge.virtual.deferred import MaterializeReport
from mstore.notes import (
    BAD_SIGNATURE,
    GOOD_SIGNATURE,
    UNCHECKED,
    UNKNOWN_KEY,
    NoteReport,
    SignatureReport,
)
from mstore.pins.pin import PinReport
from mstore.pins.unpin import UnpinReport
from mstore.progress import Progress, ProgressCallback
from mstore.signing import VerifyReport
from mstore.stats.analysis import AnalyzeReport
from mstore.store.migrations import MigrateReport
from mstore.store.not_finite import NotFiniteTensor
from mstore.store_size import StoreReport
from mstore.vocabulary.align import AlignedModel, AlignReport

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
    "BlameReport",
    "CastReport",
    "CheckReport",
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
    "DiffReport",
    "DirectoryDiffReport",
    "ExpertBlame",
    "ExpertShare",
    "Explanation",
    "ExtractReport",
    "FileDiff",
    "FileReport",
    "GcReport",
    "HeldBytes",
    "LayerBlame",
    "LayerExplanation",
    "MaterializeReport",
    "MergeReport",
    "MergeWarning",
    "MethodReport",
    "MigrateReport",
    "NotFiniteTensor",
    "NoteReport",
    "OriginReport",
    "ParameterReport",
    "ParentReport",
    "PinReport",
    "PlanReport",
    "PreparedModel",
    "Problem",
    "Progress",
    "ProgressCallback",
    "PruneReport",
    "RefReport",
    "RefUsage",
    "ReflogReport",
    "ReindexReport",
    "RemoveReport",
    "RepairReport",
    "ReplayReport",
    "SharedBytes",
    "SignatureReport",
    "SnapshotReport",
    "StoreReport",
    "SweepPoint",
    "SweepReport",
    "TensorBlame",
    "TensorDiff",
    "TensorExplanation",
    "TensorReport",
    "TruncatedTensor",
    "UnpinReport",
    "UsageReport",
    "VerifyReport",
]
