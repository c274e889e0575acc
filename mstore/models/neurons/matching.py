"""Matching: the permutation of one model by which it is nearest to another.

Weight matching of Ainsworth, Hayase and Srinivasa (Git Re-Basin, 2022), with signs (Sweeney 2026):
for one symmetry after the other, the assignment that makes the sum of the tensors' cosines largest,
while all others stay as they are; again and again until none changes.  The first is the residual
stream, by the tensors that have no other symmetry: with the others, whatever is at one place by
chance would hold itself there (docs/design/062-neurons.md).

Sums are in float64.  What is as good as before stays as it was, so what is aligned stays.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore.models.neurons.permutation import Bits, Numbers, Ordering, moved
from mstore.models.neurons.symmetries import Axis, Symmetries, Symmetry
from mstore.store.view import array_dtype
from mstore.terms.errors import Incompatible, Unavailable

Doubles = npt.NDArray[np.float64]
Read = Callable[[str], Bits]
"""Returns a tensor by its name."""
Assign = Callable[[Doubles], Numbers]
"""Returns the assignment with the least sum: the column of each row."""

ROUNDS: Final = 20
"""At most so often is every symmetry matched."""
_SLAB: Final = 64 << 20
"""Bytes of float64 at a time."""
_EQUAL: Final = 1e-12
"""Sums that differ by less, of themselves, are equal."""


def matched(
    symmetries: Symmetries,
    dtypes: Mapping[str, tuple[str, str]],
    read: Read,
    read_other: Read,
    begin_round: Callable[[], Callable[[int], None]],
) -> tuple[dict[str, Ordering], int]:
    """Return the permutation of a model, and in how many rounds it was found.

    dtypes: of the tensors of both. read, read_other: of it, and of the model that it gets near to.
    begin_round: returns what is told of the bytes of tensors that a round is done with.

    Raises Unavailable without scipy, Incompatible for elements that are not finite.
    """
    assign = _assign()
    found = {name: Ordering.same(one.size) for name, one in symmetries.named.items()}
    known: set[str] = set()
    for number in range(1, ROUNDS + 1):
        tick = begin_round()
        is_changed = False
        for name, symmetry in symmetries.named.items():
            costs = _Costs(name, symmetry)
            costs.add_all(symmetries, dtypes, read, read_other, found, known, tick)
            known.add(name)
            one = costs.best(assign, found[name])
            is_changed |= not one.is_same(found[name])
            found[name] = one
        if not is_changed:
            return found, number
    return found, ROUNDS


def _assign() -> Assign:
    """Return scipy's solver.  Raises Unavailable."""
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise Unavailable(
            "matching neurons needs the package scipy", hint="pip install 'mstore[align]'"
        ) from error

    def assign(costs: Doubles) -> Numbers:
        found: Numbers = optimize.linear_sum_assignment(costs)[1]
        return found

    return assign


