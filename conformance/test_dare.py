"""dare_linear and dare_ties, with mergekit's own masks and factors, equal mergekit's."""

from __future__ import annotations

import pytest
import torch
from case import Case
from compare import assert_same
from conftest import Workplace
from generated import DTYPES
from oracle import recorded
from subject import replay
from test_elementwise import minus_zeros, outputs

CASES = [
    Case(method, *others)
    for method in ("dare_linear", "dare_ties")
    for others in [
        # weights, density, lambda, normalize, rescale, seed
        ((1.0, 0.5, 0.7, 0.3), 0.3, 1.0, False, True, 7),
        ((1.0, -0.5, 0.7), 0.5, 1.3, True, True, 8),
        ((1.0, -1.0, 0.5, -0.5), 0.8, 0.5, True, True, 9),
        ((0.4, 0.6), 0.05, 1.0, False, False, 10),
        ((0.4, 0.0, 0.6), 0.9, -0.7, True, True, 2**32 - 1),
        ((0.3, 0.3, 0.3), 1.0, 1.0, False, True, 1),
        ((0.4, 0.3, 0.6), (0.3, 0.9, 0.5), 0.7, False, True, 11),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dare(workplace: Workplace, case: Case) -> None:
    """The kernel, fed with the masks and factors that mergekit drew, gives mergekit's bits (but
    for the sign of a -0 that nothing moves)."""
    family = workplace.family
    for out_dtype in outputs(family):
        with recorded() as draws:
            theirs = workplace.theirs(case, out_dtype)
        wanted = [case.of("density", k) for k in range(len(case.weights))]
        if min(wanted) < 1:
            counts = {len(drawn) for drawn in draws.values()}
            assert counts == {len(case.weights)}
            for k, density in enumerate(wanted):
                kept = torch.cat([drawn[k].mask.reshape(-1) for drawn in draws.values()])
                assert abs(float(kept.mean()) - density) < 0.01
        ours = replay(family, case, draws, out_dtype=DTYPES[out_dtype])
        assert_same(ours, theirs, minus_zeros(family, ours, theirs))
