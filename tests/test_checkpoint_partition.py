"""Cutting bytes into blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstore.store.objects.tensor import block_count, partition


@given(st.integers(0, 5000), st.integers(1, 700))
def test_blocks_cover_the_bytes_once(nbytes: int, block_size: int) -> None:
    """Blocks follow each other from 0 to the end; all are full but the last, and none is empty."""
    blocks = partition(nbytes, block_size)
    reached = 0
    for offset, length in blocks:
        assert offset == reached
        assert 1 <= length <= block_size
        reached += length
    assert reached == nbytes
    assert all(length == block_size for _, length in blocks[:-1])
    assert len(blocks) == block_count(nbytes, block_size)


def test_sizes_beyond_a_float_are_exact() -> None:
    """Block counts of sizes that a double cannot hold are exact."""
    assert block_count(2**62 + 1, 2**20) == 2**42 + 1


@pytest.mark.parametrize(("nbytes", "block_size"), [(-1, 1), (1, 0), (1, -5)])
def test_senseless_numbers_are_refused(nbytes: int, block_size: int) -> None:
    """A negative length or an empty block is a mistake of the caller."""
    with pytest.raises(ValueError, match=r"negative|at least one"):
        partition(nbytes, block_size)
