"""The DARE draws: the published generator, keyed and counted as the format says."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from mstore.merge.arithmetic.masks import mask_key, mask_keys
from mstore.merge.arithmetic.philox import fill_draws, philox

# Counter, key and output words of philox 4x32 10 in Random123's file of known answers.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Philox4x32-10 gives the words published with Random123, here and in the reference."""
    c0, c1, c2, c3 = counter
    low, high = np.uint64(c0 + (c1 << 32)), np.uint64(c2 + (c3 << 32))
    assert philox(low, high, np.uint64(key[0]), np.uint64(key[1])) == words
    arrays = [np.array([word], dtype=np.uint64) for word in counter]
    assert tuple(int(word[0]) for word in reference.philox(arrays, key)) == words


@pytest.mark.parametrize("first", [0, 1, 255, 2**32 - 1, 2**40 + 3])
def test_draws_depend_on_the_counter_alone(first: int) -> None:
    """Draws of a stretch of counters are those of each counter, wherever the stretch begins."""
    key = mask_key(3, 1, "t")
    draws = np.zeros(4 * 300 + 1, dtype=np.uint32)
    fill_draws(key[0], key[1], first, 300, draws)
    counters = np.arange(first, first + 300, dtype=np.uint64)
    zero = np.zeros_like(counters)
    words = reference.philox(
        (counters % 2**32, counters // 2**32, zero, zero), (int(key[0]), int(key[1]))
    )
    np.testing.assert_array_equal(draws[:-1].reshape(300, 4), np.stack(words, axis=1))
    assert draws[-1] == 0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("tensor", ["model.norm.weight", "", "é\N{SNOWMAN}"])
def test_keys_are_the_stated_hash(seed: int, tensor: str) -> None:
    """A key is eight bytes of BLAKE3 over seed, position and name, in a domain of its own."""
    keys = mask_keys(seed, 3, tensor)
    assert keys.dtype == np.uint32
    assert keys.tolist() == [list(reference.mask_key(seed, k, tensor)) for k in range(3)]
    assert len({tuple(key) for key in keys.tolist()}) == 3


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_keys_of_numbers_out_of_range(seed: int, position: int) -> None:
    """A seed over 64 bits or a position over 32 is refused, not cut off."""
    with pytest.raises(OverflowError):
        mask_key(seed, position, "t")
