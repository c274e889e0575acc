"""Extract: the difference of a fine-tune to its base as a LoRA adapter in PEFT's form.

Each matrix that differs becomes a product of two factors, by a truncated singular value
decomposition (`truncation`); vectors that differ (norms, biases) are stored whole.  What has
another form (three dimensions, other element types) stays out, and the report names it.  One matrix
is in memory at a time, as factors; its difference is a mapped file.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstore import fs
from mstore.adapters.config import CONFIG
from mstore.adapters.targets import is_adapter
from mstore.adapters.truncation import Singles, truncated
from mstore.checkpoint.small_files import json_bytes
from mstore.errors import BadRequest, Incompatible
from mstore.ids import SnapshotId, TensorId
from mstore.numeric.codes import CODES, ITEMSIZES
from mstore.numeric.singles import singles
from mstore.objects.manifest import OPAQUE, SAFETENSORS, File, Manifest, Part
from mstore.objects.shapes import (
    EMBEDDINGS,
    chosen,
    require_matches,
    require_same_shapes,
    told_difference,
)
from mstore.objects.snapshot import BASE, EXPERT, Parent
from mstore.objects.tensor import Tensor
from mstore.phrases import Option
from mstore.progress import Progress, ProgressCallback
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of
from mstore.store.derived import derived
from mstore.store.rebuilt import new_header
from mstore.store.transaction import Transaction, branch_to_move
from mstore.view import array_dtype

WEIGHTS: Final = "adapter_model.safetensors"
MOST: Final = 4096
"""The largest rank."""

_PREFIX: Final = "base_model.model."
_WEIGHT: Final = ".weight"
_BIAS: Final = ".bias"
_OUTPUTS: Final = ("lm_head", "embed_out", "output", "output_projection", "decoder")
"""Names of modules among the embeddings that are linear layers."""
_TRANSPOSED: Final = frozenset({"gpt2"})
_PANEL: Final = 1 << 22
_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class ExtractedTensor:
    """What an extraction leaves out of one matrix."""

    tensor: str
    """its name"""
    relative_error: float
    """norm of what is left out, relative to the norm of the difference"""


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """An adapter that was made of a difference."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    new_snapshot: bool
    """false if the ref already held this adapter"""
    rank: int
    """rank of each product"""
    products: int
    """matrices as products"""
    whole: int
    """tensors that are stored whole"""
    left_out: tuple[str, ...]
    """tensors that differ and have a form that no adapter can state"""
    relative_error: float
    """norm of all that is left out, relative to the norm of the difference: 0 for nothing, 1 for
    all"""
    tensors: tuple[ExtractedTensor, ...]
    """matrices, those with the largest errors first"""
    notes: tuple[str, ...]
    """what PEFT does not do with it, as text"""
    plain_bytes: int
    """size of the adapter"""
    bytes_written: int
    """bytes added to the store"""
    seconds: float
    """how long it took"""


