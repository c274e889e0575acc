"""breadcrumbs and breadcrumbs_ties keep mergekit's band of elements, and differ only in which of
equal ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case import Case
from compare import assert_same, bits
from conftest import FAMILIES, Workplace
from generated import ZERO_BASED, Family
from test_elementwise import minus_zeros, outputs
from torch import Tensor

FOUR = (1.0, 0.5, 0.7, 0.3)
CASES = [
    Case("breadcrumbs", FOUR, density=0.2),
    Case("breadcrumbs", FOUR, density=0.5, gamma=0.1, normalize=True, scale=0.6),
    Case("breadcrumbs", (1.0, -0.5, 0.7), density=0.85, gamma=0.05, scale=1.3),
    Case("breadcrumbs", (1.0, -1.0), density=0.37, gamma=0.37, normalize=True),
    # No outliers, outliers beyond what density leaves, nothing but outliers, nothing at all.
    Case("breadcrumbs", (0.6, 0.0, 0.4), density=0.9, gamma=0.0),
    Case("breadcrumbs", (0.8, 0.1), density=0.999, gamma=0.01),
    Case("breadcrumbs", (0.8, 0.1), density=0.3, gamma=1.0),
    Case("breadcrumbs", (0.8, 0.1), density=0.001, gamma=0.0001),
    Case("breadcrumbs", (0.8, 0.1), density=1e-9, gamma=0.5),
    # With density 1 there are no outliers, whatever gamma says.
    Case("breadcrumbs", FOUR, density=1.0, gamma=0.5, normalize=True),
    # Of each model its own.
    Case("breadcrumbs", (1.0, 0.5, 0.7), density=(0.5, 1.0, 0.2), gamma=(0.1, 0.3, 0.0)),
    Case("breadcrumbs_ties", FOUR, density=0.2),
    Case("breadcrumbs_ties", FOUR, density=0.5, gamma=0.1, normalize=True, scale=0.6),
    Case("breadcrumbs_ties", (1.0, -0.5, 0.7), density=0.85, gamma=0.05, scale=1.3),
    Case("breadcrumbs_ties", (1.0, -1.0), density=0.37, gamma=0.37, normalize=True),
    Case("breadcrumbs_ties", FOUR, density=1.0, gamma=0.5, normalize=True),
]


def band(case: Case, expert: int, elements: int) -> tuple[int, int]:
    """How many of the largest elements are dropped, and how many are kept or dropped."""
    kept = int(case.of("density", expert) * elements)
    last = min(elements, kept + int(case.of("gamma", expert) * elements))
    return last - kept, last


def at_cuts(family: Family, case: Case) -> dict[str, Tensor]:
    """By tensor, flat: where some expert's |delta| is that at one of the two cuts, and the cut is
    within elements that equal it."""
    found = {}
    for name, base in family.base.items():
        tied = torch.zeros(base.numel(), dtype=torch.bool)
        for k, member in enumerate(case.experts):
            if case.of("density", k) == 1:
                continue
            delta = (family.members[member][name].float() - base.float()).abs().reshape(-1)
            order = delta.sort(descending=True).values
            for rank in band(case, k, delta.numel()):
                if rank and int((delta >= order[rank - 1]).sum()) > rank:
                    tied |= delta == order[rank - 1]
        found[name] = tied
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_breadcrumbs(workplace: Workplace, case: Case) -> None:
    """Both methods are mergekit's, bit for bit, but where a delta ties at a cut (and for -0)."""
    family = workplace.family
    tied = at_cuts(family, case)
    for out_dtype in outputs(family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        zeros = minus_zeros(family, ours, theirs)
        assert_same(ours, theirs, {name: tied[name] | zeros[name] for name in ours})


def test_most_elements_are_compared(workplaces: Callable[[str], Workplace]) -> None:
    """Ties excuse little: of float32 noise at most one element an expert and cut, of others less
    than an eighth."""
    for name in ("fp32 untied", "bf16 untied"):
        family = workplaces(name).family
        tied = at_cuts(family, CASES[1])
        noise = "model.layers.0.self_attn.q_proj.weight"
        assert int(tied[noise].sum()) <= (8 if name.startswith("fp32") else tied[noise].numel() / 8)


@pytest.mark.parametrize(
    ("density", "gamma"), [(0.0001, 0.3), (0.2, 0.01), (0.5, 0.5), (0.7, 0.9), (0.999, 0.02)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_band(
    workplaces: Callable[[str], Workplace], name: str, density: float, gamma: float
) -> None:
    """Both keep the same number of elements of each tensor, of the same magnitudes: those after
    the largest."""
    workplace = workplaces(name)
    case = Case("breadcrumbs", (1.0,), density=density, gamma=gamma)
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    for tensor in ZERO_BASED:
        delta = workplace.family.expert(0)[tensor].float().abs().reshape(-1)
        first, last = band(case, 0, delta.numel())
        wanted = delta.sort(descending=True).values[first:last]
        wanted = wanted[wanted > 0]
        for merged in (ours, theirs):
            kept = merged[tensor].abs().reshape(-1).sort(descending=True).values
            assert torch.equal(bits(kept[kept > 0]), bits(wanted))
