"""Warnings about a plan: what is allowed, and usually a mistake.  Nothing here stops a merge.

Computed from the plan and what is recorded beside it, so that a stored plan, a merge and an
explanation agree.  Whether experts moved as far as fine-tunes do follows from statistics and from
lineage: no block is read, and what is not known draws no warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from mstore.blocks.schema import NamedSnapshot, PlanInputs
from mstore.merge.measures.grid import split
from mstore.merge.methods.method import Operation
from mstore.merge.methods.parameters import written
from mstore.merge.methods.registry import Operations
from mstore.merge.planning.cosines import known_cosines
from mstore.merge.planning.tensors import (
    left_to_base,
    names_of_plan,
    own_head_of,
    own_head_text,
)
from mstore.models.adapters.inputs import Inputs, stand_ins
from mstore.models.adapters.targets import is_adapter
from mstore.models.compare import ComparedSums, by_layer, comparable, known_norms
from mstore.models.stats.store import StatsStore
from mstore.models.vocabulary import tokenizer as tokenizers
from mstore.models.vocabulary.tokenizer import TokenDifferences, Tokenizer
from mstore.numeric.codes import LARGEST
from mstore.store.catalog import Catalog
from mstore.store.models import Input, config_of, models_in, paired, tensors_of
from mstore.store.not_finite import NotFiniteTensor
from mstore.store.objects.manifest import File, Manifest
from mstore.store.objects.plan import BELOW, DROPPED, EQUAL, OMITTED, READ, SHARED, Plan, PlanInput
from mstore.store.objects.shapes import EMBEDDINGS
from mstore.store.objects.snapshot import BASE
from mstore.store.tied import own_head, sizes_of, ties_embeddings
from mstore.terms.errors import Corrupt, Incompatible, NotFound
from mstore.terms.ids import ManifestId, SnapshotId
from mstore.terms.phrases import call, few, phrase
from mstore.terms.report import Report

IS_BASE = "expert is the base"
REPEATED = "expert given twice"
NO_WEIGHT = "expert without weight"
EQUALS_BASE = "expert equals the base"
OVER_BUDGET = "expert over budget"
LEFT_OUT = "expert left out"
TRIMMED = "expert trimmed away"
OTHER_BASE = "adapter of another base"
OTHER_TOKENS = "tokens in other rows"
OTHER_TENSORS = "other tensors"
OTHER_MODELS = "other models"
OWN_HEAD = "head of its own"
OVERFLOW = "overflow"
NOT_FINITE = "not finite"
LICENCE_TERMS = "licences"
CONFIG_LEFT = "config of a stack"
INPUT_MOVED = "merged branch moved"
FAR = "expert far from the base"
SWAPPED = "base and expert swapped"
OUT_OF_SCALE = "weight out of scale"
NO_ENCODER = "no text encoder"
EQUAL_MODELS = "equal models"

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

_NAMED = 3
_LAYERS_NAMED = 4
# Tensors with numbers that are not finite are damaged weights, so more of them are named.
_MANY = 20


class MergeWarning(Report, frozen=True):
    """Something allowed that is usually a mistake."""

    kind: str
    """expert is the base, expert given twice, expert without weight, expert equals the base, expert
    over budget, expert left out, expert trimmed away, expert far from the base, weight out of
    scale, base and expert swapped, adapter of another base, no text encoder, tokens in other rows,
    other tensors, other models, equal models, head of its own, config of a stack, merged branch
    moved, overflow, not finite, or licences"""
    expert: str | None
    """the expert concerned, as it was named; None: several models"""
    text: str
    """the warning, as text"""


def idle_experts(plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
    """Return a warning for each reason why an expert adds nothing to this plan, in plan order."""
    if plan.is_assembly:
        used = {member for member, _ in plan.layers} | {one.member for one in plan.taken}
        what = "layer" if plan.layers else "tensor"
        return tuple(
            MergeWarning(LEFT_OUT, source.name, f"no {what} is from {source.name}")
            for number, (one, source) in enumerate(
                zip(plan.experts, sources.experts, strict=False), start=1
            )
            if number not in used and one.key != plan.inputs[0].key
        )
    return tuple(
        MergeWarning(kind, sources.experts[k].name, text)
        for k in range(len(plan.experts))
        for kind, text in _of(plan, sources, k)
    )


def moved_inputs(sources: PlanInputs, name: str) -> tuple[MergeWarning, ...]:
    """Return a warning if a merge moved one of its inputs, by the name that it was given."""
    if name not in {source.name for source in (sources.base, *sources.experts)}:
        return ()
    expert = None if name == sources.base.name else name
    text = f"{name}, which was merged, is now this merge; {name}@{{1}} is what it was"
    return (MergeWarning(INPUT_MOVED, expert, text),)


def stack_warnings(catalog: Catalog, plan: Plan) -> tuple[MergeWarning, ...]:
    """Return a warning for each thing that the config of a stack cannot say of its layers."""
    if not plan.layers:
        return ()
    from mstore.merge.planning.stack import stacked_config

    members = [one.manifest_id() for one in plan.inputs]
    configs = [config_of(catalog, catalog.manifest(member)) for member in members]
    return tuple(
        MergeWarning(CONFIG_LEFT, None, f"config.json: {one}; correct it before you use the model")
        for one in stacked_config(configs, plan.layers).left
    )


def adapters_of_other_bases(
    catalog: Catalog, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return a warning for each adapter that was added as one of another model than the base.

    A fine-tune or a merge of that model is no other one: LoRAs of an original go into its mixes.
    """
    if is_adapter(tensors_of(catalog, catalog.manifest(plan.base_id()))):
        return ()
    found = []
    for expert, source in _models(plan, sources):
        if not is_adapter(tensors_of(catalog, catalog.manifest(expert.manifest_id()))):
            continue
        bases = catalog.snapshot(source.snapshot_id()).of_role(BASE)
        contents = [catalog.snapshot(id).manifest_id() for id in bases]
        if contents and _descent(catalog, sources.base.snapshot_id()).isdisjoint(contents):
            names = {ref.snapshot_id(): name for name, ref in catalog.refs().items()}
            told = names.get(bases[0], bases[0].short)
            text = f"{source.name} was added as an adapter of {told}, not of {sources.base.name}"
            found.append(MergeWarning(OTHER_BASE, source.name, text))
    return tuple(found)


