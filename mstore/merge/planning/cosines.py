"""The cosines by which tensors of a plan were mixed, for reports: a plan keeps only the mixtures.

Reads no block: statistics keep what planning measured, and what they do not know is not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from mstore.blocks.reader import Meter
from mstore.merge.measures.grid import split
from mstore.merge.methods.registry import Operations
from mstore.models.adapters.inputs import Inputs
from mstore.models.stats.store import StatsStore
from mstore.store.catalog import Catalog
from mstore.store.objects.plan import Plan
from mstore.terms.errors import BadRequest, Corrupt, NotFound


def known_cosines(catalog: Catalog, statistics: StatsStore, plan: Plan) -> dict[str, float]:
    """Return the cosine of each tensor of a plan that has one which is known.

    Raises as `Operations`.
    """
    try:
        return dict(_known(catalog, statistics, plan))
    except (NotFound, Corrupt):
        # An input is not here any more.
        return {}


def _known(catalog: Catalog, statistics: StatsStore, plan: Plan) -> Iterator[tuple[str, float]]:
    operations = Operations(plan)
    if not any(one.method.combine.by_cosine for one in operations.used(plan)):
        return
    # Late: most methods need no facts.
    from mstore.merge.measures.facts import Facts

    inputs = Inputs.of(catalog, plan)
    asked = operations.main.method.companions
    places = split(asked, len(plan.experts), range(len(inputs.experts)))
    facts = Facts(
        *(catalog, statistics),
        analyze=False,
        meter=Meter("reported"),
        models=lambda _: {},
        layer=lambda _: None,
    )
    # Nothing is measured, so no thread starts.
    with ThreadPoolExecutor(1) as pool:
        for tensor in plan.tensors:
            names = [tensor.source(member) for member in range(len(inputs.members))]
            ids = [own[name] for own, name in zip(inputs.members, names, strict=True)]
            base, *others = zip(ids, inputs.records(ids), strict=True)
            companions = {
                one.role: [others[n] if inputs.has(n, names[1 + n]) else None for n in numbers]
                for one, numbers in places
            }
            experts = others[: len(inputs.models)]
            known = facts.of(tensor.name, base, experts, pool, companions=companions)
            operation = operations.unsettled(tensor)
            try:
                found = operation.method.combine.cosine(operation, known)
            except BadRequest:
                continue
            if found is not None:
                yield tensor.name, found
