"""The embeddings of an alignment: which change, and their new rows as stored blocks.

Tensors are read to files without a name in the store's temporary directory, those of all models
for one name at a time; memory is a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.models.vocabulary.members import Member
from mstore.models.vocabulary.rows import (
    MISSING,
    ZERO,
    Numbers,
    Places,
    Wish,
    gathered,
    places_of,
    positions,
)
from mstore.models.vocabulary.target import Target
from mstore.store.catalog import Catalog
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.store.view import array_dtype
from mstore.terms.errors import Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.progress import Progress, ProgressCallback
from mstore.terms.requests import Vocabulary

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
        self._progress = progress
        base = members[0].tokenizer
        otherwise = target.ids if base is None else base.ids
        self.tokens = [one.tokens(otherwise) for one in members]
        self._positions = [
            positions(target.ids, tokens, one.rows, target.length)
            for one, tokens in zip(members, self.tokens, strict=True)
        ]
        self._first = 0 if asked.base_first else None
        self._done = 0
        self._total = 0
        self.changed = self._changed()

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

    def _changed(self) -> dict[str, dict[int, Places]]:
        """Return the places of rows in tensors that change, by member."""
        wanted: dict[str, dict[int, Places]] = {}
        for name in dict.fromkeys(name for one in self._members for name in one.embeddings):
            given = self._given(name)
            for number, one in enumerate(self._members):
                if name not in one.embeddings:
                    continue
                places = self._places(number, given)
                if not places.are_all(number, one.rows):
                    self._require_donors(name, number, places)
                    wanted.setdefault(name, {})[number] = places
                    self._total += one.embeddings[name][1].nbytes // one.rows * self._target.rows
        return wanted

    def _given(self, name: str) -> list[Numbers | None]:
        return [
            rows if name in one.embeddings else None
            for one, rows in zip(self._members, self._positions, strict=True)
        ]

    def _places(self, number: int, given: Sequence[Numbers | None]) -> Places:
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

    def _padding(self, number: int, *, has_base: bool) -> Places:
        """Return the places of rows after the tokens: the member's own padding, else the base's."""
        at = np.arange(self._target.length, self._target.rows)
        own, base = self._members[number], self._members[0]
        used = max(self.tokens[number].values(), default=-1)
        is_own = (at > used) & (at < own.rows)
        is_base = ~is_own & (at < base.rows) & has_base
        member = np.where(is_own, number, np.where(is_base, 0, ZERO))
        return Places(member, np.where(member == ZERO, MISSING, at))

    def _require_donors(self, name: str, number: int, places: Places) -> None:
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
        places: Places,
        sources: Sequence[npt.NDArray[Any] | None],
        transaction: Transaction,
    ) -> Tensor:
        record = self._members[number].embeddings[name][1]
        dtype = array_dtype(record.dtype)
        pieces = self._pieces(places, sources, self._given(name), dtype, _width(record))
        shape = (len(places.row), *record.shape[1:])
        file = f"{number}/{name}"
        try:
            return transaction.put_tensor(record.dtype, shape, self._told(pieces), file)
        except Incompatible as error:
            error.locate(f"{self._members[number].name}: {name}")
            raise

    def _told(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self._done += len(piece)
            if self._progress is not None:
                self._progress(Progress("align", self._done, self._total))

    def _pieces(
        self,
        places: Places,
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
