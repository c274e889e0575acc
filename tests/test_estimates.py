"""Estimates of merges that elect signs, against elections held element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mstore.merge.measures.estimates import elected

Array = np.ndarray
ELEMENTS = 50_000
# Sizes, shares of elements that are moved, weights, and who is left out, of two experts.
PAIRS = [
    ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (False, True)),
    ((1.0, 1.0), (0.3, 0.6), (1.0, 0.4), (True, False)),
    ((1.0, 0.1), (1.0, 1.0), (1.0, 0.05), (False, True)),
    ((0.1, 1.0), (0.5, 1.0), (1.0, 0.2), (False, True)),
    ((1.0, 0.2), (1.0, 0.5), (0.1, 1.0), (True, True)),
]


def consensus(moves: Array, weights: Array, *, normalize: bool) -> Array:
    """What an election makes of float64[K, n]: by the textbook, in numpy."""
    weighted = moves * weights[:, None]
    agree = np.sign(weighted) == np.where(weighted.sum(axis=0) >= 0, 1, -1)
    total, divisor = (weighted * agree).sum(axis=0), (agree * weights[:, None]).sum(axis=0)
    return total / np.where(divisor > 0, divisor, 1) if normalize else total


def both(
    draw: np.random.Generator,
    shape: str,
    sizes: Array,
    moved: Array,
    weights: Array,
    left: Array,
    *,
    normalize: bool,
) -> tuple[float, float]:
    """The error that an omission makes, and its estimate."""
    count = len(sizes), ELEMENTS
    unit = (
        draw.standard_normal(count)
        if shape == "normal"
        else draw.exponential(1 / math.sqrt(2), count) * draw.choice([-1.0, 1.0], count)
    )
    moves = unit * sizes[:, None] * (draw.random(count) < moved[:, None])
    full = consensus(moves, weights, normalize=normalize)
    part = consensus(moves * ~left[:, None], weights, normalize=normalize)
    [found] = elected(
        (moves * moves).sum(axis=1, keepdims=True),
        (moves != 0).mean(axis=1, keepdims=True),
        weights.tolist(),
        left[:, None],
        normalize=normalize,
    )
    return float(np.linalg.norm(full - part)), math.sqrt(found)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_experts_of_the_model_are_estimated_exactly(
    pair: tuple[tuple[float, ...], ...], normalize: bool
) -> None:
    """Of two experts with exponential magnitudes the estimate is the error's expectation."""
    real, found = both(
        np.random.default_rng(1),
        "exponential",
        *map(np.array, pair),  # type: ignore[arg-type]
        normalize=normalize,
    )
    assert real == pytest.approx(found, rel=0.03)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shape", ["normal", "exponential"])
def test_families_of_all_kinds(shape: str, normalize: bool) -> None:
    """Up to six experts of weights 0.05 to 1, sizes 1 to 30, dense and sparse: the real error is
    mostly within a third of the estimate, and at most twice it.
    """
    draw, ratios = np.random.default_rng(2), []
    for _ in range(40):
        count = int(draw.integers(2, 7))
        left = draw.random(count) < 0.5
        left[int(draw.integers(count))] = True
        real, found = both(
            draw,
            shape,
            10.0 ** draw.uniform(-1.5, 0, count),
            np.where(draw.random(count) < 0.5, 1.0, draw.uniform(0.05, 1, count)),
            draw.choice([1.0, 0.5, 0.3, 0.1, 0.05], count),
            left,
            normalize=normalize,
        )
        ratios.append(real / found)
    assert min(ratios) > 0.33
    assert max(ratios) < 2.0
    assert np.mean([0.67 < ratio < 1.33 for ratio in ratios]) > 0.85


def test_nothing_left_out_nothing_lost() -> None:
    """Without an omission, and of experts without weight or without a move, nothing is lost."""
    squares, kept = np.array([[4.0, 0.0], [9.0, 0.0]]), np.array([[0.5, 0.0], [1.0, 0.0]])
    none, first, all_ = (np.array([[k > 1] * 2, [k > 0 and k != 2] * 2]) for k in (0, 2, 3))
    for normalize in (True, False):
        for left, weights in ((none, (1.0, 0.5)), (first, (0.0, 1.0)), (all_, (0.0, 0.0))):
            found = elected(squares, kept, weights, left, normalize=normalize)
            assert found.tolist() == [0.0, 0.0]
        # One that is alone moves by all of its delta; nobody moves the second chunk.
        assert elected(squares[:1], kept[:1], (1.0,), all_[:1], normalize=normalize).tolist() == [
            4.0,
            0.0,
        ]
