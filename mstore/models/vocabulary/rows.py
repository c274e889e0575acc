"""Rows: where each row of an embedding comes from, if a model gets the tokens of a vocabulary.

A row that the model has is its own.  For a token that it lacks, the rows of the other models that
have the same tensor decide, as in mergekit 0.1.5: the only model that has the token; else the base,
if it has it and counts first; else the mean of all that have it; nothing but zeros if none has.  A
request may name another source for a token, or force it on the models that have the token, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.terms.errors import Incompatible

Numbers = npt.NDArray[np.int64]

ZERO: Final = -1
"""As a member: the row is zeros."""
MEAN: Final = -2
"""As a member: the row is the mean of the members that have the token."""
PADDING: Final = -3
"""As a member: the row is the mean of all rows of tokens."""
MISSING: Final = -1
"""As a row: the member does not have the token."""


class Wish(msgspec.Struct, frozen=True):
    """What a request says of one token: a member's row, or ZERO; force: for all members."""

    member: int
    row: int
    force: bool


class Places(msgspec.Struct, frozen=True):
    """int64[rows] each. member: whose row it is, or ZERO, MEAN, PADDING. row: which of its rows."""

    member: Numbers
    row: Numbers

    def are_all(self, member: int, rows: int) -> bool:
        """Return whether these are just the rows of a member that has so many."""
        return (
            len(self.row) == rows
            and bool((self.member == member).all())
            and bool((self.row == np.arange(rows)).all())
        )


def positions(ids: Mapping[str, int], own: Mapping[str, int], rows: int, length: int) -> Numbers:
    """Return the row of each token in a model that has `rows`, int64[length], MISSING for none.

    ids: the tokens' new places. own: their places in the model.
    """
    found = np.full(length, MISSING, dtype=np.int64)
    for token, new in ids.items():
        old = own.get(token, rows)
        if old < rows and new < length:
            found[new] = old
    return found


def places_of(
    member: int,
    given: Sequence[Numbers | None],
    wishes: Mapping[int, Wish],
    *,
    first: int | None,
    padding: Places | None,
    rows: int,
) -> Places:
    """Return the places of a tensor's rows in one member.

    given: what `positions` returned for each member, None for one without this tensor. first: the
    member that counts first, if any. padding: the places of rows after those of tokens; None: they
    are the mean of the others. rows: how many there are in all.
    """
    own = given[member]
    assert own is not None
    have = np.stack([np.full(len(own), MISSING) if one is None else one for one in given])
    count = (have != MISSING).sum(axis=0)
    donor = np.argmax(have != MISSING, axis=0)
    chosen = np.where(count == 1, donor, np.where(count == 0, ZERO, MEAN))
    if first is not None and given[first] is not None:
        chosen = np.where((count > 1) & (have[first] != MISSING), first, chosen)
    row = np.where(chosen >= 0, have[np.maximum(chosen, 0), np.arange(len(own))], MISSING)
    forced = np.zeros(len(own), dtype=bool)
    for at, wish in wishes.items():
        chosen[at], row[at], forced[at] = wish.member, wish.row, wish.force
    is_own = (own != MISSING) & ~forced
    chosen, row = np.where(is_own, member, chosen), np.where(is_own, own, row)
    tail = rows - len(own)
    if tail:
        rest = padding or Places(np.full(tail, PADDING), np.full(tail, MISSING))
        chosen, row = np.concatenate([chosen, rest.member]), np.concatenate([row, rest.row])
    return Places(chosen, row)


def gathered(
    places: Places,
    span: slice,
    tensors: Sequence[npt.NDArray[Any] | None],
    given: Sequence[Numbers | None],
    dtype: np.dtype[Any],
    padding: npt.NDArray[np.float32] | None,
) -> npt.NDArray[Any]:
    """Return some rows of the tensor, [rows of the span, row length], as `dtype`.

    tensors: of each member, [rows, row length], None if it is not needed.  Means are sums in the
    order of members, in float32, over their number, rounded once.

    Raises Incompatible if an element is finite and `dtype` cannot hold it.
    """
    member, row = places.member[span], places.row[span]
    width = next(one.shape[1] for one in tensors if one is not None)
    out = np.zeros((len(member), width), dtype=dtype)
    for number in np.unique(member):
        at = np.flatnonzero(member == number)
        if number >= 0:
            source = tensors[number]
            assert source is not None
            out[at] = _rounded(source[row[at]], dtype)
        elif number == PADDING:
            assert padding is not None
            out[at] = padding.astype(dtype)
        elif number == MEAN:
            out[at] = _rounded(_mean(at + (span.start or 0), tensors, given, width), dtype)
    return out


def _rounded(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    if found.dtype != values.dtype and (np.isfinite(values) & ~np.isfinite(found)).any():
        raise Incompatible(f"rows of another model have elements that are too large for {dtype}")
    return found


def _mean(
    tokens: Numbers,
    tensors: Sequence[npt.NDArray[Any] | None],
    given: Sequence[Numbers | None],
    width: int,
) -> npt.NDArray[np.float32]:
    total = np.zeros((len(tokens), width), dtype=np.float32)
    count = np.zeros((len(tokens), 1), dtype=np.float32)
    for source, rows in zip(tensors, given, strict=True):
        if rows is None:
            continue
        assert source is not None
        has = rows[tokens] != MISSING
        total[has] += source[rows[tokens[has]]].astype(np.float32)
        count[has] += 1
    mean: npt.NDArray[np.float32] = total / count
    return mean
