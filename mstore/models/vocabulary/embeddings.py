"""The embeddings of an alignment: where each row comes from, and the new rows as stored blocks.

A row that the model has is its own.  For a token that it lacks, the rows of the other models that
have the same tensor decide, as in mergekit 0.1.5: the only model that has the token; else the base,
if it has it and counts first; else the mean of all that have it; nothing but zeros if none has.  A
request may name another source for a token, or force it on the models that have the token, too.

Tensors are read to files without a name in the store's temporary directory, those of all models
for one name at a time; memory is a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.models.vocabulary.members import Member
from mstore.models.vocabulary.target import Target, Wishes
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.report import ProgressCallback, ProgressCounter
from mstore.terms.requests import Vocabulary

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


class RowOrigins(msgspec.Struct, frozen=True):
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
    padding: RowOrigins | None,
    rows: int,
) -> RowOrigins:
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
        rest = padding or RowOrigins(np.full(tail, PADDING), np.full(tail, MISSING))
        chosen, row = np.concatenate([chosen, rest.member]), np.concatenate([row, rest.row])
    return RowOrigins(chosen, row)


def gathered(
    places: RowOrigins,
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
            out[at] = rounded(source[row[at]], dtype)
        elif number == PADDING:
            assert padding is not None
            out[at] = padding.astype(dtype)
        elif number == MEAN:
            out[at] = rounded(_mean(at + (span.start or 0), tensors, given, width), dtype)
    return out


def rounded(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return values in another type.  Raises Incompatible for finite ones that it cannot hold."""
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


_SLAB_BYTES: Final = 4 << 20


