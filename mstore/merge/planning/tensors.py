"""The tensors of a merge: under which name each is merged, which stay the base's own and why, and
whether those of experts can be merged with the base's.

A model whose output layer is its embedding may store both.  They are surveyed, planned and merged
once, under the first of their names, so that they stay one tensor whatever a method draws by name
and whatever a budget leaves out.  Tied are input and output embeddings that the base's config ties
(`store.tied`) and that have equal contents in all members.

`store.objects.shapes` compares names and shapes, `models.casting` owns what a cast does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.models import split_name
from mstore.models.adapters.inputs import Inputs
from mstore.numeric.codes import CASTS, CODES, ITEMSIZES, cast_hint
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Criteria, Plan
from mstore.store.objects.shapes import (
    EMBEDDINGS,
    Globs,
    differ_in_channels,
    differ_in_vocabulary,
    difference_hint,
    matching,
    require_matches,
)
from mstore.store.objects.tensor import Tensor
from mstore.store.tied import KEY, own_head, sizes_of, ties_embeddings
from mstore.terms.errors import Corrupt, Incompatible
from mstore.terms.ids import TensorId
from mstore.terms.phrases import Option, Phrase, Text, call, few, joined, phrase

Names = Mapping[str, TensorId]


def first_names(base: Names, experts: Sequence[Names], *, tied: Collection[str]) -> dict[str, str]:
    """Map each tensor of the base to the first one that it is tied to in all members.

    tied: the result of `ties_embeddings`.  A tensor that an expert lacks is tied to nothing.
    """
    found: dict[tuple[str, tuple[TensorId | None, ...]], str] = {}
    first = {}
    for name, id in base.items():
        first[name] = name
        model = split_name(name)[0]
        if model in tied and EMBEDDINGS.search(name):
            members = (id, *(expert.get(name) for expert in experts))
            if None not in members:
                first[name] = found.setdefault((model, members), name)
    return first


def names_of_plan(
    catalog: Catalog, plan: Plan, base: Names, experts: Sequence[Names], *, lenient: bool = False
) -> dict[str, str]:
    """Map each tensor of the base, and each new one of the plan, to its name in a stored plan.

    lenient: continue without a config that is pruned or damaged.
    """
    try:
        tied = ties_embeddings(catalog, catalog.manifest(plan.base_id()))
    except Corrupt:
        if not lenient:
            raise
        tied = frozenset()
    # What companions say of two names does not make them two tensors.
    experts = experts[: len(plan.experts)]
    first = first_names(base, experts, tied=tied)
    return first | {tensor.name: tensor.name for tensor in plan.tensors if tensor.sources}


def own_head_of(
    catalog: Catalog, plan: Plan, inputs: Inputs, first: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the output's head and the embedding that it is not tied to, though the config ties it.

    first: the result of `names_of_plan`.  Raises Corrupt, StorageFailed.
    """
    base = catalog.manifest(plan.base_id())
    planned = {tensor.name for tensor in plan.tensors}
    contents: dict[str, object] = {
        name: first[name] if first[name] in planned else id for name, id in inputs.base.items()
    }
    contents |= {one.name: inputs.members[one.member][one.source] for one in plan.taken}
    found = own_head(sizes_of(catalog, base), contents)
    return found if found and split_name(found[0])[0] in ties_embeddings(catalog, base) else None


def own_head_text(head: str, embedding: str) -> str:
    """Return that a model has a head of its own, and what becomes of it, as text."""
    return (
        f"has a head of its own: {head} differs from {embedding}, and the base's config ties them. "
        f"The result has both, and {KEY} is false in its {CONFIG}"
    )


def left_to_base(names: Mapping[str, object], criteria: Criteria) -> set[str]:
    """Return the names that the patterns leave to the base."""
    left_out = matching(names, criteria.skip)
    return left_out | names.keys() - matching(names, criteria.only or ("*",))


def left_out_names(
    first: Mapping[str, str],
    only: Sequence[str],
    skip: Sequence[str],
    *,
    base: str,
    others: Collection[str] = (),
) -> dict[str, str]:
    """Return the tensors that patterns leave to the base, and why; by the first of their names.

    A tensor of several names is skipped if one of them is to be skipped, and merged if at least one
    is to be merged.  Raises BadRequest for a pattern that matches neither a tensor nor one of
    `others`, which experts have.
    """
    require_matches({*first, *others}, only, skip, base)
    left_out = {}
    if only:
        wanted = {first[name] for name in matching(first, only)}
        left_out = dict.fromkeys(set(first.values()) - wanted, NOT_AMONG_ONLY)
    skipping = Globs(skip)
    for name, tensor in first.items():
        number = skipping.first(name)
        if number is not None:
            left_out[tensor] = skipped(skip[number])
    return left_out


# -- whether experts fit ---------------------------------------------------------------------------

RecordsByName = Mapping[str, tuple[TensorId, Tensor]]
"""Tensors of a model with their records, by name."""


