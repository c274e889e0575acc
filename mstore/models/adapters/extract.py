"""Extract: the difference of a fine-tune to its base as a LoRA adapter in PEFT's form.

Each matrix that differs becomes a product of two factors, by a truncated singular value
decomposition (`truncation`); vectors that differ (norms, biases) are stored whole.  What has
another form (three dimensions, other element types) stays out, and the report names it.  One matrix
is in memory at a time, as factors; its difference is a mapped file.

Owns the files of every adapter that mstore makes, too, and which branches may have them.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np

from mstore import fs
from mstore.checkpoint.declared import CARD
from mstore.checkpoint.strict_json import json_bytes
from mstore.models.adapters.config import CONFIG
from mstore.models.adapters.formats import KOHYA, PEFT, Keys, LayerProduct, require_format
from mstore.models.adapters.low_rank import read_panels
from mstore.models.adapters.targets import PREFIX, factor_names, is_adapter
from mstore.models.adapters.truncation import (
    Errors,
    Singles,
    TruncatedTensor,
    linear_algebra,
    squares_left,
    truncated,
)
from mstore.models.header_lineage import (
    ARCHITECTURE,
    MERGED_FROM,
    SPEC,
    MadeOf,
    header_lineage,
    told_by,
)
from mstore.models.made import NEW, Publication, put_array, put_model
from mstore.models.optional import optional_differences
from mstore.numeric.codes import CODES, cast_hint
from mstore.store.catalog import Catalog
from mstore.store.models import config_of, model_of, models_in, tensors_of
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.shapes import (
    EMBEDDINGS,
    chosen,
    difference_hint,
    require_matches,
    require_same_shapes,
)
from mstore.store.objects.snapshot import BASE, EXPERT, EXTRACT, Parent
from mstore.store.objects.tensor import Tensor
from mstore.store.refs import Ref
from mstore.store.tied import HEAD, Tied
from mstore.store.transaction import Transaction, branch_to_move, tip_of
from mstore.store.view import array_dtype
from mstore.terms.errors import BadRequest, Corrupt, Incompatible, NotFound
from mstore.terms.ids import SnapshotId, TensorId
from mstore.terms.phrases import Option, Phrase, joined, phrase
from mstore.terms.report import ProgressCallback, ProgressCounter, Report

MOST: Final = 4096
"""The largest rank."""

_WEIGHT: Final = ".weight"
_BIAS: Final = ".bias"
_FUSED: Final = ".in_proj_weight"
_PRODUCTS: Final = (2, 4)
"""Dimensions of what becomes a product: a matrix, or a convolution of images."""
_TRANSPOSED: Final = frozenset({"gpt2"})
_NAMED: Final = 4


class ExtractReport(Report, frozen=True):
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
    tensors: tuple[TruncatedTensor, ...]
    """matrices, those with the largest errors first"""
    remarks: tuple[str, ...]
    """what PEFT does not do with it, as text"""
    linear_algebra: str
    """what decomposed the matrices, and for which processor: another gives other bits"""
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
    format: str,
    only: Sequence[str],
    skip: Sequence[str],
    message: str,
    progress: ProgressCallback | None = None,
) -> ExtractReport:
    """Store an adapter that turns the base into the expert, nearly, under a ref.

    dtype: of the factors, BF16, F16 or F32. format: of its files.

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
    require_format(format)
    current = branch_for_adapter(catalog, name)
    ours, theirs = (_tensors(catalog, one, only, skip) for one in (base, expert))
    odd = optional_differences(
        *({name: one.dtype for name, (_, one) in side.items()} for side in (ours, theirs))
    )
    ours, theirs = (
        {name: one for name, one in side.items() if name not in odd} for side in (ours, theirs)
    )
    require_same_shapes(
        {tensor: record.shape for tensor, (_, record) in ours.items()},
        {tensor: record.shape for tensor, (_, record) in theirs.items()},
        what=f"cannot be compared with {base[0]}",
        where=expert[0],
        hint=difference_hint(base[0], expert[0]),
    )
    model = catalog.manifest_of(base[1])
    models = models_in(catalog, model)
    main = models.meant(base[0])
    config = config_of(catalog, model, models.config(main))
    if config.get("model_type") in _TRANSPOSED:
        raise Incompatible(
            f"layers of {config['model_type']} lie transposed: extraction does not support them",
            where=base[0],
        )
    work = _Work.of(ours, theirs, Tied.of(catalog, model, main))
    keys = None
    if format != PEFT:
        keys = Keys(format, {tensor: record.shape for tensor, (_, record) in ours.items()})
        work = work.of_keys(keys)
    if not (work.products or work.whole):
        more = f": only in {', '.join(work.left_out[:_NAMED])}" if work.left_out else ""
        raise BadRequest(
            f"does not differ from {base[0]} in what an adapter can state{more}",
            where=expert[0],
            hint=work.cast_hint(base[0], expert[0]),
        )
    metadata = _metadata(catalog, base, expert, rank, format)
    with Transaction(catalog, f"extract {name}") as transaction:
        run = _Extractor(catalog, transaction, rank, dtype, work, keys, metadata, progress)
        # What is not finite is refused by name.
        with np.errstate(over="ignore", invalid="ignore"):
            manifest = run.manifest(base[0], name)
        publication = Publication(catalog, transaction)
        record, is_new = publication.put(
            name,
            current,
            manifest,
            EXTRACT,
            (Parent(BASE, base[1]), Parent(EXPERT, expert[1])),
            message=message or f"{expert[0]} less {base[0]}, rank {rank}",
            action=f"extract: {expert[0]} less {base[0]}",
        )
        publication.commit()
        written = transaction.bytes_written
    return ExtractReport(
        name=name,
        snapshot=record.id(),
        new_snapshot=is_new,
        rank=rank,
        products=len(work.products),
        whole=len(work.whole),
        left_out=work.left_out,
        relative_error=run.errors.relative(),
        tensors=run.errors.tensors(),
        remarks=_remarks(work, base[0], expert[0]),
        linear_algebra=linear_algebra(),
        plain_bytes=manifest.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _remarks(work: _Work, base: str, expert: str) -> tuple[str, ...]:
    found: list[str] = []
    hint = work.cast_hint(base, expert)
    if hint is not None:
        kinds = ", ".join(sorted(work.odd[0] | work.odd[1]))
        found.append(phrase("no difference of {kinds} is in it: {hint}", kinds=kinds, hint=hint))
    if not work.products:
        found.append("there is no product in it: PEFT does not load such an adapter, mstore does")
    if work.tied:
        found.append(
            "embeddings and output layer are tied: with PEFT, use the model after merge_and_unload "
            "(before, only one of them has the adapter)"
        )
    if work.untied:
        found.append(
            f"{' and '.join(work.untied)} stored whole: {base} ties its embeddings, {expert} does "
            "not, and a product would change both"
        )
    return tuple(found)


_Tensors = Mapping[str, tuple[TensorId, Tensor]]


def _tensors(
    catalog: Catalog, one: tuple[str, SnapshotId], only: Sequence[str], skip: Sequence[str]
) -> _Tensors:
    models = models_in(catalog, catalog.manifest_of(one[1]))
    tensors = models.in_model(models.meant(one[0]))
    if is_adapter(tensors):
        raise Incompatible("is an adapter already", where=one[0])
    require_matches(tensors, only, skip, one[0])
    names = chosen(dict.fromkeys(tensors, ()), only, skip)
    wanted = {name: id for name, id in tensors.items() if name in names}
    records = catalog.tensors(list(wanted.values()))
    return {name: (id, record) for (name, id), record in zip(wanted.items(), records, strict=True)}


def _metadata(
    catalog: Catalog,
    base: tuple[str, SnapshotId],
    expert: tuple[str, SnapshotId],
    rank: int,
    format: str,
) -> dict[str, str]:
    """Return what the header of one file says: of what model it is, and what it was made of."""
    source, less = (
        MadeOf(catalog.snapshot(one[1]).manifest_id(), model_of(one[0])) for one in (expert, base)
    )
    how = {"base": str(less), "extracted": str(source), "rank": rank}
    _, told = told_by(catalog, less)
    found = header_lineage(catalog, how, [less, source])
    del found[MERGED_FROM]
    if ARCHITECTURE in told:
        found |= {ARCHITECTURE: f"{told[ARCHITECTURE]}/lora", SPEC: told.get(SPEC, "1.0.0")}
    if format == KOHYA:
        # What its programs read of a file without looking at its tensors.
        found |= {"ss_network_module": "networks.lora"}
        found |= {"ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
    return found


class _Work(msgspec.Struct, frozen=True):
    """Tensors that differ, by what becomes of them: (name, the base's, the expert's)."""

    products: tuple[tuple[str, Tensor, Tensor], ...]
    whole: tuple[tuple[str, Tensor, Tensor], ...]
    left_out: tuple[str, ...]
    odd: tuple[frozenset[str], frozenset[str]]
    """Types of the base's and of the expert's tensors that are left out for it."""
    tied: bool
    """Whether one of the products changes a tied tensor."""
    untied: tuple[str, ...]
    """Those stored whole because only the base ties them."""
    unnamed: tuple[tuple[str, Tensor, Tensor], ...] = ()
    """Of those left out, what a format has no name for."""

    def of_keys(self, keys: Keys) -> _Work:
        """Return the same for a file whose keys say all: of products with a name there."""
        named = keys.named()
        others = (*(one for one in self.products if one[0] not in named), *self.whole)
        return msgspec.structs.replace(
            self,
            products=tuple(one for one in self.products if one[0] in named),
            whole=(),
            left_out=(*self.left_out, *(one for one, _, _ in others)),
            unnamed=others,
        )

    def cast_hint(self, base: str, expert: str) -> Phrase | None:
        """Return the hint for tensors that are left out for their types, None if there is none."""
        hints = [
            cast_hint(odd, name) for odd, name in zip(self.odd, (base, expert), strict=True) if odd
        ]
        return joined(*hints, between="; ")

    @classmethod
    def of(cls, ours: _Tensors, theirs: _Tensors, tied: Tied) -> _Work:
        products, whole, left_out = [], [], []
        odd: list[tuple[str, str]] = []
        groups = [[name for name in group if name in ours] for group in tied.groups]
        # A product of one name changes all of its group.
        apart = {
            name
            for group in groups
            if len({theirs[name][0] for name in group}) > 1
            for name in group
        }
        follow = {name for group in groups for name in group[1:]} - apart
        untied = []
        for name, (id, record) in ours.items():
            other_id, other = theirs[name]
            if id == other_id or name in follow:
                continue
            sides = (name, record, other)
            if not {record.dtype, other.dtype} <= CODES.keys():
                left_out.append(name)
                odd.append((record.dtype, other.dtype))
            elif name in apart:
                whole.append(sides)
                untied.append(name)
            elif len(record.shape) in _PRODUCTS and name.endswith((_WEIGHT, _FUSED)):
                products.append(sides)
            elif len(record.shape) == 1:
                whole.append(sides)
            else:
                left_out.append(name)
        ours_odd, theirs_odd = (frozenset(pair[n] for pair in odd) - CODES.keys() for n in (0, 1))
        is_tied = any(name in group for group in groups for name, _, _ in products)
        return cls(
            tuple(products),
            tuple(whole),
            tuple(left_out),
            (ours_odd, theirs_odd),
            is_tied,
            tuple(untied),
        )


class _Extractor:
    """Makes the files of one adapter."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        rank: int,
        dtype: str,
        work: _Work,
        keys: Keys | None,
        metadata: Mapping[str, str],
        progress: ProgressCallback | None,
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._keys = keys
        self._rank = rank
        self._dtype = dtype
        self._work = work
        self._metadata = metadata
        every = (*work.products, *work.whole, *work.unnamed)
        total = sum(other.nbytes for _, _, other in every) or 1
        self._counter = ProgressCounter("extract", total, progress)
        self._modules = {name.removesuffix(_WEIGHT) for name, _, _ in work.products}
        self._ranks: dict[str, int] = {}
        self.errors = Errors()

    def manifest(self, base: str, name: str) -> Manifest:
        """Store the adapter's tensors and files."""
        if self._keys is not None:
            return self._of_keys(self._keys, name)
        tensors: dict[str, Tensor] = {}
        for tensor, ours, theirs in self._work.products:
            if tensor.endswith(_FUSED):
                raise Incompatible(
                    "PEFT has no name for it", where=tensor, hint=Option("format", KOHYA)
                )
            module = tensor.removesuffix(_WEIGHT)
            left, right = self._factors(tensor, ours, theirs)
            is_embedding = _is_embedding(module)
            if is_embedding:
                # An embedding's product lies transposed.
                left, right = right.T, left.T
            elif len(ours.shape) > 2:
                product = LayerProduct(left, right.reshape(-1, *ours.shape[1:]), 1.0)
                left, right = product.up, product.right
            names = factor_names(module, embedding=is_embedding)
            for key, factor in zip(names, (right, left), strict=True):
                tensors[key] = put_array(self._transaction, key, factor, self._dtype)
            self._tick(theirs)
        for tensor, ours, theirs in self._work.whole:
            self.errors.add_whole(self._finite_squares(tensor, ours, theirs))
            tensors[whole_name(tensor, self._modules)] = theirs
            self._tick(theirs)
        return put_files(self._transaction, tensors, self._config(base))

    def _of_keys(self, keys: Keys, name: str) -> Manifest:
        """Store one file whose keys say all.  What is no product is not in it."""
        products: dict[str, LayerProduct] = {}
        for tensor, ours, theirs in self._work.products:
            left, right = self._factors(tensor, ours, theirs)
            products[tensor] = LayerProduct(left, right.reshape(-1, *ours.shape[1:]), 1.0)
            self._tick(theirs)
        for tensor, ours, theirs in self._work.unnamed:
            squares = self._finite_squares(tensor, ours, theirs)
            self.errors.add(tensor, squares, squares)
            self._tick(theirs)
        found = keys.tensors(products, name)
        return put_keys(self._transaction, found, self._dtype, name, name, self._metadata)

    def _finite_squares(self, name: str, ours: Tensor, theirs: Tensor) -> float:
        squares = self._squares(ours, theirs)
        if not math.isfinite(squares):
            raise _not_finite("has elements that are not finite", name)
        return squares

    def _tick(self, record: Tensor) -> None:
        self._counter(record.nbytes)

    def _config(self, base: str) -> dict[str, object]:
        products = [name.removesuffix(_WEIGHT) for name, _, _ in self._work.products]
        return {
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self._rank,
            "lora_alpha": self._rank,
            "rank_pattern": self._ranks,
            "alpha_pattern": self._ranks,
            "target_modules": products,
            **whole_settings([name for name, _, _ in self._work.whole]),
        }

    # -- one matrix ----------------------------------------------------------------------------

    def _factors(self, name: str, ours: Tensor, theirs: Tensor) -> tuple[Singles, Singles]:
        """Return (left, right) as they are stored, and take note of what they leave."""
        rows, columns = ours.shape[0], math.prod(ours.shape[1:])
        panels = read_panels(self._catalog, (ours, theirs))
        pieces = ((expert - base).tobytes() for base, expert in panels)
        data = fs.unnamed(self._transaction.directory, pieces)
        delta = np.frombuffer(data, dtype=np.float32).reshape(rows, columns)
        if not np.isfinite(delta).all():
            raise _not_finite("has elements, or differences, that are not finite", name)
        rank = min(self._rank, rows, columns)
        if rank < self._rank:
            self._ranks[name.removesuffix(_WEIGHT)] = rank
        found = truncated(delta, rank, seed=zlib.crc32(name.encode()))
        left, right = (one.astype(array_dtype(self._dtype)).astype(np.float32) for one in found)
        squares, rest = squares_left(delta, left, right)
        if not math.isfinite(rest):
            raise _not_finite(f"its difference is too large for factors of {self._dtype}", name)
        self.errors.add(name, squares, rest)
        return left, right

    def _squares(self, ours: Tensor, theirs: Tensor) -> float:
        """Return the squared norm of the difference."""
        return math.fsum(
            float(np.square(expert.astype(np.float64) - base).sum())
            for base, expert in read_panels(self._catalog, (ours, theirs))
        )


def _not_finite(what: str, name: str) -> Incompatible:
    return Incompatible(what, where=name, hint=Option("skip", (name,)))


def _is_embedding(module: str) -> bool:
    return bool(EMBEDDINGS.search(module)) and not HEAD.search(module)


def whole_name(tensor: str, modules: Collection[str]) -> str:
    """Return PEFT's name of a tensor that is stored whole.  modules: those that have a product."""
    module = tensor.removesuffix(_BIAS)
    if module != tensor and module in modules:
        return f"{PREFIX}{module}.base_layer{_BIAS}"
    return PREFIX + tensor


def whole_settings(tensors: Collection[str]) -> dict[str, object]:
    """Return the settings of a config that say which tensors are stored whole."""
    saved = sorted({name.removesuffix(_WEIGHT) for name in tensors if name.endswith(_WEIGHT)})
    return {
        "bias": "all" if any(name.endswith(_BIAS) for name in tensors) else "none",
        "modules_to_save": saved or None,
    }


WEIGHTS: Final = "adapter_model.safetensors"

# A product is added as it is, so alpha / rank is 1: whoever makes an adapter sets both.
_SETTINGS: Final[Mapping[str, object]] = {
    "peft_type": "LORA",
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "use_dora": False,
}


def put_factor(
    transaction: Transaction, key: str, values: Singles, dtype: str, where: str
) -> Tensor:
    """Store a factor and return its record.  Raises Incompatible for what its type cannot hold."""
    with np.errstate(over="ignore"):
        rounded = values.astype(array_dtype(dtype)).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise Incompatible(f"{key} has elements that are too large for {dtype}", where=where)
    return put_array(transaction, key, values, dtype)


def put_keys(
    transaction: Transaction,
    found: Mapping[str, tuple[str, Singles]],
    dtype: str,
    name: str,
    where: str,
    metadata: Mapping[str, str],
) -> Manifest:
    """Store an adapter without a config: one file, called as its ref.

    found: what `Keys.tensors` returns. dtype: of factors; alphas are F32. metadata: of the header,
    beside its form.
    """
    tensors = {
        key: put_factor(transaction, key, values, "F32" if kind == "alpha" else dtype, where)
        for key, (kind, values) in found.items()
    }
    path = f"{name.rpartition('/')[2]}.safetensors"
    return put_model(transaction, path, tensors, {}, {**NEW, **metadata})


def branch_for_adapter(catalog: Catalog, name: str) -> Ref | None:
    """Return what the branch points at that an adapter is to move, None if it is new.

    Raises as `branch_to_move`, and BadRequest for a branch of a model.
    """
    current = branch_to_move(catalog, name)
    tip, _ = tip_of(catalog, current)
    if tip is not None:
        # A damaged tip says nothing.
        with suppress(NotFound, Corrupt):
            manifest = catalog.manifest(tip.manifest_id())
            if manifest.file(CONFIG) is None and not is_adapter(tensors_of(catalog, manifest)):
                raise BadRequest(
                    f"{name} is a branch of a model: an adapter needs one of its own",
                    where=Option("name"),
                    hint=phrase("choose another {name}", name=Option("name")),
                )
    return current


def put_files(
    transaction: Transaction,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, object],
    card: str | None = None,
) -> Manifest:
    """Store the files of an adapter whose tensors were put, and return what it consists of.

    settings: of its config, beside or in place of those that all adapters of mstore have. card: the
    text of its model card, None for no card.
    """
    texts = {CONFIG: json_bytes({**_SETTINGS, **settings})}
    if card is not None:
        texts[CARD] = card.encode()
    return put_model(transaction, WEIGHTS, tensors, texts)