def extract(
    catalog: Catalog,
    expert: tuple[str, SnapshotId],
    base: tuple[str, SnapshotId],
    *,
    name: str,
    rank: int,
    dtype: str,
    only: Sequence[str],
    skip: Sequence[str],
    message: str,
    progress: ProgressCallback | None = None,
) -> ExtractReport:
    """Store an adapter that turns the base into the expert, nearly, under a ref.

    dtype: of the factors, BF16, F16 or F32.

    Raises BadRequest (a rank), Incompatible (models that differ in names or shapes, transposed
    layers), Conflict, Corrupt, StorageFailed; then nothing is published.
    """
    began = time.monotonic()
    if not 1 <= rank <= MOST:
        raise BadRequest(f"a rank is 1 to {MOST}, not {rank}", where=Option("rank"))
    if name in (base[0], expert[0]):
        raise BadRequest(
            "is one of the two models: the adapter needs a name of its own", where=Option("name")
        )
    current = branch_to_move(catalog, name)
    ours, theirs = (_tensors(catalog, one, only, skip) for one in (base, expert))
    require_same_shapes(
        {tensor: record.shape for tensor, (_, record) in ours.items()},
        {tensor: record.shape for tensor, (_, record) in theirs.items()},
        what=f"cannot be compared with {base[0]}",
        where=expert[0],
        hint=told_difference(base[0], expert[0]),
    )
    config = config_of(catalog, catalog.manifest(catalog.snapshot(base[1]).manifest_id()))
    if config.get("model_type") in _TRANSPOSED:
        raise Incompatible(
            f"layers of {config['model_type']} lie transposed: extraction does not support them",
            where=base[0],
        )
    is_tied = config.get("tie_word_embeddings") is True
    work = _Work.of(ours, theirs, tied=is_tied)
    if not (work.products or work.whole):
        more = f": only in {', '.join(work.left_out[:_NAMED])}" if work.left_out else ""
        raise BadRequest(
            f"does not differ from {base[0]} in what an adapter can state{more}", where=expert[0]
        )
    with Transaction(catalog, f"extract {name}") as transaction:
        run = _Run(catalog, transaction, rank, dtype, work, progress)
        manifest = run.manifest(base[0])
        snapshot, record, move = derived(
            catalog,
            transaction,
            name,
            current,
            manifest,
            (Parent(BASE, base[1]), Parent(EXPERT, expert[1])),
            message=message or f"{expert[0]} less {base[0]}, rank {rank}",
            action="extract-lora",
        )
        if record is not None and move is not None:
            transaction.commit(snapshots=[record], moves=[move])
        written = transaction.bytes_written
    errors = sorted(run.errors, key=lambda one: -one.relative_error)
    return ExtractReport(
        name=name,
        snapshot=snapshot,
        new_snapshot=record is not None,
        rank=rank,
        products=len(work.products),
        whole=len(work.whole),
        left_out=work.left_out,
        relative_error=run.relative_error(),
        tensors=tuple(errors),
        notes=_notes(work, tied=is_tied),
        plain_bytes=manifest.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _notes(work: _Work, *, tied: bool) -> tuple[str, ...]:
    found = []
    if not work.products:
        found.append("there is no product in it: PEFT does not load such an adapter, mstore does")
    if tied and any(_is_embedding(name.removesuffix(_WEIGHT)) for name, _, _ in work.products):
        found.append(
            "embeddings and output layer are tied: with PEFT, use the model after merge_and_unload "
            "(before, the output layer is the base's)"
        )
    return tuple(found)


_Tensors = Mapping[str, tuple[TensorId, Tensor]]


def _tensors(
    catalog: Catalog, one: tuple[str, SnapshotId], only: Sequence[str], skip: Sequence[str]
) -> _Tensors:
    tensors = catalog.manifest(catalog.snapshot(one[1]).manifest_id()).tensors()
    if is_adapter(tensors):
        raise Incompatible("is an adapter already", where=one[0])
    require_matches(tensors, only, skip)
    names = chosen(dict.fromkeys(tensors, ()), only, skip)
    wanted = {name: id for name, id in tensors.items() if name in names}
    records = catalog.tensors(list(wanted.values()))
    return {name: (id, record) for (name, id), record in zip(wanted.items(), records, strict=True)}


@dataclass(frozen=True, slots=True)
class _Work:
    """Tensors that differ, by what becomes of them: (name, the base's, the expert's)."""

    products: tuple[tuple[str, Tensor, Tensor], ...]
    whole: tuple[tuple[str, Tensor, Tensor], ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, ours: _Tensors, theirs: _Tensors, *, tied: bool) -> _Work:
        products, whole, left_out = [], [], []
        embedding: TensorId | None = None
        for name, (id, record) in ours.items():
            other_id, other = theirs[name]
            if id == other_id:
                continue
            is_tied = tied and EMBEDDINGS.search(name) and other_id == embedding
            if EMBEDDINGS.search(name) and embedding is None:
                embedding = other_id
            if is_tied:
                # The base's layers are one: the adapter of the first one changes both.
                continue
            sides = (name, record, other)
            if not {record.dtype, other.dtype} <= CODES.keys():
                left_out.append(name)
            elif len(record.shape) == 2 and name.endswith(_WEIGHT):
                products.append(sides)
            elif len(record.shape) == 1:
                whole.append(sides)
            else:
                left_out.append(name)
        return cls(tuple(products), tuple(whole), tuple(left_out))


class _Run:
    """Makes the files of one adapter."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        rank: int,
        dtype: str,
        work: _Work,
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._rank = rank
        self._dtype = dtype
        self._work = work
        self._progress = progress
        self._total = sum(other.nbytes for _, _, other in (*work.products, *work.whole)) or 1
        self._done = 0
        self._squares = 0.0
        self._left_squares = 0.0
        self._modules = {name.removesuffix(_WEIGHT) for name, _, _ in work.products}
        self._ranks: dict[str, int] = {}
        self.errors: list[ExtractedTensor] = []

    def relative_error(self) -> float:
        """Return the norm of what is left out, relative to that of the difference."""
        return math.sqrt(self._left_squares / self._squares) if self._squares else 0.0

    def manifest(self, base: str) -> Manifest:
        """Store the adapter's tensors and files."""
        tensors: dict[str, Tensor] = {}
        for name, ours, theirs in self._work.products:
            module = name.removesuffix(_WEIGHT)
            left, right = self._factors(name, ours, theirs)
            down, up = f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"
            if _is_embedding(module):
                # An embedding's product lies transposed.
                down, up = (f"{_PREFIX}{module}.lora_embedding_{side}" for side in "AB")
                left, right = right.T, left.T
            for key, factor in ((down, right), (up, left)):
                tensors[key] = self._put(key, factor)
            self._tick(theirs)
        for name, ours, theirs in self._work.whole:
            delta = self._delta(ours, theirs)
            self._squares += float(np.square(delta, dtype=np.float64).sum())
            tensors[self._whole_name(name)] = theirs
            self._tick(theirs)
        config = self._transaction.put_bytes(json_bytes(self._config(base)), CONFIG)
        return Manifest((File(CONFIG, OPAQUE, config.nbytes, (config,)), self._weights(tensors)))

    def _whole_name(self, name: str) -> str:
        """Return PEFT's name of a tensor that is stored whole."""
        module = name.removesuffix(_BIAS)
        if module != name and module in self._modules:
            return f"{_PREFIX}{module}.base_layer{_BIAS}"
        return _PREFIX + name

    def _tick(self, record: Tensor) -> None:
        self._done += record.nbytes
        if self._progress is not None:
            self._progress(Progress("extract", self._done, self._total))

    def _weights(self, tensors: Mapping[str, Tensor]) -> File:
        names = sorted(tensors)
        records = [tensors[name] for name in names]
        raw = new_header({"format": "pt"}, names, records)
        parts = [
            self._transaction.put_bytes(raw, WEIGHTS),
            *(
                Part(name, id, record.nbytes)
                for name, record, id in zip(
                    names, records, self._transaction.put_records(records), strict=True
                )
            ),
        ]
        return File(WEIGHTS, SAFETENSORS, sum(part.nbytes for part in parts), tuple(parts))

    def _config(self, base: str) -> dict[str, object]:
        products = [name.removesuffix(_WEIGHT) for name, _, _ in self._work.products]
        whole = [name for name, _, _ in self._work.whole]
        biased = any(name.endswith(_BIAS) for name in whole)
        saved = sorted({name.removesuffix(_WEIGHT) for name in whole if name.endswith(_WEIGHT)})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self._rank,
            # A product is added as it is: alpha / r is 1.
            "lora_alpha": self._rank,
            "rank_pattern": self._ranks,
            "alpha_pattern": self._ranks,
            "lora_dropout": 0.0,
            "bias": "all" if biased else "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "target_modules": products,
            "modules_to_save": saved or None,
            "use_rslora": False,
            "use_dora": False,
        }

    # -- one matrix ----------------------------------------------------------------------------

    def _factors(self, name: str, ours: Tensor, theirs: Tensor) -> tuple[Singles, Singles]:
        """Return (left, right) as they are stored, and take note of what they leave."""
        rows, columns = ours.shape
        pieces = (panel.tobytes() for panel in self._panels(ours, theirs))
        data = fs.unnamed(self._transaction.directory, pieces)
        delta = np.frombuffer(data, dtype=np.float32).reshape(rows, columns)
        if not np.isfinite(delta).all():
            raise Incompatible("has elements that are not finite", where=name)
        rank = min(self._rank, rows, columns)
        if rank < self._rank:
            self._ranks[name.removesuffix(_WEIGHT)] = rank
        found = truncated(delta, rank, seed=zlib.crc32(name.encode()))
        left, right = (one.astype(array_dtype(self._dtype)).astype(np.float32) for one in found)
        squares = left_squares = 0.0
        step = max(1, _PANEL // max(1, columns))
        for start in range(0, rows, step):
            own = delta[start : start + step]
            rest = own - left[start : start + step] @ right
            squares += float(np.square(own, dtype=np.float64).sum())
            left_squares += float(np.square(rest, dtype=np.float64).sum())
        self._squares += squares
        self._left_squares += left_squares
        share = math.sqrt(left_squares / squares) if squares else 0.0
        self.errors.append(ExtractedTensor(name, share))
        return left, right

    def _panels(self, ours: Tensor, theirs: Tensor) -> Iterator[Singles]:
        """Yield the difference, some blocks at a time."""
        count = math.prod(ours.shape)
        # Both are powers of two, so a step is whole blocks of either type.
        step = max(_PANEL, self._catalog.block_size)
        for start in range(0, count, step):
            base, expert = (
                self._elements(one, start, min(step, count - start)) for one in (ours, theirs)
            )
            yield expert - base

    def _delta(self, ours: Tensor, theirs: Tensor) -> Singles:
        return np.concatenate([np.zeros(0, np.float32), *self._panels(ours, theirs)])

    def _elements(self, record: Tensor, start: int, count: int) -> Singles:
        """Return elements from `start`, the first one of a block."""
        each = self._catalog.block_size // ITEMSIZES[record.dtype]
        numbers = range(start // each, -(-(start + count) // each))
        data = self._catalog.read_blocks([record.block(number) for number in numbers])
        return singles(data, record.dtype, count)

    def _put(self, name: str, factor: npt.NDArray[Any]) -> Tensor:
        data = np.ascontiguousarray(factor).astype(array_dtype(self._dtype))
        shape = (int(data.shape[0]), int(data.shape[1]))
        return self._transaction.put_tensor(self._dtype, shape, [data.tobytes()], name)


def _is_embedding(module: str) -> bool:
    return bool(EMBEDDINGS.search(module)) and module.rpartition(".")[2] not in _OUTPUTS
