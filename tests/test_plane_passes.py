"""Ordering by class: by wide vectors or one element at a time, the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mstore.blocks import planes as callers
from mstore.blocks.plane_passes import FLOATS, FLOATS_AGAIN, SCRATCH, TILE, steps
from mstore.numeric.expansion import IS_WIDE, TOGETHER
from mstore.numeric.passes import Pass

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LENGTHS = (0, 1, 3, TOGETHER - 1, TOGETHER, TOGETHER + 1, TILE, TILE + 65, 3 * TILE + 200)
Bytes = npt.NDArray[np.uint8]


def _by_class(width: int, words: npt.NDArray[Any], base: npt.NDArray[Any]) -> Bytes:
    """The planes as docs/format.md describes them, by numpy."""
    bits = 8 * width
    mask, top = (1 << bits) - 1, 1 << (bits - 1)
    numbers = []
    for x, b in zip(words.tolist(), base.tolist(), strict=True):
        mapped = [v ^ mask if v & top else v | top for v in (x, b)]
        d = (mapped[0] - mapped[1]) & mask
        numbers.append(((d << 1) & mask) ^ (mask if d & top else 0))
    classes = [((b << 1) & mask) >> (bits - 8) for b in base.tolist()]
    order = sorted(range(len(numbers)), key=lambda j: classes[j])
    raw = [numbers[j] for j in order]
    return np.array([(v >> (8 * p)) & 255 for p in range(width) for v in raw], dtype=np.uint8)


def _members(width: int, n: int, kind: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(n)
    word = WORDS[width]
    if kind == "any":
        raw = rng.integers(0, 256, (2, n * width), dtype=np.uint8)
        return raw[0].view(word), raw[1].view(word)
    if kind == "stretches":
        # A class at a time, which a sample of groups finds or misses.
        base = np.minimum(np.arange(n) // 90, 40).astype(word) << word(8 * width - 7)
        return base ^ rng.integers(0, 8, n).astype(word), base
    # As weights are: a few exponents, of both signs.
    base = (rng.standard_normal(n) * 0.02).astype(np.float32).view(np.uint32)
    base = (base >> np.uint32(max(0, 32 - 8 * width))).astype(word) << word(max(0, 8 * width - 32))
    return base + rng.integers(0, 4, n).astype(word), base


def _passes(width: int, *, is_wide: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """Split and join for a kind of processor: what the build compiled for this one, or what is
    compiled now for another."""
    if is_wide != IS_WIDE:
        return steps(WORDS[width], 8 * width, is_wide=is_wide)

    def built(found: Pass) -> Callable[..., None]:
        return lambda mode, n, *rooms: found(mode, n, *(room.ctypes.data for room in rooms))

    return built(callers._split[width]), built(callers._join[width])


@pytest.mark.parametrize(
    "is_wide",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not IS_WIDE, reason="the processor has no AVX-512 VBMI2")
        ),
    ],
)
@pytest.mark.parametrize("width", WORDS)
def test_every_processor_writes_the_same_planes(width: int, is_wide: bool) -> None:
    """Planes are those of the format, however they are made, and come back bit by bit."""
    split, join = _passes(width, is_wide=is_wide)
    scratch = np.empty(SCRATCH + 8 * max(LENGTHS), dtype=np.uint8)
    for n in LENGTHS:
        for kind in ("any", "stretches", "weights"):
            words, base = _members(width, n, kind)
            sides = [one.view(np.uint8) for one in (words, base)]
            # Bytes after the planes stay as they are.
            planes = np.full(n * width + TOGETHER, 7, dtype=np.uint8)
            split(FLOATS, n, *sides, planes[: n * width], scratch)
            assert planes[: n * width].tobytes() == _by_class(width, words, base).tobytes()
            assert (planes[n * width :] == 7).all()
            found = np.full(n * width + TOGETHER, 7, dtype=np.uint8)
            join(FLOATS, n, planes[: n * width], sides[1], found[: n * width], scratch)
            assert found[: n * width].tobytes() == sides[0].tobytes()
            assert (found[n * width :] == 7).all()
            # The same once more, and in the other order, from what the passes left in the scratch.
            again = np.zeros_like(planes)
            for _ in range(2):
                found[: n * width] = 0
                join(FLOATS_AGAIN, n, planes[: n * width], sides[1], found[: n * width], scratch)
                assert found[: n * width].tobytes() == sides[0].tobytes()
                split(FLOATS_AGAIN, n, *sides, again[: n * width], scratch)
                assert again[: n * width].tobytes() == planes[: n * width].tobytes()


def test_the_caller_has_the_constants_of_the_passes() -> None:
    """`planes`, which must not import the passes, has their size of scratch and their mode for a
    base that was just used."""
    assert callers._SCRATCH == SCRATCH
    assert callers._AGAIN == FLOATS_AGAIN
