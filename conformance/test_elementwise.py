"""linear, task_arithmetic, nearswap, ram and ramplus_tl equal mergekit's bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case import Case
from compare import assert_same, bits
from conftest import Workplace
from generated import Family, Tensors
from torch import Tensor

LINEAR = [
    Case("linear", (0.25, 0.25, 0.25, 0.25), normalize=True),
    Case("linear", (0.5, 0.3, 0.2), normalize=True),
    Case("linear", (1.0, 0.7, -0.4, 0.1), normalize=True),
    Case("linear", (0.5, 0.7, -0.4, 0.0)),
    Case("linear", (1.0, -1.0, 0.5, -0.5)),
    Case("linear", (1.3,)),
    Case("linear", (0.4, 0.3, 0.6), normalize=True, members=("base", "e1", "e0")),
    # Six experts: weights whose sum is exact, for torch adds more than four in an order of its own.
    Case("linear", (0.5, 0.25, -0.125, 0.75, 1.5, 0.0625), normalize=True),
]
TASK = [
    Case("task_arithmetic", (1.0, 0.4, -0.25, 0.7)),
    Case("task_arithmetic", (0.3, 0.3), scale=0.6),
    Case("task_arithmetic", (0.5, 0.3, 0.2, 0.9), scale=-1.7, normalize=True),
    Case("task_arithmetic", (1.0, -1.0, 0.5, -0.5), normalize=True),
    Case("task_arithmetic", (0.9, 0.0, 0.33), normalize=True),
]
NEAR = [Case("nearswap", (1.0,), t=t, members=("e1",)) for t in (1e-4, 0.003, 0.1, 1e3)]
FOUR = (1.0, 1.0, 1.0, 1.0)
RAM = [
    *(Case("ram", FOUR[:count], least=least) for count, least in ((4, 1e-5), (3, 0.01), (1, 1e-3))),
    Case("ramplus_tl", FOUR),
    Case("ramplus_tl", FOUR[:2], least=0.003, r=0.5, alpha=3.0),
    Case("ramplus_tl", FOUR[:3], least=0.05, r=2.0, alpha=50.0),
]


def untouched(family: Family, case: Case) -> dict[str, Tensor]:
    """By tensor, flat: where every expert has the base's bits."""
    found = {}
    for name, base in family.base.items():
        same = torch.ones(base.numel(), dtype=torch.bool)
        for member in case.experts:
            same &= bits(family.members[member][name]) == bits(base)
        found[name] = same
    return found


def minus_zeros(family: Family, ours: Tensors, theirs: Tensors) -> dict[str, Tensor]:
    """By tensor, flat: where the base is -0 and both results are zeros, of whatever sign."""
    return {
        name: (base.reshape(-1) == 0)
        & base.reshape(-1).signbit()
        & (ours[name].reshape(-1) == 0)
        & (theirs[name].reshape(-1) == 0)
        for name, base in family.base.items()
    }


def outputs(family: Family) -> list[str]:
    """The models' own type, and float32, in which no rounding hides a difference."""
    return list(dict.fromkeys([family.dtype, "float32"]))


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear(workplace: Workplace, case: Case) -> None:
    """linear is mergekit's, bit for bit; where all experts are the base and the weights add up to
    a mean, it is the base's own bits, and mergekit's is that but for the rounding of its sum."""
    family = workplace.family
    for out_dtype in outputs(family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        allowed = untouched(family, case) if case.normalize else {}
        assert_same(ours, theirs, allowed)
        for name, same in allowed.items():
            own = family.base[name].to(ours[name].dtype)
            assert torch.equal(bits(ours[name])[same], bits(own)[same])


@pytest.mark.parametrize("case", LINEAR[:3], ids=str)
def test_linear_without_a_dtype(workplace: Workplace, case: Case) -> None:
    """mergekit's linear computes in float32 also where the recipe names no dtype: the same bits."""
    out_dtype = workplace.family.dtype
    ours = workplace.ours(case, out_dtype)
    theirs = workplace.theirs(case, out_dtype, dtype=None)
    assert_same(ours, theirs, untouched(workplace.family, case))


@pytest.mark.parametrize("case", TASK, ids=str)
def test_task_arithmetic(workplace: Workplace, case: Case) -> None:
    """task_arithmetic is mergekit's, bit for bit; only a -0 that nothing moves stays -0 here and
    becomes +0 there."""
    for out_dtype in outputs(workplace.family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        assert_same(ours, theirs, minus_zeros(workplace.family, ours, theirs))


@pytest.mark.parametrize("case", NEAR, ids=str)
def test_nearswap(workplace: Workplace, case: Case) -> None:
    """nearswap is mergekit's, bit for bit, where the expert moves anything."""
    family = workplace.family
    for out_dtype in outputs(family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        assert_same(ours, theirs, untouched(family, case))


@pytest.mark.parametrize("case", RAM, ids=str)
def test_ram(workplace: Workplace, case: Case) -> None:
    """ram and ramplus_tl are mergekit's, bit for bit, but for -0 as for task_arithmetic."""
    for out_dtype in outputs(workplace.family):
        ours, theirs = workplace.ours(case, out_dtype), workplace.theirs(case, out_dtype)
        assert_same(ours, theirs, minus_zeros(workplace.family, ours, theirs))


def test_more_than_four_experts(workplaces: Callable[[str], Workplace]) -> None:
    """With six experts only a tensor's last elements differ: there torch adds in another order."""
    workplace = workplaces("fp32 untied")
    case = Case("task_arithmetic", (0.5, 0.3, -0.25, 0.7, 1.5, 0.1))
    ours, theirs = workplace.ours(case, "float32"), workplace.theirs(case, "float32")
    allowed = minus_zeros(workplace.family, ours, theirs)
    for name, base in workplace.family.base.items():
        # torch sums columns in groups of four vectors, of 16 elements at most; the rest apart.
        allowed[name][base.numel() - base.numel() % 64 :] = True
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert_same(ours, theirs, allowed)
