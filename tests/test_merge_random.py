"""The draws of masks: a published hash, keyed as the format says."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from mstore.merge.arithmetic import masks
from mstore.merge.arithmetic.masks import mask_key, mask_keys

# What triple32 in C, as github.com/skeeto/hash-prospector publishes it, makes of numbers.
UNKEYED = {
    0: 0,
    1: 0x042741D6,
    2: 0xF1DFE8E9,
    123456789: 0x09A9E661,
    2**32 - 1: 0x127F588F,
}


def test_known_answers() -> None:
    """With a key of zeros a draw is the published hash of its place, here and in the reference."""
    for place, wanted in UNKEYED.items():
        assert masks.draws(np.zeros(2, dtype=np.uint32), place, 1).tolist() == [wanted]
        assert reference.draws_at(np.array([place], dtype=np.uint64), (0, 0)).tolist() == [wanted]


@pytest.mark.parametrize("first", [0, 1, 1023, 2**32 - 700, 2**33 + 5, 2**40 - 1])
def test_draws_depend_on_the_place_alone(first: int) -> None:
    """Draws of a run of elements are those of each, wherever the run begins, and beyond 2^32."""
    key = mask_key(3, 1, "t")
    places = np.arange(first, first + 1500, dtype=np.uint64)
    wanted = reference.draws_at(places, (int(key[0]), int(key[1])))
    np.testing.assert_array_equal(masks.draws(key, first, 1500), wanted)
    one = [int(masks.draws(key, place, 1)[0]) for place in places.tolist()[::97]]
    assert one == wanted[::97].tolist()


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 0.9])
def test_masks_are_as_random_as_they_say(density: float) -> None:
    """The share that is kept, of the whole, of neighbours at any distance and of two experts at
    once, is as far from what it should be as chance leaves it: by less than five deviations."""
    n = 1 << 20
    first, other = (masks.even(mask_key(0, k, "t"), 0, n, round(density * 2**32)) for k in (0, 1))
    distances = (1, 2, 3, 4, 7, 8, 16, 64, 128, 1000, 1024, 4096, 11008, 65536)
    pairs = [first[distance:] & first[:-distance] for distance in distances]
    both = [first & other, *(first[distance:] & other[:-distance] for distance in distances)]
    for found, share in [(first, density), *((pair, density**2) for pair in (*pairs, *both))]:
        # Neighbours overlap: pairs of them vary a little more than independent ones.
        deviation = (share * (1 + 2 * density) / found.size) ** 0.5
        assert abs(found.mean() - share) < 5 * deviation
    counts = first.reshape(-1, 256).sum(axis=1)
    assert counts.var() == pytest.approx(
        256 * density * (1 - density), rel=5 * (2 * 256 / n) ** 0.5
    )


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
