"""mstore: git for model checkpoints, with budgeted merging built in.

The public face: `Store`, `Snapshot`, `MergeRequest`, `TensorRule`, `RecipeRequest`, `Vocabulary`,
`TokenRow`, the errors, and the reports that calls return.
"""

from __future__ import annotations

from mstore.api import Snapshot, Store
from mstore.errors import MstoreError
from mstore.ids import BlockId, ManifestId, PlanId, SnapshotId, TensorId
from mstore.requests import MergeRequest, RecipeRequest, TensorRule, TokenRow, Vocabulary
from mstore.sizes import Budget
from mstore.version import __version__

__all__ = [
    "BlockId",
    "Budget",
    "ManifestId",
    "MergeRequest",
    "MstoreError",
    "PlanId",
    "RecipeRequest",
    "Snapshot",
    "SnapshotId",
    "Store",
    "TensorId",
    "TensorRule",
    "TokenRow",
    "Vocabulary",
    "__version__",
]
