"""Tied tensors: names that stand for one tensor in the base and in every expert alike.

A model whose output layer is its embedding may store both.  They are surveyed, planned and merged
once, under the first of their names, so that they stay one tensor whatever a method draws by name
and whatever a budget leaves out.

Tied are input and output embeddings that the base's config ties (`store.tied`) and that have equal
contents in all members.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mstore.checkpoint.declared import CONFIG
from mstore.checkpoint.models import split_name
from mstore.merge.planning.stored_texts import NOT_AMONG_ONLY, skipped
from mstore.models.adapters.inputs import Inputs
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Criteria, Plan
from mstore.store.objects.shapes import EMBEDDINGS, Globs, matching, require_matches
from mstore.store.tied import KEY, own_head, sizes_of, ties_embeddings
from mstore.terms.errors import Corrupt
from mstore.terms.ids import TensorId

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


def told_of_head(head: str, embedding: str) -> str:
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
    others: Collection[str] = (),
) -> dict[str, str]:
    """Return the tensors that patterns leave to the base, and why; by the first of their names.

    A tensor of several names is skipped if one of them is to be skipped, and merged if at least one
    is to be merged.  Raises BadRequest for a pattern that matches neither a tensor nor one of
    `others`, which experts have.
    """
    require_matches({*first, *others}, only, skip)
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
