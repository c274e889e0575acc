"""arcee_fusion is mergekit's, but for elements whose importance rounding puts on the other side.

mergekit computes importance in float32 (here), and sums of logarithms lose much of that; mstore
computes it in float64.
"""

from __future__ import annotations

import pytest
import torch
from case import Case
from compare import assert_same
from conftest import Workplace
from generated import Family
from test_elementwise import minus_zeros, outputs
from torch import Tensor

CASES = [Case("arcee_fusion", (1.0,), members=(one,)) for one in ("e0", "e1", "e3", "e5")]
ROUNDING = 2.0**-20
"""Of a sum of shares times logarithms in float32: the shares add up to one."""


def shares(side: Tensor) -> Tensor:
    return torch.softmax(side.double(), dim=-1) + 1e-8


def undecided(family: Family, case: Case) -> dict[str, Tensor]:
    """By tensor, flat: where the rounding of sums may move an importance across the threshold."""
    found = {}
    for name, base in family.base.items():
        expert = family.members[case.experts[0]][name]
        sizes = (expert.double() - base.double()).abs()
        p, q = shares(expert), shares(base)
        divergence = (p * torch.log(p / q)).sum(dim=-1, keepdim=True)
        lows = (sizes * (divergence - ROUNDING)).reshape(-1)
        highs = (sizes * (divergence + ROUNDING)).reshape(-1)
        ends = []
        # The quartiles of what is rounded lie between those of both ends.
        for side, other in ((lows, highs), (highs, lows)):
            one, two = side.sort().values, other.sort().values
            first, median, third = ((one.numel() - 1) * k // 4 for k in (1, 2, 3))
            ends.append(one[median] + 1.5 * (one[third] - two[first]))
        margin = 2.0**-20 * max(map(abs, ends))
        found[name] = (highs >= ends[0] - margin) & (lows <= ends[1] + margin)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arcee_fusion(workplace: Workplace, case: Case) -> None:
    """Each element is the base's or the expert's, as in mergekit; of those that rounding leaves
    undecided there are few."""
    family = workplace.family
    open_ones = undecided(family, case)
    for out_dtype in outputs(family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        zeros = minus_zeros(family, ours, theirs)
        assert_same(ours, theirs, {n: zeros[n] | open_ones[n] for n in ours})
        for name, one in ours.items():
            other = theirs[name]
            assert int((one != other).sum()) <= 0.005 * one.numel(), name
