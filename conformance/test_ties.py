"""ties keeps exactly as many elements as mergekit, and differs only in which of equal ones."""

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

CASES = [
    Case("ties", (1.0, 0.5, 0.7, 0.3), density=0.2, normalize=True),
    Case("ties", (1.0, 0.5, 0.7), density=0.55, scale=1.3),
    Case("ties", (1.0, -0.5, 0.7, -0.2), density=0.37, normalize=True, scale=0.5),
    Case("ties", (1.0, -1.0), density=0.5, normalize=True),
    Case("ties", (0.3, 0.3, 0.3, 0.3), density=1.0, normalize=True),
    Case("ties", (0.6, 0.0, 0.4), density=0.9, normalize=True),
    Case("ties", (0.8, 0.1), density=0.001),
    # A density for each model; one is kept whole.
    Case("ties", (1.0, 0.5, 0.7), density=(0.2, 1.0, 0.5), normalize=True),
    Case("ties", (1.0, -0.5, 0.7, 0.3), density=(0.9, 0.05, 0.3, 0.6)),
]


def at_thresholds(family: Family, case: Case) -> dict[str, Tensor]:
    """By tensor, flat: where some expert's |delta| is the least that is kept, and not all that
    equal it are."""
    found = {}
    for name, base in family.base.items():
        tied = torch.zeros(base.numel(), dtype=torch.bool)
        for k, member in enumerate(case.experts):
            density = case.of("density", k)
            if density == 1:
                continue
            delta = (family.members[member][name].float() - base.float()).abs().reshape(-1)
            keep = max(1, int(density * delta.numel()))
            least = delta.sort(descending=True).values[keep - 1]
            if int((delta >= least).sum()) > keep:
                tied |= delta == least
        found[name] = tied
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ties(workplace: Workplace, case: Case) -> None:
    """ties is mergekit's, bit for bit, but where a delta ties at the threshold (and for -0)."""
    family = workplace.family
    tied = at_thresholds(family, case)
    for out_dtype in outputs(family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        zeros = minus_zeros(family, ours, theirs)
        assert_same(ours, theirs, {name: tied[name] | zeros[name] for name in ours})


@pytest.mark.parametrize("density", [0.0001, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_k(workplaces: Callable[[str], Workplace], name: str, density: float) -> None:
    """Both keep max(1, int(density * n)) elements of each tensor, of the same magnitudes."""
    workplace = workplaces(name)
    case = Case("ties", (1.0,), density=density)
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    for tensor in ZERO_BASED:
        delta = workplace.family.expert(0)[tensor].float().abs().reshape(-1)
        keep = max(1, int(density * delta.numel()))
        largest = delta.sort(descending=True).values[:keep]
        assert largest[-1] > 0
        for merged in (ours, theirs):
            kept = merged[tensor].abs().reshape(-1).sort(descending=True).values
            assert int((kept > 0).sum()) == keep
            assert torch.equal(bits(kept[:keep]), bits(largest))
