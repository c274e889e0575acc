"""Differences: a checkpoint whose floating-point tensors are what to add to those of a base.

Owns how such a checkpoint fits its base, and the sums: base + difference in float32, rounded to the
base's type, to nearest even.  Where a difference is zero the base's bits stay.  The sums have the
layout of the base: its files, headers and types; a tensor that the checkpoint lacks is the base's.
Tensors of other elements are no differences; they are taken as they are.

Does not own blocks, statistics, nor what is published (`add`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from mstore.checkpoint.declared import CARD
from mstore.checkpoint.directory import Checkpoint, SourceFile
from mstore.checkpoint.header import TensorSlot
from mstore.checkpoint.models import full_name, is_index, renamed, split_name
from mstore.checkpoint.reading import OpenSource
from mstore.models.adapters.config import CONFIG as ADAPTER_CONFIG
from mstore.models.adapters.targets import is_adapter, is_any_adapter
from mstore.models.vocabulary.members import TEMPLATES, TOKENIZER_CONFIG, TOKENIZER_FILES
from mstore.numeric.casts import singles
from mstore.numeric.codes import ITEMSIZES
from mstore.store.catalog import Catalog
from mstore.store.models import models_in, paired
from mstore.store.objects.manifest import File, Manifest, Part
from mstore.store.objects.shapes import matching
from mstore.store.objects.tensor import Tensor
from mstore.terms.errors import Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Call, Option, phrase

_SAID: Final = 4
_SAMPLED: Final = 16
_ALIKE: Final = 0.5
"""Whole weights of a fine-tune have nearly the base's direction and norm, differences have not: a
cosine above this, and norms that are within this factor of each other, are those of weights."""

_QUIET_NAN: Final = np.float32(np.nan)
_WHOLE: Final = ("I", "U", "BOOL")
"""How the names of types begin whose elements are no differences."""


class DifferenceTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint: where it lies, what it is added to."""

    source: SourceFile
    tensor: TensorSlot
    base_id: TensorId
    base: Tensor

    @property
    def is_sum(self) -> bool:
        """Whether it is a difference, and not elements that are taken as they are."""
        return self.tensor.dtype in ITEMSIZES


class Differences:
    """A checkpoint of differences that fits its base.

    slots: by name. tensors that the patterns leave out are the base's.  Raises Incompatible, with
    the names, for one that does not fit.
    """

    def __init__(
        self,
        catalog: Catalog,
        checkpoint: Checkpoint,
        base: Manifest,
        *,
        only: Sequence[str],
        skip: Sequence[str],
        where: str,
    ) -> None:
        self._catalog = catalog
        self._checkpoint = checkpoint
        self._base = base
        self._models = models_in(catalog, base)
        self._pairs = paired(self._models.named, checkpoint.named)
        self._where = where
        tensors = renamed(self._models.tensors, self._pairs)
        found: dict[str, list[tuple[SourceFile, TensorSlot]]] = {}
        models_by_file = checkpoint.models_by_file()
        for file in checkpoint.files:
            model = models_by_file.get(file.path)
            if model is not None:
                for own in file.slots:
                    found.setdefault(full_name(model, own.name), []).append((file, own))
        config = any(file.path == ADAPTER_CONFIG for file in checkpoint.files)
        if is_adapter(tensors):
            raise Incompatible("the base is an adapter: differences are those of a model")
        if is_any_adapter(found, tensors, config):
            raise Incompatible(
                "is an adapter: its factors are no differences of tensors",
                where=where,
                hint=phrase("{add} recognises adapters", add=_as_weights(checkpoint, where)),
            )
        wanted = (matching(found, only) if only else found.keys()) - matching(found, skip)
        ids = [tensors[name] for name in found if name in wanted and name in tensors]
        records = dict(zip(ids, catalog.tensors(ids), strict=True))
        self.slots: dict[str, DifferenceTensor] = {}
        problems: list[str] = []
        for name in sorted(wanted):
            (file, tensor), *others = found[name]
            if others:
                problems.append(f"{name} is in {file.path} and in {others[0][0].path}")
            elif name not in tensors:
                problems.append(f"{name} is not in the base")
            else:
                slot = DifferenceTensor(file, tensor, tensors[name], records[tensors[name]])
                problems += _misfits(slot)
                self.slots[name] = slot
        if problems:
            more = f"; and {len(problems) - _SAID} more" if len(problems) > _SAID else ""
            raise Incompatible(
                f"its differences do not fit the base: {'; '.join(problems[:_SAID])}{more}",
                where=where,
                hint=phrase("{skip} leaves tensors to the base", skip=Option("skip", ("PATTERN",))),
            )
        if not self.slots:
            raise Incompatible("has no tensor of the base", where=where)

    # -- files -------------------------------------------------------------------------------

    def own_files(self) -> list[SourceFile]:
        """Return the checkpoint's files that are stored as they are: neither weights nor index."""
        return [
            file
            for file in self._checkpoint.files
            if file.header is None and not is_index(file.path)
        ]

    def base_files(self) -> list[File]:
        """Return the base's files that belong to the sums.

        Those with tensors; of the others, those that the checkpoint lacks, but for the model card,
        and for a tokenizer where the checkpoint has one.
        """
        paths = {file.path for file in self.own_files()}
        gone = {*paths, CARD}
        if paths & (TOKENIZER_FILES - TEMPLATES - {TOKENIZER_CONFIG}):
            gone |= TOKENIZER_FILES
        return [
            file
            for file in self._base.files
            if any(file.tensors()) or is_index(file.path) or file.path not in gone
        ]

    def changes(self, file: File, part: Part) -> DifferenceTensor | None:
        """Return what is added to a tensor of a file of the base, None if it stays."""
        name = None if part.name is None else self._models.name(file.path, part)
        if name is None:
            return None
        model, own = split_name(name)
        if model in self._pairs:
            return self.slots.get(full_name(self._pairs[model], own))
        # A copy, in a model that the checkpoint does not have, has the same sum.
        copies = (self.slots.get(full_name(theirs, own)) for theirs in self._pairs.values())
        return next((one for one in copies if one and one.base_id == part.tensor_id()), None)

    # -- what it looks like ------------------------------------------------------------------

    def require_differences(self) -> str | None:
        """Raise Incompatible if a sample looks like whole weights; return a remark if it is large.

        Reads the first block of up to 16 tensors, and of those of the base.
        """
        slots = [one for one in self.slots.values() if one.is_sum and one.base.nbytes]
        slots.sort(key=lambda one: -math.prod(one.base.shape))
        product = own = base = 0.0
        with SummedBlocks(self, slots[:_SAMPLED]) as sums:
            for slot in slots[:_SAMPLED]:
                difference, theirs = sums.sides(slot, 0)
                # One infinite element must not hide what all the others are.
                known = np.isfinite(difference) & np.isfinite(theirs)
                left, right = (side[known].astype(np.float64) for side in (difference, theirs))
                product += float(left @ right)
                own += float(left @ left)
                base += float(right @ right)
        if not (own and base):
            return None
        ratio, cosine = math.sqrt(own / base), product / math.sqrt(own * base)
        if cosine > _ALIKE and _ALIKE < ratio < 1 / _ALIKE:
            raise Incompatible(
                f"looks like whole weights, not like differences: {ratio:.2g} times as large as "
                f"the base, with a cosine of {cosine:.2g}",
                where=self._where,
                hint=phrase("{add} stores weights", add=_as_weights(self._checkpoint, self._where)),
            )
        if ratio > 1:
            return f"the differences are {ratio:.2g} times as large as the base: is it their base?"
        return None

    def read_base(self, slot: DifferenceTensor, number: int) -> bytes:
        """Return a block of the base.  Raises Corrupt, StorageFailed."""
        return bytes(self._catalog.read_block(slot.base.block(number)))

    @property
    def block_size(self) -> int:
        """The store's."""
        return self._catalog.block_size