class Embeddings:
    """The embeddings of all members.

    tokens: the rows of each member's tokens. changed: by tensor and member, where the rows of a
    tensor that changes come from.
    """

    def __init__(
        self,
        catalog: Catalog,
        asked: Vocabulary,
        members: Sequence[Member],
        target: Target,
        wishes: Mapping[int, Wish],
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._asked = asked
        self._members = members
        self._target = target
        self._wishes = wishes
        base = members[0].tokenizer
        otherwise = target.ids if base is None else base.ids
        self.tokens = [one.tokens(otherwise) for one in members]
        self._positions = [
            positions(target.ids, tokens, one.rows, target.length)
            for one, tokens in zip(members, self.tokens, strict=True)
        ]
        self._first = 0 if asked.base_first else None
        self.changed = self._changed()
        total = sum(
            members[number].embeddings[name][1].nbytes // members[number].rows * target.rows
            for name, changed in self.changed.items()
            for number in changed
        )
        self._tick = ProgressCounter("align", total, progress)

    def changes(self, number: int) -> bool:
        """Return whether embeddings of a member change."""
        return any(number in own for own in self.changed.values())

    def written(self, transaction: Transaction) -> list[dict[str, Tensor]]:
        """Write the embeddings that change; return them by name, for each member."""
        found: list[dict[str, Tensor]] = [{} for _ in self._members]
        for name, changed in self.changed.items():
            sources = self._sources(name, transaction.directory)
            for number, places in changed.items():
                found[number][name] = self._rewritten(name, number, places, sources, transaction)
        return found

    def _changed(self) -> dict[str, dict[int, RowOrigins]]:
        """Return the places of rows in tensors that change, by member."""
        wanted: dict[str, dict[int, RowOrigins]] = {}
        for name in dict.fromkeys(name for one in self._members for name in one.embeddings):
            given = self._given(name)
            for number, one in enumerate(self._members):
                if name not in one.embeddings:
                    continue
                places = self._places(number, given)
                if not places.are_all(number, one.rows):
                    self._require_donors(name, number, places)
                    wanted.setdefault(name, {})[number] = places
        return wanted

    def _given(self, name: str) -> list[Numbers | None]:
        return [
            rows if name in one.embeddings else None
            for one, rows in zip(self._members, self._positions, strict=True)
        ]

    def _places(self, number: int, given: Sequence[Numbers | None]) -> RowOrigins:
        padding = None
        if self._asked.keep_padding and self._asked.pad_to is None:
            padding = self._padding(number, has_base=given[0] is not None)
        return places_of(
            number,
            given,
            self._wishes,
            first=self._first,
            padding=padding,
            rows=self._target.rows,
        )

    def _padding(self, number: int, *, has_base: bool) -> RowOrigins:
        """Return the places of rows after the tokens: the member's own padding, else the base's."""
        at = np.arange(self._target.length, self._target.rows)
        own, base = self._members[number], self._members[0]
        used = max(self.tokens[number].values(), default=-1)
        is_own = (at > used) & (at < own.rows)
        is_base = ~is_own & (at < base.rows) & has_base
        member = np.where(is_own, number, np.where(is_base, 0, ZERO))
        return RowOrigins(member, np.where(member == ZERO, MISSING, at))

    def _require_donors(self, name: str, number: int, places: RowOrigins) -> None:
        """Raise Incompatible for rows from a member that has no such tensor, or one unlike it."""
        shape = self._members[number].embeddings[name][1].shape[1:]
        for donor in np.unique(places.member[places.member >= 0]):
            one = self._members[donor]
            if name not in one.embeddings:
                raise Incompatible(
                    f"has no {name}, from which {self._members[number].name} takes rows",
                    where=one.name,
                )
            if one.embeddings[name][1].shape[1:] != shape:
                raise Incompatible(
                    f"{name} has other rows than that of {self._members[number].name}",
                    where=one.name,
                )

    def _sources(self, name: str, directory: Path) -> list[npt.NDArray[Any] | None]:
        """Return the tensor of each member that has it, [rows, row length], read to a file."""
        found: list[npt.NDArray[Any] | None] = []
        known: dict[TensorId, npt.NDArray[Any]] = {}
        for one in self._members:
            if name not in one.embeddings:
                found.append(None)
                continue
            id, record = one.embeddings[name]
            if id not in known:
                known[id] = self._read(record, directory)
            found.append(known[id])
        return found

    def _read(self, record: Tensor, directory: Path) -> npt.NDArray[Any]:
        blocks = (self._catalog.read_block(block) for block in record.block_ids())
        data = np.frombuffer(fs.unnamed(directory, blocks), dtype=array_dtype(record.dtype))
        return data.reshape(record.shape[0], _width(record))

    def _rewritten(
        self,
        name: str,
        number: int,
        places: RowOrigins,
        sources: Sequence[npt.NDArray[Any] | None],
        transaction: Transaction,
    ) -> Tensor:
        record = self._members[number].embeddings[name][1]
        dtype = array_dtype(record.dtype)
        pieces = self._pieces(places, sources, self._given(name), dtype, _width(record))
        shape = (len(places.row), *record.shape[1:])
        file = f"{number}/{name}"
        try:
            return transaction.put_tensor(record.dtype, shape, self._counted(pieces), file)
        except Incompatible as error:
            error.locate(f"{self._members[number].name}: {name}")
            raise

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self._tick(len(piece))

    def _pieces(
        self,
        places: RowOrigins,
        sources: Sequence[npt.NDArray[Any] | None],
        given: Sequence[Numbers | None],
        dtype: np.dtype[Any],
        width: int,
    ) -> Iterator[bytes]:
        """Yield the rows' bytes, a few MiB at a time."""
        step = max(1, _SLAB_BYTES // max(1, width * dtype.itemsize))
        length, rows = self._target.length, len(places.row)
        total = np.zeros(width, dtype=np.float64)
        padding: npt.NDArray[np.float32] | None = None
        for begin, end in ((0, length), (length, rows)):
            for start in range(begin, end, step):
                span = slice(start, min(end, start + step))
                slab = gathered(places, span, sources, given, dtype, padding)
                if begin == 0 and length < rows:
                    total += slab.astype(np.float64).sum(axis=0)
                yield slab.tobytes()
            if begin == 0:
                padding = (total / max(1, length)).astype(np.float32)


def _width(record: Tensor) -> int:
    """Return how many elements a row has."""
    return int(np.prod(record.shape[1:], dtype=np.int64))


def wishes_of(
    wishes: Wishes,
    members: Sequence[Member],
    target: Target,
) -> dict[int, Wish]:
    """Return what is wished for rows of the vocabulary.  Raises BadRequest."""
    found = {}
    for token, (model, wanted, force) in wishes.items():
        at = target.ids.get(token)
        if at is None:
            raise BadRequest("is no token of the vocabulary", where=f"tokens: {token}")
        if model is None:
            found[at] = Wish(ZERO, MISSING, force)
            continue
        number = next((k for k, one in enumerate(members) if one.is_meant(model)), None)
        if number is None:
            raise BadRequest(
                "its source is neither the base nor an expert", where=f"tokens: {token}"
            )
        one = members[number]
        row: int | None
        if isinstance(wanted, int):
            row = wanted if 0 <= wanted < one.rows else None
        else:
            row = one.tokens(target.ids).get(token if wanted is None else wanted)
        if row is None:
            raise BadRequest(
                f"{one.name} has no row for {token if wanted is None else wanted!r}",
                where=f"tokens: {token}",
            )
        found[at] = Wish(number, row, force)
    return found
