"""mstore: git for model checkpoints, with budgeted merging built in.

The public face: `Store`, `Snapshot`, `MergeRequest`, `TensorRule`, `RecipeRequest`, `Vocabulary`,
`TokenRow`, `Transplant`, the errors, and the reports that calls return.

Names are imported when they are first used: a program that mounts, say, needs the errors, and not
the whole library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mstore.api import Snapshot, Store
    from mstore.judging.gate import Gate
    from mstore.terms import __version__
    from mstore.terms.errors import (
        BadCheckpoint,
        BadName,
        BadRequest,
        BudgetExceeded,
        CommandFailed,
        Conflict,
        Corrupt,
        GateFailed,
        Incompatible,
        Interrupted,
        InvalidInput,
        MstoreError,
        NotFound,
        RemoteAway,
        StorageFailed,
        Unavailable,
        Unreadable,
        WrongCommand,
    )
    from mstore.terms.ids import BlockId, ManifestId, NoteId, PlanId, SnapshotId, TensorId
    from mstore.terms.requests import (
        MergeRequest,
        RecipeRequest,
        TensorRule,
        TokenRow,
        Transplant,
        Vocabulary,
    )
    from mstore.terms.sizes import Budget

__all__ = [
    "BadCheckpoint",
    "BadName",
    "BadRequest",
    "BlockId",
    "Budget",
    "BudgetExceeded",
    "CommandFailed",
    "Conflict",
    "Corrupt",
    "Gate",
    "GateFailed",
    "Incompatible",
    "Interrupted",
    "InvalidInput",
    "ManifestId",
    "MergeRequest",
    "MstoreError",
    "NotFound",
    "NoteId",
    "PlanId",
    "RecipeRequest",
    "RemoteAway",
    "Snapshot",
    "SnapshotId",
    "StorageFailed",
    "Store",
    "TensorId",
    "TensorRule",
    "TokenRow",
    "Transplant",
    "Unavailable",
    "Unreadable",
    "Vocabulary",
    "WrongCommand",
    "__version__",
]

_MODULES = {
    "mstore.api": ("Snapshot", "Store"),
    "mstore.terms.errors": (
        *("BadCheckpoint", "BadName", "BadRequest", "BudgetExceeded", "CommandFailed", "Conflict"),
        *("Corrupt", "GateFailed"),
        *("Incompatible", "Interrupted", "InvalidInput", "MstoreError", "NotFound"),
        *("RemoteAway", "StorageFailed", "Unavailable", "Unreadable", "WrongCommand"),
    ),
    "mstore.terms.ids": ("BlockId", "ManifestId", "NoteId", "PlanId", "SnapshotId", "TensorId"),
    "mstore.terms.requests": (
        *("MergeRequest", "RecipeRequest", "TensorRule"),
        *("TokenRow", "Transplant", "Vocabulary"),
    ),
    "mstore.judging.gate": ("Gate",),
    "mstore.terms.sizes": ("Budget",),
    "mstore.terms": ("__version__",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
