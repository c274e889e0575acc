"""The reference of merges: what it selects is what sorting would."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import reference

RNG = np.random.default_rng(5)
NORMAL = RNG.standard_normal(999).astype(np.float32)
STEPS = np.round(NORMAL * 2)
NO_NUMBERS = np.where(RNG.random(999) < 0.3, np.float32(np.nan), STEPS)
INFINITE = np.where(RNG.random(999) < 0.2, np.float32(-np.inf), NO_NUMBERS)


@pytest.mark.parametrize("values", [NORMAL, STEPS, NO_NUMBERS, INFINITE, np.zeros_like(NORMAL)])
def test_the_first_are_those_of_a_stable_sort(values: npt.NDArray[np.float32]) -> None:
    """The first by (-|d|, index) are the first of a stable sort, for every number of them."""
    order = np.argsort(-np.abs(values), kind="stable")
    for count in range(values.size + 1):
        expected = np.zeros(values.size, dtype=bool)
        expected[order[:count]] = True
        assert np.array_equal(reference.first(values, count), expected), count
