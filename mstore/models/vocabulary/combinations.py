"""What new rows of an embedding are made of: rows of the model, and a factor for each.

A checkpoint of them, on a branch below `prepared/`, has for each embedding (`input`, `output`)

    NAME.tokens    I32[n]      rows of the result
    NAME.rows      I32[n, k]   rows of the model
    NAME.factors   F32[n, k]   their factors; 0 where fewer than k are enough

and in `held_out` how many of the last rows are tokens that the model has: they were made as if it
lacked them, so their own rows tell how good the others are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.models.made import published, put_array, put_model
from mstore.models.vocabulary.embeddings import rounded
from mstore.numeric.casts import singles
from mstore.store.catalog import Catalog
from mstore.store.models import tensors_of
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import Incompatible
from mstore.terms.ids import SnapshotId

Singles = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

_WEIGHTS: Final = "model.safetensors"
_HELD_OUT: Final = "held_out"
_SLAB: Final = 4096
"""Rows at a time."""


class Combinations(msgspec.Struct, frozen=True):
    """New rows of one embedding.

    tokens: int64[n], rows of the result. rows, factors: int64[n, k], float32[n, k]. held_out: how
    many of the last ones are tokens that the model has.
    """

    tokens: Numbers
    rows: Numbers
    factors: Singles
    held_out: int

    def __len__(self) -> int:
        return len(self.tokens) - self.held_out

    def made_of(self, span: slice, matrix: Matrix) -> Singles:
        """Return some of the rows, float32[rows, width], made of these of `matrix`.

        Sums in the order of the factors, so each bit is the same on every machine.
        """
        rows, factors = self.rows[span], self.factors[span]
        out = np.zeros((len(rows), matrix.width), np.float32)
        for column in range(rows.shape[1]):
            out += factors[:, column, None] * matrix.singles(rows[:, column])
        return out


class Matrix:
    """An embedding, [rows, width], as it is stored."""

    def __init__(self, data: Any, dtype: str, rows: int) -> None:
        self.dtype = dtype
        self.raw: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(rows, -1)
        self.width = self.raw.shape[1] // (4 if dtype == "F32" else 2)

    def singles(self, at: Numbers) -> Singles:
        """Return some rows, float32[rows, width], exactly."""
        found = np.ascontiguousarray(self.raw[at]).reshape(-1)
        return singles(found, self.dtype, len(at) * self.width).reshape(len(at), self.width)

    def rounded(self, values: Singles) -> npt.NDArray[np.uint8]:
        """Return rows as this has them, uint8[rows, bytes].  Raises Incompatible if it cannot."""
        own = rounded(values, array_dtype(self.dtype))
        return np.ascontiguousarray(own).view(np.uint8).reshape(len(values), -1)

    def mean(self, at: Numbers) -> Singles:
        """Return the mean of some rows, float32[width]: summed in their order, in float64."""
        total = np.zeros(self.width, np.float64)
        for start in range(0, len(at), _SLAB):
            total += self.singles(at[start : start + _SLAB]).astype(np.float64).sum(axis=0)
        found: Singles = (total / max(1, len(at))).astype(np.float32)
        return found


def stored(
    catalog: Catalog, transaction: Transaction, branch: str, made: Mapping[str, Combinations]
) -> SnapshotId:
    """Store combinations by embedding, and publish them on a branch; the same ones stay."""
    arrays: dict[str, tuple[npt.NDArray[Any], str]] = {}
    for name, one in made.items():
        arrays |= {
            f"{name}.tokens": (one.tokens, "I32"),
            f"{name}.rows": (one.rows, "I32"),
            f"{name}.factors": (one.factors, "F32"),
            f"{name}.{_HELD_OUT}": (np.asarray([one.held_out]), "I32"),
        }
    tensors = {
        name: put_array(transaction, name, array, dtype) for name, (array, dtype) in arrays.items()
    }
    content = put_model(transaction, _WEIGHTS, tensors, {})
    return published(
        catalog,
        transaction,
        branch,
        content,
        message="what new rows of an embedding are made of",
        action="align: combinations",
    )


def read(
    catalog: Catalog, snapshot: SnapshotId, branch: str, rows: Mapping[str, int]
) -> dict[str, Combinations]:
    """Return stored combinations.  rows: of the model's embeddings, by name.

    Raises Incompatible for what are none, Corrupt, StorageFailed.
    """
    names = tensors_of(catalog, catalog.manifest_of(snapshot))

    def array(name: str, dtype: str, dimensions: int) -> npt.NDArray[Any]:
        record = catalog.tensor(names[name]) if name in names else None
        if record is None or record.dtype != dtype or len(record.shape) != dimensions:
            raise _none(branch)
        data = catalog.read_blocks(list(record.block_ids()))
        return data.view(np.int32 if dtype == "I32" else np.float32).reshape(record.shape)

    found = {}
    for name, count in rows.items():
        tokens = array(f"{name}.tokens", "I32", 1).astype(np.int64)
        own = array(f"{name}.rows", "I32", 2).astype(np.int64)
        factors = array(f"{name}.factors", "F32", 2)
        held_out = int(array(f"{name}.{_HELD_OUT}", "I32", 1)[0])
        is_whole = own.shape == factors.shape and len(own) == len(tokens) >= held_out >= 0
        if not is_whole or (own.size and not 0 <= own.min() <= own.max() < count):
            raise _none(branch)
        found[name] = Combinations(tokens, own, factors, held_out)
    return found


def of_pieces(tokens: Numbers, pieces: Sequence[Sequence[int]]) -> Combinations:
    """Return rows that are the means of others: those of the pieces of each token."""
    k = max(map(len, pieces), default=1)
    rows = np.zeros((len(tokens), k), np.int64)
    factors = np.zeros((len(tokens), k), np.float32)
    for number, own in enumerate(pieces):
        rows[number, : len(own)] = own
        factors[number, : len(own)] = 1 / max(1, len(own))
    return Combinations(tokens, rows, factors, 0)


def _none(branch: str) -> Incompatible:
    return Incompatible(
        "is no checkpoint of combinations as they are stored there",
        where=branch,
        hint="remove the branch, and they are computed again",
    )