class SummedBlocks:
    """Blocks of the sums, from any thread; keeps the checkpoint's files open until it is left.

    A file that is replaced or changes meanwhile raises BadCheckpoint.
    """

    def __init__(self, differences: Differences, slots: Sequence[DifferenceTensor]) -> None:
        self._differences = differences
        self._open: dict[str, OpenSource] = {}
        with ExitStack() as opening:
            for source in {slot.source.path: slot.source for slot in slots}.values():
                file = opening.enter_context(source.open())
                if source.header is not None:
                    file.require_start(source.header.raw)
                self._open[source.path] = file
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def require_unchanged(self) -> None:
        """Raise BadCheckpoint unless all files are as they were listed."""
        for file in self._open.values():
            file.require_unchanged()

    def block(self, slot: DifferenceTensor, number: int) -> bytes:
        """Return block `number` of a tensor's result."""
        if not slot.is_sum:
            begin = number * self._differences.block_size
            return self._read(
                slot, begin, min(self._differences.block_size, slot.base.nbytes - begin)
            )
        raw = self._differences.read_base(slot, number)
        difference, base = self._singles(slot, number, raw)
        with np.errstate(all="ignore"):
            total = base + difference
        # The payload of another NaN differs from machine to machine.
        total[np.isnan(total)] = _QUIET_NAN
        words = np.frombuffer(raw, dtype=f"u{ITEMSIZES[slot.base.dtype]}")
        return np.where(difference == 0, words, rounded(total, slot.base.dtype)).tobytes()

    def sides(self, slot: DifferenceTensor, number: int) -> tuple[Any, Any]:
        """Return a block of the difference, and of the base: float32[n] each."""
        return self._singles(slot, number, self._differences.read_base(slot, number))

    def _singles(
        self, slot: DifferenceTensor, number: int, base: bytes
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        size, dtype = self._differences.block_size, slot.base.dtype
        first, n = number * (size // ITEMSIZES[dtype]), len(base) // ITEMSIZES[dtype]
        wide = ITEMSIZES[slot.tensor.dtype]
        own = self._read(slot, first * wide, n * wide)
        return (
            singles(np.frombuffer(own, dtype=np.uint8), slot.tensor.dtype, n),
            singles(np.frombuffer(base, dtype=np.uint8), dtype, n),
        )

    def _read(self, slot: DifferenceTensor, begin: int, length: int) -> bytes:
        source = slot.source
        start = source.data_start + slot.tensor.begin + begin
        return self._open[source.path].read(start, length)


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return the bits of float32 rounded to an element type, to nearest even: words of its size."""
    bits = values.view(np.uint32)
    if dtype == "F32":
        return bits
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    # A NaN here is the quiet one, which stays that.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)


def _misfits(slot: DifferenceTensor) -> list[str]:
    name, own, base = slot.tensor.name, slot.tensor, slot.base
    if tuple(own.shape) != tuple(base.shape):
        return [f"{name} has shape {list(own.shape)}, the base {list(base.shape)}"]
    if own.dtype in ITEMSIZES and base.dtype in ITEMSIZES:
        return []
    if own.dtype == base.dtype and own.dtype.startswith(_WHOLE):
        return []
    return [f"{name} has elements of {own.dtype}, the base of {base.dtype}: they cannot be added"]


def _as_weights(checkpoint: Checkpoint, name: str) -> Call:
    return Call("add", (str(checkpoint.shown),), (("name", name), ("base", "REF")))
