"""Inputs: the tensors of a merge's base and experts, by name.

An expert is a stored model, or an adapter: then it stands for what the adapter makes of the base.
An adapter whose base is an adapter, too, is merged as it is.  A tensor that a model lacks may stand
for the base's.  Owns what each name stands for; reads records and configs, no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstore.adapters.config import CONFIG, MAX_CONFIG, LoraConfig
from mstore.adapters.fit import is_any_adapter, is_transposed, plan_adapter, require_product
from mstore.adapters.targets import Product, is_adapter
from mstore.errors import Incompatible
from mstore.ids import ManifestId, TensorId
from mstore.objects.applied import AppliedTensor, applied
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Plan
from mstore.objects.shapes import EMBEDDINGS
from mstore.objects.tensor import Tensor
from mstore.store.catalog import Catalog
from mstore.store.tied import KEY, Tied, ties_embeddings

Names = Mapping[str, TensorId]


def stand_ins(base: Names, own: Names) -> dict[str, TensorId]:
    """Return what stands for each tensor of a base that a model lacks, if it may: the base's.

    Of an embedding that the base has twice, a model may have one: it stands for both.
    """
    lacks = [name for name in base if name not in own]
    if not lacks:
        return {}
    twice: dict[TensorId, TensorId] = {}
    for name, id in base.items():
        if name in own and EMBEDDINGS.search(name):
            twice.setdefault(id, own[name])
    return {
        name: twice.get(base[name], base[name]) if EMBEDDINGS.search(name) else base[name]
        for name in lacks
    }


class Inputs:
    """The base and the experts of one merge.

    base: its tensors. experts: those of each expert, with the base's names. names: what errors call
    the experts, in their order; ids otherwise. fill: in a model that lacks tensors of the base, the
    base's stand for them. fishers: how many of the experts, the last ones, are Fishers of the
    others: of what they lack, too, the base's hold the place. lacking: the names of what an expert
    lacks, for each; none without `fill`, but for Fishers.

    Raises Incompatible for an adapter that cannot be applied to the base, NotFound, Corrupt,
    StorageFailed.
    """

    def __init__(
        self,
        catalog: Catalog,
        base: ManifestId,
        experts: Sequence[ManifestId],
        names: Sequence[str] = (),
        *,
        fill: bool = False,
        fishers: int = 0,
    ) -> None:
        self._catalog = catalog
        self._applied: dict[TensorId, AppliedTensor] = {}
        self._model = model = catalog.manifest(base)
        self.base: Names = model.tensors()
        takes_adapters = not is_adapter(self.base)
        found = []
        lacking: list[tuple[str, ...]] = []
        for number, id in enumerate(experts):
            manifest = catalog.manifest(id)
            tensors: Names = manifest.tensors()
            where = names[number] if names else f"expert {number + 1}"
            has_config = manifest.file(CONFIG) is not None
            is_fisher = number >= len(experts) - fishers
            if takes_adapters and is_any_adapter(tensors, self.base, has_config):
                if fishers:
                    raise Incompatible(
                        "an adapter, and a Fisher is one of a whole model's tensors",
                        where=where,
                        hint="merge the adapter into the base alone, and give that merge and its "
                        "Fisher",
                    )
                tied = Tied.of(catalog, model, tensors)
                tensors = self._applied_to_base(manifest, tied, where)
            elif not takes_adapters and not is_adapter(tensors):
                raise Incompatible(
                    "the base is an adapter, and this is not",
                    where=where,
                    hint="the model is the base, and the adapter an expert",
                )
            lacks = stand_ins(self.base, tensors) if fill or is_fisher else {}
            found.append({**tensors, **lacks} if lacks else tensors)
            lacking.append(tuple(lacks))
        self.experts: tuple[Names, ...] = tuple(found)
        self.lacking: tuple[tuple[str, ...], ...] = tuple(lacking)
        self.fishers = fishers

    @classmethod
    def of(cls, catalog: Catalog, plan: Plan, fishers: int) -> Inputs:
        """Return the inputs of a plan, of which so many are Fishers; raises as the class."""
        experts = [expert.manifest_id() for expert in plan.experts]
        return cls(catalog, plan.base_id(), experts, fill=plan.allows_missing, fishers=fishers)

    @property
    def models(self) -> tuple[Names, ...]:
        """Each expert, without the Fishers."""
        return self.experts[: len(self.experts) - self.fishers]

    def has(self, expert: int, name: str) -> bool:
        """Return whether an expert's tensor is its own: nothing holds its place."""
        return name not in self.lacking[expert] or self.experts[expert][name] != self.base[name]

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

    def ties_embeddings(self) -> bool:
        """Return whether the base's config ties its embeddings.  Raises Corrupt, StorageFailed."""
        return ties_embeddings(self._catalog, self._model)

    # -- adapters ------------------------------------------------------------------------------

    def _applied_to_base(self, adapter: Manifest, tied: Tied, where: str) -> Names:
        own = adapter.tensors()
        base = tied.both(self.base)
        raw = self._catalog.read_small(adapter.file(CONFIG), MAX_CONFIG)
        config, targets = plan_adapter(raw, own, base, where)
        for tensor, name in targets.kept:
            if own[name] != base[tensor]:
                raise Incompatible(
                    f"the adapter was trained on other weights of {tensor} than the base's",
                    where=where,
                )
        tensors = dict(base)
        for tensor, name in targets.replaced:
            tensors[tensor] = own[name]
        for product in targets.products:
            record = self._product(product, base, own, config, where)
            id = record.id()
            self._applied[id] = record
            tensors[product.tensor] = id
        changed = [one.tensor for one in targets.products]
        for group in tied.groups:
            _follow(group, base, tensors, changed, tying=config.tying)
            if tied.unstored in group and tensors[group[0]] != tensors.pop(group[1]):
                raise Incompatible(
                    f"the adapter makes {group[0]} and {group[1]} differ, and the base stores one "
                    f"tensor for both ({KEY})",
                    where=where,
                    hint=f"save the base with both tensors and {KEY} false, add that, and merge "
                    "into it",
                )
        return tensors

    def _product(
        self, product: Product, base: Names, own: Names, config: LoraConfig, where: str
    ) -> AppliedTensor:
        magnitude = product.magnitude if config.dora else None
        named = [product.up, product.down, *([] if magnitude is None else [magnitude])]
        before, *factors = self._catalog.tensors(
            [base[product.tensor], *(own[name] for name in named)]
        )
        found = dict(zip(named, factors, strict=True))
        require_product(product, config, {product.tensor: before}, found, where)
        up, down = found[product.up], found[product.down]
        transposed = is_transposed(product, config)
        # The transposed product is that of the transposed factors, in the other order.
        left, right = (down, up) if transposed else (up, down)
        return applied(
            before,
            left,
            right,
            transposed=transposed,
            scale=config.scale_of(product.module),
            magnitude=None if magnitude is None else found[magnitude],
            block_size=self._catalog.block_size,
        )


def _follow(
    group: Sequence[str],
    base: Names,
    tensors: dict[str, TensorId],
    changed: Sequence[str],
    *,
    tying: bool,
) -> None:
    """Give all names of a tied tensor what its only product makes of it, as PEFT does.

    Names that have a product or new contents each keep their own.
    """
    own = [name for name in changed if name in group]
    if len(own) == 1 or (own and tying):
        for name in group:
            if name in own or tensors[name] == base[name]:
                tensors[name] = tensors[own[0]]
