"""della and della_linear: mergekit's probabilities, and with its masks and factors its bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from case import Case
from compare import assert_same
from conftest import Workplace
from generated import DTYPES
from mergekit import sparsify
from oracle import chances, recorded
from subject import replay
from test_elementwise import minus_zeros, outputs

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key

CASES = [
    Case(method, *others)
    for method in ("della", "della_linear")
    for others in [
        # weights, density, lambda, normalize, rescale, seed, gamma, epsilon
        ((1.0, 0.5, 0.7, 0.3), 0.3, 1.0, False, True, 7, 0.01, 0.1),
        ((1.0, -0.5, 0.7), 0.5, 1.3, True, True, 8, 0.01, 0.4),
        ((0.4, 0.6), 0.2, 1.0, False, False, 10),
        ((0.4, 0.3, 0.6), (0.3, 0.6, 0.5), 0.7, True, True, 11, 0.01, (0.05, 0.3, 0.2)),
    ]
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_della(workplace: Workplace, case: Case) -> None:
    """The kernel, fed with the masks and factors that mergekit drew, gives mergekit's bits (but
    for the sign of a -0 that nothing moves)."""
    family = workplace.family
    for out_dtype in outputs(family):
        with recorded() as draws, chances():
            theirs = workplace.theirs(case, out_dtype)
        ours = replay(family, case, draws, out_dtype=DTYPES[out_dtype])
        assert_same(ours, theirs, minus_zeros(family, ours, theirs))


@pytest.mark.parametrize("shape", [(300, 128), (40, 1000), (5000,), (64, 2), (3, 30000)])
@pytest.mark.parametrize(("density", "epsilon"), [(0.5, 0.15), (0.2, 0.199), (0.7, 0.01)])
def test_probabilities(shape: tuple[int, ...], density: float, epsilon: float) -> None:
    """Every rank has mergekit's probability, bit for bit, and every element the draw and the rank
    of theirs; of equal magnitudes in a row each has one of their ranks."""
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    with chances() as seen:
        sparsify.della_magprune(delta, density, epsilon)
    (theirs,) = seen
    rows = delta.abs().reshape(theirs.shape).numpy()
    length = rows.shape[1]
    ours = np.broadcast_to(masks.chances(length, density, epsilon), rows.shape)
    assert np.array_equal(np.sort(ours, axis=1), np.sort(theirs.numpy(), axis=1))
    key = mask_key(5, 0, "t")
    kept = masks.Ranks(length, density, epsilon).keep(rows.reshape(-1), key, 0).reshape(rows.shape)
    drawn = masks.draws(key, 0, rows.size).reshape(rows.shape)
    wanted = drawn < np.rint(theirs.numpy().astype(np.float64) * 2.0**32)
    for size, own, other in zip(rows, kept, wanted, strict=True):
        values, counts = np.unique(size, return_counts=True)
        single = np.isin(size, values[counts == 1])
        assert np.array_equal(own[single], other[single])
