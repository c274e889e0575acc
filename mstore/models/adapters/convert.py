"""Convert: an adapter in another format of files, with the names of its base's layers.

Factors of LoRA stay as they are, block for block; other forms become products of their own rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from mstore.models.adapters.extract import branch_for_adapter, put_factor, put_files, put_keys
from mstore.models.adapters.formats import PEFT, Keys, LayerProduct, require_format
from mstore.models.adapters.image import METADATA
from mstore.models.adapters.inputs import Inputs
from mstore.models.adapters.low_rank import Singles, load_factors
from mstore.models.adapters.targets import PREFIX, factor_names, is_adapter
from mstore.models.header_lineage import MadeOf, header_lineage, told_by
from mstore.models.made import Publication, kept_metadata
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.snapshot import BASE, COMBINE, EXPERT, Parent
from mstore.store.objects.tensor import AppliedTensor, MultipliedTensor, Tensor
from mstore.store.transaction import Transaction
from mstore.terms.errors import Incompatible
from mstore.terms.ids import SnapshotId
from mstore.terms.phrases import few
from mstore.terms.report import Report

_WEIGHT: Final = ".weight"


class ConvertReport(Report, frozen=True):
    """An adapter in another format."""

    name: str
    """the ref"""
    snapshot: SnapshotId
    """the snapshot's id"""
    new_snapshot: bool
    """false if the ref already held this adapter"""
    format: str
    """peft, kohya or diffusers"""
    dtype: str
    """element type of the factors"""
    products: int
    """tensors of the base that it changes"""
    rank: int
    """the largest rank of a product"""
    left_out: tuple[str, ...]
    """its tensors of text encoders that the base does not have"""
    plain_bytes: int
    """size of the adapter"""
    bytes_written: int
    """bytes added to the store"""
    seconds: float
    """how long it took"""


def convert(
    catalog: Catalog,
    adapter: Input,
    base: Input,
    *,
    name: str,
    format: str,
    dtype: str | None,
    message: str = "",
) -> ConvertReport:
    """Store an adapter of a base in another format under a ref.

    dtype: of the factors, BF16, F16 or F32; None for the adapter's own, F32 if they are computed.

    Raises BadRequest (a format), Incompatible (no adapter of this base, a layer that the format has
    no name for), Conflict, Corrupt, StorageFailed; then nothing is published.
    """
    began = time.monotonic()
    require_format(format)
    current = branch_for_adapter(catalog, name)
    ids = [catalog.snapshot(one.snapshot).manifest_id() for one in (base, adapter)]
    if not is_adapter(tensors_of(catalog, catalog.manifest(ids[1]))):
        raise Incompatible("is no LoRA adapter", where=adapter.name)
    inputs = Inputs(catalog, ids[0], ids[1:], [base.name, adapter.name])
    moved = {
        tensor: id for tensor, id in inputs.experts[0].items() if id != inputs.base.get(tensor)
    }
    records = dict(zip(moved, inputs.records(list(moved.values())), strict=True))
    applied = {tensor: one for tensor, one in records.items() if isinstance(one, AppliedTensor)}
    whole = sorted(
        name for name, one in records.items() if name not in applied or len(one.shape) < 2
    )
    if whole:
        raise Incompatible(f"has tensors that are not products: {few(whole)}", where=adapter.name)
    multiplied = sorted(
        tensor for tensor, one in applied.items() if isinstance(one, MultipliedTensor)
    )
    if multiplied:
        raise Incompatible(
            f"multiplies the base, and a LoRA adds products: {few(multiplied)}",
            where=adapter.name,
            hint="merge it into its base, and extract-lora the result",
        )
    dtype = dtype or _own_type(applied)
    with Transaction(catalog, f"convert {name}") as transaction:
        files = _Files(catalog, transaction, dtype, applied)
        if format == PEFT:
            manifest = files.of_peft(base.name, adapter.name)
        else:
            every = inputs.records(list(inputs.base.values()))
            shapes = {name: one.shape for name, one in zip(inputs.base, every, strict=True)}
            source = MadeOf(ids[1], adapter.model)
            _, told_before = told_by(catalog, source)
            metadata = kept_metadata(told_before, [METADATA]) | header_lineage(
                catalog, {"base": str(source), "format": format}, [source]
            )
            manifest = files.of_keys(Keys(format, shapes), name, adapter.name, metadata)
        publication = Publication(catalog, transaction)
        told = f"{adapter.name} in the format {format}"
        record, is_new = publication.put(
            name,
            current,
            manifest,
            COMBINE,
            (Parent(BASE, base.snapshot), Parent(EXPERT, adapter.snapshot)),
            message=message or told,
            action=f"convert: {told}",
        )
        publication.commit()
        written = transaction.bytes_written
    return ConvertReport(
        name=name,
        snapshot=record.id(),
        new_snapshot=is_new,
        format=format,
        dtype=dtype,
        products=len(applied),
        rank=files.rank,
        left_out=inputs.left_out.get(0, ()),
        plain_bytes=manifest.plain_bytes(),
        bytes_written=written,
        seconds=time.monotonic() - began,
    )


