"""Permutations: in which order a model gets its channels, neurons and heads, and their signs.

A checkpoint of one has, for each symmetry,

    NAME.order   I32[n]   which of the given model's is at each place
    NAME.signs   I8[n]    1 or -1, for each place; only where signs are symmetric

Of heads, the order is that of the query heads; a key head goes with its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.models.made import published, put_array, put_model
from mstore.models.neurons.symmetries import Axes, Axis, Symmetries, Symmetry
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.transaction import Transaction
from mstore.terms.errors import Incompatible
from mstore.terms.ids import SnapshotId

Numbers = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]
"""The elements of a tensor, as unsigned integers."""

_WEIGHTS: Final = "model.safetensors"


class Ordering(msgspec.Struct, frozen=True):
    """The order of one symmetry, and the sign of each place: int64[n], int64[n]."""

    order: Numbers
    signs: Numbers

    def is_same(self, other: Ordering) -> bool:
        """Return whether the other is equal to this."""
        return np.array_equal(self.order, other.order) and np.array_equal(self.signs, other.signs)

    @classmethod
    def same(cls, size: int) -> Ordering:
        """Return the one that changes nothing."""
        return cls(np.arange(size), np.ones(size, np.int64))

    @property
    def moved(self) -> int:
        """How many are at another place."""
        return int((self.order != np.arange(len(self.order))).sum())

    @property
    def flipped(self) -> int:
        """How many have the other sign."""
        return int((self.signs < 0).sum())

    def keys(self, count: int) -> Numbers:
        """Return the order of key heads, of which there are so many."""
        each = len(self.order) // count
        found: Numbers = self.order[::each] // each
        return found

    def fits(self, symmetry: Symmetry) -> bool:
        """Return whether this is an order of all of them that leaves groups together."""
        size, order = symmetry.size, self.order
        if len(order) != size or len(self.signs) != size:
            return False
        if not np.array_equal(np.sort(order), np.arange(size)):
            return False
        if not (symmetry.is_signed or (self.signs == 1).all()) or (np.abs(self.signs) != 1).any():
            return False
        each = size // symmetry.keys if symmetry.keys else 1
        groups = order.reshape(-1, each) // each
        return bool((groups == groups[:, :1]).all())


Permutation = Mapping[str, Ordering]
"""By the name of the symmetry."""


def is_identity(permutation: Permutation) -> bool:
    """Return whether it changes nothing."""
    return not any(one.moved or one.flipped for one in permutation.values())


def moved(
    bits: Bits, axes: Axes, symmetries: Symmetries, permutation: Permutation, but: str = ""
) -> Bits:
    """Return a tensor in the order of a permutation; elements are moved, or their sign bit flipped.

    but: a symmetry whose axis stays as it is.
    """
    for number, axis in enumerate(axes):
        if axis is None or axis.symmetry == but:
            continue
        one = permutation[axis.symmetry]
        if one.moved:
            index = _index(bits.shape[number], axis, one, symmetries.named[axis.symmetry])
            bits = np.take(bits, index, axis=number)
        if axis.is_signed and one.flipped:
            sign_bit = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
            flips = np.where(one.signs < 0, sign_bit, bits.dtype.type(0))
            shape = [1] * bits.ndim
            shape[number] = -1
            bits = bits ^ flips.reshape(shape)
    return bits


def _index(length: int, axis: Axis, one: Ordering, symmetry: Symmetry) -> Numbers:
    """Return which element of an axis is at each place."""
    order = one.keys(symmetry.keys) if axis.of_keys else one.order
    width = length // (axis.copies * len(order))
    starts = np.arange(axis.copies)[:, None] * len(order) + order
    return (starts.reshape(-1, 1) * width + np.arange(width)).reshape(-1)


def stored(
    catalog: Catalog,
    transaction: Transaction,
    branch: str,
    symmetries: Symmetries,
    permutation: Permutation,
) -> SnapshotId:
    """Store a permutation, and publish it on a branch; the same one stays."""
    tensors = {}
    for name, symmetry in symmetries.named.items():
        one = permutation[name]
        arrays = {"order": (one.order, "I32")}
        if symmetry.is_signed:
            arrays["signs"] = (one.signs, "I8")
        for part, (array, dtype) in arrays.items():
            full = f"{name}.{part}"
            tensors[full] = put_array(transaction, full, array, dtype)
    content = put_model(transaction, _WEIGHTS, tensors, {})
    return published(
        catalog,
        transaction,
        branch,
        content,
        message="in which order a model has its channels, neurons and heads",
        action="permute: permutation",
    )


def read(catalog: Catalog, given: Input, symmetries: Symmetries) -> dict[str, Ordering]:
    """Return a stored permutation.

    Raises Incompatible for what is none of a model of these symmetries, Corrupt, StorageFailed.
    """
    names = tensors_of(catalog, catalog.manifest_of(given.snapshot))

    def array(name: str, dtype: str) -> Numbers | None:
        record = catalog.tensor(names[name]) if name in names else None
        if record is None or record.dtype != dtype or len(record.shape) != 1:
            return None
        data = catalog.read_blocks(list(record.block_ids()))
        return data.view(np.int32 if dtype == "I32" else np.int8).astype(np.int64)

    found: dict[str, Ordering] = {}
    for name, symmetry in symmetries.named.items():
        order = array(f"{name}.order", "I32")
        signs = np.ones(symmetry.size, np.int64)
        told = array(f"{name}.signs", "I8") if symmetry.is_signed else signs
        one = None if order is None or told is None else Ordering(order, told)
        if one is None or not one.fits(symmetry):
            raise Incompatible(
                f"is no permutation of this model: nothing in it says where {symmetry.size} "
                f"{name} go",
                where=given.name,
            )
        found[name] = one
    return found