class _Costs:
    """Sums of products, for each place and each of the given model's that may come there.

    plain: of elements without a sign. signed: of those with one. keys: of key heads.
    """

    def __init__(self, name: str, symmetry: Symmetry) -> None:
        self._name = name
        self._symmetry = symmetry
        self._plain: Doubles | None = None
        self._signed: Doubles | None = None
        self._keys: Doubles | None = None

    def add_all(
        self,
        symmetries: Symmetries,
        dtypes: Mapping[str, tuple[str, str]],
        read: Read,
        read_other: Read,
        permutation: Mapping[str, Ordering],
        known: set[str],
        tick: Callable[[int], None],
    ) -> None:
        """Add the tensors that have the symmetry, if their others are known; if none is, all."""
        own = {
            name: (number, axis)
            for name, axes in symmetries.axes.items()
            for number, axis in enumerate(axes)
            if axis is not None and axis.symmetry == self._name
        }
        others = {name: {one.symmetry for one in symmetries.axes[name] if one} for name in own}
        chosen = [name for name in own if others[name] <= {*known, self._name}] or list(own)
        for name in chosen:
            number, axis = own[name]
            bits = moved(read(name), symmetries.axes[name], symmetries, permutation, self._name)
            self._add(name, dtypes[name], bits, read_other(name), number, axis)
            tick(bits.nbytes)

    def _add(
        self,
        name: str,
        dtypes: tuple[str, str],
        ours: Bits,
        theirs: Bits,
        number: int,
        axis: Axis,
    ) -> None:
        count = self._symmetry.keys if axis.of_keys else self._symmetry.size
        total = self._total(axis, count)
        # Of each copy, a row for each channel, neuron or head.
        sides = [
            np.moveaxis(bits.view(array_dtype(dtype)), number, 0).reshape(axis.copies, count, -1)
            for bits, dtype in zip((ours, theirs), dtypes, strict=True)
        ]
        step = max(1, _SLAB // (8 * count))
        slabs = [
            (copy, slice(None), slice(start, start + step))
            for copy in range(axis.copies)
            for start in range(0, sides[0].shape[2], step)
        ]
        # Each tensor counts by its cosine; else the embeddings, of large elements, outweigh all.
        squares = (
            math.fsum(float(np.square(side[slab].astype(np.float64)).sum()) for slab in slabs)
            for side in sides
        )
        scale = math.sqrt(math.prod(squares)) or 1.0
        for slab in slabs:
            mine, other = (side[slab].astype(np.float64) for side in sides)
            total += other @ (mine / scale).T
        if not np.isfinite(total).all():
            raise Incompatible(f"tensor {name} has elements that are not finite, in one of the two")

    def _total(self, axis: Axis, count: int) -> Doubles:
        """Return what products of an axis are added to."""
        kind = "_keys" if axis.of_keys else "_signed" if axis.is_signed else "_plain"
        total: Doubles | None = getattr(self, kind)
        if total is None:
            total = np.zeros((count, count))
            setattr(self, kind, total)
        return total

    def best(self, assign: Assign, now: Ordering) -> Ordering:
        """Return the ordering with the largest sum; the present one if it is as good."""
        if self._keys is not None:
            return self._best_heads(assign, now)
        places = np.arange(self._symmetry.size)
        signs, total = np.ones(len(places), np.int64), self._plain
        negative: npt.NDArray[np.bool_] | None = None
        if self._signed is not None:
            # Each may come with the sign that it needs.
            negative, total = np.signbit(self._signed), np.abs(self._signed, out=self._signed)
            total += 0 if self._plain is None else self._plain
        assert total is not None
        self._plain = self._signed = None
        order = _better(total, assign, now.order)
        if negative is not None:
            signs[negative[places, order]] = -1
        return Ordering(order, signs)

    def _best_heads(self, assign: Assign, now: Ordering) -> Ordering:
        """Return the best order of groups, of which each has its heads in the best order."""
        assert self._keys is not None
        assert self._plain is not None
        keys, each = self._symmetry.keys, self._symmetry.size // self._symmetry.keys
        pairs = self._plain.reshape(keys, each, keys, each).swapaxes(1, 2)
        same = np.arange(each)
        inner = np.zeros((keys, keys, each), np.int64)
        for to, of in np.ndindex(keys, keys):
            inner[to, of] = _better(pairs[to, of].copy(), assign, same)
            self._keys[to, of] += pairs[to, of][same, inner[to, of]].sum()
        groups = _better(self._keys, assign, now.keys(keys))
        order = groups[:, None] * each + inner[np.arange(keys), groups]
        return Ordering(order.reshape(-1), np.ones(self._symmetry.size, np.int64))


def _better(total: Doubles, assign: Assign, now: Numbers) -> Numbers:
    """Return the assignment with the largest sum, `now` if it is as good.  Takes the matrix."""
    places = np.arange(len(total))
    kept = total[places, now]
    np.negative(total, out=total)  # in place: there may be gigabytes
    found = assign(total)
    new = -total[places, found]
    differs = found != now
    gain = math.fsum(new[differs]) - math.fsum(kept[differs])
    return found if gain > _EQUAL * math.fsum(np.abs(new[differs])) else now