def hint_for(
    base: str,
    expert: str,
    ours: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
    records: RecordsByName,
    found: RecordsByName,
) -> Text:
    """Return what to do about an expert whose tensors have not the names and shapes of the base's.

    base, expert: their names. ours, theirs: shapes of what is merged. records, found: all tensors.
    """
    hint = difference_hint(base, expert)
    if ours.keys() != theirs.keys():
        allowed = Option("allow_missing", True)
        hint = phrase("{told}, {allowed} merges the others", told=hint, allowed=allowed)
    if differ_in_vocabulary(ours, theirs):
        models = {"base": base, "experts": (expert,)}
        hint = phrase("{align} gives them one vocabulary", align=call("align", **models))
    pairs = [(ours[name], shape) for name, shape in theirs.items() if name in ours]
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if differing and all(differ_in_channels(*pair) for pair in differing):
        hint = hint_for_channels(base, expert)
    return hint_for_scales(base, _types(records), expert, _types(found)) or hint


def hint_for_channels(base: str, expert: str) -> Phrase:
    """Return what to do about an expert whose tensors differ in input channels alone."""
    cast = call("cast", expert, channels_of=base)
    return phrase("{cast} gives them the base's channels", cast=cast)


def odd_types(base: Tensor, other: Tensor) -> set[str]:
    """Return element types without arithmetic here of tensors that differ; none if they may."""
    types = {base.dtype, other.dtype} - ITEMSIZES.keys()
    return types if types and other != base and 0 not in base.shape else set()


def require_types(
    base_records: RecordsByName,
    records: RecordsByName,
    names: Sequence[str],
    *,
    base: str,
    where: str,
) -> None:
    """Raise Incompatible if elements differ from the base's that have no arithmetic here."""
    odd = {
        name: types
        for name in names
        if (types := odd_types(base_records[name][1], records[name][1]))
    }
    if odd:
        kinds = sorted(set().union(*odd.values()))
        pairs = [(base_records[name][1].dtype, records[name][1].dtype) for name in odd]
        skip = phrase(
            "{skip} leaves them as they are in the base",
            skip=Option("skip", next(iter(odd)) if len(odd) == 1 else ("PATTERN",)),
        )
        raise Incompatible(
            f"elements of {', '.join(kinds)} cannot be merged, and have other values than "
            f"in {base}: {few(list(odd))}",
            where=where,
            hint=joined(hint_for_types(base, where, pairs), skip, between="; "),
        )


def hint_for_types(base: str, other: str, pairs: Iterable[tuple[str, str]]) -> Phrase | None:
    """Return the hint for tensors whose types cannot be merged; None if casting does not help.

    base, other: names of the models. pairs: the types of both for each such tensor.
    """
    known = list(pairs)
    found: list[Phrase] = []
    for model, own in ((base, 0), (other, 1)):
        odd = {pair[own] for pair in known} - CODES.keys()
        to = sorted({pair[1 - own] for pair in known} & CODES.keys())
        hint = cast_hint(odd, model, *to[:1])
        if hint is None:
            return None
        if odd:
            found.append(hint)
    return joined(*found, between="; ")


def hint_for_scales(
    base: str, ours: Mapping[str, str], other: str, theirs: Mapping[str, str]
) -> Phrase | None:
    """Return the hint for models that differ in scales of weights in fp8; None if not so.

    base, other: names of the models. ours, theirs: types of their tensors, by name.
    """
    from mstore.models.scales import are_scales

    for model, one, two in ((other, theirs, ours), (base, ours, theirs)):
        if are_scales([name for name in one if name not in two], one):
            cast = call("cast", model, dtype=CASTS["BF16"])
            return phrase("{cast} multiplies its weights by their scales", cast=cast)
    return None


def _types(tensors: RecordsByName) -> dict[str, str]:
    return {name: record.dtype for name, (_, record) in tensors.items()}


# -- texts that plans keep -------------------------------------------------------------------------
# A plan's id covers these bytes.  They never change, so that a request keeps its plan: they name
# options as the command line does.  Reports say them with `phrased`, in the words of each face.

NOT_AMONG_ONLY: Final = "not among --only"
"""The cause for a tensor that none of the patterns of `only` names."""
AT_EDGES: Final = (
    "some trim thresholds are bin edges of the magnitude histograms, which keep more than k "
    "elements (--no-analyze); the estimate counts them"
)
"""The remark of a plan that was made without reading what exact thresholds need."""
_SKIP: Final = "--skip "
_TOLD: Final = {
    NOT_AMONG_ONLY: phrase("not among {only}", only=Option("only")),
    AT_EDGES: phrase(
        "some trim thresholds are bin edges of the magnitude histograms, which keep more than k "
        "elements ({off}); the estimate counts them",
        off=Option("analyze", False),
    ),
}


def skipped(pattern: str) -> str:
    """Return the cause for a tensor that a pattern of `skip` names."""
    return f"{_SKIP}{pattern}"


def phrased(stored: str) -> str:
    """Return a remark or cause for a report: a phrase where it names an option."""
    if stored.startswith(_SKIP):
        return phrase("{skip}", skip=Option("skip", (stored.removeprefix(_SKIP),)))
    return _TOLD.get(stored, stored)
