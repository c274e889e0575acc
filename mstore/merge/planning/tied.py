"""Tied tensors: names that stand for one tensor in the base and in every expert alike.

A model whose output layer is its embedding may store both.  They are surveyed, planned and merged
once, under the first of their names, so that they stay one tensor whatever a method draws by name
and whatever a budget leaves out.

Tied are input and output embeddings that the base's config ties (`store.tied`) and that have equal
contents in all members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstore.adapters.inputs import Inputs
from mstore.checkpoint.declared import CONFIG
from mstore.errors import Corrupt
from mstore.ids import TensorId
from mstore.merge.methods import registry
from mstore.objects.plan import Criteria, Plan
from mstore.objects.shapes import EMBEDDINGS, matching
from mstore.store.catalog import Catalog
from mstore.store.tied import KEY, own_head, ties_embeddings

Names = Mapping[str, TensorId]


def first_names(base: Names, experts: Sequence[Names], *, tied: bool) -> dict[str, str]:
    """Map each tensor of the base to the first one that it is tied to in all members.

    tied: the result of `ties_embeddings`.  A tensor that an expert lacks is tied to nothing.
    """
    embeddings = {name for name in base if tied and EMBEDDINGS.search(name)}
    return _firsts(base, experts, embeddings)


def names_of_plan(
    catalog: Catalog, plan: Plan, base: Names, experts: Sequence[Names], *, lenient: bool = False
) -> dict[str, str]:
    """Map each tensor of the base, and each new one of the plan, to its name in a stored plan.

    Earlier versions took names of equal contents as tied.  Of such names, their plans contain only
    the first, although nothing says that the others stay as they are. lenient: continue without a
    config that is pruned or damaged; the plan's tensors then show what was tied.
    """
    try:
        tied = ties_embeddings(catalog, catalog.manifest(plan.base_id()))
    except Corrupt:
        if not lenient:
            raise
        tied = False
    # What Fishers say of two names does not make them two tensors.
    experts = experts[: len(experts) - registry.fishers_of(plan)]
    first = first_names(base, experts, tied=tied)
    planned = {tensor.name for tensor in plan.tensors}
    new = {tensor.name: tensor.name for tensor in plan.tensors if tensor.sources}
    left_out = left_to_base(base, plan.criteria)
    equal = _firsts(base, experts, set(base))
    missing = {
        name: other
        for name, other in equal.items()
        if other in planned and name not in planned and name not in left_out
    }
    return first | missing | new


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
    found = own_head(base, contents)
    return found if found and ties_embeddings(catalog, base) else None


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


def _firsts(base: Names, experts: Sequence[Names], among: set[str]) -> dict[str, str]:
    found: dict[tuple[TensorId | None, ...], str] = {}
    first = {}
    for name, id in base.items():
        members = (id, *(expert.get(name) for expert in experts))
        alone = None in members or name not in among
        first[name] = name if alone else found.setdefault(members, name)
    return first
