"""Sense: whether experts moved as far as fine-tunes do, and weights are of a useful size.

Owns the thresholds of these warnings, and nothing that stops a merge.  All follows from statistics
and from lineage: no block is read, and what is not known draws no warning.

A full fine-tune moves by some 0.1 % to 10 % of the base's norm, an adapter by less, long continued
pretraining by some 30 %.  Noise of the base's size has moved by 100 %, an unrelated model of the
same norm by 141 %.  Single layers move further than the whole: heads and projections may be new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from mstore.blocks.schema import Sources
from mstore.merge.methods.method import Operation
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.warnings import MergeWarning
from mstore.models.adapters.inputs import Inputs
from mstore.models.adapters.targets import is_adapter
from mstore.models.compare import Measure, Sums, by_layer, comparable
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.models import Input, tensors_of
from mstore.store.objects.plan import Plan
from mstore.store.objects.snapshot import BASE
from mstore.terms.errors import Corrupt, NotFound
from mstore.terms.ids import ManifestId
from mstore.terms.phrases import call, few, phrase

MOST_OF_MODEL: Final = 0.5
"""An expert that moved a whole model further than this, relative to the base's norm, is odd."""
MOST_OF_LAYER: Final = 0.8
"""The same for a layer."""
TIMES_OTHERS: Final = 10.0
"""An expert that moved so many times as far as two or more others, in their median, is odd, ..."""
LEAST_BESIDE_OTHERS: Final = 0.1
"""... if it moved this far at least: below, nobody is."""
MOST_SUMMED: Final = 2.0
"""Weights of whole models that are added up, each and together: a base and one delta have 2."""
MOST_WEIGHTED: Final = 1.0
"""An expert whose change times its factor is further than this, relative to the base's norm."""

FAR: Final = "expert far from the base"
SWAPPED: Final = "base and expert swapped"
OUT_OF_SCALE: Final = "weight out of scale"
_LAYERS_NAMED: Final = 4


def known_sums(
    catalog: Catalog,
    statistics: StatsStore,
    inputs: Inputs,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    products: bool = False,
) -> dict[str, Sums]:
    """Return what statistics know of each tensor that may be merged; no block is read."""
    measure = Measure(catalog, statistics, inputs, products=products)
    return dict(measure.tensors(comparable(inputs, only, skip)[0]))


def far_experts(
    sums: Mapping[str, Sums], experts: Sequence[str], counted: Sequence[bool] = ()
) -> dict[str, str]:
    """Return the experts that moved further than fine-tunes do, and what to say of each.

    counted: whether an expert has a part in the merge; without them, all have.
    """
    if not sums:
        return {}
    whole = Sums.total(list(sums.values()))
    totals = by_layer(sums)
    moved = [whole.change(k) for k in range(len(experts))]
    found = {}
    for k, (name, own) in enumerate(zip(experts, moved, strict=True)):
        if counted and not counted[k]:
            continue
        others = [
            one for j, one in enumerate(moved) if j != k and one and (not counted or counted[j])
        ]
        usual = median(others) if len(others) > 1 else math.inf
        changes = {layer: total.change(k) for layer, total in totals.items()}
        odd = {layer: one for layer, one in changes.items() if one and one > MOST_OF_LAYER}
        if own is not None and own > MOST_OF_MODEL:
            found[name] = f"{_differs(name, own)}, more than a fine-tune does"
        elif odd:
            most = max(odd.values())
            found[name] = (
                f"{_differs(name, most)} in {_named(list(odd))}, more than a fine-tune does"
            )
        elif own is not None and own > max(LEAST_BESIDE_OTHERS, TIMES_OTHERS * usual):
            times = f"{own / usual:.0f} times as far as the other experts"
            found[name] = f"{_differs(name, own)}, {times}"
    return found


def _differs(name: str, change: float) -> str:
    return f"{name} differs from the base by {100 * change:.3g} % of the base's norm"


def _named(layers: Sequence[str]) -> str:
    """Name layers: those of one kind by their numbers."""
    parts = [layer.rpartition(".") for layer in layers]
    if len(layers) == 1 or len({kind for kind, *_ in parts}) > 1:
        return few(layers)
    numbers = [number for *_, number in parts]
    if not all(number.isdigit() for number in numbers):
        return few(layers)
    shown = numbers[:_LAYERS_NAMED]
    more = len(numbers) - len(shown)
    last = f"{more} more" if more else shown.pop()
    return f"layers {', '.join(shown)} and {last}"


