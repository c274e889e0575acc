"""Inputs: the tensors of a merge's base and experts, by name.

An expert is a stored model, or an adapter: then it stands for what the adapter makes of the base.
An adapter whose base is an adapter, too, is merged as it is.  A tensor that a model lacks may stand
for the base's.  Owns what each name stands for; reads records and configs, no weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from mstore.checkpoint.models import full_name, own_name, renamed, split_name
from mstore.models.adapters.config import CONFIG, MAX_CONFIG
from mstore.models.adapters.low_rank import read_singles
from mstore.models.adapters.multipliers import rows_together
from mstore.models.adapters.products import Product
from mstore.models.adapters.targets import (
    AdapterPlan,
    has_keys,
    is_adapter,
    is_any_adapter,
    plan_of_keys,
    plan_of_peft,
)
from mstore.models.made import metadata_of
from mstore.store.catalog import Catalog
from mstore.store.models import Models, models_in, paired, require_pairs
from mstore.store.objects.manifest import Manifest
from mstore.store.objects.plan import Plan
from mstore.store.objects.shapes import EMBEDDINGS, chosen
from mstore.store.objects.tensor import AppliedTensor, FactoredProduct, Tensor, applied
from mstore.store.tied import KEY, Tied, ties_embeddings
from mstore.terms.errors import Incompatible
from mstore.terms.ids import ManifestId, TensorId

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


Companions = Sequence[tuple[str, int | None]]
"""The role of each, and the number of what it belongs to (`PlanInput.of`)."""


class ModelChoice(msgspec.Struct, frozen=True):
    """Which models of its inputs a merge takes: of the base, and of each expert; None: not said."""

    base: str | None
    experts: tuple[str | None, ...]


class ModelPairs:
    """Which models of the experts of a merge stand for which of the base.

    without: models of the base that an expert lacks, beside that of their directory: other forms of
    the same weights (a variant, a consolidated copy), which would not be those of the result.
    base: the tensors of the others that are taken. pairs: for each expert, its models by those of
    the base that they stand for.

    names: what errors call the base and the experts. only, skip: patterns of the tensors to merge;
    a model of which they leave out all is not taken.  Raises Incompatible for an expert without a
    model of the base.
    """

    def __init__(
        self,
        base: Models,
        experts: Sequence[Models],
        choice: ModelChoice,
        names: Sequence[str],
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> None:
        found = [
            _of_all(base, own, choice.base) or paired(base.named, own.named, (choice.base, given))
            for own, given in zip(experts, choice.experts, strict=True)
        ]
        for own, pair, where in zip(experts, found, names[1:], strict=True):
            require_pairs(base, own, pair, names[0], where)
        taken = set(base.named) if choice.base is None else {choice.base}
        # What patterns leave to the base is the base's, in all its forms.
        merged: Collection[str] = base.tensors
        if only or skip:
            merged = chosen(dict.fromkeys(base.tensors, ()), only, skip)
        taken &= {split_name(one)[0] for one in merged}
        self.without = _other_forms(base, taken, found)
        self.base: Names = renamed(base.tensors, {one: one for one in taken - {*self.without}})
        self.pairs: tuple[Mapping[str, str], ...] = tuple(
            {ours: own for ours, own in pair.items() if ours not in self.without} for pair in found
        )
        self._experts = experts

    def own(self, expert: int) -> dict[str, TensorId]:
        """Return the tensors of an expert by the base's names, an adapter's as they are."""
        names = {theirs: ours for ours, theirs in self.pairs[expert].items()}
        return renamed(self._experts[expert].tensors, names)


class Inputs:
    """The base and the experts of one merge.

    base: its tensors. experts: those of each expert, with the base's names. names: what errors call
    the base and the experts, in their order; ids otherwise. choice: the models to take; without, of
    the base all, but those in `without`. fill: in a model that lacks tensors of the base, the
    base's stand for them. companions: the last of the experts: of
    what they lack, too, the base's hold the place. lacking: the names of what an expert lacks, for
    each; none without `fill`, but for companions. without, only, skip: as in `ModelPairs`.

    Raises Incompatible for an adapter that cannot be applied to the base, and as `ModelPairs`,
    NotFound, Corrupt, StorageFailed.
    """

    def __init__(
        self,
        catalog: Catalog,
        base: ManifestId,
        experts: Sequence[ManifestId],
        names: Sequence[str] = (),
        *,
        choice: ModelChoice | None = None,
        fill: bool = False,
        companions: Companions = (),
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
    ) -> None:
        self._catalog = catalog
        self._applied: dict[TensorId, AppliedTensor] = {}
        self.left_out: dict[int, tuple[str, ...]] = {}
        """By expert: an adapter's tensors of text encoders that the base does not have."""
        self._model = catalog.manifest(base)
        self._models = models_in(catalog, self._model)
        self.fills = fill
        members = [models_in(catalog, catalog.manifest(id)) for id in experts]
        choice = choice or ModelChoice(None, (None,) * len(experts))
        names = names or ("the base", *(f"expert {number + 1}" for number in range(len(experts))))
        pairs = ModelPairs(self._models, members, choice, names, only, skip)
        self.without = pairs.without
        self.base: Names = pairs.base
        self._takes_adapters = not is_adapter(self.base)
        found: list[Names] = []
        lacking: list[tuple[str, ...]] = []
        for number, (own, pair, where) in enumerate(
            zip(members, pairs.pairs, names[1:], strict=True)
        ):
            is_model = number < len(experts) - len(companions)
            tensors: dict[str, TensorId] = {}
            if self._takes_adapters and is_model and _is_keyed(own):
                tensors |= self._of_keys(number, own, pair, where)
            else:
                for ours, theirs in pair.items():
                    tensors |= self._taken(own, ours, theirs, where, companions)
            lacks = stand_ins(self.base, tensors) if fill or not is_model else {}
            found.append({**tensors, **lacks} if lacks else tensors)
            lacking.append(tuple(lacks))
        self.experts: tuple[Names, ...] = tuple(found)
        self.lacking: tuple[tuple[str, ...], ...] = tuple(lacking)
        self.models = self.experts[: len(experts) - len(companions)]
        """Each expert, without the companions."""

    def _taken(
        self, own: Models, ours: str, theirs: str, where: str, companions: Companions
    ) -> Mapping[str, TensorId]:
        """Return what a model of an expert makes of one of the base, by the base's names.

        companions: all; without one of a model an adapter counts as what it makes of the base.
        """
        tensors = own.in_model(theirs)
        base = self._models.in_model(ours)
        has_config = own.manifest.file(own.named[theirs].path(CONFIG)) is not None
        if self._takes_adapters and is_any_adapter(tensors, base, has_config):
            roles = [role for role, of in companions if of is not None]
            if roles:
                raise Incompatible(
                    f"an adapter, and a companion ({roles[0]}) is of a whole model's tensors",
                    where=where,
                    hint="merge the adapter into the base alone, and give that merge and its "
                    "companion",
                )
            tensors = dict(self._applied_to_base(own, theirs, ours, where))
        elif not self._takes_adapters and not is_adapter(tensors):
            raise Incompatible(
                "the base is an adapter, and this is not",
                where=where,
                hint="the model is the base, and the adapter an expert",
            )
        return {full_name(ours, name): id for name, id in tensors.items()}

    @classmethod
    def of(cls, catalog: Catalog, plan: Plan) -> Inputs:
        """Return the inputs of a plan; raises as the class."""
        # They are a function of the plan, so they are kept beside it for whoever asks next.
        found = plan.__dict__.get("inputs")
        if not isinstance(found, cls) or found._catalog is not catalog:
            base, *others = plan.inputs
            experts = [one.manifest_id() for one in others]
            choice = ModelChoice(base.model, tuple(one.model for one in others))
            found = plan.__dict__["inputs"] = cls(
                *(catalog, base.manifest_id(), experts),
                choice=choice,
                fill=plan.allow_missing,
                companions=[(one.role, one.of) for one in plan.companions],
                only=plan.criteria.only,
                skip=plan.criteria.skip,
            )
        return found

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

    def ties_embeddings(self) -> frozenset[str]:
        """Return the models whose configs tie embeddings.  Raises Corrupt, StorageFailed."""
        return ties_embeddings(self._catalog, self._model)

    # -- adapters ------------------------------------------------------------------------------

    def _applied_to_base(self, adapter: Models, theirs: str, ours: str, where: str) -> Names:
        """Return the tensors that an adapter makes of a model of the base, by names in it."""
        own = adapter.in_model(theirs)
        tied = Tied.of(self._catalog, self._model, ours, own)
        base = tied.both(self._models.in_model(ours))
        config_file = adapter.manifest.file(adapter.named[theirs].path(CONFIG))
        raw = self._catalog.read_small(config_file, MAX_CONFIG)
        plan = plan_of_peft(raw, own.keys(), base.keys(), where)
        tensors = self._changed(plan, own, base, where)
        changed = [one.tensor for one in plan.targets.products]
        for group in tied.groups:
            _follow(group, base, tensors, changed, tying=plan.tying)
            if tied.unstored in group and tensors[group[0]] != tensors.pop(group[1]):
                raise Incompatible(
                    f"the adapter makes {group[0]} and {group[1]} differ, and the base stores one "
                    f"tensor for both ({KEY})",
                    where=where,
                    hint=f"save the base with both tensors and {KEY} false, add that, and merge "
                    "into it",
                )
        return tensors

    def _of_keys(self, number: int, adapter: Models, pair: Mapping[str, str], where: str) -> Names:
        """Return the tensors that an adapter without a config makes of all models of a base."""
        own = adapter.tensors
        base = {
            full_name(ours, name): id
            for ours in pair
            for name, id in self._models.in_model(ours).items()
        }
        records = dict(zip(own, self._catalog.tensors(list(own.values())), strict=True))
        before = dict(zip(base, self._catalog.tensors(list(base.values())), strict=True))
        [model] = adapter.named.values()
        header = adapter.manifest.file(model.files[0])
        told = None if header is None else metadata_of(self._catalog.read_parts(header.parts[:1]))
        plan = plan_of_keys(records, before, where, told)
        self.left_out[number] = plan.targets.without
        return self._changed(plan, own, base, where)

    def _changed(
        self, plan: AdapterPlan, own: Names, base: Names, where: str
    ) -> dict[str, TensorId]:
        """Return the tensors of a base as an adapter makes them."""
        targets = plan.targets
        for tensor, name in targets.kept:
            if own[name] != base[tensor]:
                raise Incompatible(
                    f"the adapter was trained on other weights of {tensor} than the base's",
                    where=where,
                )
        tensors = dict(base)
        for tensor, name in targets.replaced:
            tensors[tensor] = own[name]
        # All of them with one look into the index.
        ids = [base[product.tensor] for product in targets.products]
        ids += [own[name] for product in targets.products for name in _names(product)]
        stored = dict(zip(ids, self._catalog.tensors(ids), strict=True))
        found = {name: stored[own[name]] for one in targets.products for name in _names(one)}
        alphas = self._numbers(
            {one.alpha: found[one.alpha] for one in targets.products if one.alpha is not None}
        )
        parts: dict[str, list[FactoredProduct]] = {}
        magnitudes: dict[str, Tensor] = {}
        settings = {one.tensor: one.settings for one in targets.products}
        for product in targets.products:
            one = stored[base[product.tensor]]
            plan.require(product, {product.tensor: one}, found, where)
            parts.setdefault(product.tensor, []).append(
                FactoredProduct(
                    product.form,
                    tuple(found[name] for name in product.names),
                    plan.scale_of(product, found, alphas),
                    product.first,
                    product.rows or one.shape[0],
                    product.at,
                )
            )
            if product.magnitude is not None:
                magnitudes[product.tensor] = found[product.magnitude]
        for tensor, several in parts.items():
            record = applied(
                stored[base[tensor]],
                tuple(several),
                magnitude=magnitudes.get(tensor),
                settings=settings.get(tensor),
                group=rows_together(several[0]),
                block_size=self._catalog.block_size,
            )
            id = record.id()
            self._applied[id] = record
            tensors[tensor] = id
        return tensors

    def _numbers(self, records: Mapping[str, Tensor]) -> dict[str, float]:
        """Return what tensors of one number say.  Raises Incompatible."""
        found = {}
        for name, values in zip(
            records, read_singles(self._catalog, list(records.values())), strict=True
        ):
            if values.size != 1 or not np.isfinite(values).all():
                raise Incompatible(f"the adapter's {name} is no number")
            found[name] = float(values.reshape(()))
        return found


