"""sce selects as many elements as mergekit, elects the same signs, and differs by the rounding of
weights, and in which elements of equal variance are selected."""

from __future__ import annotations

import pytest
import torch
from case import Case
from compare import assert_same
from conftest import Workplace
from generated import Family
from oracle import ties_by_index
from test_elementwise import minus_zeros, outputs
from torch import Tensor

CASES = [
    *(Case("sce", (1.0,) * 4, select_topk=share) for share in (1.0, 0.5, 0.1)),
    Case("sce", (1.0,) * 2, select_topk=0.29),
    Case("sce", (1.0,) * 3, select_topk=0.001),
    Case("sce", (1.0,)),
]


def deltas(family: Family, case: Case, name: str) -> Tensor:
    """Of all experts, flat."""
    base = family.base[name].float()
    return torch.stack(
        [(family.members[one][name].float() - base).reshape(-1) for one in case.experts]
    )


def rounded_otherwise(
    family: Family, case: Case, ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """By tensor, flat: where results differ by no more than weights that are off by 2^-16, and the
    rounding of the output."""
    found = {}
    for name, own in ours.items():
        one, other = own.double().reshape(-1), theirs[name].double().reshape(-1)
        moved = deltas(family, case, name).abs().max(dim=0).values.double()
        place = torch.finfo(own.dtype).eps * torch.maximum(one.abs(), other.abs())
        found[name] = (one - other).abs() <= 2.0**-16 * moved + place
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sce(workplace: Workplace, case: Case) -> None:
    """sce is mergekit's but for the rounding of weights, and for ties at the end of the selection;
    where all experts weigh the same it is that bit for bit."""
    family = workplace.family
    for out_dtype in outputs(family):
        with ties_by_index():
            ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        zeros = minus_zeros(family, ours, theirs)
        near = rounded_otherwise(family, case, ours, theirs)
        for name in ours:
            spread = deltas(family, case, name)
            energy = float(spread.double().square().mean(dim=1).sum())
            if case.select_topk == 1 and energy < 0.9e-6:
                near[name][:] = False
        differ = assert_same(ours, theirs, {n: zeros[n] | near[n] for n in ours})
        assert differ < 0.3 * sum(one.numel() for one in ours.values())
