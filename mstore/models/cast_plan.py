"""Cast plan: what becomes of each tensor and file of a model that is cast.

All of it is known before a tensor is read, but for the scales that weights get: these follow from
their largest elements.  `cast` runs it, `casting` computes the new tensors.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.dtypes import DTYPES, nbytes
from mstore.checkpoint.models import Model, full_name
from mstore.checkpoint.strict_json import json_bytes, json_object
from mstore.models.casting import Change, largest
from mstore.models.header_lineage import MadeOf, header_lineage
from mstore.models.made import Slot, metadata_of, with_dtype
from mstore.models.reshape import Placed, Reshape, Reshaped
from mstore.models.scales import (
    HEADER_KEY,
    NO_SCALES,
    QUANTIZATIONS,
    Marks,
    Scale,
    Scales,
    marks_of,
    quantization_of,
    scale_name,
    scaled_weights,
    scales_of,
)
from mstore.numeric.casts import LARGEST_E4M3, SIZES
from mstore.numeric.codes import CASTABLE, CASTS, CODES, EIGHT_BITS
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of, models_in
from mstore.store.objects.manifest import OPAQUE, File, Manifest, Part
from mstore.store.objects.shapes import chosen, require_matches
from mstore.store.objects.tensor import Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import BadRequest, Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option, call, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter

SCALABLE: Final = "F8_E4M3"
"""The type in which weights get scales."""

STATED_ELSEWHERE: Final = "hf_quant_config.json"
"""A file in which ModelOpt states a quantization."""

_MAX_MARK: Final = 1 << 16


CastKey = tuple[TensorId, Scale | None, Tensor | None, float | None]


class CastSlot(msgspec.Struct, frozen=True):
    """A tensor of the output: its name, its part, and if it is cast, from and to what.

    channels: the tensor of whose channels it gets as many. divisor: the scale that it gets.
    """

    full: str
    part: Part
    source: Tensor
    scale: Scale | None
    target: Tensor | None
    channels: Tensor | None = None
    divisor: float | None = None

    @property
    def name(self) -> str:
        return str(self.part.name)

    @property
    def key(self) -> CastKey:
        """What the new tensor follows from."""
        return self.part.tensor_id(), self.scale, self.channels, self.divisor

    @property
    def change(self) -> Change | None:
        """What becomes of its elements before they are rounded."""
        if self.divisor is None:
            return None
        divisor = np.float32(self.divisor)
        return lambda values, _: values / divisor

    @property
    def entry(self) -> Slot:
        """The tensor's entry in the output's header."""
        record = self.source if self.target is None else self.target
        return Slot(self.name, record.dtype, record.shape)


class CastPlan:
    """What becomes of each tensor, known before any is read.

    files: the tensors of each file of weights that changes. configs: contents of each config.json
    that changes. removed: files that the output lacks.
    """

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        of: str | None,
        dtype: str | None,
        reshape: Reshape,
        only: Sequence[str],
        skip: Sequence[str],
        where: str,
        *,
        scaled: bool,
    ) -> None:
        self._catalog = catalog
        self._marks_made: dict[str, str] = {}
        self._scales_made = scaled
        self._of = of
        self._reshape = reshape
        self.before = manifest
        self.dtype = dtype
        self._where = where
        models = models_in(catalog, manifest)
        self.reshaped = Reshaped(catalog, models, of, reshape, where)
        ids = [one.part.tensor_id() for placed in self.reshaped.files.values() for one in placed]
        self._records = dict(zip(ids, catalog.tensors(ids), strict=True))
        names = [
            full_name(model.name, one.own)
            for model in models.named.values()
            if of in (None, model.name)
            for path in model.files
            for one in self.reshaped.files[path]
        ]
        require_matches(names, only, skip, where)
        self._only = bool(only)
        self._wanted: AbstractSet[str] = chosen(dict.fromkeys(names, ()), only, skip).keys()
        self.files: dict[str, list[CastSlot]] = {}
        self.configs: dict[str, bytes] = {}
        self.removed: set[str] = set()
        self.cast: set[str] = set()
        self.scaled: set[str] = set()
        self.shared = 0
        self.dropped = 0
        self.resized = 0
        for model in models.named.values():
            own = model.path(CONFIG)
            path = own if manifest.file(own) is not None else CONFIG
            config = config_of(catalog, manifest, path)
            files = models.weights(model.name)
            self._take(catalog, model, files, config, inherited=path != own)
        for file in manifest.files:
            if file.form == OPAQUE and posixpath.basename(file.path) == CONFIG and dtype:
                self._take_config(catalog, file, dtype)

    def header_lineage(self) -> dict[str, str]:
        """Return what the header of a single file says of the cast."""
        asked = self._reshape
        taken, channels = (
            None if one is None else self._other(one) for one in (asked.take, asked.channels_of)
        )
        source = MadeOf(self.before.id(), self._of)
        how = {
            "base": str(source),
            "dtype": None if self.dtype is None else CASTS[self.dtype],
            "scaled": self._scales_made,
            "without": list(asked.without),
            "take": taken and str(taken),
            "below": asked.below,
            "channels_of": channels and str(channels),
            "strip_prefix": asked.strip_prefix,
            "prefix": asked.prefix,
        }
        given = {key: value for key, value in how.items() if value}
        return header_lineage(self._catalog, given, filter(None, (source, taken, channels)))

    def _other(self, one: Input) -> MadeOf:
        return MadeOf(self._catalog.snapshot(one.snapshot).manifest_id(), one.model)

    def _take(
        self,
        catalog: Catalog,
        model: Model,
        files: Sequence[File],
        config: Mapping[str, object],
        *,
        inherited: bool,
    ) -> None:
        """Decide on the tensors of a model.  inherited: the config is not its own."""
        placed = [one for file in files for one in self.reshaped.files[file.path]]
        tensors: dict[str, Tensor] = {}
        for one in placed:
            tensors.setdefault(one.own, self._records[one.part.tensor_id()])
        stated = quantization_of(config)
        kinds = {record.dtype for record in tensors.values()}
        if inherited and kinds <= CODES.keys():
            # An adapter or a part in a directory of its own, which is not quantized.
            stated = None
        skipped = {one for one in tensors if full_name(model.name, one) not in self._wanted}
        told = self._headers(catalog, files)
        scales = NO_SCALES
        if self.dtype is not None:
            marks = self._marks(catalog, placed, told)
            scales = scales_of(tensors, stated, self._where, marks, skipped)
        elif told and any(one.own != one.part.name for one in placed):
            raise Incompatible(
                f"{HEADER_KEY} of its header names layers, which would have other names",
                where=self._where,
                hint=phrase("{dtype} does without", dtype=Option("dtype", CASTS["BF16"])),
            )
        if self._scales_made:
            self._choose_weights(model.name, tensors, scales)
        left = [name for name in scales.of if name in skipped]
        if left:
            raise BadRequest(
                f"{left[0]} has scales, and a weight with scales cannot be left out",
                where=Option("only") if self._only else Option("skip"),
            )
        if scales.of and self.before.file(path := model.path(STATED_ELSEWHERE)):
            self.removed.add(path)
        for file in files:
            placed = self.reshaped.files[file.path]
            slots = [self._slot(model.name, one, scales) for one in placed]
            kept = [slot for slot in slots if slot is not None]
            self.dropped += len(slots) - len(kept)
            self.shared += sum(slot.target is None for slot in kept)
            parts = [slot.part for slot in kept]
            if parts != [*file.tensors()] or any(slot.target is not None for slot in kept):
                self.files[file.path] = kept

    def _choose_weights(self, model: str, tensors: Mapping[str, Tensor], scales: Scales) -> None:
        """Cast the weights of layers alone, and note which mark says that they have scales."""
        if any(one.dtype in EIGHT_BITS for one in tensors.values()) or scales.dropped:
            raise Incompatible(
                "has elements of 8 bits already",
                where=self._where,
                hint=call("cast", self._where, dtype=CASTS["BF16"]),
            )
        names, mark = scaled_weights(tensors)
        chosen_names = {full_name(model, name) for name in names} & self._wanted
        own = {full_name(model, name) for name in tensors}
        self._wanted = (self._wanted - own) | chosen_names
        self._marks_made |= dict.fromkeys(chosen_names, mark)

    def give_scales(
        self,
        transaction: Transaction,
        pool: ThreadPoolExecutor,
        ahead: int,
        progress: ProgressCallback | None,
    ) -> None:
        """Give each weight that is cast a scale: its largest element becomes the type's largest.

        Tensors of wide elements come first in a file, so that all lie where readers map them.
        """
        if not self._marks_made:
            raise Incompatible("has no matrix of a layer to give a scale", where=self._where)
        every = (slot for own in self.files.values() for slot in own)
        slots = [slot for slot in every if slot.full in self._marks_made]
        sources = {slot.part.tensor_id(): slot.source for slot in slots}
        total = sum(one.nbytes for one in sources.values())
        tick = ProgressCounter("scale", total or 1, progress)
        found = largest(self._catalog, [*sources.values()], pool, ahead=ahead, tick=tick)
        divisors = dict(zip(sources, map(_divisor, found), strict=True))
        for path, own in self.files.items():
            made: list[CastSlot] = []
            marks: dict[str, None] = {}
            for slot in own:
                mark = self._marks_made.get(slot.full)
                if mark is None:
                    made.append(slot)
                    continue
                divisor = divisors[slot.part.tensor_id()]
                if divisor is None:
                    raise Incompatible("has elements that are not finite", where=slot.full)
                value = np.float32(divisor).tobytes()
                made.append(msgspec.structs.replace(slot, divisor=divisor))
                made.append(self._new(transaction, scale_name(slot.name), "F32", (), value, path))
                marks[self._reshape.renamed(mark)] = None
            made += [self._new(transaction, one, SCALABLE, (0,), b"", path) for one in marks]
            self.files[path] = sorted(made, key=lambda slot: -SIZES.get(slot.entry.dtype, 1))
        self.scaled |= self._marks_made.keys() & self.cast

    def _new(
        self,
        transaction: Transaction,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        data: bytes,
        path: str,
    ) -> CastSlot:
        """Store a tensor that the model did not have."""
        record = transaction.put_tensor(dtype, shape, [data] if data else [], path)
        [id] = transaction.put_records([record])
        return CastSlot(name, Part(name, id, record.nbytes), record, None, None)

    @staticmethod
    def _headers(catalog: Catalog, files: Sequence[File]) -> list[str]:
        """Return what headers say of scales."""
        headers = []
        for file in files:
            metadata = metadata_of(catalog.read_parts(file.parts[:1])) or {}
            headers += [text for key, text in metadata.items() if key == HEADER_KEY]
        return headers

    def _marks(self, catalog: Catalog, placed: Sequence[Placed], headers: Sequence[str]) -> Marks:
        """Return what files say of their scales."""
        parts = {one.own: one.part for one in placed}

        def read(name: str) -> bytes:
            part = parts[name]
            return catalog.read_parts((part,)) if part.nbytes <= _MAX_MARK else b""

        return marks_of(parts, read, headers, self._where)

    def _slot(self, model: str, placed: Placed, scales: Scales) -> CastSlot | None:
        """Return what becomes of a tensor of a model, None if it is dropped."""
        own, part, like = placed.own, placed.part, placed.channels
        source = self._records[part.tensor_id()]
        if own in scales.dropped:
            return None
        name = full_name(model, own)
        # Another shard may have a tensor of the same name, without scales.
        scale = scales.of.get(own) if source.dtype in EIGHT_BITS else None
        is_float = DTYPES[source.dtype].floating and name in self._wanted
        dtype = self.dtype if is_float and self.dtype is not None else source.dtype
        if like is not None:
            return self._resized(name, part, scale, like, dtype)
        if dtype == source.dtype and scale is None:
            return CastSlot(name, part, source, None, None)
        if source.dtype not in CASTABLE:
            raise Incompatible(
                f"elements of {source.dtype} cannot be cast: {name}", where=self._where
            )
        self.cast.add(name)
        if scale is not None:
            self.scaled.add(name)
        target = Tensor(dtype, source.shape, nbytes(dtype, source.shape), b"")
        return CastSlot(name, part, source, scale, target)

    def _resized(
        self, name: str, part: Part, scale: Scale | None, like: Tensor, dtype: str
    ) -> CastSlot:
        """Return what becomes of a tensor that gets as many channels as another."""
        if scale is not None:
            raise Incompatible(
                f"{name} has scales, and gets other channels without alone", where=self._where
            )
        self.resized += 1
        target = Tensor(dtype, like.shape, nbytes(dtype, like.shape), b"")
        return CastSlot(name, part, self._records[part.tensor_id()], None, target, like)

    def _take_config(self, catalog: Catalog, file: File, dtype: str) -> None:
        # Parsed by strict rules first: what is no usual config stays.
        if not config_of(catalog, self.before, file.path):
            return
        fields = json_object(catalog.read_parts(file.parts))
        changed = fields
        if dtype not in EIGHT_BITS:
            changed = with_dtype(changed, CASTS[dtype], known=CASTS.values())
        if self.scaled:
            changed = _without_quantization(changed)
        if changed != fields:
            self.configs[file.path] = json_bytes(changed)


def _divisor(most: float) -> float | None:
    """Return the scale of a weight by its largest magnitude; None if that is not finite."""
    if not math.isfinite(most):
        return None
    return float(np.float32(most / LARGEST_E4M3)) or 1.0


def _without_quantization(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that states no quantization, neither of a part of the model."""
    return {
        key: _without_quantization(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in QUANTIZATIONS
    }