def _is_keyed(one: Models) -> bool:
    """Return whether a checkpoint is one adapter without a config."""
    if len(one.named) != 1 or not has_keys(one.tensors):
        return False
    [model] = one.named.values()
    return one.manifest.file(model.path(CONFIG)) is None


def _of_all(base: Models, own: Models, chosen: str | None) -> dict[str, str] | None:
    """Return what such an adapter stands for: all models of a base, or the one that is named."""
    if not _is_keyed(own) or is_adapter(base.tensors):
        return None
    return dict.fromkeys(base.named if chosen is None else [chosen], next(iter(own.named)))


def _names(product: Product) -> tuple[str, ...]:
    """Return all tensors of an adapter that a product is made of."""
    more = (product.magnitude, product.alpha)
    return (*product.names, *(name for name in more if name is not None))


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


def _other_forms(
    base: Models, taken: Collection[str], pairs: Sequence[Mapping[str, str]]
) -> tuple[str, ...]:
    """Return the models of the base that an expert lacks, beside that of their directory."""
    mains = {
        one.directory: one.name
        for one in base.named.values()
        if one.name == own_name(one.directory)
    }
    return tuple(
        name
        for name, one in base.named.items()
        if name in taken
        and any(name not in pair and mains.get(one.directory) in pair for pair in pairs)
    )


def files_merged_into(catalog: Catalog, plan: Plan) -> Manifest:
    """Return the base of a plan without the models that the output does not have."""
    base = catalog.manifest(plan.base_id())
    if not plan.without:
        return base
    models = models_in(catalog, base)
    gone = {
        path
        for name in plan.without
        for one in (models.named[name],)
        for path in (*one.files, one.index)
    }
    return Manifest(tuple(file for file in base.files if file.path not in gone))
