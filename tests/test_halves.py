"""The n-th largest number, found by counting the halves of bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstore.numeric import halves


@given(st.integers(1, 4000), st.floats(0, 1), st.integers(1, 5), st.integers(0, 1000))
def test_the_nth_largest(n: int, share: float, parts: int, seed: int) -> None:
    """Of numbers that come in parts, with many equal ones: the one that sorting gives, and how many
    of those that equal it are among the n largest."""
    rng = np.random.default_rng(seed)
    values = np.abs(rng.normal(0, 1, n)).astype(np.float32)
    values[rng.random(n) < 0.3] = values[0]
    values[rng.random(n) < 0.1] = 0.0
    rank = 1 + int(share * (n - 1))
    pieces = [piece.view(np.uint32) for piece in np.array_split(values, parts)]
    counts = halves.no_counts()
    for piece in pieces:
        halves.count_upper(piece, counts)
    high, left = halves.place(counts, rank)
    counts = halves.no_counts()
    for piece in pieces:
        halves.count_lower(piece, high, counts)
    low, left = halves.place(counts, left)
    found = np.uint32(halves.joined(high, low)).view(np.float32)
    wanted = np.sort(values)[::-1][rank - 1]
    assert found == wanted
    assert left == rank - np.count_nonzero(values > wanted)
    assert halves.half_of(wanted) == high