def _own_type(applied: Mapping[str, AppliedTensor]) -> str:
    """Return the type that all factors have, if they stay as they are; else F32."""
    products = [product for one in applied.values() for product in one.products]
    types = {factor.dtype for product in products for factor in product.factors}
    is_plain = all(product.form == "lora" for product in products)
    return types.pop() if is_plain and len(types) == 1 else "F32"


class _Files:
    """The files of one adapter.  rank: the largest of its products."""

    def __init__(
        self,
        catalog: Catalog,
        transaction: Transaction,
        dtype: str,
        applied: Mapping[str, AppliedTensor],
    ) -> None:
        self._catalog = catalog
        self._transaction = transaction
        self._dtype = dtype
        loaded = load_factors(catalog, list(applied.values()), None)
        self._products = {
            tensor: LayerProduct(
                one.left,
                one.right.reshape(-1, *record.shape[1:]),
                float(one.scale[0]),
                one.magnitude,
            )
            for (tensor, record), one in zip(applied.items(), loaded, strict=True)
        }
        self.rank = max((len(one.right) for one in self._products.values()), default=0)

    def of_keys(self, keys: Keys, name: str, where: str, metadata: Mapping[str, str]) -> Manifest:
        """Store one file, called as the ref; metadata: of its header."""
        found = keys.tensors(self._products, where)
        return put_keys(self._transaction, found, self._dtype, name, where, metadata)

    def of_peft(self, base: str, where: str) -> Manifest:
        """Store the file of PEFT and its config.  Layers are called as the base's tensors."""
        odd = [tensor for tensor in self._products if not tensor.endswith(_WEIGHT)]
        if odd:
            raise Incompatible(f"PEFT has no name for {few(odd)}", where=where)

        def put(key: str, values: Singles) -> Tensor:
            return put_factor(self._transaction, key, values, self._dtype, where)

        tensors: dict[str, Tensor] = {}
        for tensor, one in self._products.items():
            module = tensor.removesuffix(_WEIGHT)
            down, up = factor_names(module, embedding=False)
            tensors[down] = put(down, one.right)
            tensors[up] = put(up, one.up)
            if one.magnitude is not None:
                magnitude = f"{PREFIX}{module}.lora_magnitude_vector"
                tensors[magnitude] = put(magnitude, one.magnitude)
        modules = {tensor.removesuffix(_WEIGHT): one for tensor, one in self._products.items()}
        settings = {
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.rank,
            "rank_pattern": {module: len(one.right) for module, one in modules.items()},
            "alpha_pattern": {
                module: one.scale * len(one.right) for module, one in modules.items()
            },
            "use_dora": any(one.magnitude is not None for one in modules.values()),
            "target_modules": list(modules),
        }
        return put_files(self._transaction, tensors, settings)