def _descent(catalog: Catalog, snapshot: SnapshotId) -> set[ManifestId]:
    """Return the contents that a model comes from, its own first, by the bases of each."""
    line = catalog.nearest_first(snapshot, lambda record: record.of_role(BASE))
    return {record.manifest_id() for _, record in line}


def text_encoders_left_out(
    catalog: Catalog, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return a warning for each adapter with tensors of a text encoder that the base lacks."""
    left_out = Inputs.of(catalog, plan).left_out
    return tuple(
        MergeWarning(
            NO_ENCODER,
            source.name,
            f"{source.name}: {len(left_out[number])} of its tensors are of text encoders, which "
            f"{sources.base.name} does not have",
        )
        for number, source in enumerate(sources.experts)
        if left_out.get(number)
    )


def tokens_in_other_rows(
    catalog: Catalog, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return a warning for each expert whose embeddings have other tokens in the base's rows."""
    if not merges_embeddings(plan):
        return ()
    base, path = catalog.manifest(plan.base_id()), tokenizers.TOKENIZER
    known: dict[File | None, Tokenizer | None] = {}
    found = []
    for expert, source in _models(plan, sources):
        model = catalog.manifest(expert.manifest_id())
        sides = []
        # Fine-tunes mostly have the base's file, which need not be read.
        if model.file(path) != base.file(path) and not is_adapter(tensors_of(catalog, model)):
            for one in (base, model):
                file = one.file(path)
                if file not in known:
                    known[file] = _tokenizer(catalog, one)
                sides.append(known[file])
        ours, theirs = sides or (None, None)
        if ours is not None and theirs is not None:
            differing = tokenizers.differences(ours, theirs)
            if differing.moved:
                text = f"{source.name}: {moved_tokens_text(differing)}"
                found.append(MergeWarning(OTHER_TOKENS, source.name, text))
    return tuple(found)


def other_tensors(catalog: Catalog, plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
    """Return warnings for experts that lack tensors of the base, or have others, and may."""
    if not plan.allow_missing:
        return ()
    base = tensors_of(catalog, catalog.manifest(plan.base_id()))
    # What patterns leave out, and outputs use, is as it was asked for.
    merged = base.keys() - left_to_base(base, plan.criteria)
    used = {source for tensor in plan.tensors for source in tensor.sources}
    models = len(plan.experts)
    moved = {
        name
        for expert in plan.experts
        for name, id in tensors_of(catalog, catalog.manifest(expert.manifest_id())).items()
        if base.get(name) != id
    }
    found = []
    for k, (expert, source) in enumerate(zip(plan.inputs[1:], sources.experts, strict=True)):
        own = tensors_of(catalog, catalog.manifest(expert.manifest_id()))
        if is_adapter(own) and not is_adapter(base):
            continue
        told = []
        lacking = [
            name for name, id in stand_ins(base, own).items() if name in merged and id == base[name]
        ]
        if k >= models:
            # What no expert moves needs no companion.
            lacking = [name for name in lacking if name in moved]
        if lacking:
            so = "the base's count for them" if k < models else "its expert has no part in them"
            told.append(f"lacks {few(lacking)}: {so}")
        others = own.keys() - base.keys() - used
        others -= left_to_base(dict.fromkeys(others), plan.criteria)
        if others:
            told.append(f"has {few(sorted(others))}, not in the base and left out")
        if told:
            text = f"{source.name} {'; '.join(told)}"
            found.append(MergeWarning(OTHER_TENSORS, source.name, text))
    return tuple(found)


def other_models(catalog: Catalog, plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
    """Return what becomes of models that base or experts have alone."""
    base = models_in(catalog, catalog.manifest(plan.base_id()))
    found = []
    if plan.without:
        text = (
            f"{few(_told_models(plan.without))} is left out of the result: not every expert has "
            "it, and the base's would be the unmerged model"
        )
        found.append(MergeWarning(OTHER_MODELS, None, text))
    chosen = base.named.get(plan.model) if plan.model is not None else None
    forms = [
        one.name
        for one in base.named.values()
        if chosen is not None and one.directory == chosen.directory and one.name != chosen.name
    ]
    if forms:
        text = f"{few(_told_models(forms))} stays the base's, beside {plan.model or 'its model'}"
        found.append(MergeWarning(OTHER_MODELS, None, text))
    for expert, source in _models(plan, sources):
        own = models_in(catalog, catalog.manifest(expert.manifest_id()))
        given = (plan.model, expert.model)
        more = own.named.keys() - paired(base.named, own.named, given).values()
        if more and given == (None, None):
            told = few(_told_models(sorted(more)))
            text = f"{source.name} has {told}, which the base has not: left out"
            found.append(MergeWarning(OTHER_MODELS, source.name, text))
    return tuple(found)


def unmixed(
    catalog: Catalog, statistics: StatsStore, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return a warning if a method that mixes some tensors, by their cosines, mixes none."""
    last = len(plan.experts) - 1
    mixtures = [one.mixture for one in plan.tensors]
    if not mixtures or any(one is None or one.experts[last] for one in mixtures):
        return ()
    used = Operations(plan).used(plan)
    if not all(map(_decides_by_cosine, used)):
        return ()
    own = {operation.parameters["threshold"] for operation in used}
    at = f"the threshold {written(own.pop())}" if len(own) == 1 else "their thresholds"
    name, cosines = sources.experts[last].name, known_cosines(catalog, statistics, plan)
    text = f"{name} contributes nothing: no tensor has a cosine below {at}"
    if cosines:
        least = min(cosines, key=cosines.__getitem__)
        text += f"; the least of {len(cosines)} is {cosines[least]:.3f}, that of {least}"
    return (MergeWarning(TRIMMED, name, text),)


def _decides_by_cosine(operation: Operation) -> bool:
    return operation.method.combine.by_cosine


def equal_companions(catalog: Catalog, plan: Plan, sources: PlanInputs) -> tuple[MergeWarning, ...]:
    """Return in which tensors companions are equal that are to be compared: they say nothing."""
    if not plan.companions:
        return ()
    asked = Operations(plan).main.method.companions
    numbers = dict(split(asked, len(plan.experts), range(len(plan.inputs) - 1)))
    roles = {one.role: own[0] for one, own in numbers.items()}
    found = []
    for one in asked:
        if one.unlike is None:
            continue
        first, second = pair = [roles[role] for role in (one.unlike, one.role)]
        inputs = Inputs.of(catalog, plan)
        records = inputs.records([inputs.base[tensor.source(0)] for tensor in plan.tensors])
        names, equal = [], []
        for tensor, record in zip(plan.tensors, records, strict=True):
            if one.shape(tensor.name, record.shape) is None:
                continue
            mine, theirs = (tensor.source(1 + number) for number in pair)
            names.append(tensor.name)
            if not (inputs.has(first, mine) and inputs.has(second, theirs)):
                continue
            if inputs.experts[first][mine] == inputs.experts[second][theirs]:
                equal.append(tensor.name)
        if equal:
            told = " and ".join(sources.experts[number].name for number in pair)
            text = (
                f"{told}, the {one.unlike} and the {one.role} model, are equal in {len(equal)} of "
                f"{len(names)} tensors that they are compared in, so nothing is known of these: "
                f"{few(equal)}"
            )
            found.append(MergeWarning(EQUAL_MODELS, None, text))
    return tuple(found)


def _told_models(names: Iterable[str]) -> list[str]:
    return [f"the model {name or 'at the top'}" for name in names]


def heads_of_their_own(
    catalog: Catalog, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return a warning if the merge has a head of its own and the base's config ties it."""
    base = catalog.manifest(plan.base_id())
    sizes = sizes_of(catalog, base)
    stores_both = own_head(sizes, {name: name for name in sizes})
    if not (stores_both and ties_embeddings(catalog, base)):
        return ()
    inputs = Inputs.of(catalog, plan)
    first = names_of_plan(catalog, plan, inputs.base, inputs.experts)
    found = own_head_of(catalog, plan, inputs, first)
    if found is None:
        return ()
    names = (sources.base.name, *(one.name for one in sources.experts))
    models = zip(names, (inputs.base, *inputs.models), strict=False)
    name = next((name for name, own in models if own_head(sizes, own)), None)
    return (MergeWarning(OWN_HEAD, name, f"{name or 'the merge'} {own_head_text(*found)}"),)


def merges_embeddings(plan: Plan) -> bool:
    """Return whether a plan merges rows of tokens."""
    return any(EMBEDDINGS.search(tensor.name) for tensor in plan.tensors)


def moved_tokens_text(found: TokenDifferences) -> str:
    """Return that tokens are in other rows, as text."""
    return (
        f"{found.moved} tokens are in other rows than the base's, such as {found.example!r}: rows "
        "of different tokens would be merged"
    )


def _tokenizer(catalog: Catalog, model: Manifest) -> Tokenizer | None:
    try:
        return tokenizers.tokenizer_of(catalog, model, "")
    except Incompatible:
        return None


def _models(plan: Plan, sources: PlanInputs) -> Iterator[tuple[PlanInput, NamedSnapshot]]:
    # Companions come after them.
    return zip(plan.experts, sources.experts, strict=False)


def _of(plan: Plan, sources: PlanInputs, k: int) -> Iterator[tuple[str, str]]:
    own, name = plan.experts[k], sources.experts[k].name
    used = Operations(plan).used(plan)
    idle = {n for n in range(k + 1) if used and all(one.given[n] == 0 for one in used)}
    same = [n for n in range(k) if plan.experts[n].key == own.key and n not in idle]
    if same and k not in idle:
        earlier = sources.experts[same[0]].name
        also = "" if earlier == name else f": it has the content of {earlier}"
        weighted = any(operation.method.weighted for operation in used)
        adds = "; its weights add up" if weighted else ""
        yield REPEATED, f"{name} is given more than once{also}{adds}"
    # Where whole models are mixed as vectors, or added up, the base is a model like the others.
    if own.key == plan.inputs[0].key and all(one.counts_base for one in used):
        return
    if own.key == plan.inputs[0].key:
        yield IS_BASE, f"{name} is the base itself, so it changes nothing{_diluting(plan)}"
        return
    if all(operation.given[k] == 0 for operation in used):
        yield NO_WEIGHT, f"{name} has weight 0, so nothing of it is in the merge"
        return
    states = b"".join([tensor.states[k] for tensor in plan.tensors])
    if READ in states or SHARED in states:
        return
    if OMITTED in states and plan.budget is None and plan.criteria.expert_budget is None:
        yield (
            LEFT_OUT,
            f"{name} contributes nothing: the error limit allows all of it to be left out",
        )
    elif OMITTED in states:
        yield OVER_BUDGET, f"{name} contributes nothing: the budget leaves all of it out"
    elif DROPPED in states:
        yield OVER_BUDGET, f"{name} contributes nothing: all of it is outside the top-p share"
    elif BELOW in states:
        if k == len(plan.experts) - 1 and all(map(_decides_by_cosine, used)):
            # `unmixed` knows more.
            return
        yield TRIMMED, f"{name} contributes nothing: none of it reaches the result"
    elif not states.strip(bytes((EQUAL,))):
        yield (
            EQUALS_BASE,
            (
                f"{name} is equal to the base in all tensors that are merged, so it changes "
                f"nothing{_diluting(plan)}"
            ),
        )


def _diluting(plan: Plan) -> str:
    """Return what an expert without a delta still changes if weights are divided by their sum."""
    # Consensus divides by the weights that agree, which never include an expert without a delta.
    used = Operations(plan).used(plan)
    divides = any(one.method.combine.dilutes(one) for one in used)
    if divides and len(plan.experts) > 1:
        return " but to take weight from the others"
    return ""


def not_finite_warnings(
    plan: Plan, sources: PlanInputs, counts: Sequence[NotFiniteTensor] | None
) -> tuple[MergeWarning, ...]:
    """Return warnings of elements that are infinite or NaN, and are finite in the base.

    counts: what a merge of the plan has; None if it was not run.
    """
    found = [MergeWarning(NOT_FINITE, None, not_finite_text(counts))] if counts else []
    have = {one.tensor for one in counts or ()}
    for k, expert in enumerate(sources.experts):
        names = [risk.tensor for risk in sources.risks if k in risk.experts]
        if names:
            what = f"{expert.name}: infinite or NaN elements, or differences from the base, in"
            so = "the result may have them"
            if counts is not None:
                so = f"the result has {'some' if have & {*names} else 'none'} of them"
            else:
                combinations = [one.method.combine for one in Operations(plan).used(plan)]
                so = next((one.of_nan for one in combinations if one.of_nan is not None), so)
            text = f"{what} {few(names, _MANY)}; {so}"
            found.append(MergeWarning(NOT_FINITE, expert.name, text))
    wide = [risk.tensor for risk in sources.risks if not risk.experts]
    if wide and counts is None:
        what = "the output's type" if plan.dtype is None else plan.dtype
        holds = "" if plan.dtype is None else f", which holds {LARGEST[plan.dtype]:g} at most"
        so = "merge refuses a result that has them"
        text = f"elements may become infinite in {what}{holds}: {few(wide, _NAMED)}; {so}"
        found.append(MergeWarning(OVERFLOW, None, text))
    return tuple(found)


def not_finite_text(counts: Sequence[NotFiniteTensor], finite: str = "the base") -> str:
    """Return how many elements are infinite or NaN, and of which tensors, as text.

    finite: which of the inputs have finite elements there.
    """
    total, of = sum(one.elements or 0 for one in counts), sum(one.elements_total for one in counts)
    names = few([f"{one.tensor} {one.elements} of {one.elements_total}" for one in counts], _NAMED)
    are = "is" if total == 1 else "are"
    return f"{total} of {of} elements {are} infinite or NaN, and finite in {finite}: {names}"


# -- how far experts moved -------------------------------------------------------------------------
# A full fine-tune moves by some 0.1 % to 10 % of the base's norm, an adapter by less, long
# continued pretraining by some 30 %.  Noise of the base's size has moved by 100 %, an unrelated
# model of the same norm by 141 %.  Single layers move further than the whole: heads and
# projections may be new.


def far_experts(
    sums: Mapping[str, ComparedSums], experts: Sequence[str], counted: Sequence[bool] = ()
) -> dict[str, str]:
    """Return the experts that moved further than fine-tunes do, and what to say of each.

    counted: whether an expert has a part in the merge; without them, all have.
    """
    if not sums:
        return {}
    whole = ComparedSums.total(list(sums.values()))
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
    catalog: Catalog, statistics: StatsStore, plan: Plan, sources: PlanInputs
) -> tuple[MergeWarning, ...]:
    """Return warnings about experts that are no fine-tunes of the base, and odd weights."""
    models = len(plan.experts)
    names = [source.name for source in sources.experts[:models]]
    used = Operations(plan)
    operations = used.used(plan)
    if plan.is_assembly or is_adapter(tensors_of(catalog, catalog.manifest(plan.base_id()))):
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
            # What is subtracted may well be the origin: that is adding a difference.
            if any(one.given[k] > 0 for one in operations)
        ]
    try:
        inputs = Inputs.of(catalog, plan)
        can, _ = comparable(inputs, plan.criteria.only, plan.criteria.skip)
        sums = known_norms(statistics, inputs, can)
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
    sums: Mapping[str, ComparedSums],
    factors: Mapping[str, Sequence[float]],
    names: Sequence[str],
) -> list[MergeWarning]:
    """Return warnings about experts whose weighted change is larger than the base."""
    base = ComparedSums.total(list(sums.values())).base if sums else None
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
