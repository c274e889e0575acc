"""Inputs: the tensors of a merge's base and experts, by name.

An expert is a stored model, or an adapter: then it stands for what the adapter makes of the base.
An adapter whose base is an adapter, too, is merged as it is.  Owns what each name stands for; reads
records and configs, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mstore.adapters.config import CONFIG, LoraConfig, parse_config
from mstore.adapters.targets import Product, is_adapter, targets_of
from mstore.errors import Incompatible
from mstore.ids import ManifestId, TensorId
from mstore.numeric.codes import CODES
from mstore.objects.applied import AppliedTensor, applied
from mstore.objects.manifest import OPAQUE, Manifest
from mstore.objects.plan import Plan
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog

_MAX_CONFIG: Final = 1 << 20

Names = Mapping[str, TensorId]


class Inputs:
    """The base and the experts of one merge.

    base: its tensors. experts: those of each expert, with the base's names. names: what errors call
    the experts, in their order; ids otherwise.

    Raises Incompatible for an adapter that cannot be applied to the base, NotFound, Corrupt,
    StorageFailed.
    """

    def __init__(
        self,
        catalog: Catalog,
        base: ManifestId,
        experts: Sequence[ManifestId],
        names: Sequence[str] = (),
    ) -> None:
        self._catalog = catalog
        self._applied: dict[TensorId, AppliedTensor] = {}
        self.base: Names = catalog.manifest(base).tensors()
        takes_adapters = not is_adapter(self.base)
        found = []
        for number, id in enumerate(experts):
            manifest = catalog.manifest(id)
            tensors: Names = manifest.tensors()
            if takes_adapters and is_adapter(tensors):
                where = names[number] if names else f"expert {number + 1}"
                tensors = self._applied_to_base(manifest, where)
            found.append(tensors)
        self.experts: tuple[Names, ...] = tuple(found)

    @classmethod
    def of(cls, catalog: Catalog, plan: Plan) -> Inputs:
        """Return the inputs of a plan; raises as the class."""
        return cls(catalog, plan.base_id(), [expert.manifest_id() for expert in plan.experts])

    @property
    def members(self) -> tuple[Names, ...]:
        """The base and each expert."""
        return (self.base, *self.experts)

    def records(self, ids: Sequence[TensorId]) -> list[Tensor]:
        """Return the records of some of these tensors, with one lookup.  Raises as the catalog."""
        if not self._applied:
            return self._catalog.tensors(ids)
        stored = iter(self._catalog.tensors([id for id in ids if id not in self._applied]))
        return [self._applied.get(id) or next(stored) for id in ids]

    # -- adapters ------------------------------------------------------------------------------

    def _applied_to_base(self, adapter: Manifest, where: str) -> Names:
        own = adapter.tensors()
        config = parse_config(_config_of(self._catalog, adapter, where), where)
        targets = targets_of(own, self.base, where)
        for tensor, name in targets.kept:
            if own[name] != self.base[tensor]:
                raise Incompatible(
                    f"the adapter was trained on other weights of {tensor} than the base's",
                    where=where,
                )
        tensors = dict(self.base)
        for tensor, name in targets.replaced:
            tensors[tensor] = own[name]
        for product in targets.products:
            record = self._product(product, own, config, where)
            id = record.id()
            self._applied[id] = record
            tensors[product.tensor] = id
        return tensors

    def _product(
        self, product: Product, own: Names, config: LoraConfig, where: str
    ) -> AppliedTensor:
        named = [product.up, product.down]
        if config.dora:
            if product.magnitude is None or product.embedding:
                raise Incompatible(
                    f"cannot apply DoRA to {product.tensor}: "
                    + ("it is an embedding" if product.embedding else "it has no magnitudes"),
                    where=where,
                )
            named.append(product.magnitude)
        base, up, down, *magnitudes = self._catalog.tensors(
            [self.base[product.tensor], *(own[name] for name in named)]
        )
        transposed = product.embedding or config.transposed
        # An embedding's product is that of its transposed factors, in the other order.
        left, right = (down, up) if transposed else (up, down)
        rank = config.rank_of(product.module)
        _require_fit(product.tensor, base, left, right, rank, transposed=transposed, where=where)
        magnitude = magnitudes[0] if magnitudes else None
        if magnitude is not None and (
            magnitude.nbytes == 0
            or magnitude.shape not in ((base.shape[0],), (base.shape[0], 1))
            or magnitude.dtype not in CODES
        ):
            raise Incompatible(
                f"the magnitudes of {product.tensor} have shape {list(magnitude.shape)}",
                where=where,
            )
        return applied(
            base,
            left,
            right,
            transposed=transposed,
            scale=config.scale_of(product.module),
            magnitude=magnitude,
            block_size=self._catalog.block_size,
        )


def _require_fit(
    name: str,
    base: Tensor,
    left: Tensor,
    right: Tensor,
    rank: int,
    *,
    transposed: bool,
    where: str,
) -> None:
    """Raise Incompatible unless left @ right has the base's shape."""
    dtypes = {base.dtype, left.dtype, right.dtype}
    if not dtypes <= CODES.keys():
        odd = ", ".join(sorted(dtypes - CODES.keys()))
        raise Incompatible(f"cannot apply an adapter to elements of {odd}", where=where)
    rows, columns = (left.shape, right.shape)
    if transposed:
        rows, columns = rows[::-1], columns[::-1]
    if len(base.shape) != 2 or len(rows) != 2 or len(columns) != 2 or rows[1] != columns[0]:
        raise Incompatible(
            f"the adapter has {list(left.shape)} and {list(right.shape)} for {name}, "
            f"{list(base.shape)} in the base: mstore applies products of matrices to matrices",
            where=where,
        )
    if (rows[0], columns[1]) != base.shape:
        raise Incompatible(
            f"the adapter's product for {name} has shape {[rows[0], columns[1]]}, the base "
            f"{list(base.shape)}",
            where=where,
        )
    if rows[1] != rank:
        raise Incompatible(
            f"the adapter's product for {name} has rank {rows[1]}, its {CONFIG} says {rank}",
            where=where,
        )


def _config_of(catalog: Catalog, adapter: Manifest, where: str) -> bytes:
    file = adapter.file(CONFIG)
    if file is None or file.form != OPAQUE or file.size > _MAX_CONFIG:
        raise Incompatible(f"an adapter without its {CONFIG}", where=where)
    blocks = (block for p in file.parts for block in catalog.tensor(p.tensor_id()).block_ids())
    return b"".join(catalog.read_block(block) for block in blocks)