def senseless(
    catalog: Catalog, statistics: StatsStore, plan: Plan, sources: Sources
) -> tuple[MergeWarning, ...]:
    """Return warnings about experts that are no fine-tunes of the base, and odd weights."""
    models = len(plan.experts)
    names = [source.name for source in sources.experts[:models]]
    used = Operations(plan)
    operations = used.used(plan)
    if plan.layers or is_adapter(tensors_of(catalog, catalog.manifest(plan.base_id()))):
        # Factors of adapters have no base in common, and a stack takes layers as they are.
        return ()
    if all(one.adds_whole for one in operations):
        # The base is no origin: deltas, or models of any kind, may be added to it.
        return _large_sums(operations, names)
    manifests = [expert.manifest_id() for expert in plan.experts[:models]]
    base = Input(sources.base.snapshot_id(), sources.base.name)
    found = []
    if any(one.has_origin for one in operations):
        found = [
            MergeWarning(SWAPPED, names[k], why)
            for k, why in swapped(catalog, base, manifests, names)
        ]
    try:
        inputs = Inputs.of(catalog, plan)
        sums = known_sums(catalog, statistics, inputs, plan.criteria.only, plan.criteria.skip)
    except (NotFound, Corrupt):
        # Whoever needs what is missing says so.
        return tuple(found)
    counted = [any(one.given[k] for one in operations) for k in range(models)]
    for name, why in far_experts(sums, names, counted).items():
        more = call("compare", name, base=sources.base.name)
        told = phrase("{why}; {more} shows where", why=why, more=more)
        found.append(MergeWarning(FAR, name, told))
    factors = {one.name: used.of(one).most for one in plan.tensors if not one.sources}
    found += _weighted(sums, factors, names)
    if not found and sources.change is not None and sources.change > MOST_WEIGHTED:
        by = f"{sources.change:.3g} times its norm"
        text = f"the experts together change the base by {by}; give them smaller weights"
        found.append(MergeWarning(OUT_OF_SCALE, None, text))
    return tuple(found)


def swapped(
    catalog: Catalog, base: Input, experts: Sequence[ManifestId], names: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield the number of each expert that the base was made from, and what to say of it."""
    parents = catalog.snapshot(base.snapshot).parents
    records = [catalog.snapshot_if_there(one.snapshot_id()) for one in parents if one.role == BASE]
    contents = {record.manifest_id() for record in records if record is not None}
    for k, (expert, name) in enumerate(zip(experts, names, strict=True)):
        if expert in contents:
            yield k, f"{base.name}, the base, was made from {name}: the two may be swapped"


def _large_sums(operations: Sequence[Operation], names: Sequence[str]) -> tuple[MergeWarning, ...]:
    sums = [sum(one.stated_weights) for one in operations]
    most = max(sums, key=abs)
    columns = zip(*(one.stated_weights for one in operations), strict=True)
    large = [max(map(abs, column)) > MOST_SUMMED for column in columns]
    if abs(most) > MOST_SUMMED and not any(large):
        text = (
            f"the weights add up to {most:.3g}, and nothing divides by them: of whole models, the "
            "result is far larger than each"
        )
        return (MergeWarning(OUT_OF_SCALE, None, text),)
    return tuple(
        MergeWarning(
            OUT_OF_SCALE,
            name,
            f"{name} is multiplied by its weight, and nothing divides by it: the result is far "
            "larger than the base",
        )
        for name, is_large in zip(names, large, strict=True)
        if is_large
    )


def _weighted(
    sums: Mapping[str, Sums],
    factors: Mapping[str, Sequence[float]],
    names: Sequence[str],
) -> list[MergeWarning]:
    """Return warnings about experts whose weighted change is larger than the base."""
    base = Sums.total(list(sums.values())).base if sums else None
    found = []
    for k, name in enumerate(names):
        parts = [
            (factors[tensor][k], sums[tensor].squares[k]) for tensor in sums if tensor in factors
        ]
        largest = max((factor for factor, _ in parts), default=0.0)
        known = [(factor, square) for factor, square in parts if square is not None]
        if not base or len(known) < len(parts) or largest <= 1:
            continue
        norms = [factor * math.sqrt(square) for factor, square in known]
        by = math.hypot(*norms) / math.sqrt(base)
        if by > MOST_WEIGHTED:
            text = (
                f"{name} is multiplied by {largest:.3g}, so that it changes the result by "
                f"{by:.3g} times the base's norm; give it a smaller weight"
            )
            found.append(MergeWarning(OUT_OF_SCALE, name, text))
    return found
