"""Tied tensors: names that stand for one tensor in the base and in every expert alike.

A model whose output layer is its embedding may store both.  They are surveyed, planned and merged
once, under the first of their names, so that they stay one tensor whatever a method draws by name
and whatever a budget leaves out.

The base's config says what is tied (`tie_word_embeddings`): names of input and output embeddings
that have equal contents in all members.  Equal values alone do not tie (the norms of a young model
are all ones), and in safetensors no two names share storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstore.errors import Corrupt
from mstore.ids import TensorId
from mstore.merge.methods import registry
from mstore.objects.manifest import Manifest
from mstore.objects.plan import Criteria, Plan
from mstore.objects.shapes import EMBEDDINGS, matching
from mstore.store.catalog import Catalog
from mstore.store.configs import config_of

_KEY = "tie_word_embeddings"
Names = Mapping[str, TensorId]


def ties_embeddings(catalog: Catalog, base: Manifest) -> bool:
    """Return whether the base's config says that input and output embeddings are one.

    Looks in the config itself and in that of a part of the model (`text_config`).  Raises Corrupt,
    StorageFailed.
    """
    config = config_of(catalog, base)
    parts = (value for value in config.values() if isinstance(value, dict))
    return any(one.get(_KEY) is True for one in (config, *parts))


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
